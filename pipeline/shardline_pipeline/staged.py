"""Interface of models in stages."""

from __future__ import annotations

import abc
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from shardline.core.spec import TensorKind, TensorSpec
from shardline.errors import JobError
from shardline_pipeline.hosts import Hosts

if TYPE_CHECKING:
    from shardline_pipeline.partition.profile import Profile


class StagedModel(nn.Module, abc.ABC):
    """A model that workers can compute stage by stage. In one process it is a torch.nn.Module like any other."""

    hosts: Hosts
    """Numbers of the workers of each stage; () = the chief chooses."""
    automatic: str = ""
    """"auto" or "auto:4", where a job's build_model() finds the cuts; "" = they were given."""
    profile: Profile | None = None
    """What in_layers() need, where build_model() has looked at them."""
    cuts_option: str
    """How the cuts are given, for messages."""

    @abc.abstractmethod
    def in_layers(self) -> nn.Sequential:
        """What can be cut between: a layer is called with what the one before has returned."""

    @abc.abstractmethod
    def begin_with(self, layers: Sequence[int], profile: Profile) -> None:
        """Begin stages with these of in_layers(), which need what the profile says. Raises JobError."""

    @abc.abstractmethod
    def span(self, stage: int) -> range:
        """Numbers of a stage's in_layers(), where these are known: they were given, or profile is set."""

    @property
    @abc.abstractmethod
    def num_stages(self) -> int:
        """Number of stages."""

    @abc.abstractmethod
    def run(self, stage: int, *inputs: Any, **named: Any) -> Any:
        """What a stage returns, and the last one what the model returns.

        Stage 0 is called like the model; any other gets what the one before has returned, see parcel.Values.
        """

    @abc.abstractmethod
    def stage_of_tensor(self, name: str) -> int:
        """The stage that has a tensor of the state_dict."""

    @abc.abstractmethod
    def where(self, stage: int) -> str:
        """A stage for messages, with its layers."""

    @abc.abstractmethod
    def end_of(self, stage: int) -> str:
        """The layer that a stage ends with, for messages."""

    def staged(self, tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The model's tensors, each with its stage as TensorSpec.fragment.

        Raises JobError for a stage in which nothing is trained.
        """
        found = tuple(replace(one, fragment=self.stage_of_tensor(one.name)) for one in tensors)
        trained = {one.fragment for one in found if one.kind is TensorKind.PARAM}
        for stage in range(self.num_stages):
            if stage not in trained:
                raise JobError(f"nothing is trained in {self.where(stage)}; cut the model elsewhere")
        return found

    def _unsettled(self) -> JobError:
        """For who asks for stages that nobody has found yet."""
        return JobError(
            f'{self.cuts_option}={self.automatic!r} is settled when a job builds the model, and "auto" by the number '
            "of workers in its cluster, which is not known here; give a number, such as "
            f'{self.cuts_option.rpartition(" ")[2]}="auto:4", or what begins a stage, as `shardline partition` finds it'
        )


def wanted_stages(text: str, option: str) -> int:
    """The number of stages in "auto:4"; 0 in "auto". option: how it was given. Raises JobError for any other text."""
    found = re.fullmatch(r"auto(?::([1-9]\d*))?", text)
    if found is None:
        raise JobError(
            f'{option} is {text!r}; give "auto:4" for 4 stages, "auto" for as many as there are workers, or a list of '
            "what begins a stage"
        )
    return int(found[1] or 0)

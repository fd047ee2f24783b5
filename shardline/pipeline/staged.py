"""Interface of models in stages."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from shardline.core.spec import TensorKind, TensorSpec
from shardline.errors import JobError
from shardline.pipeline.hosts import Hosts


class StagedModel(nn.Module, abc.ABC):
    """A model that workers can compute stage by stage. In one process it is a torch.nn.Module like any other."""

    hosts: Hosts
    """Numbers of the workers of each stage; () = the chief chooses."""

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

"""Divisions: how the workers of a job share each step. Pure, but for a worker's own part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardline.consistency import Consistency
from shardline.consistency.assignment import assign
from shardline.core.placement import Post
from shardline.core.plan import Plan
from shardline.core.spec import TensorSpec
from shardline.data import BatchSource, DataSource, replica_gradients
from shardline.division.share import Share
from shardline.seams import Resident


@dataclass(frozen=True)
class DivisionChoice(Resident):
    """A choice for a job's `pipeline`."""

    def division(self, job: Any) -> Division:
        """The division of a Job or JobSpec that has this choice."""
        raise NotImplementedError(f"{self} divides no job")


Gradients = Callable[[int, int], float]
"""(step, replica): computes a replica's gradients into .grad, and returns its mean loss."""
Predict = Callable[[int], Sequence[dict[str, torch.Tensor]]]
"""All parameters after 1, 2, ... steps of the optimizer without a gradient, so many."""


class Division:
    """How the workers of a job share its steps. A unit is what one worker computes of one replica's step.

    This one is data parallelism, in which a unit is a whole replica; the base of all others. Made from a Job, of which
    only the first part is asked, or from a JobSpec.
    """

    def __init__(self, job: Any) -> None:
        self.job = job

    # A job file

    def check_choices(self) -> None:
        """Raise JobError for settings that no model could have."""

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The job's model. make: a new one, with the job's initial values."""
        return make()

    def consistency(self, mode: Consistency) -> Consistency:
        """The mode for units, from that for whole replicas."""
        return mode

    def tensors(self, model: nn.Module, tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """The model's tensors in fragments, and cut where workers have parts of them.

        Raises JobError for a model or a tensor that can't be divided so.
        """
        return tensors

    def hosts(self, model: nn.Module) -> tuple[tuple[int, ...], ...]:
        """JobSpec.hosts."""
        return ()

    def check(self, *, standbys: int, workers: int | None) -> None:
        """Raise JobError for what this division can't be combined with. See fit.check_fit()."""

    # The chief

    @property
    def units(self) -> int:
        """Number of units of the job."""
        return int(self.job.replicas)

    @property
    def team(self) -> int:
        """Workers of one host that compute each layer together."""
        return 1

    def assign(
        self, previous: Mapping[int, str], machines: Mapping[str, str], homes: Mapping[int, str]
    ) -> dict[int, str]:
        """Task by unit; {} if there are too few. See consistency.assignment.assign().

        machines: host of each living task, in order of index.
        """
        return assign(previous, list(machines), self.units, homes)

    def replicas(self, units: Iterable[int]) -> Sequence[int]:
        """The replicas of which these units are, ascending."""
        return sorted(units)

    def named(self, units: Sequence[int]) -> str:
        """Units for messages: "replicas 0, 1"."""
        return numbered("replica", units)

    def described(self) -> str:
        """What follows the number of replicas where a job is described: " in 2 stages"."""
        return ""

    @property
    def codec(self) -> str:
        """Codec of what one worker hands to the next; "" where none does."""
        return ""

    @property
    def warnings(self) -> Sequence[str]:
        """Sentences for whoever starts the job."""
        codec = self.job.codec_parcels
        if codec in ("", "raw"):
            return ()
        nobody = "which changes nothing: without a pipeline no stage hands anything to another one"
        return (f"codec_parcels is {codec!r}, {nobody}",)

    # A worker

    @property
    def partial(self) -> bool:
        """Whether a unit is only a part of a replica's step, so that other workers are needed to compute one again."""
        return False

    @property
    def goes_back(self) -> bool:
        """Whether the job goes back to a checkpoint when a unit moves to another worker."""
        return False

    @property
    def alone(self) -> bool:
        """Whether nobody else has any of a worker's parameters."""
        return False

    @property
    def repeats(self) -> bool:
        """Whether a worker that has closed a step may have to compute it again, for others that have not."""
        return False

    def share(self, plan: Plan, units: Iterable[int]) -> Share:
        """What a worker with these units exchanges."""
        return Share(plan, units)

    def together(self, posts: Sequence[Post], share: Share, *, all_do: bool) -> Sequence[int]:
        """The replicas that make each step together with a worker's. all_do: all have the same one."""
        return share.replicas

    @property
    def worker(self) -> Any:
        """What its workers do besides: a shardline.client.partners.WorkerSide; None = nothing."""
        return None

    # Tests

    def in_one_process(self, job: DataSource, model: nn.Module, source: BatchSource, predict: Predict) -> Gradients:
        """Computes what the workers compute, in one process, for testing.reference().

        Raises JobError if the result depends on who was first.
        """
        return lambda step, replica: replica_gradients(model, job, source, step, replica)[0]


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Numbers for messages: "replica 0", "replicas 0, 1"."""
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"

"""Data parallelism: every worker computes whole replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from shardline import plugins
from shardline.consistency import Consistency
from shardline.consistency.assignment import assign
from shardline.core.placement import Post
from shardline.core.plan import Plan
from shardline.core.spec import TensorSpec
from shardline.data import BatchSource, DataSource, replica_gradients
from shardline.division.base import Division, DivisionChoice, Gradients, Predict
from shardline.division.share import Share
from shardline.seams import Table


@dataclass(frozen=True)
class WholeModel(DivisionChoice):
    """Every worker computes the whole model."""

    name: ClassVar[str] = "whole-model"

    def division(self, job: Any) -> Division:
        return of_parts(job) if job.shares_layers else WholeReplicas(job)


def of_parts(job: Any) -> Division:
    """That of a Job or JobSpec whose workers compute parts of a replica, from the package that has it."""
    found: Division = plugins.installed("shardline.divisions", "parts", "pipelines and tensor_parallel")(job)
    return found


class WholeReplicas:
    """The Division of data parallelism: a unit is a replica."""

    team = 1
    partial = goes_back = alone = repeats = False
    codec = ""
    worker = None

    def __init__(self, job: Any) -> None:
        self.job = job
        self.units: int = job.replicas

    def check_choices(self) -> None:
        pass

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        return make()

    def consistency(self, mode: Consistency) -> Consistency:
        return mode

    def tensors(self, model: nn.Module, tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tensors

    def hosts(self, model: nn.Module) -> tuple[tuple[int, ...], ...]:
        return ()

    def check(self, *, standbys: int, workers: int | None) -> None:
        pass

    # The chief

    def assign(
        self, previous: Mapping[int, str], machines: Mapping[str, str], homes: Mapping[int, str]
    ) -> dict[int, str]:
        return assign(previous, list(machines), self.units, homes)

    def replicas(self, units: Iterable[int]) -> Sequence[int]:
        return sorted(units)

    def named(self, units: Sequence[int]) -> str:
        return numbered("replica", units)

    def described(self) -> str:
        return ""

    @property
    def warnings(self) -> Sequence[str]:
        return unused_codec(self.job.codec_parcels)

    # A worker

    def share(self, plan: Plan, units: Iterable[int]) -> Share:
        return Share(plan, units)

    def together(self, posts: Sequence[Post], share: Share, *, all_do: bool) -> Sequence[int]:
        return share.replicas

    def in_one_process(self, job: DataSource, model: nn.Module, source: BatchSource, predict: Predict) -> Gradients:
        return lambda step, replica: replica_gradients(model, job, source, step, replica)[0]


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Numbers for messages: "replica 0", "replicas 0, 1"."""
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def unused_codec(codec: str) -> list[str]:
    """The warning for a codec between stages where there are none."""
    if codec in ("", "raw"):
        return []
    return [
        f"codec_parcels is {codec!r}, which changes nothing: without a pipeline no stage hands anything to another one"
    ]


PIPELINES: Table[DivisionChoice] = Table("pipeline", WholeModel)


def of(job: Any) -> Division:
    """The division of a Job or a JobSpec. Raises JobError if its pipeline does not exist."""
    return PIPELINES.parse(job.pipeline).division(job)

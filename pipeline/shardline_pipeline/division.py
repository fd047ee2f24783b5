"""The division of jobs whose workers compute parts of a replica's step: stages of a pipeline, or ranks of layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

import shardline_pipeline as pipeline
from shardline import codecs
from shardline.consistency import Consistency
from shardline.consistency.assignment import NOWHERE, assign
from shardline.core.placement import Post
from shardline.core.plan import Plan
from shardline.core.spec import TensorSpec
from shardline.data import BatchSource, DataSource
from shardline.division import Division, Share
from shardline.division.base import Gradients, Predict
from shardline.errors import JobError
from shardline.model import model_tensors
from shardline_pipeline import fit, tensor_parallel
from shardline_pipeline.staged import StagedModel


class DividedReplicas(Division):
    """The division of jobs in which a unit is a part of a replica."""

    partial = True

    @functools.cached_property
    def schedule(self) -> pipeline.PipelineSchedule:
        return pipeline.of(self.job)

    # A job file

    def check_choices(self) -> None:
        if self.job.scheduler is not None and self.schedule.staged and self.schedule.gap_aware:
            raise JobError(
                f"pipeline {self.job.pipeline} measures steps by the learning rate, which a scheduler doesn't tell it; "
                "use schedule=shardline.schedule.constant, step, linear or cosine"
            )
        tensor_parallel.check_choices({str(pattern): str(style) for pattern, style in self.job.tensor_parallel.items()})

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The model, with the cuts that are found by itself."""
        model = make()
        if isinstance(model, StagedModel) and model.automatic and self.schedule.staged:
            # Only here: most jobs need none of it.
            from shardline_pipeline.partition.automatic import cuts_for

            # Lazy layers, and nothing to train, are no matter of shapes.
            model_tensors(model)
            found = cuts_for(model, self.job)
            if found is not None:
                # The pass that was looked at may have changed it: statistics, buffers made on the way, weights.
                del model
                model = make()
                assert isinstance(model, StagedModel), "model() returned one before"
                model.begin_with(*found)
        return model

    def consistency(self, mode: Consistency) -> Consistency:
        return mode.staged() if self.schedule.staged else mode

    def tensors(self, model: nn.Module, tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """The tensors, each with its stage. Raises JobError for a model without stages."""
        if self.schedule.staged and not isinstance(model, StagedModel):
            raise JobError(
                f"pipeline {self.job.pipeline} needs a model in stages, but model() returned a "
                f"{type(model).__name__}; return shardline.Pipeline([layer, layer, ...], stages=2)"
            )
        if isinstance(model, StagedModel) and self.schedule.staged:
            tensors = model.staged(tensors)
        return tensor_parallel.cut(tensors, tensor_parallel.layers_of(self.job, model), self.job.tensor_ranks)

    def hosts(self, model: nn.Module) -> tuple[tuple[int, ...], ...]:
        return model.hosts if isinstance(model, StagedModel) and self.schedule.staged else ()

    def check(self, *, standbys: int, workers: int | None) -> None:
        fit.check(self.job, standbys=standbys, workers=workers)

    # The chief

    @property
    def units(self) -> int:
        return pipeline.units(self.job)

    @property
    def team(self) -> int:
        return pipeline.ranks(self.job)

    def assign(
        self, previous: Mapping[int, str], machines: Mapping[str, str], homes: Mapping[int, str]
    ) -> dict[int, str]:
        """As the model names workers, or where it names none, about equally many units for each."""
        if pipeline.planned(self.job):
            return pipeline.assigned(self.job, previous, list(machines))
        return assign_teams(previous, machines, pipeline.cells(self.job), self.team, homes)

    def replicas(self, units: Iterable[int]) -> Sequence[int]:
        return list(pipeline.by_replica(self.job, units))

    def named(self, units: Sequence[int]) -> str:
        return pipeline.named(self.job, units)

    def described(self) -> str:
        text = f" in {pipeline.stages(self.job)} stages" if self.schedule.staged else ""
        return f"{text}, layers shared by {self.team} ranks" if self.team > 1 else text

    @property
    def codec(self) -> str:
        return str(codecs.of_parcels(self.job)) if self.schedule.staged else ""

    @property
    def warnings(self) -> Sequence[str]:
        if not self.schedule.staged:
            return super().warnings
        return [self.schedule.warning] if self.schedule.warning else []

    # A worker

    @property
    def goes_back(self) -> bool:
        return fit.goes_back(self.job)

    @property
    def alone(self) -> bool:
        return self.schedule.staged and self.job.replicas == 1

    @property
    def repeats(self) -> bool:
        """Stages close a step one by one, and begin it again together."""
        return self.schedule.staged and self.schedule.flushes

    def share(self, plan: Plan, units: Iterable[int]) -> Share:
        return pipeline.share_of(self.job, plan, units)

    def together(self, posts: Sequence[Post], share: Share, *, all_do: bool) -> Sequence[int]:
        return range(self.job.replicas) if all_do else pipeline.bound(self.job, posts, share.replicas)

    @property
    def worker(self) -> Any:
        from shardline_pipeline.worker.side import PartsWorker

        return PartsWorker()

    def in_one_process(self, job: DataSource, model: nn.Module, source: BatchSource, predict: Predict) -> Gradients:
        from shardline_pipeline.alone import in_one_process

        return in_one_process(self.job, job, model, source, predict)


def assign_teams(
    previous: Mapping[int, str], hosts: Mapping[str, str], cells: int, ranks: int, homes: Mapping[int, str] = NOWHERE
) -> dict[int, str]:
    """Worker by unit, where `ranks` workers of one host share each of the cells [0, cells); {} if no host has as many.

    Unit `rank * cells + cell` is a rank's part of a cell. Each worker has one rank, in all the cells of its team.
    previous: the assignment so far. A team keeps its living members of one host, where most are; others take the places
    of those that it lacks, or it is dissolved. hosts: of the living workers, in order of index. homes: see assign().
    """
    if ranks == 1:
        return assign(previous, list(hosts), cells, homes)
    before: dict[tuple[str, ...], list[int]] = {}
    for cell in range(cells):
        before.setdefault(tuple(previous.get(rank * cells + cell, "") for rank in range(ranks)), []).append(cell)
    remains = [(_left(team, hosts), own) for team, own in before.items()]
    # The most complete first.
    remains.sort(key=lambda item: item[0].count(""))
    placed = {member for team, _ in remains for member in team}
    free = [worker for worker in hosts if worker not in placed]
    teams: list[list[str]] = []
    cells_of: dict[str, list[int]] = {}
    while remains:
        team, own = remains[0]
        here = {hosts[member] for member in team if member}
        spare = [worker for worker in free if hosts[worker] in here]
        if len(spare) < team.count("") or not here:
            # The least complete one, in the end this one itself.
            free += filter(None, remains.pop()[0])
            continue
        for worker in spare[: team.count("")]:
            team[team.index("")] = worker
            free.remove(worker)
        teams.append(team)
        cells_of[team[0]] = own
        remains.pop(0)
    teams += _new_teams(sorted(free, key=list(hosts).index), hosts, ranks)
    leaders = {team[0]: team for team in teams[:cells]}
    held = {cell: leader for leader, own in cells_of.items() for cell in own}
    found = assign(held, sorted(leaders, key=list(hosts).index), cells)
    return {
        rank * cells + cell: worker for cell, leader in found.items() for rank, worker in enumerate(leaders[leader])
    }


def _left(team: Sequence[str], hosts: Mapping[str, str]) -> list[str]:
    """The members that go on together, each in its place: a worker may have come back on another host."""
    where = [hosts[member] for member in team if member in hosts]
    home = max(where, key=where.count, default="")
    return [member if member in hosts and hosts[member] == home else "" for member in team]


def _new_teams(free: Sequence[str], hosts: Mapping[str, str], ranks: int) -> list[list[str]]:
    teams = []
    for host in dict.fromkeys(hosts.values()):
        there = [worker for worker in free if hosts[worker] == host]
        teams += [there[first : first + ranks] for first in range(0, len(there) - ranks + 1, ranks)]
    return teams

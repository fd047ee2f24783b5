"""Which plan a job should have: the best pipeline of those that it can run, and data parallelism beside it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardline.errors import JobError
from shardline_pipeline.layout import StageLayout
from shardline_pipeline.partition.costs import Costs, PlannedStage, Stages, kept
from shardline_pipeline.partition.dynamic import candidates
from shardline_pipeline.partition.forecast import Forecast, forecast_of
from shardline_pipeline.partition.mixed import mixed
from shardline_pipeline.schedules.flushed import Undivided

WORTH = 1.05
"""A pipeline has to be faster than data parallelism by this factor to be advised."""


@dataclass(frozen=True, kw_only=True)
class Rated:
    """A plan, and what it takes."""

    plan: Stages
    forecast: Forecast
    fits: bool = True
    """Into the workers' memory."""

    @property
    def replicas(self) -> int:
        """Replicas that the job needs for it: the workers of each stage share them evenly."""
        return replicas_of(self.plan)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was compared."""

    whole: Rated
    """Every worker has the whole model."""
    staged: Rated | None
    """The best pipeline; None if there is none: too few layers, or none fits into memory."""
    mixed: bool
    """Some worker has several stages."""

    @property
    def pipeline_is_better(self) -> bool:
        if self.staged is None:
            return False
        return not self.whole.fits or self.staged.forecast.seconds * WORTH <= self.whole.forecast.seconds


def choose(costs: Costs, *, allow_mixed: bool = False) -> Comparison:
    """Compare the plans of a cluster: pipelines that the job can run with as many samples a step, and no pipeline.

    allow_mixed: also plans in which a worker has several stages that are no neighbours; see mixed().
    """
    workers = costs.cluster.workers
    every = PlannedStage(first=0, end=costs.count, workers=tuple(range(workers)))
    whole = rated(replace(costs, schedule=Undivided()), (every,))
    plans = [plan for copies in (None, *range(1, workers + 1)) for plan in _staged(costs, copies)]
    if allow_mixed:
        found = mixed(_alone(costs), workers, also=[plan for plan in plans if len(plan[0].workers) == 1])
        plans += [found] if found is not None and _runs(costs, found) else []
    options = [rated(costs, plan) for plan in plans]
    staged = min((one for one in options if one.fits), key=_rank, default=None)
    homes = [worker for stage in (staged.plan if staged is not None else ()) for worker in stage.workers]
    return Comparison(whole=whole, staged=staged, mixed=len(homes) > len(set(homes)))


def smallest(costs: Costs) -> float:
    """Memory that the largest worker of a pipeline needs at least, of one with as many stages as there are workers."""
    free = replace(costs, cluster=replace(costs.cluster, memory_bytes=float("inf")))
    found = [max(forecast_of(free, plan).memory_bytes) for plan in _staged(free, 1)]
    return min(found, default=float("inf"))


def replicas_of(plan: Stages) -> int:
    """The fewest replicas that the workers of each stage can share evenly."""
    return math.lcm(*(len(stage.workers) for stage in plan))


def rated(costs: Costs, plan: Stages) -> Rated:
    forecast = forecast_of(kept(costs, plan), plan)
    return Rated(plan=plan, forecast=forecast, fits=max(forecast.memory_bytes) <= costs.cluster.memory_bytes)


def _staged(costs: Costs, copies: int | None) -> list[Stages]:
    searched = _alone(costs) if copies == 1 else costs
    return [plan for plan in candidates(searched, copies=copies) if len(plan) > 1 and _runs(costs, plan)]


def _alone(costs: Costs) -> Costs:
    return kept(costs, [PlannedStage(first=0, end=0, workers=(0,))] * 2)


def _runs(costs: Costs, plan: Stages) -> bool:
    """Whether replicas have equally many microbatches, and the schedule takes so many stages with so few of them."""
    replicas, workers = replicas_of(plan), tuple(len(stage.workers) for stage in plan)
    accumulate, rest = divmod(costs.microbatches, replicas)
    try:
        costs.schedule.check(StageLayout(workers=workers, microbatches=max(1, accumulate), replicas=replicas))
    except JobError:
        return False
    return not rest


def _rank(option: Rated) -> tuple[float, float, float]:
    """The fastest, then the one with the least to do for its busiest worker, then the fewest bytes."""
    found = option.forecast
    return found.seconds, max(*found.compute_s, *found.link_s), found.bytes

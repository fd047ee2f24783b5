"""Which plan a job should have: the best pipeline of those that it can run, and data parallelism beside it. Pure.

In a mixed pipeline a worker may have several stages that are no neighbours, so balance is a matter of packing. Eliad et
al.: Fine-tuning giant neural networks on commodity hardware with automatic pipeline model parallelism (FTPipe, 2021),
section 4: join layers to about L blocks, pack these into P workers, the longest first; runs of blocks in one worker are
stages; then move layers at borders while that helps; try several L. The price is more stages than workers: a longer way
for each microbatch, and without a flush older parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardline.errors import JobError
from shardline_pipeline.base import StageLayout
from shardline_pipeline.partition.costs import Costs, PlannedStage, Stages, kept
from shardline_pipeline.partition.dynamic import candidates, points
from shardline_pipeline.partition.forecast import Forecast, forecast_of
from shardline_pipeline.schedules.flushed import Undivided

MULTIPLES = (1, 2, 3, 4)
"""Blocks per worker that are tried."""
Score = tuple[float, float]


def mixed(
    costs: Costs, workers: int, *, multiples: Iterable[int] = MULTIPLES, also: Iterable[Stages] = ()
) -> Stages | None:
    """The fastest of the plans for several numbers of blocks, and of those in `also`; None if none fits into memory."""
    found = list(also)
    for multiple in multiples:
        blocks = joined(costs, multiple * workers)
        packed = pack(costs, blocks, workers) if blocks is not None and len(blocks) > workers else None
        if multiple == 1 and blocks is not None and len(blocks) <= workers:
            packed = list(range(len(blocks)))
        if blocks is not None and packed is not None:
            found.append(refined(costs, blocks, packed))
    fitting = [plan for plan in found if _fits(costs, plan)]
    return min(fitting, key=lambda plan: score(costs, plan), default=None)


def score(costs: Costs, plan: Stages) -> Score:
    """What is compared: seconds of a step, then bytes on all wires."""
    found = forecast_of(costs, plan)
    return found.seconds, found.bytes


def joined(costs: Costs, most: int) -> list[range] | None:
    """The layers as at most so many blocks, each of which could be a stage; None if there is no such block.

    Blocks in which nothing is trained join a neighbour first, then neighbours that compute least together.
    """
    ends = points(costs, most=costs.count)
    if not costs.stage_allowed(0, costs.count):
        return None
    while True:
        bare = [i for i in range(1, len(ends)) if not costs.stage_allowed(ends[i - 1], ends[i])]
        if bare:
            # With the block before, whose output is often larger than its own.
            del ends[bare[0] - 1 if bare[0] > 1 else 1]
        elif len(ends) - 1 > most:
            del ends[min(range(1, len(ends) - 1), key=lambda i: (costs.total("seconds", ends[i - 1], ends[i + 1]), i))]
        else:
            return [range(first, end) for first, end in itertools.pairwise(ends)]


def pack(costs: Costs, blocks: Sequence[range], workers: int) -> list[int] | None:
    """A worker for each block: the longest block first, each to the worker with the least to do that has room for it.

    Without a limit of memory no worker has more than 4/3 - 1/(3 P) of what the best packing has (Graham, 1969). If
    memory runs out it is tried again with the block that needs most memory first; None if that fails too.
    """
    seconds = [costs.total("seconds", block.start, block.stop) for block in blocks]
    # Which blocks are neighbours in one worker is not known yet, nor how many stages follow: each is taken for a stage.
    memory = [
        costs.memory_bytes(block.start, block.stop, copies=1, behind=len(blocks) - 1 - number, slots=len(blocks))
        for number, block in enumerate(blocks)
    ]
    for sizes in (seconds, memory):
        order = sorted(range(len(blocks)), key=lambda number: (-sizes[number], number))
        found = _greedy(order, seconds, memory, workers, costs.cluster.memory_bytes)
        if found is not None:
            return found
    return None


def _greedy(
    order: Sequence[int], seconds: Sequence[float], memory: Sequence[float], workers: int, memory_bytes: float
) -> list[int] | None:
    busy, used, home = [0.0] * workers, [0.0] * workers, [0] * len(order)
    for number in order:
        fitting = [worker for worker in range(workers) if used[worker] + memory[number] <= memory_bytes]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda worker: (busy[worker], worker))
        home[number] = chosen
        busy[chosen] += seconds[number]
        used[chosen] += memory[number]
    return home


def stages_of(blocks: Sequence[range], home: Sequence[int]) -> Stages:
    """Stages: runs of blocks in one worker, as long as possible. Workers are numbered as they come."""
    numbers: dict[int, int] = {}
    found: list[PlannedStage] = []
    for block, worker in zip(blocks, home, strict=True):
        number = numbers.setdefault(worker, len(numbers))
        if found and found[-1].workers == (number,):
            found[-1] = PlannedStage(first=found[-1].first, end=block.stop, workers=(number,))
        else:
            found.append(PlannedStage(first=block.start, end=block.stop, workers=(number,)))
    return tuple(found)


def refined(costs: Costs, blocks: Sequence[range], home: Sequence[int]) -> Stages:
    """The plan after moving layers across borders, one at a time, as long as the score gets better."""
    plan = stages_of(blocks, home)
    now = score(costs, plan)
    while True:
        found = min(
            ((score(costs, other), number, other) for number, other in enumerate(_neighbours(costs, plan))),
            default=None,
        )
        if found is None or not found[0] < now:
            return plan
        now, _, plan = found


def _neighbours(costs: Costs, plan: Stages) -> Iterator[Stages]:
    """Plans with one border moved to the next layer at which a stage may begin."""
    for number in range(1, len(plan)):
        left, right = plan[number - 1], plan[number]
        for way in (-1, 1):
            border = right.first + way
            while left.first < border < right.end and not costs.cut_allowed(border):
                border += way
            if not (costs.stage_allowed(left.first, border) and costs.stage_allowed(border, right.end)):
                # Layers in which nothing is trained may lie on the way.
                continue
            if left.first < border < right.end:
                before = PlannedStage(first=left.first, end=border, workers=left.workers)
                after = PlannedStage(first=border, end=right.end, workers=right.workers)
                other = (*plan[: number - 1], before, after, *plan[number + 1 :])
                if _fits(costs, other):
                    yield other


def _fits(costs: Costs, plan: Stages) -> bool:
    return max(forecast_of(costs, plan).memory_bytes) <= costs.cluster.memory_bytes


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

"""How long a step without a flush takes: by what must be done in it, and by what must follow each other. Pure.

Workers compute, and links carry parcels and parameters, all at the same time; none of them has more than a step's time
for a step. What follows each other goes in circles:

- A stage that is `a` microbatches ahead begins another one when the oldest of a + 1 has come back. So these take as
  long as one on its way from the stage to the last one and back, links included.
- The update of a step is here x after its last backward pass. The first microbatch that needs it, the o-th one of the
  steps that follow, goes from there to the last stage and back (L), and then, one after the other (c, of the longest
  stage from there on), come the others of its step:

      (1 + floor(o / m)) step >= x + L + (m - 1 - o mod m) c

- A worker's exchange begins when the one before it has ended. Where a stage keeps one version of its parameters, it
  computes nothing meanwhile.

m, a and o are those of one worker of the stage: it computes every r-th microbatch. A step takes the longest of all.
"""

from __future__ import annotations

from shardline_pipeline.base import PipelineSchedule
from shardline_pipeline.layout import StageLayout
from shardline_pipeline.partition import flushed, groups
from shardline_pipeline.partition.costs import Costs, PlannedStage, Stages
from shardline_pipeline.schedules.unbroken import Unbroken

Measure = flushed.Measure


def measure(costs: Costs, stage: PlannedStage, behind: int, slots: int, rest: Measure | None = None) -> Measure:
    """Of a stage and those after it: (seconds, bytes for the servers, one microbatch's way, longest stage's time).

    behind: workers of the stages after it. slots: of all stages. rest: the measure of those after it.
    """
    rest = rest or (0.0, 0.0, 0.0, 0.0)
    first, end, copies = stage.first, stage.end, len(stage.workers)
    once = flushed.once_s(costs, first, end) + rest[2]
    longest = max(costs.total("seconds", first, end) / copies, rest[3])
    computing, exchange = costs.compute_s(first, end, copies), exchange_s(costs, first, end, copies)
    circles = circles_s(costs, copies, behind, slots, way_s=once, longest_s=longest, exchange_s=exchange)
    own = max(computing, costs.link_s(first, end, copies), *circles, computing * _keeps_one(costs) + exchange)
    return max(own, rest[0]), copies * costs.load(first, end) + rest[1], once, longest


def circles_s(
    costs: Costs, copies: int, behind: int, slots: int, *, way_s: float, longest_s: float, exchange_s: float
) -> tuple[float, float]:
    """The first two of the circles above, as what a step takes for them."""
    share, ahead, most = costs.share(copies), *costs.ahead(copies, behind, slots)
    laps, place = divmod(offset(costs.schedule, ahead, most, share), share)
    flight = share * way_s / (ahead + 1)
    return flight, (exchange_s + way_s + (share - 1 - place) * copies * longest_s) / (1 + laps)


def exchange_s(costs: Costs, first: int, end: int, copies: int) -> float:
    """From a stage's last backward pass of a step to the parameters after it."""
    own, shared = flushed.exchange_s(costs, first, end, copies), costs.servers_s(copies * costs.load(first, end))
    return max(own, shared) + costs.last_s(first, end)


def offset(schedule: PipelineSchedule, ahead: int, most: int, share: int) -> int:
    """The first microbatch that is computed with a step's update, counted from the step's end on.

    ahead: stages after it; most: after the first one.
    """
    update = 2 * (most + 2)
    number = update * share
    while schedule.version(number, most - ahead, StageLayout.straight(most + 1, share)) < update:
        number += 1
    return number - update * share


def times(costs: Costs, plan: Stages) -> dict[str, float]:
    """What a step takes at least, by what limits it."""
    compute: dict[int, float] = {}
    link: dict[int, float] = {}
    exchange: dict[int, float] = {}
    for stage in plan:
        first, end, copies = stage.first, stage.end, len(stage.workers)
        for worker in stage.workers:
            compute[worker] = compute.get(worker, 0.0) + costs.compute_s(first, end, copies)
            link[worker] = link.get(worker, 0.0) + costs.link_s(first, end, copies)
            exchange[worker] = exchange.get(worker, 0.0) + exchange_s(costs, first, end, copies)
    load = sum(len(stage.workers) * costs.load(stage.first, stage.end) for stage in plan)
    slots, behind = sum(len(stage.workers) for stage in plan), 0
    way = longest = flights = updates = 0.0
    for stage in reversed(plan):
        copies = len(stage.workers)
        way += flushed.once_s(costs, stage.first, stage.end)
        longest = max(longest, costs.total("seconds", stage.first, stage.end) / copies)
        for worker in stage.workers:
            circles = circles_s(costs, copies, behind, slots, way_s=way, longest_s=longest, exchange_s=exchange[worker])
            flights, updates = max(flights, circles[0]), max(updates, circles[1])
        behind += copies
    alone = [exchange[worker] + _keeps_one(costs) * compute[worker] for worker in exchange]
    return {
        "computing": max(*compute.values(), sum(compute.values()) / costs.cluster.cores),
        "links": max(*link.values(), groups.links_s(costs, plan)),
        "servers": costs.servers_s(load),
        "way": flights,
        "updates": max(updates, *alone),
    }


def _keeps_one(costs: Costs) -> bool:
    return isinstance(costs.schedule, Unbroken) and costs.schedule.keeps_one

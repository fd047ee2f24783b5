"""How long a step of a plan takes, and why: what the search compares plans by. Pure.

**With a flush** all passes of a step take M: the first microbatch's way through all stages and back, and the slowest
worker's part of the other microbatches. Stage s begins its first pass later than stage 0 does, and ends its last one
earlier, together by H_s: one microbatch's time, both ways, in the stages before it. Only so long do its gradients and
its new parameters travel while others compute. Over a link that stages share, whose exchanges take x_0, x_1, ..., those
of stages 0 to s can't begin before stage s has ended its passes, and have to be over when it begins the next ones. So
for each s

    step >= M - H_s + x_0 + ... + x_s + l_s

where l_s is the time of the last bucket's parameters, which come when all gradients have gone (Carlier: The one-machine
sequencing problem, 1982: the bound of jobs with heads and tails). A step takes the largest of these, over all links. A
worker with the whole model sends the gradient of each layer when it is there, and begins a layer when its parameters
have come, so there each layer is what a stage is here.

**Without a flush** workers compute, and links carry activations and parameters, all at the same time; none of them has
more than a step's time for a step. What follows each other goes in circles:

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

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardline_pipeline.base import StageLayout
from shardline_pipeline.partition.costs import Costs, LinkLevel, PlannedStage, Stages

Measure = tuple[float, ...]
"""A stage and those after it, as the search of a flat network compares them: see measured()."""
Item = tuple[float, float, float]
"""(head start, bytes, time of the last ones) of an exchange over a link."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The expected time, traffic and memory of a plan. Per step."""

    seconds: float
    limit: str
    """The longest part of it: "computing", "links" or "servers"; without a flush also "way", of microbatches through
    the stages and back, or "updates", of gradients to the servers and of parameters back."""
    waits_s: float = 0.0
    """Of it, with a flush: for parameters on their way, when the passes are done."""
    parameter_bytes: float
    """Pushed and pulled, or all-reduced, by all workers."""
    parcel_bytes: float
    """Activations and their gradients."""
    compute_s: tuple[float, ...]
    """By worker."""
    link_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]

    @property
    def bytes(self) -> float:
        return self.parameter_bytes + self.parcel_bytes


def forecast_of(costs: Costs, plan: Stages) -> Forecast:
    """The forecast of a plan. costs: for this plan, see kept()."""
    used = sorted({worker for stage in plan for worker in stage.workers})
    compute, link, memory = (dict.fromkeys(used, 0.0) for _ in range(3))
    behind, slots = 0, sum(len(stage.workers) for stage in plan)
    parameters = handed = 0.0
    for stage in reversed(plan):
        first, end, copies = stage.first, stage.end, len(stage.workers)
        needed = costs.memory_bytes(first, end, copies=copies, behind=behind, slots=slots)
        for worker in stage.workers:
            compute[worker] += costs.compute_s(first, end, copies)
            link[worker] += costs.link_s(first, end, copies)
            memory[worker] += needed
        behind += copies
        parameters += costs.all_exchange_bytes(first, end, copies)
        handed += sum(costs.activation_bytes(first, end, copies)) * copies / 2
    if costs.schedule.flushes:
        times = {"computing": passes_s(costs, plan), **waits(costs, plan)}
        waits_s = max(times["links"], times["servers"])
    else:
        times, waits_s = asynchronous_times(costs, plan), 0.0
    limit = max(times, key=lambda name: times[name])
    return Forecast(
        seconds=times["computing"] + waits_s if costs.schedule.flushes else times[limit],
        limit=limit,
        waits_s=waits_s,
        parameter_bytes=parameters,
        parcel_bytes=handed,
        compute_s=tuple(compute.values()),
        link_s=tuple(link.values()),
        memory_bytes=tuple(memory.values()),
    )


def measured(costs: Costs, stage: PlannedStage, rest: Measure | None, behind: int, slots: int) -> Measure:
    """Of a stage and those after it, in a flat network: the less of each the better.

    With a flush once_s(), the longer of rest_s(), and what workers' links and the servers' add. Without a flush
    (seconds, bytes for the servers, one microbatch's way, longest stage's time). rest: the measure of those after it.
    behind: workers of the stages after it. slots: of all stages.
    """
    first, end, copies = stage.first, stage.end, len(stage.workers)
    once, load = once_s(costs, first, end), copies * costs.load(first, end)
    if not costs.schedule.flushes:
        slowest, loads, way, longest = rest or (0.0, 0.0, 0.0, 0.0)
        way, longest = once + way, max(costs.total("seconds", first, end) / copies, longest)
        computing, update = costs.compute_s(first, end, copies), update_s(costs, first, end, copies)
        circles = circles_s(costs, copies, behind, slots, way_s=way, longest_s=longest, exchange_s=update)
        alone = computing * costs.schedule.keeps_one + update
        return max(computing, costs.link_s(first, end, copies), *circles, alone, slowest), load + loads, way, longest
    link_s, shared_s = exchange_s(costs, first, end, copies), costs.servers_s(load)
    last_s, others = costs.last_s(first, end), max(rest_s(costs, first, end, copies))
    if rest is not None:
        later, most, links, servers = rest
        return (
            once + later,
            max(others, most),
            max(once + link_s + last_s + later, links),
            max(once + shared_s + last_s + later, shared_s + servers),
        )
    if (first, end) == (0, costs.count):
        found = waits(costs, (stage,))
        return once, others, once + found["links"], once + found["servers"]
    return once, others, once + link_s + last_s, once + shared_s + last_s


# Of one stage


def once_s(costs: Costs, first: int, end: int) -> float:
    """One microbatch's time in a stage and on its way to the next one, both ways."""
    crossing = sum(costs.handed[end - 1]) if end < costs.count else 0.0
    return costs.total("seconds", first, end) + crossing / costs.cluster.levels[0].bytes_per_s


def rest_s(costs: Costs, first: int, end: int, copies: int) -> tuple[float, float]:
    """Time that a worker of a stage computes after the first microbatch, and its link's for their activations."""
    others = costs.share(copies) - 1
    sent_s = max(costs.activation_bytes(first, end, 1)) / costs.microbatches / costs.cluster.levels[0].bytes_per_s
    return others * costs.total("seconds", first, end), others * sent_s


def exchange_s(costs: Costs, first: int, end: int, copies: int) -> float:
    """Of a worker of a stage, over its own link."""
    return costs.exchange_bytes(first, end, copies) / costs.cluster.levels[0].bytes_per_s


def update_s(costs: Costs, first: int, end: int, copies: int) -> float:
    """From a stage's last backward pass of a step to the parameters after it."""
    own, shared = exchange_s(costs, first, end, copies), costs.servers_s(copies * costs.load(first, end))
    return max(own, shared) + costs.last_s(first, end)


# With a flush


def passes_s(costs: Costs, plan: Stages) -> float:
    """Time of a step's passes: the first microbatch goes through all stages alone."""
    others: dict[int, list[float]] = {}
    for stage in plan:
        for worker in stage.workers:
            both = others.setdefault(worker, [0.0, 0.0])
            for number, more in enumerate(rest_s(costs, stage.first, stage.end, len(stage.workers))):
                both[number] += more
    outer = [
        max(map(max, crossing(costs, plan, size).values()), default=0.0) / level.bytes_per_s
        for size, level in levels(costs)
    ]
    first_s = sum(once_s(costs, stage.first, stage.end) for stage in plan)
    cores, all_s = costs.cluster.cores, costs.microbatches * costs.total("seconds", 0, costs.count)
    shared_s = sum(computing for computing, _ in others.values()) / cores
    rest_of_s = max(*map(max, others.values()), max(outer, default=0.0) * (1 - 1 / costs.microbatches), shared_s)
    return max(first_s + rest_of_s, all_s / cores)


def waits(costs: Costs, plan: Stages) -> dict[str, float]:
    """How much longer a step takes for parameters on their way: over workers' links, and servers'."""
    sent: list[tuple[float, PlannedStage]] = []
    if len(plan) == 1:
        for layer in range(costs.count):
            alone = PlannedStage(first=layer, end=layer + 1, workers=plan[0].workers)
            sent.append((costs.total("seconds", 0, layer), alone))
    head_s, heads = 0.0, dict[int, float]()
    for stage in plan if len(plan) > 1 else ():
        # A worker exchanges all its stages when the first of them is done.
        sent.append((min(heads.setdefault(worker, head_s) for worker in stage.workers), stage))
        head_s += once_s(costs, stage.first, stage.end)
    own: dict[int, list[Item]] = {}
    loads: list[Item] = []
    for head_s, part in sent:
        copies, last_s = len(part.workers), costs.last_s(part.first, part.end)
        loads.append((head_s, copies * costs.load(part.first, part.end), last_s))
        for worker in part.workers:
            own.setdefault(worker, []).append((head_s, costs.exchange_bytes(part.first, part.end, copies), last_s))
    links = [waiting_s(one, costs.cluster.levels[0].bytes_per_s) for one in own.values()]
    for size, level in levels(costs):
        links += [waiting_s(one, level.bytes_per_s) for one in exchanged(costs, sent, size).values()]
    return {"links": max(*links, 0.0), "servers": waiting_s(loads, costs.cluster.servers_bytes_per_s)}


def waiting_s(items: Iterable[Item], bytes_per_s: float) -> float:
    """How much longer than its passes a step takes because of one link."""
    ordered = sorted(items)
    ends = itertools.accumulate(nbytes for _, nbytes, _ in ordered)
    found = (end / bytes_per_s + last_s - head_s for end, (head_s, _, last_s) in zip(ends, ordered, strict=True))
    return max(found, default=0.0)


# Without a flush


def asynchronous_times(costs: Costs, plan: Stages) -> dict[str, float]:
    """The least time of a step, by what limits it."""
    compute: dict[int, float] = {}
    link: dict[int, float] = {}
    exchange: dict[int, float] = {}
    for stage in plan:
        first, end, copies = stage.first, stage.end, len(stage.workers)
        for worker in stage.workers:
            compute[worker] = compute.get(worker, 0.0) + costs.compute_s(first, end, copies)
            link[worker] = link.get(worker, 0.0) + costs.link_s(first, end, copies)
            exchange[worker] = exchange.get(worker, 0.0) + update_s(costs, first, end, copies)
    outer = 0.0
    for size, level in levels(costs):
        parameters, handed = exchanged(costs, [(0.0, stage) for stage in plan], size), crossing(costs, plan, size)
        for group in {*parameters, *handed}:
            nbytes = sum(one for _, one, _ in parameters.get(group, ())) + max(handed.get(group, (0.0,)))
            outer = max(outer, nbytes / level.bytes_per_s)
    slots, behind = sum(len(stage.workers) for stage in plan), 0
    way = longest = flights = updates = 0.0
    for stage in reversed(plan):
        copies = len(stage.workers)
        way += once_s(costs, stage.first, stage.end)
        longest = max(longest, costs.total("seconds", stage.first, stage.end) / copies)
        for worker in stage.workers:
            circles = circles_s(costs, copies, behind, slots, way_s=way, longest_s=longest, exchange_s=exchange[worker])
            flights, updates = max(flights, circles[0]), max(updates, circles[1])
        behind += copies
    alone = [exchange[worker] + costs.schedule.keeps_one * compute[worker] for worker in exchange]
    return {
        "computing": max(*compute.values(), sum(compute.values()) / costs.cluster.cores),
        "links": max(*link.values(), outer),
        "servers": costs.servers_s(sum(len(one.workers) * costs.load(one.first, one.end) for one in plan)),
        "way": flights,
        "updates": max(updates, *alone),
    }


def circles_s(
    costs: Costs, copies: int, behind: int, slots: int, *, way_s: float, longest_s: float, exchange_s: float
) -> tuple[float, float]:
    """The first two of the circles above, as the time of a step that they need."""
    share, ahead, most = costs.share(copies), *costs.ahead(copies, behind, slots)
    # The first microbatch that is computed with a step's update, counted from the step's end on.
    layout, update = StageLayout.straight(most + 1, share), 2 * (most + 2)
    numbers = itertools.count(update * share)
    needs = next(one for one in numbers if costs.schedule.version(one, most - ahead, layout) >= update)
    laps, place = divmod(needs - update * share, share)
    return share * way_s / (ahead + 1), (exchange_s + way_s + (share - 1 - place) * copies * longest_s) / (1 + laps)


# Links between groups of workers


def levels(costs: Costs) -> Sequence[tuple[int, LinkLevel]]:
    """Workers of a group, and the level of the groups' links."""
    sizes = itertools.accumulate((level.count for level in costs.cluster.levels), operator.mul)
    return list(zip(sizes, costs.cluster.levels[1:], strict=False))


def exchanged(costs: Costs, parts: Iterable[tuple[float, PlannedStage]], size: int) -> dict[int, list[Item]]:
    """By group of so many workers: the parameters that its link carries. parts: each with its head start."""
    found: dict[int, list[Item]] = {}
    for head_s, part in parts:
        homes = [worker // size for worker in part.workers]
        for home in homes:
            nbytes = costs.load(part.first, part.end)
            if costs.ring:
                nbytes = costs.ring_bytes(part.first, part.end, len(set(homes))) / homes.count(home)
            found.setdefault(home, []).append((head_s, nbytes, costs.last_s(part.first, part.end)))
    return found


def crossing(costs: Costs, plan: Stages, size: int) -> dict[int, list[float]]:
    """By group of so many workers: bytes (out, in) of a step's activations and gradients."""
    found: dict[int, list[float]] = {}
    for one, other in itertools.pairwise(plan):
        output, gradient = costs.handed[one.end - 1]
        homes, others = ([worker // size for worker in stage.workers] for stage in (one, other))
        # Which groups hand how many microbatches to each other: microbatch m is computed by worker m mod r.
        cycle = math.lcm(len(homes), len(others))
        share = costs.microbatches / cycle
        for m in range(cycle):
            left, right = homes[m % len(homes)], others[m % len(others)]
            if left != right:
                for group, out, into in ((left, output, gradient), (right, gradient, output)):
                    both = found.setdefault(group, [0.0, 0.0])
                    both[0] += share * out
                    both[1] += share * into
    return found

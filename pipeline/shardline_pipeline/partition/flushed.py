"""How long a step with a flush takes: passes, and then the exchange of what no other pass hides. Pure.

All passes of a step take M: the first microbatch's way through all stages and back, and the slowest worker's part of
the other microbatches. Stage s begins its first pass later than stage 0 does, and ends its last one earlier, together
by H_s: one microbatch's time, both ways, in the stages before it. Only so long do its gradients and its new parameters
travel while others compute. Over a link that stages share, whose exchanges take x_0, x_1, ..., those of stages 0 to s
can't begin before stage s has ended its passes, and have to be over when it begins the next ones. So for each s

    step >= M - H_s + x_0 + ... + x_s + l_s

where l_s is the time of the last bucket's parameters, which come when all gradients have gone (Carlier: The one-machine
sequencing problem, 1982: the bound of jobs with heads and tails). A step takes the largest of these, over all links. A
worker with the whole model sends the gradient of each layer when it is there, and begins a layer when its parameters
have come, so there each layer is what a stage is here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from shardline_pipeline.partition import groups
from shardline_pipeline.partition.costs import Costs, PlannedStage, Stages
from shardline_pipeline.partition.groups import Item, Travel

Measure = tuple[float, ...]


def parts(costs: Costs, plan: Sequence[PlannedStage | Travel]) -> list[Travel]:
    """What a plan exchanges, in order."""
    if len(plan) == 1:
        ends = [costs.total("seconds", 0, layer) for layer in range(costs.count)]
        return [Travel(head_s, layer, layer + 1, plan[0].workers) for layer, head_s in enumerate(ends)]
    found, head_s = [], 0.0
    heads: dict[int, float] = {}
    for stage in plan:
        # A worker exchanges all its stages when the first of them is done.
        own_s = min(heads.setdefault(worker, head_s) for worker in stage.workers)
        found.append(Travel(own_s, stage.first, stage.end, stage.workers))
        head_s += once_s(costs, stage.first, stage.end)
    return found


def waiting_s(items: Iterable[Item], bytes_per_s: float) -> float:
    """How much longer than its passes a step takes because of one link."""
    ordered = sorted(items)
    ends = itertools.accumulate(nbytes for _, nbytes, _ in ordered)
    found = (end / bytes_per_s + last_s - head_s for end, (head_s, _, last_s) in zip(ends, ordered, strict=True))
    return max(found, default=0.0)


def once_s(costs: Costs, first: int, end: int) -> float:
    """One microbatch's time in a stage and on its way to the next one, both ways."""
    crossing = sum(costs.handed[end - 1]) if end < costs.count else 0.0
    return costs.total("seconds", first, end) + crossing / costs.cluster.levels[0].bytes_per_s


def rest_s(costs: Costs, first: int, end: int, copies: int) -> tuple[float, float]:
    """What a worker of a stage computes after the first microbatch, and its link's time for their parcels."""
    others = costs.share(copies) - 1
    parcels_s = max(costs.parcels(first, end, 1)) / costs.microbatches / costs.cluster.levels[0].bytes_per_s
    return others * costs.total("seconds", first, end), others * parcels_s


def measure(costs: Costs, stage: PlannedStage, rest: Measure | None = None) -> Measure:
    """Of a stage and those after it: once_s(), the longer of rest_s(), and what workers' links and the servers' add.

    rest: the measure of those after it.
    """
    first, end, workers = stage.first, stage.end, stage.workers
    copies, once, last_s = len(workers), once_s(costs, first, end), costs.last_s(first, end)
    link_s, shared_s = exchange_s(costs, first, end, copies), costs.servers_s(copies * costs.load(first, end))
    others = max(rest_s(costs, first, end, copies))
    if rest is not None:
        later, most, links, servers = rest
        return (
            once + later,
            max(others, most),
            max(once + link_s + last_s + later, links),
            max(once + shared_s + last_s + later, shared_s + servers),
        )
    link_s, servers_s = link_s + last_s, shared_s + last_s
    if (first, end) == (0, costs.count):
        own = [
            (
                one.head_s,
                costs.exchange_bytes(one.first, one.end, copies),
                costs.load(one.first, one.end),
                costs.last_s(one.first, one.end),
            )
            for one in parts(costs, [Travel(0.0, first, end, workers)])
        ]
        bytes_per_s, shared = costs.cluster.levels[0].bytes_per_s, costs.cluster.servers_bytes_per_s
        link_s = waiting_s(((head_s, nbytes, last_s) for head_s, nbytes, _, last_s in own), bytes_per_s)
        servers_s = waiting_s(((head_s, copies * load, last_s) for head_s, _, load, last_s in own), shared)
    return once, others, once + link_s, once + servers_s


def seconds(found: Measure) -> float:
    once, others, links, servers = found
    return others + max(once, links, servers)


def exchange_s(costs: Costs, first: int, end: int, copies: int) -> float:
    """Of a worker of a stage, over its own link."""
    return costs.exchange_bytes(first, end, copies) / costs.cluster.levels[0].bytes_per_s


def passes_s(costs: Costs, plan: Stages) -> float:
    """Time of a step's passes with a flush: the first microbatch goes through all stages alone."""
    others: dict[int, list[float]] = {}
    for stage in plan:
        for worker in stage.workers:
            both = others.setdefault(worker, [0.0, 0.0])
            for number, more in enumerate(rest_s(costs, stage.first, stage.end, len(stage.workers))):
                both[number] += more
    outer_s = max((groups.parcels_s(costs, plan, size, level) for size, level in groups.levels(costs)), default=0.0)
    first_s = sum(once_s(costs, stage.first, stage.end) for stage in plan)
    cores, all_s = costs.cluster.cores, costs.microbatches * costs.total("seconds", 0, costs.count)
    shared_s = sum(computing for computing, _ in others.values()) / cores
    rest_of_s = max(*map(max, others.values()), outer_s * (1 - 1 / costs.microbatches), shared_s)
    return max(first_s + rest_of_s, all_s / cores)


def waits(costs: Costs, plan: Stages) -> dict[str, float]:
    """How much longer a step with a flush takes for parameters on their way: over workers' links, and servers'."""
    sent, own = parts(costs, plan), costs.cluster.levels[0].bytes_per_s
    items: dict[int, list[Item]] = {}
    for part in sent:
        for worker in part.workers:
            nbytes = costs.exchange_bytes(part.first, part.end, len(part.workers))
            items.setdefault(worker, []).append((part.head_s, nbytes, costs.last_s(part.first, part.end)))
    outer = [
        waiting_s(one, level.bytes_per_s)
        for size, level in groups.levels(costs)
        for one in groups.exchanged(costs, sent, size).values()
    ]
    loads = [
        (part.head_s, len(part.workers) * costs.load(part.first, part.end), costs.last_s(part.first, part.end))
        for part in sent
    ]
    return {
        "links": max(*(waiting_s(one, own) for one in items.values()), *outer, 0.0),
        "servers": waiting_s(loads, costs.cluster.servers_bytes_per_s),
    }

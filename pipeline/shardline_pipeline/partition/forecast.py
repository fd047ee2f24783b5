"""How long a step of a plan takes, and what for: by flushed.py or unbroken.py, as the schedule flushes or not. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from shardline_pipeline.partition import flushed, unbroken
from shardline_pipeline.partition.costs import Costs, Stages


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a plan is expected to take. Per step."""

    seconds: float
    limit: str
    """What takes most of it: "computing", "links" or "servers"; without a flush also "way", of microbatches through the
    stages and back, or "updates", of gradients to the servers and of parameters back."""
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
    parameters = parcels = 0.0
    for stage in reversed(plan):
        first, end, copies = stage.first, stage.end, len(stage.workers)
        needed = costs.memory_bytes(first, end, copies=copies, behind=behind, slots=slots)
        for worker in stage.workers:
            compute[worker] += costs.compute_s(first, end, copies)
            link[worker] += costs.link_s(first, end, copies)
            memory[worker] += needed
        behind += copies
        parameters += costs.all_exchange_bytes(first, end, copies)
        parcels += sum(costs.parcels(first, end, copies)) * copies / 2
    if costs.schedule.flushes:
        times = {"computing": flushed.passes_s(costs, plan), **flushed.waits(costs, plan)}
        waits = max(times["links"], times["servers"])
    else:
        times, waits = unbroken.times(costs, plan), 0.0
    limit = max(times, key=lambda name: times[name])
    return Forecast(
        seconds=times["computing"] + waits if costs.schedule.flushes else times[limit],
        limit=limit,
        waits_s=waits,
        parameter_bytes=parameters,
        parcel_bytes=parcels,
        compute_s=tuple(compute[worker] for worker in used),
        link_s=tuple(link[worker] for worker in used),
        memory_bytes=tuple(memory[worker] for worker in used),
    )

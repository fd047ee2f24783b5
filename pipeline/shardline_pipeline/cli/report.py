"""What shardline partition prints and writes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline.job import Job
    from shardline_pipeline.partition.choose import Comparison, Rated
    from shardline_pipeline.partition.costs import Costs


LIMITS = {
    "computing": "computing",
    "links": "the workers' links",
    "servers": "the servers' links",
    "way": "the way of microbatches through the stages and back",
    "updates": "the way of gradients to the servers and of parameters back",
}


def report(job: Job, costs: Costs, choice: Comparison, present: Rated | None = None) -> list[str]:
    """Lines for people. present: the stages that the job has now."""
    profile, cluster = costs.profile, costs.cluster
    seconds = costs.total("seconds", 0, costs.count)
    lines = [
        f"{cluster.workers} workers, {cluster.servers} ps; a step is {costs.microbatches} microbatches of "
        f"{profile.samples} samples, each {plain_time(seconds)} of computing (measured: {profile.measured})"
    ]
    if costs.microbatches < cluster.workers:
        lines.append(
            f"A step of {costs.microbatches} microbatches can't keep {cluster.workers} workers busy: make them smaller "
            f"and more, such as --set accumulate={max(job.accumulate, 2 * cluster.workers)} with a smaller batch_size."
        )
    lines.append("")
    if choice.staged is not None:
        lines += [*table(costs, choice.staged), ""]
        lines.append(_summary(f"pipeline {costs.schedule}, {len(choice.staged.plan)} stages", choice.staged))
    if present is not None:
        lines.append(_summary(f"the job's own {len(present.plan)} stages", present))
    lines.append(_summary(f"data parallel, {cluster.workers} workers", choice.whole))
    return [*lines, "", *advice(job, costs, choice)]


def table(costs: Costs, option: Rated) -> list[str]:
    from shardline.cli.terminal import aligned
    from shardline_pipeline.partition.costs import kept

    rows: list[tuple[str, ...]] = [
        ("stage", "layers", "workers", "computing", "link", "weights", "activations out", "held", "memory")
    ]
    costs = kept(costs, option.plan)
    behind, slots, memory = 0, sum(len(stage.workers) for stage in option.plan), []
    for stage in reversed(option.plan):
        copies = len(stage.workers)
        memory.append(costs.memory_bytes(stage.first, stage.end, copies=copies, behind=behind, slots=slots))
        behind += copies
    layers = costs.profile.layers
    for number, (stage, needed) in enumerate(zip(option.plan, reversed(memory), strict=True)):
        first, end, copies = stage.first, stage.end, len(stage.workers)
        cells = (
            str(number),
            f"{layers[first].name} to {layers[end - 1].name}" if end - first > 1 else layers[first].name,
            ", ".join(map(str, stage.workers)),
            plain_time(costs.compute_s(first, end, copies)),
            plain_time(costs.link_s(first, end, copies)),
            plain_bytes(costs.total("trained", first, end) + costs.total("fixed", first, end)),
            plain_bytes(costs.handed[end - 1][0]) if end < costs.count else "-",
            plain_bytes(costs.activations.held_bytes(first, end)),
            plain_bytes(needed),
        )
        rows.append(cells)
    return [
        *aligned(rows, texts=3),
        "Computing and link: per step. Activations out, held until the backward pass: of one microbatch.",
    ]


def _summary(name: str, option: Rated) -> str:
    found = option.forecast
    limit = LIMITS[found.limit]
    pause = f" ({plain_time(found.waits_s)} after the passes)" if found.waits_s else ""
    misfit = "" if option.fits else f"; needs {plain_bytes(max(found.memory_bytes))} per worker, more than there is"
    parts = f"{plain_bytes(found.parameter_bytes)} parameters, {plain_bytes(found.parcel_bytes)} activations"
    return (
        f"{name}: {1 / found.seconds:,.2f} steps/s, limited by {limit}{pause}; {plain_bytes(found.bytes)} on all wires "
        f"per step ({parts}){misfit}"
    )


def advice(job: Job, costs: Costs, choice: Comparison) -> list[str]:
    """Which one to choose, and what to write in the job."""
    staged, whole = choice.staged, choice.whole
    if staged is None:
        return ["No pipeline of this model fits; data parallelism is what is left.", *_whole_lines(job, costs)]
    faster = whole.forecast.seconds / staged.forecast.seconds
    bytes_less = 1 - staged.forecast.bytes / whole.forecast.bytes if whole.forecast.bytes else 0.0
    if not choice.pipeline_is_better:
        more = "as fast" if faster >= 1 else f"{1 / faster:.2f} times as fast"
        return [f"Data parallelism is better: {more} as the best pipeline, and simpler.", *_whole_lines(job, costs)]
    why = (
        "The whole model does not fit into a worker"
        if not whole.fits
        else f"The pipeline is {faster:.2f} times as fast"
    )
    compared = f"{100 * bytes_less:.0f} % fewer bytes" if bytes_less >= 0 else f"{-100 * bytes_less:.0f} % more bytes"
    return [
        f"{why}, with {compared} on all wires. Put into the job:",
        *(f"    {line}" for line in lines_of(costs, staged)),
    ]


def lines_of(costs: Costs, option: Rated) -> list[str]:
    """What to write in the job for a pipeline."""
    cuts = [stage.first for stage in option.plan[1:]]
    counts = [len(stage.workers) for stage in option.plan]
    hosts = [list(stage.workers) for stage in option.plan]
    shared = len({worker for stage in option.plan for worker in stage.workers}) < sum(counts)
    workers: list[Any] = hosts if shared else counts if max(counts) > 1 else []
    where = f", workers={workers}" if workers else ""
    made = f"(layers, stages={cuts}{where})"
    if costs.profile.split:
        made = f".split(model, example_inputs, cuts={[*map(costs.profile.module, cuts)]}{where})"
    return [
        f"shardline.Pipeline{made}",
        f'pipeline="{costs.schedule}", replicas={option.replicas}, accumulate={costs.microbatches // option.replicas},',
    ]


def _whole_lines(job: Job, costs: Costs) -> list[str]:
    workers = costs.cluster.workers
    accumulate = costs.share(workers)
    lines = ["Put into the job:", f'    pipeline="whole-model", replicas={workers}, accumulate={accumulate},']
    if workers * accumulate != costs.microbatches:
        before, after = (count * job.batch_size for count in (costs.microbatches, workers * accumulate))
        lines.append(f"A step then takes {after} samples instead of {before}.")
    return lines


def figures(costs: Costs, choice: Comparison, present: Rated | None = None) -> dict[str, Any]:
    """What was found, as JSON. present: the stages that the job has now."""

    def option(found: Rated | None) -> dict[str, Any] | None:
        if found is None:
            return None
        forecast = {**asdict(found.forecast), "bytes": found.forecast.bytes, "steps_per_s": 1 / found.forecast.seconds}
        return {"stages": [asdict(stage) for stage in found.plan], "fits": found.fits, **forecast}

    better = "pipeline" if choice.pipeline_is_better else "data parallel"
    return {
        "pipeline": str(costs.schedule),
        "microbatches": costs.microbatches,
        "better": better,
        "lines": lines_of(costs, choice.staged) if choice.staged is not None else [],
        "staged": option(choice.staged),
        "present": option(present),
        "data_parallel": option(choice.whole),
    }


def plain_time(seconds: float) -> str:
    """Such as 41.7 ms."""
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * 1e3:.3g} ms"


def plain_bytes(count: float) -> str:
    """Such as 16.8 MB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"

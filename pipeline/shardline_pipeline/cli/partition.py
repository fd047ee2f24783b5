"""shardline partition: where to cut a model into stages, and whether to cut it at all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.cli import options, quantities
from shardline.errors import JobError, UsageError
from shardline_pipeline.cli.report import figures, plain_bytes, report

if TYPE_CHECKING:
    from torch import nn

    from shardline.codecs.coding import JobCoding
    from shardline.core.plan import Plan
    from shardline.core.spec import JobSpec
    from shardline.job import Job
    from shardline_pipeline.partition.costs import Cluster, Costs, LayerTraffic, Stages
    from shardline_pipeline.partition.profile import Profile


@click.command(short_help="Find the best stages of a pipeline, and compare them with data parallelism.")
@click.argument("job", metavar="JOB.py", type=click.Path(path_type=Path))
@options.option("--workers", type=click.IntRange(min=1), default=4, help="Workers.")
@options.option("--ps", type=click.IntRange(min=1), default=1, help="Parameter servers.")
@click.option("--link", default="none", metavar="RATE", help="Bandwidth of each machine, each way: 940Mbit, 25MB.")
@click.option(
    "--group",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Workers that share a machine, and its --link.",
)
@click.option("--group-link", default="none", metavar="RATE", help="Bandwidth between workers of a machine.")
@click.option("--cores", type=click.IntRange(min=1), help="Cores that all workers share. Default: each has its own.")
@click.option("--memory", default="none", metavar="SIZE", help="Memory of each worker for its stages: 8GB, 500MB.")
@click.option(
    "--sync",
    type=click.Choice(["servers", "all-reduce"]),
    default="servers",
    show_default=True,
    help="How workers of a stage get its parameters: all-reduce is for comparison, Shardline uses servers.",
)
@click.option("--mixed", is_flag=True, help="A worker may have several stages that are no neighbours (FTPipe).")
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Profile of the layers: read if it exists, else measured and written. Default: measured each time.",
)
@options.job_fields
@options.plugin
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the plan to a file.")
def partition(**flags: Any) -> int:
    """Measure the layers of JOB.py, find the best stages for a cluster, and say what to write in the job.

    The job's model must be a shardline.Pipeline, one of Pipeline.split, or a torch.nn.Sequential; how it is cut now
    does not matter. A step keeps its samples: the job's replicas x accumulate x batch_size.
    """
    from shardline_pipeline.partition.choose import choose, rated, smallest

    job = options.loaded_job(flags)
    model = in_layers(replace(job, pipeline="whole-model", tensor_ranks=1).build_model())
    costs = make_costs(job, flags, model)
    choice = choose(costs, allow_mixed=flags["mixed"])
    own = own_stages(job, model, flags["workers"])
    present = rated(costs, own) if own is not None else None
    for line in report(job, costs, choice, present):
        click.echo(line)
    if flags["json_path"] is not None:
        options.write_file(flags["json_path"], json.dumps(figures(costs, choice, present), indent=2) + "\n")
    if choice.staged is None and not choice.whole.fits:
        raise JobError(
            f"neither the whole model nor a stage of any pipeline fits into --memory {flags['memory']}: with "
            f"{costs.cluster.workers} workers the largest stage needs {plain_bytes(smallest(costs))} at least; give "
            "more workers or memory, or cut large layers into several"
        )
    return 0


def make_costs(job: Job, flags: Mapping[str, Any], model: nn.Sequential) -> Costs:
    from shardline.core.settings import WORKER
    from shardline_pipeline import Flush, schedule_named
    from shardline_pipeline.partition.costs import Costs
    from shardline_pipeline.partition.profile import coded

    spec = spec_of(replace(job, pipeline="whole-model", tensor_ranks=1), model)
    profile = read_profile(job, model, flags["profile"])
    return Costs(
        profile=profile,
        cluster=make_cluster(flags),
        # If the job has no pipeline, 1F1B with a flush.
        schedule=found if (found := schedule_named(job.pipeline)).staged else Flush(),
        microbatches=job.contributors * job.accumulate,
        exchange=exchanges(spec, len(profile.layers), flags["ps"]),
        coded=coded(profile, str(job.codec_parcels)),
        bucket_bytes=max(bucket_sizes(spec, flags["ps"]), default=0.0),
        optimizer_bytes=optimizer_bytes(spec) if job.apply == WORKER else 0.0,
        keeps=job.apply == WORKER and not spec.consistency.clip_norm,
    )


def spec_of(job: Job, model: nn.Sequential) -> JobSpec:
    """The job's identity, with each tensor's layer in front of its name."""
    from shardline_pipeline.split.model import Units

    if not isinstance(model, Units):
        return job.spec(model)
    # The job's param_groups and codec_tensors are for the model's own modules and names.
    spec, place = job.spec(model.whole), model.whole.stage_of_tensor
    return replace(spec, tensors=tuple(replace(one, name=f"{place(one.name)}.{one.name}") for one in spec.tensors))


def optimizer_bytes(job: JobSpec) -> float:
    """Bytes of the optimizer's state per byte of what is trained."""
    from shardline.core.plan import make_plan
    from shardline.core.spec import TensorKind, itemsize
    from shardline_pipeline.worker.memory import state_bytes

    trained = sum(one.elements * itemsize(one.dtype) for one in job.tensors if one.kind is TensorKind.PARAM)
    return sum(state_bytes(job, make_plan(job.tensors, 1)).values()) / trained


def own_stages(job: Job, model: nn.Sequential, workers: int) -> Stages | None:
    """The stages that the job has now, on the workers that the chief gives them to; None where it has none."""
    from shardline.consistency.assignment import assign
    from shardline_pipeline import schedule_named
    from shardline_pipeline.hosts import assign_hosts, planned_hosts
    from shardline_pipeline.model import Pipeline
    from shardline_pipeline.partition.costs import PlannedStage
    from shardline_pipeline.split.model import Units

    if not schedule_named(job.pipeline).staged:
        return None
    if isinstance(model, Units):
        hosts, spans = model.hosts, model.spans()
    else:
        assert isinstance(model, Pipeline), "made by in_layers()"
        hosts, spans = model.hosts, [] if model.automatic else [model.span(n) for n in range(model.num_stages)]
    if len(spans) < 2:
        return None
    tasks, count = [f"worker/{number}" for number in range(workers)], len(spans)
    plan = planned_hosts(hosts, job.replicas)
    homes = assign_hosts(plan, {}, tasks) if plan else assign({}, tasks, count * job.replicas)
    found = []
    for stage, span in enumerate(spans):
        units = range(stage * job.replicas, (stage + 1) * job.replicas)
        own = tuple(dict.fromkeys(tasks.index(homes[unit]) for unit in units))
        found.append(PlannedStage(first=span.start, end=span.stop, workers=own))
    return tuple(found)


def make_cluster(flags: Mapping[str, Any]) -> Cluster:
    """The cluster, from parsed flags. Raises UsageError."""
    from shardline_pipeline.partition.costs import Cluster, LinkLevel

    link, workers, group = quantities.bytes_per_s(flags["link"], "--link"), flags["workers"], flags["group"]
    memory = quantities.byte_count(flags["memory"], "--memory")
    if workers % group:
        raise UsageError(f"--workers {workers} don't make groups of --group {group}; give a multiple of {group}")
    levels: tuple[LinkLevel, ...] = (LinkLevel(count=workers, bytes_per_s=link),)
    if group > 1:
        inside = quantities.bytes_per_s(flags["group_link"], "--group-link")
        levels = (LinkLevel(count=group, bytes_per_s=inside), LinkLevel(count=workers // group, bytes_per_s=link))
    cores = flags["cores"] or math.inf
    return Cluster(levels=levels, servers=flags["ps"], sync=flags["sync"], memory_bytes=memory, cores=cores)


def in_layers(model: nn.Module) -> nn.Sequential:
    """The model as layers to cut between. Raises JobError for one that has none."""
    from torch import nn

    from shardline_pipeline.model import Pipeline
    from shardline_pipeline.staged import StagedModel

    if isinstance(model, StagedModel):
        return model.in_layers()
    if isinstance(model, nn.Sequential):
        return Pipeline(list(model), stages=1)
    raise JobError(
        f"model() returned a {type(model).__name__}, which has no layers to cut between; return "
        "shardline.Pipeline([layer, layer, ...], stages=2), or name modules to cut at: shardline.Pipeline.split(...)"
    )


def read_profile(job: Job, model: nn.Sequential, path: Path | None) -> Profile:
    """The profile in a file, or if there is none, measured here and written to it. Raises UsageError, JobError."""
    from shardline.host.process import torch_threads
    from shardline_pipeline.partition.measure import measure
    from shardline_pipeline.partition.profile import Profile

    if path is not None and path.exists():
        try:
            profile = Profile.read(path.read_text(encoding="utf-8"), f"--profile {path}")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--profile {path} can't be read: {error}") from None
        from shardline_pipeline.partition.measure import name_of

        names = [name_of(number, layer) for number, layer in enumerate(model)]
        found = [layer.name for layer in profile.layers]
        if names != found or profile.samples != job.batch_size:
            raise UsageError(
                f"--profile {path} is of {len(found)} layers and microbatches of {profile.samples} samples, with "
                f"{found[-1]} last; the job has {len(names)}, {job.batch_size} and {names[-1]}: name a new file"
            )
        return profile
    with torch_threads(job.threads):
        profile = measure(model, job)
    if path is not None:
        options.write_file(path, profile.text())
    return profile


def plan_of(job: JobSpec, servers: int) -> tuple[Plan, JobCoding]:
    """The job's plan with every layer by itself: a bucket has tensors of one fragment, here of one layer."""
    from shardline.codecs import coding_of
    from shardline.core.plan import make_plan

    by_layer = tuple(replace(one, fragment=int(one.name.partition(".")[0])) for one in job.tensors)
    plan = make_plan(by_layer, servers)
    return plan, coding_of(job, plan)


def bucket_sizes(job: JobSpec, servers: int) -> list[int]:
    """Bytes of the buckets of parameters, as the job's codecs write them."""
    plan, coding = plan_of(job, servers)
    return [
        coding.pull.bucket(server, number).usual_bytes
        for server, shard in enumerate(plan.shards)
        for number in range(len(shard.buckets))
    ]


def exchanges(job: JobSpec, layers: int, servers: int) -> list[LayerTraffic]:
    """What a worker with a layer pushes and pulls in a step, as the job's codecs write it."""
    from shardline.core.spec import TensorKind
    from shardline_pipeline.partition.costs import LayerTraffic

    plan, coding = plan_of(job, servers)
    push, pull, once = ([0] * layers for _ in range(3))
    for server, shard in enumerate(plan.shards):
        for number, bucket in enumerate(shard.buckets):
            if bucket.kind is TensorKind.FROZEN:
                continue
            layer = plan.tensors[bucket.slices[0].tensor].fragment
            sent = once if bucket.kind is TensorKind.BUFFER else push
            sent[layer] += coding.push.bucket(server, number).usual_bytes
            pull[layer] += coding.pull.bucket(server, number).usual_bytes
    return [
        LayerTraffic(push_bytes=out, pull_bytes=into, once_bytes=first)
        for out, into, first in zip(push, pull, once, strict=True)
    ]

"""shardline simulate|advise: how fast a job would run on a cluster that need not exist."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.cli import options, quantities
from shardline.cluster import read_spec
from shardline.core.timeouts import Timeouts
from shardline.errors import JobError, UsageError
from shardline_pipeline.cli.report import plain_bytes, plain_time

if TYPE_CHECKING:
    from torch import nn

    from shardline.job import Job
    from shardline_lab.simulator.menu import Choice, Menu
    from shardline_lab.simulator.result import Result
    from shardline_lab.simulator.simulation import Death, Setup, StageCosts
    from shardline_lab.simulator.times import Times

_DEATH = re.compile(r"worker/([0-9]{1,6})@([^:]+)(?::back=(.+))?")
cluster_shape = options.together(
    options.option("--ps", type=click.IntRange(min=1), default=1, help="Parameter servers."),
    options.option("--workers", type=click.IntRange(min=1), default=1, help="Workers."),
    options.option(
        "--cluster",
        metavar="FILE",
        help="cluster.json: its parameter servers and workers, and which of them share a machine. "
        "Default: --ps and --workers, each on a machine of its own.",
    ),
    click.option(
        "--mesh",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Instead of --cluster, --link and --latency: what shardline bench mesh has measured.",
    ),
    click.option("--link", default="none", metavar="RATE", help="Bandwidth of each machine, each way: 1Gbit, 25MB."),
    click.option("--latency", default="0s", metavar="TIME", help="From one machine to another: 0.2ms."),
    click.option(
        "--compute",
        metavar="TIME[,TIME...]",
        help="Mean time of one pass over a replica's batch, by worker, repeated; in a pipeline, of one microbatch, by "
        "stage. Default: measured on this machine.",
    ),
    click.option("--cv", type=float, default=0.1, show_default=True, help="Spread of --compute: deviation / mean."),
    click.option(
        "--from",
        "source",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="Take the times from the folder of a run, or a file with a number of seconds per line.",
    ),
    click.option(
        "--parcel",
        default="0s",
        metavar="TIME",
        help="In a pipeline: time of an activation, or of its gradient, besides the links.",
    ),
    click.option(
        "--exchange",
        default="0s",
        metavar="TIME",
        help="Time of a worker's exchange besides the links: coding, calls, the servers' work.",
    ),
    click.option("--overlap/--no-overlap", default=True, help="As in shardline train.  [default: overlap]"),
)
json_file = click.option(
    "--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures to a file."
)


@click.command(short_help="Simulate a job: hundreds of workers, any links, in one process.")
@click.argument("job", metavar="JOB.py", type=click.Path(path_type=Path))
@cluster_shape
@options.job_fields
@options.plugin
@click.option(
    "--kill",
    "kills",
    multiple=True,
    metavar="TASK@TIME[:back=TIME]",
    help="A worker dies, and perhaps starts again some time after: worker/3@120s:back=10s; may be repeated.",
)
@options.timeout
@click.option("--gradients", is_flag=True, help="Train the model too, in this process; shows the loss.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw the figures over virtual time.")
@json_file
def simulate(**flags: Any) -> int:
    """Simulate JOB.py: its consistency mode decides as in a real run, at virtual times.

    The same seed gives the same result.
    """
    from shardline_lab.simulator.gradients import training_contents
    from shardline_lab.simulator.plot import svg
    from shardline_lab.simulator.stages import simulated

    job = options.loaded_job(flags)
    kills = tuple(death(text, "--kill") for text in flags["kills"])
    fence_s = Timeouts(total_s=flags["timeout"]).dead_s
    setup = make_setup(job, flags, deaths=kills, fence_s=fence_s, seed=job.seed)
    for line in remarks(setup):
        click.echo(line)
    result = simulated(setup, training_contents(job, setup) if flags["gradients"] else None)
    lines = report(job, setup, result)
    for line in lines:
        click.echo(line)
    if flags["json_path"] is not None:
        options.write_file(flags["json_path"], json.dumps(result.figures(), indent=2) + "\n")
    if flags["plot"] is not None:
        options.write_file(flags["plot"], svg(result, lines[0]))
    return 0


@click.command(short_help="Compare what a job could choose on a cluster, by simulation.")
@click.argument("job", metavar="JOB.py", type=click.Path(path_type=Path))
@cluster_shape
@options.job_fields
@options.plugin
@json_file
def advise(**flags: Any) -> int:
    """Simulate JOB.py with every consistency, codec and cadence; print the fastest first, and what to write in the job.

    With --mesh: with every topology, and servers in other places. Only speed is compared. Without --compute or --from
    it measures some passes on this machine.
    """
    from shardline_lab.simulator import arrangements, menu

    job = options.loaded_job(flags)
    if flags["mesh"] is not None:
        setup = make_setup(job, flags, seed=job.seed)
        compared, refused = arrangements.simulated(job, setup)
        for line in [*remarks(setup), *arrangements.report(job, compared), *refused]:
            click.echo(line)
        if flags["json_path"] is not None:
            told = [
                {**row.result.figures(), **asdict(row.arrangement), "servers": row.servers, "expected_s": row.step_s}
                for row in compared
            ]
            options.write_file(flags["json_path"], json.dumps(told, indent=2) + "\n")
        return 0
    setup = make_setup(job, flags, compares=True, seed=job.seed)
    found = menu.simulated(job, setup)
    for line in [*remarks(setup), *table(found, menu.own(job)), "", *advice(job, found)]:
        click.echo(line)
    if flags["json_path"] is not None:
        rows = [
            {**asdict(row.choice), "samples_per_s": row.samples_per_s, **row.result.figures()} for row in found.rows
        ]
        options.write_file(flags["json_path"], json.dumps(rows, indent=2) + "\n")
    return 0


def table(found: Menu, own: Choice) -> list[str]:
    """All choices; the job's own is marked."""
    from shardline.cli.terminal import aligned

    staged = any(row.result.stages for row in found.rows)
    head = ("pipeline",) if staged else ()
    rows = [("", *head, "consistency", "codec", "cadence", "samples/s", "steps/s", "MB/step", "staleness", "computing")]
    for row in found.rows:
        choice, result = row.choice, row.result
        cells = (
            "*" if choice == own else "",
            *((f"{choice.pipeline} x {choice.replicas}",) if staged else ()),
            choice.consistency,
            row.codec,
            f"{choice.cadence}, {row.ticks} passes a step" if row.ticks not in (None, 1) else choice.cadence,
            f"{row.samples_per_s:,.0f}",
            f"{result.steps_per_s:,.2f}",
            f"{(result.push_bytes + result.pull_bytes + result.parcel_bytes) / result.steps / 1e6:,.2f}",
            f"{result.staleness:.1f}",
            f"{100 * result.computing:.0f} %",
        )
        rows.append(cells)
    lines = aligned(rows, texts=4 + staged)
    between = ", and between stages" if staged else ""
    lines.append(f"* the job as it is. MB/step: pushed and pulled by all workers{between}. Staleness in updates.")
    reasons: dict[str, list[Choice]] = {}
    for choice, why in found.refused:
        reasons.setdefault(why, []).append(choice)
    for why, (first, *others) in reasons.items():
        more = f", nor {len(others)} others" if others else ""
        lines.append(f"Not {first.consistency}, {first.codec}, {first.cadence}{more}: {why}")
    return lines


def advice(job: Job, found: Menu) -> list[str]:
    """What to write in the job for the fastest choice."""
    changes = found.rows[0].choice.lines(job)
    if not changes:
        return ["Nothing that was simulated is faster than the job as it is."]
    return [
        "The fastest one needs these lines in the job:",
        *(f"    {line}" for line in changes),
        "Only speed was compared. Stale gradients, codecs that round, local training and more replicas change what a",
        "step achieves: compare the loss with shardline simulate --gradients, or in real runs.",
    ]


def death(text: str, option: str) -> Death:
    """A death such as worker/3@120s, or worker/3@120s:back=10s. Raises UsageError."""
    found = _DEATH.fullmatch(text)
    if found is None:
        raise UsageError(f"{option}: {text!r} is not of the form worker/INDEX@TIME or worker/INDEX@TIME:back=TIME")
    index, at, back = found.groups()
    # Imports torch, which --help must not do.
    from shardline_lab.simulator.simulation import Death

    return Death(
        worker=int(index),
        at_s=quantities.seconds(at, option),
        back_s=None if back is None else quantities.seconds(back, option),
    )


def make_setup(job: Job, flags: Mapping[str, Any], *, compares: bool = False, **more: Any) -> Setup:
    """What is simulated, from parsed flags. compares: with other choices of the job."""
    import shardline_pipeline as pipeline
    from shardline_lab.bench.mesh import Mesh
    from shardline_lab.simulator.links import Network
    from shardline_lab.simulator.simulation import Setup, placed
    from shardline_pipeline.partition.automatic import cuts_for
    from shardline_pipeline.staged import StagedModel

    places = {"workers": flags["workers"], "servers": flags["ps"]}
    links = Network(
        bytes_per_s=quantities.bytes_per_s(flags["link"], "--link"),
        latency_s=quantities.seconds(flags["latency"], "--latency"),
    )
    roles = ("ps", "worker", "aggregator")
    if flags["mesh"] is not None:
        if flags["cluster"] is not None or links != Network():
            raise UsageError("--mesh says which tasks and links there are; leave out --cluster, --link and --latency")
        mesh = Mesh.read(flags["mesh"])
        places = placed(*(mesh.hosts(role) for role in roles)) | {"racks": mesh.racks}
        trip_s = statistics.median(mesh.round_trip_s.values())
        links = Network(latency_s=trip_s / 2, pairs=mesh.bytes_per_s, trips_s=mesh.round_trip_s)
    elif flags["cluster"] is not None:
        spec = read_spec(flags["cluster"])
        racks = {spec.machine(spec.address(task)): rack for task, rack in spec.racks.items()}
        places = placed(*(spec.machines(role) for role in roles)) | {"racks": racks}
    if not places["workers"] or not places["servers"]:
        raise UsageError(f"{flags['mesh'] or flags['cluster']} has no worker or no ps; a simulation needs some")
    model = job.build_model()
    described = job.spec(model)
    # Of a model in stages both ways are compared; then the times of its stages are those of the whole, too.
    both = compares and isinstance(model, StagedModel)
    if compares and isinstance(model, StagedModel) and model.automatic:
        try:
            found = cuts_for(model, job)
            assert found is not None, "the number of workers is given"
            model.begin_with(*found)
        except JobError as error:
            # A job in stages has been refused already.
            click.echo(f"No pipeline is compared: {error}")
            both = False
    both = both and isinstance(model, StagedModel) and model.num_stages > 1
    if flags["source"] is not None and flags["compute"] is not None:
        raise UsageError("--from and --compute both say how long a pass takes; give one of them")
    stages = stage_costs(job, flags, model) if both or pipeline.of(described).staged else None
    return Setup(
        job=described,
        times=pass_times(job, flags) if stages is None else stages.whole(job.accumulate, flags["cv"]),
        stages=stages,
        network=links,
        overlap=flags["overlap"],
        exchange_s=quantities.seconds(flags["exchange"], "--exchange"),
        **places,
        **more,
    )


def pass_times(job: Job, flags: Mapping[str, Any]) -> tuple[Times, ...]:
    """How long the workers compute, from parsed flags."""
    from shardline.cadence import CADENCES
    from shardline_lab.simulator import runs
    from shardline_lab.simulator.times import Gamma

    if flags["source"] is not None:
        return runs.read_times(flags["source"], CADENCES.parse(job.cadence).rounds.ticks)
    if flags["compute"] is None:
        mean_s = runs.measure(job).mean_s
        click.echo(f"measured here: {mean_s * 1e3:.1f} ms per pass")
        return (Gamma(mean_s, flags["cv"]),)
    means = [quantities.seconds(text, "--compute") for text in flags["compute"].split(",")]
    return tuple(Gamma(mean_s, flags["cv"]) for mean_s in means)


def stage_costs(job: Job, flags: Mapping[str, Any], model: nn.Module) -> StageCosts:
    """What the stages of a pipeline cost, from parsed flags."""
    from shardline_lab.simulator import runs
    from shardline_lab.simulator.times import Gamma

    # Also where times are given: the sizes of activations have to be seen.
    costs = runs.measure_stages(job, model)
    means = [times.mean_s for times in costs.times]
    if flags["source"] is not None:
        read = runs.read_stages(flags["source"], len(costs.times))
        costs = replace(costs, times=read.times, forward=read.forward)
    elif flags["compute"] is not None:
        given = [quantities.seconds(text, "--compute") for text in flags["compute"].split(",")]
        means = [given[stage % len(given)] for stage in range(len(means))]
        costs = replace(costs, forward=(1 / 3,))
    else:
        click.echo(f"measured here: {', '.join(f'{1e3 * mean_s:.1f}' for mean_s in means)} ms per microbatch, by stage")
    if flags["source"] is None:
        costs = replace(costs, times=tuple(Gamma(mean_s, flags["cv"]) for mean_s in means))
    return replace(costs, parcel_s=quantities.seconds(flags["parcel"], "--parcel"))


def remarks(setup: Setup) -> list[str]:
    """What the user might not expect."""
    import shardline_pipeline as pipeline
    from shardline.core.spec import TensorKind

    job, units = setup.job, pipeline.units(setup.job)
    tables = sum(tensor.kind is TensorKind.TABLE for tensor in job.tensors)
    rows = [f"rows of {tables} embedding tables are left out: only the rest of the model moves"] if tables else []
    return rows + _idle(setup, units)


def _idle(setup: Setup, units: int) -> list[str]:
    import shardline_pipeline as pipeline
    from shardline import consistency

    job = setup.job
    if pipeline.of(job).staged:
        what = f"{pipeline.stages(job)} stages, {job.replicas} times"
    elif consistency.of(job.consistency).assigns_replicas:
        units = job.replicas
        what = f"{units} replicas (replicas={setup.workers} in the job, or --set replicas={setup.workers})"
    else:
        return []
    idle = setup.workers - units
    return [f"{idle} of {setup.workers} workers have nothing to do: the job has {what}"] if idle > 0 else []


def report(job: Job, setup: Setup, result: Result) -> list[str]:
    # Imports torch, which --help must not do.
    from shardline import codecs

    found = result.figures()
    step, passes, samples = found["step_s"], found["passes_per_s"], job.batch_size * job.accumulate
    bytes_per_step, staleness = found["bytes_per_step"], found["staleness"]
    wasted = round(100 * found["passes_unused"])
    unused = f", and {wasted} % of the passes for nothing" if wasted else ""
    how = f"{job.pipeline}, " if result.stages else ""
    lines = [
        f"{setup.workers} workers, {setup.servers} ps, {how}{job.consistency}, {job.cadence}, {codecs.of(job)}: "
        f"{result.steps:,} steps in {result.seconds:,.1f} s of virtual time",
        f"  time per step   {plain_time(step['mean'])} in the mean, {plain_time(step['median'])} median, "
        f"95 % below {plain_time(step['p95'])}",
        f"  throughput      {result.steps_per_s:,.2f} steps/s, {passes * samples:,.0f} samples/s{unused}",
        f"  staleness       {staleness['mean']:.2f} updates in the mean, {staleness['max']} at most",
        f"  bytes per step  {plain_bytes(bytes_per_step['push'])} pushed, {plain_bytes(bytes_per_step['pull'])} pulled"
        + (f", {plain_bytes(bytes_per_step['parcels'])} between stages" if result.stages else ""),
        f"  computing       {100 * result.computing:.0f} % of the workers' time",
    ]
    for one in result.stages:
        lines.append(
            f"  stage {one.stage:<10}{100 * one.bubble:.0f} % idle within steps, "
            f"holds {one.held} microbatches at most, stale by {one.behind} at most, "
            f"{one.versions} versions"
        )
    if result.losses:
        loss = found["loss"]
        lines.append(f"  loss            {loss['first']:.4g} in the first tenth, {loss['last']:.4g} in the last")
    return lines

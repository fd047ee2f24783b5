"""shardline sweep: train a job once for each combination of settings, one model per process or device."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline import plugins
from shardline.cli import options
from shardline.errors import JobError, UsageError
from shardline.host.run_lock import RunLock, ever_begun
from shardline.observability.counting import plural
from shardline_lab.sweep import space

if TYPE_CHECKING:
    from shardline.job import Job
    from shardline_lab.sweep.member import SweepMember
    from shardline_lab.sweep.plans import Plan

MEMBERS = "models"
ALL = 1 << 31
"""At most so many models has an ensemble whose number is not given."""


@click.command(short_help="Train a job with many settings, one model per process or GPU.")
@click.argument("job", metavar="JOB.py", type=click.Path(path_type=Path))
@click.option("--grid", multiple=True, metavar="KEY=V1,V2,...", help="Values to combine with all others; repeatable.")
@click.option("--random", "draws", type=click.IntRange(min=1), metavar="N", help="Draw N points from --over.")
@click.option("--over", multiple=True, metavar="KEY=LOW..HIGH[:log]", help="A range for --random; repeatable.")
@click.option("--draw-seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of --random.")
@click.option("--sampler", type=click.Choice(["random", "optuna"]), default="random", help="optuna: Optuna draws.")
@click.option("--halving", is_flag=True, help="All train a part of their steps, the better half goes on, and so on.")
@click.option(
    "--ensemble",
    type=click.IntRange(min=2),
    is_flag=False,
    flag_value=ALL,
    metavar="[K]",
    help="Score the average of all models too, or of the best K, and write it as DIR/ensemble.safetensors.",
)
@click.option(
    "--average",
    type=click.Choice(["outputs", "probabilities"]),
    default="outputs",
    show_default=True,
    help="Of --ensemble: probabilities: of classifiers that return logits, the logarithm of the mean softmax.",
)
@options.job_fields
@options.plugin
@options.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Default: runs/JOB-sweep-DATE-TIME. A sweep that was interrupted goes on in its folder.",
)
@options.device
@click.option("--parallel", type=click.IntRange(min=1), metavar="N", help="Processes. Default: one per GPU, or core.")
def sweep(**flags: Any) -> int:
    """Train JOB.py once for each combination of settings, each model alone in a process.

    KEY is a field of the job, or lr, momentum or weight_decay of its optimizer. Each model has the bits of a cluster of
    its own. At the end: a table, DIR/results.json, results.png, and the best checkpoint as DIR/best.
    """
    grid, over = chosen(flags)
    plugins.load()
    out: Path = flags["out"] or Path("runs") / f"{flags['job'].stem}-sweep-{time.strftime('%Y%m%d-%H%M%S')}"
    if ever_begun(out):
        raise UsageError(f"--out {out} contains a run of shardline train; choose another folder")
    job, make = maker(flags, out.absolute())
    # Import torch, which --help must not do.
    from shardline_lab.sweep import fleet, plans

    places = fleet.devices(flags["device"], flags["parallel"], job.threads)
    if flags["sampler"] == "optuna":
        plan = plans.suggested({**over, **grid}, flags["draws"], flags["draw_seed"], len(places), make)
    else:
        drawn = space.drawn(over, flags["draws"], flags["draw_seed"]) if over else [()]
        members = make([random + listed for random in drawn for listed in space.product(grid)])
        if flags["ensemble"] and len(members) < 2:
            raise UsageError("--ensemble averages 2 models or more, and this sweep has 1; give more, such as seeds")
        least = min(member.job.steps for member in members)
        rounds = space.halves(len(members), least) if flags["halving"] else [(len(members), 1.0)]
        plan = plans.halved(members, rounds)
    lock = RunLock.take(out.absolute() / MEMBERS)
    try:
        ranked = trained(plan, places, out.absolute())
        return reported(ranked, places, out.absolute(), flags["ensemble"], flags["average"])
    except KeyboardInterrupt:
        click.echo(f"interrupted: the same command with --out {out} trains what is missing", err=True)
        raise
    finally:
        lock.close()


def chosen(flags: Mapping[str, Any]) -> tuple[dict[str, tuple[str, ...]], dict[str, space.Range]]:
    """Values and ranges by field. Raises UsageError, JobError."""
    grid = space.grid(flags["grid"])
    over = space.ranges(flags["over"], grid)
    if bool(over) != (flags["draws"] is not None):
        lacking = "--random N, the number of points" if over else "--over KEY=LOW..HIGH, the ranges"
        raise UsageError(f"--random and --over go together; add {lacking}")
    if not grid and not over:
        raise UsageError("a sweep has settings to compare: --grid lr=0.1,0.01, or --random 20 --over lr=1e-4..0.1:log")
    for name, _ in options.overrides(flags):
        if name.replace("-", "_") in {**grid, **over}:
            raise UsageError(f"{name} is set for all models, and swept as well; give it once")
    if flags["average"] != "outputs" and not flags["ensemble"]:
        raise UsageError("--average is of --ensemble, which is not given")
    if flags["ensemble"] and flags["halving"]:
        raise UsageError("--halving trains one model to the end, and --ensemble averages several; leave one out")
    if flags["sampler"] == "optuna":
        if not over or flags["halving"]:
            raise UsageError(
                "--sampler optuna draws whole trainings from --over: give it --random N, without --halving"
            )
        if importlib.util.find_spec("optuna") is None:
            raise UsageError("--sampler optuna needs a package that is missing: pip install optuna")
    return grid, over


def maker(flags: Mapping[str, Any], out: Path) -> tuple[Job, Callable[[Sequence[space.Point]], list[SweepMember]]]:
    """The job, and the function that makes models of points. Raises JobError if it can't train so; both do."""
    path = options.existing_job(flags["job"])
    assert path is not None
    # Imports torch, which --help must not do.
    from shardline.update.torch_optim.eager import leave_compiler_out

    leave_compiler_out()
    from shardline.host.process import torch_threads
    from shardline.job import changed, load_job
    from shardline_lab.sweep.member import SweepMember, checked

    given = options.overrides(flags)

    def make(points: Sequence[space.Point]) -> list[SweepMember]:
        with torch_threads(1):
            return [
                SweepMember(
                    point=point,
                    job=changed(job, point),
                    folder=out / MEMBERS / ",".join(map("=".join, point)).replace("/", "_"),
                    settings=dict(given + point),
                )
                for point in points
            ]

    # Other threads of torch's would be missing in a fork, which would wait for them.
    with torch_threads(1):
        job = load_job(path, given, workers=1)
        checked(job)
    if flags["ensemble"] and job.evaluate is None:
        raise JobError("--ensemble scores the average of the models with `evaluate`, which the job lacks; add it")
    return job, make


def trained(plan: Plan, places: Sequence[str], out: Path) -> list[SweepMember]:
    """Train, and tell of each model as it ends; returns them, the best first."""
    from shardline_lab.sweep import fleet, report

    members: dict[str, SweepMember] = {}
    for going, share in plan:
        members.update({member.name: member for member in going})
        click.echo(f"{plural(len(going), 'model')} to {share:.3g} of the steps, {len(places)} at a time: {out}")
        with contextlib.closing(fleet.train(going, share, places)) as ends:
            for number, member in enumerate(ends, 1):
                click.echo(f"{number}/{len(going)} {member.name}: {report.sentence(member)}")
    return report.ranked(members.values())


def reported(ranked: Sequence[SweepMember], places: Sequence[str], out: Path, most: int | None, average: str) -> int:
    """Show and write the results, with those of an ensemble of `most` models; returns the exit code."""
    from shardline_lab.sweep import ensemble, report

    ensemble.forget(out)
    mean = ensemble.averaged(ranked, most, average, places[0], out) if most else None
    report.write(ranked, out, mean)
    for line in report.table(ranked if mean is None else [*ranked, mean]):
        click.echo(line)
    if ranked[0].found.failure:
        return 1
    click.echo(f"best: {ranked[0].name}: {out / report.BEST}")
    if mean is not None and not mean.found.failure:
        click.echo(f"ensemble: {mean.name}: {out / ensemble.MODULE}")
    return int(mean is not None and bool(mean.found.failure))

"""shardline check: whether a job trains as in plain PyTorch, to the bit, in seconds."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.cli import options
from shardline.core.timeouts import Timeouts
from shardline.errors import JobError
from shardline.host.printable import printable
from shardline.observability.counting import plural
from shardline.roles import ROLES

if TYPE_CHECKING:
    from torch import Tensor

    from shardline.job import Job

MOST_NAMED = 20
"""Tensors that are named if more differ."""


@click.command(short_help="Compare a job's first steps with plain PyTorch, bit by bit.")
@click.argument("job", metavar="JOB.py", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps to compare.")
@options.option("--ps", type=click.IntRange(min=1), default=2, help="Parameter servers.")
@options.other_fields
@options.plugin
@options.device
@options.option("--ps-device", default="cpu", callback=options.check_device, help="Device of the parameter servers.")
@options.lanes
@options.timeout
def check(**flags: Any) -> int:
    """Train JOB.py for some steps in plain PyTorch, then through servers in this process, and compare all tensors.

    The exit code is 0 if all bits are equal, 1 if not. Checkpoints are written to the temporary folder.
    """
    # Imports torch, which --help must not do.
    from shardline.update.torch_optim.eager import leave_compiler_out

    leave_compiler_out()
    from shardline.job import load_job
    from shardline_lab.comparison.difference import differences
    from shardline_lab.comparison.plain import checked_job

    steps: int = flags["steps"]
    path = options.existing_job(flags["job"])
    assert path is not None
    # Once: what a file registers, such as an operator, can't be registered again.
    job, replaced = checked_job(load_job(path, options.overrides({**flags, "steps": None}), workers=1), steps)
    if replaced:
        click.echo(
            f"compared without {', '.join(replaced)}, which plain PyTorch has no equal for: synchronous, an exchange "
            "in every step, exact bytes"
        )
    expected = _plain(job, flags)
    found = _served(job, flags, steps, overlap=flags["overlap"])
    if not differences(expected, found):
        click.echo(f"{plural(steps, 'step')}: equal bits in {plural(len(expected[steps]), 'tensor')}")
        return 0
    # Raise JobError if plain PyTorch itself ends elsewhere when it runs again.
    for one in differences(expected, _plain(job, flags))[:1]:
        when = f"in step {one.step}" if one.step else "before the first step"
        raise JobError(
            f"plain PyTorch itself trains {one.name!r} to other values when it runs again, first {when}, so there is "
            "nothing to compare with: the model, the loss or the data set depends on something that the seed does not "
            "fix, such as a generator of its own, the time, or nondeterministic operations"
        )
    # Where it began: nothing stops between two steps to look at values, which would hide what comes of overlapping.
    for fewer in range(1, steps):
        found[fewer] = _served(job, flags, fewer, overlap=flags["overlap"])[fewer]
    different = differences(expected, found)
    click.echo(f"{plural(steps, 'step')}: {len(different)} of {plural(len(expected[steps]), 'tensor')} differ")
    lines = [f"  {printable(str(one))}" for one in different[:MOST_NAMED]]
    more = len(different) - MOST_NAMED
    for line in [*lines, f"  and {more} more"] if more > 0 else lines:
        click.echo(line)
    if flags["overlap"]:
        found = _served(job, flags, steps, overlap=False)
        result = "the bits are equal" if not differences(expected, found) else "bits differ as well"
        click.echo(f"with --no-overlap {result}")
    return 1


def _plain(job: Job, flags: Mapping[str, Any]) -> dict[int, dict[str, Tensor]]:
    from shardline.host.process import resolve_device
    from shardline_lab.comparison.plain import PlainTraining

    return PlainTraining(job, resolve_device(flags["device"])).run(flags["steps"])


def _served(job: Job, flags: Mapping[str, Any], steps: int, *, overlap: bool) -> dict[int, dict[str, Tensor]]:
    from shardline_lab.comparison.served import InProcessCluster, train_served

    with tempfile.TemporaryDirectory(prefix="shardline-check-") as folder:
        cluster = InProcessCluster(
            role=lambda name: ROLES[name].runner(),
            out=Path(folder),
            ps=flags["ps"],
            lane=flags["lane"],
            overlap=overlap,
            device=flags["device"],
            ps_device=flags["ps_device"],
            timeouts=Timeouts(total_s=flags["timeout"]),
        )
        return train_served(dataclasses.replace(job, steps=steps), cluster)

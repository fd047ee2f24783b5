"""shardline status|stop|page|export: show a running cluster, end it, show a run's files, export a checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardline import plugins
from shardline.cli import options
from shardline.cluster import ClusterSpec, from_tf_config, read_spec
from shardline.core.timeouts import Timeouts
from shardline.errors import ClusterSpecError
from shardline.security import Security

if TYPE_CHECKING:
    from rich.table import Table

    from shardline.core.status import ChiefStatus, TaskStatus
    from shardline.rpc.watch import ChiefWatch

VIEWERS = "shardline.viewers"
"""Entry points that serve the page of a run from its files."""

short_timeout = options.option("--timeout", type=float, default=15.0, help="Seconds; the call waits a third of this.")


def _spec(cluster: str | None) -> ClusterSpec:
    tf_config = os.environ.get("TF_CONFIG")
    if cluster:
        return read_spec(cluster)
    if tf_config:
        return from_tf_config(tf_config).spec
    raise ClusterSpecError("no cluster given; use --cluster FILE, SHARDLINE_CLUSTER or TF_CONFIG")


def chief_address(cluster: str | None) -> str:
    """Address of the chief in --cluster or TF_CONFIG. Raises ClusterSpecError."""
    return _spec(cluster).chief


def _client(cluster: str | None, timeout: float, security: Security) -> ChiefWatch:
    timeouts = Timeouts(total_s=timeout)
    address = chief_address(cluster)
    from shardline.rpc.watch import ChiefWatch

    return ChiefWatch(address, timeouts, security)


@click.command(short_help="Show the tasks of a running cluster.")
@options.cluster
@short_timeout
@options.secured
def status(cluster: str | None, timeout: float, **files: Path | None) -> int:
    """Print a table of tasks, versions and rates."""
    client = _client(cluster, timeout, options.security(files))
    try:
        found = client.status()
    finally:
        client.close()
    from shardline.cli.terminal import PlainConsole

    # A pipe has no width: make the table as wide as necessary.
    console = PlainConsole(width=None if sys.stdout.isatty() else 240)
    for text in headline(found):
        console.say(text)
    console.print(table(found))
    return 0


def headline(found: ChiefStatus) -> list[str]:
    """The job in a line or two."""
    from shardline.cli.progress import line

    lines = [f"{found.job or 'job'} ({found.consistency}): {found.phase}, {line(found)}"]
    if found.checkpoint_step >= 0:
        lines.append(f"checkpoint: step {found.checkpoint_step}, {found.checkpoint_path}")
    lines += list(found.faults)
    lines += [f"  {event}" for event in found.events[-5:]]
    return lines


def versions(task: TaskStatus) -> str:
    """Versions of a ps's shards, such as "0:120 2:118"; empty for other tasks."""
    return " ".join(f"{shard.shard}:{shard.version}" for shard in task.shards)


def standbys(task: TaskStatus) -> str:
    """Standbys of a ps's shards, such as "0:ps/1 in step, 2:ps/0 copying"; empty if there are to be none."""
    from shardline.observability.view import STANDBY_WORDS

    return ", ".join(
        f"{shard.shard}:{shard.standby_task} {STANDBY_WORDS[shard.standby]}" for shard in task.shards if shard.standby
    )


def table(found: ChiefStatus) -> Table:
    """One row per task."""
    from rich.table import Table

    rows = Table(box=None, pad_edge=False)
    # The widest and least important columns come last: a narrow terminal wraps there.
    right = ("step", "push MB/s", "pull MB/s", "heard")
    # Most jobs have no standbys.
    second = ("shard:standby",) if any(standbys(task) for task in found.tasks) else ()
    names = ("task", "state", *right, "shard:version", *second, "incarnation", "address", "metrics")
    for name in names:
        rows.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    for task in found.tasks:
        rows.add_row(
            task.task,
            task.state,
            # A ps takes no steps: the versions of its shards show its progress.
            "" if task.shards else str(task.step),
            f"{task.push_bytes_per_s / 1e6:.2f}",
            f"{task.pull_bytes_per_s / 1e6:.2f}",
            f"{task.last_heard_s:.1f} s ago",
            versions(task),
            *((standbys(task),) if second else ()),
            # term << 32 | counter, shown as "term.counter".
            f"{task.incarnation >> 32}.{task.incarnation & 0xFFFFFFFF}",
            task.address,
            task.metrics_address,
        )
    return rows


@click.command(short_help="End a running job with a checkpoint.")
@options.cluster
@click.option("--reason", default="asked to stop by `shardline stop`", help="For the logs.")
@short_timeout
@options.secured
@options.admin
def stop(cluster: str | None, reason: str, timeout: float, **files: Path | None) -> int:
    """Ask the chief to end the job with a checkpoint; all tasks then exit."""
    client = _client(cluster, timeout, options.security(files))
    try:
        client.stop(reason)
    finally:
        client.close()
    print("the job will end with a checkpoint at its next common step, and its tasks will exit")
    return 0


@click.command(short_help="Serve the page of a run from its files.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=0, show_default=True, help="Port on 127.0.0.1; 0 = a free one."
)
@options.plugin
@options.token
def page(run: Path, port: int, token_file: Path | None) -> int:
    """Serve the page of RUN, the --out of a run that has ended or goes on elsewhere, until Ctrl-C.

    It reads the files in RUN, and changes nothing. With a token, a browser has to give it.
    """
    security = Security(token_file=token_file)
    code: int = plugins.installed(VIEWERS, "run", "the page of a run")(run, port, security)
    return code


@click.command(short_help="Export a checkpoint as one plain PyTorch file.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT.safetensors|OUT.pt")
@click.option("--best", is_flag=True, help="The best checkpoint of a run, by its metric, instead of the newest.")
def export(checkpoint: Path, out: Path, best: bool) -> int:
    """Write the parameters of CHECKPOINT as one state_dict that loads in PyTorch without Shardline.

    CHECKPOINT: a run's --out, its folder of checkpoints, one of these (step-00000100), or the file `best` or `latest`
    there.
    """
    from shardline.checkpoint import export as write

    for warning in write(checkpoint, out, best=best).warnings:
        print(f"shardline: {warning}", file=sys.stderr)
    print(out)
    return 0

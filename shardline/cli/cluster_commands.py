"""shardline stop|drain|rebalance|page|export: end a running job, move its shards, show and export what a run wrote."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from pathlib import Path

import click

from shardline import plugins
from shardline.cli import options
from shardline.cluster import from_tf_config, read_spec
from shardline.core.timeouts import Timeouts
from shardline.errors import ClusterSpecError, TaskLostError, UsageError
from shardline.security import Security

EXPORTERS = "shardline.exporters"
"""Entry points that write a checkpoint as another library does."""
VIEWERS = "shardline.viewers"
"""Entry points that serve the page of a run from its files."""
PS = re.compile(r"ps/\d+")
POLL_S = 0.5
"""Seconds between two questions whether shards have moved."""


def chief_address(cluster: str | None) -> str:
    """Address of the chief in --cluster or TF_CONFIG. Raises ClusterSpecError."""
    if cluster:
        return read_spec(cluster).chief
    if tf_config := os.environ.get("TF_CONFIG"):
        return from_tf_config(tf_config).spec.chief
    raise ClusterSpecError("no cluster given; use --cluster FILE, SHARDLINE_CLUSTER or TF_CONFIG")


@click.command(short_help="End a running job with a checkpoint.")
@options.cluster
@click.option("--reason", default="asked to stop by `shardline stop`", help="For the logs.")
@options.option("--timeout", type=float, default=15.0, help="Seconds; the call waits a third of this.")
@options.secured
@options.admin
def stop(cluster: str | None, reason: str, timeout: float, **files: Path | None) -> int:
    """Ask the chief to end the job with a checkpoint; all tasks then exit."""
    timeouts = Timeouts(total_s=timeout)
    address = chief_address(cluster)
    security = options.security(files)
    from shardline.rpc.watch import ChiefWatch

    client = ChiefWatch(address, timeouts, security)
    try:
        client.stop(reason)
    finally:
        client.close()
    print("the job will end with a checkpoint at its next common step, and its tasks will exit")
    return 0


WITHIN = options.option(
    "--within", type=float, default=600.0, help="Seconds to wait for the moves; the chief goes on after that."
)


@click.command(short_help="Move the shards of a server elsewhere while the job trains.")
@click.argument("task", metavar="ps/N")
@options.cluster
@WITHIN
@options.secured
@options.admin
def drain(task: str, cluster: str | None, within: float, **files: Path | None) -> int:
    """Move all shards of a server to the others while the job trains; then it can be stopped.

    It gets no shard and no standby any more. A new process under its name may: see rebalance.
    """
    if not PS.fullmatch(task):
        raise UsageError(f"{task!r} is no server; name one, such as ps/1")
    _move(task, cluster, within, files)
    print(f"{task} holds no shard; it can be stopped")
    return 0


@click.command(short_help="Even out the shards of the servers while the job trains.")
@options.cluster
@WITHIN
@options.secured
@options.admin
def rebalance(cluster: str | None, within: float, **files: Path | None) -> int:
    """Move shards from the servers with most bytes to those with least while the job trains.

    For example to a server that came back: after a drain, or after standbys had taken over from it.
    """
    _move("", cluster, within, files)
    print("no further move would make the largest server smaller")
    return 0


def _move(drain: str, cluster: str | None, within_s: float, files: dict[str, Path | None]) -> None:
    """Ask the chief to move shards, and wait until they have moved. Raises UsageError, TaskLostError if they don't."""
    address, security = chief_address(cluster), options.security(files)
    from shardline.rpc.watch import ChiefWatch

    client, never, deadline_s = ChiefWatch(address, security=security), threading.Event(), time.monotonic() + within_s
    try:
        asked, told = client.move(drain), set[tuple[int, str]]()
        while not (asked.done or asked.failure):
            for shard, task in sorted(set(asked.moves.items()) - told):
                print(f"shard {shard} moves to {task}", flush=True)
            told.update(asked.moves.items())
            if time.monotonic() > deadline_s:
                left = ", ".join(map(str, sorted(asked.moves)))
                raise TaskLostError(f"shards {left} have not moved within {within_s:g} s; the chief's log says why")
            never.wait(POLL_S)
            asked = client.move(number=asked.number)
        if asked.failure:
            raise UsageError(f"the move was given up: {asked.failure}")
    finally:
        client.close()


@click.command(short_help="Serve the page of runs from their files.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=0, show_default=True, help="Port on 127.0.0.1; 0 = a free one."
)
@options.plugin
@options.token
def page(runs: tuple[Path, ...], port: int, token_file: Path | None) -> int:
    """Serve the page of RUN, the --out of a run that has ended or goes on, until Ctrl-C.

    The curves of further runs, up to 8 in all, are drawn beside its own. It reads their files, and changes nothing.
    With a token, a browser has to give it.
    """
    security = Security(token_file=token_file)
    code: int = plugins.installed(VIEWERS, "run", "the page of a run")(runs, port, security)
    return code


@click.command(short_help="Export a checkpoint as a PyTorch file, or as a folder of transformers.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT.safetensors|OUT.pt|FOLDER")
@click.option("--best", is_flag=True, help="The best checkpoint of a run, by its metric, instead of the newest.")
@click.option("--hf", is_flag=True, help="A new folder that from_pretrained() of transformers, or of peft, reads.")
def export(checkpoint: Path, out: Path, best: bool, hf: bool) -> int:
    """Write the parameters of CHECKPOINT as one state_dict that loads in PyTorch without Shardline.

    With --hf, as a folder with the model's config and weights; of a model of peft its adapters alone.

    CHECKPOINT: a run's --out, its folder of checkpoints, one of these (step-00000100), or the file `best` or `latest`
    there.
    """
    from shardline.checkpoint import export as write

    if hf:
        write = plugins.installed(EXPORTERS, "hf", "--hf")
    for warning in write(checkpoint, out, best=best).warnings:
        print(f"shardline: {warning}", file=sys.stderr)
    print(out)
    return 0

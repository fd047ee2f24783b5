"""shardline stop|page|export: end a running job, show a run's files, export a checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from shardline import plugins
from shardline.cli import options
from shardline.cluster import from_tf_config, read_spec
from shardline.core.timeouts import Timeouts
from shardline.errors import ClusterSpecError
from shardline.security import Security

EXPORTERS = "shardline.exporters"
"""Entry points that write a checkpoint as another library does."""
VIEWERS = "shardline.viewers"
"""Entry points that serve the page of a run from its files."""


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

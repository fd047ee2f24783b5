"""shardline health: is the task at an address healthy? Used by the image's HEALTHCHECK."""

from __future__ import annotations

from pathlib import Path

import click

from shardline.cli import options
from shardline.cluster import own_address
from shardline.errors import UnreachableError


@click.command(short_help="Check whether a task is healthy.")
@options.option(
    "--address",
    default="127.0.0.1:2222",
    metavar="HOST:PORT",
    help="Address of the task. :PORT = at this machine's name.",
)
@click.option("--within", type=click.FloatRange(0.1, 3600.0), default=5.0, show_default=True, help="Seconds.")
@options.secured
def health(address: str, within: float, **files: Path | None) -> int:
    """Query the gRPC health service of a task; the exit code is 0 if it is serving, else 3."""
    from shardline.rpc.health import check

    asked = own_address(address)
    found = check(asked, timeout_s=within, security=options.security(files))
    if found != "SERVING":
        raise UnreachableError(f"the task at {asked} is not serving: it is starting or ending")
    click.echo(f"{asked} is serving")
    return 0

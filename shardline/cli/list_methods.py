"""shardline methods: the tables of what a job can choose from."""

from __future__ import annotations

import click

from shardline import methods
from shardline.cli import options


@click.command()
@click.argument("seam", required=False, type=click.Choice(list(methods.SEAMS)))
@options.plugin
def list_methods(seam: str | None) -> None:
    """List the choices for --consistency, --rule, --codec and the other methods of a job, with their settings."""
    for name, (_, _, about) in methods.SEAMS.items():
        if seam in (None, name):
            rows = methods.table(name).describe()
            width = max(len(usage) for usage, _ in rows)
            click.echo(f"--{name}: {about}")
            for usage, line in rows:
                click.echo(f"  {usage:<{width}}  {line}")

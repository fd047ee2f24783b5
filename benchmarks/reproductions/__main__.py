"""Run reproductions: see the package."""

from __future__ import annotations

import logging
import time

import click

from benchmarks.reproductions import (
    codecs,
    compressors,
    delays,
    local,
    momentum,
    planned,
    slow_worker,
    spare_workers,
    staged,
)
from benchmarks.reproductions.base import SEEDS, Reproduction
from benchmarks.reproductions.page import draw

ALL: tuple[Reproduction, ...] = (
    *delays.ALL,
    *momentum.ALL,
    *spare_workers.ALL,
    *local.ALL,
    *codecs.ALL,
    *compressors.ALL,
    *slow_worker.ALL,
    *staged.ALL,
    *planned.ALL,
)


@click.command()
@click.option("--only", multiple=True, help="Number, such as R4; may be repeated.")
@click.option("--quick", is_flag=True, help="One seed.")
def main(only: tuple[str, ...], quick: bool) -> None:
    """Run reproductions and keep their figures and plots."""
    logging.disable(logging.WARNING)
    unknown = sorted(set(only) - {one.number for one in ALL})
    if unknown:
        raise click.UsageError(f"no reproduction {unknown[0]}; choose from {', '.join(one.number for one in ALL)}")
    for one in ALL:
        if only and one.number not in only:
            continue
        began_s = time.monotonic()
        found = one.save(SEEDS[:1] if quick else SEEDS)
        draw(one, found)
        click.echo(f"{one.number} {one.title}: {time.monotonic() - began_s:.0f} s")
        for part, holds in found.verdicts.items():
            click.echo(f"    {'yes' if holds else 'NO '}  {part}")


if __name__ == "__main__":
    main()

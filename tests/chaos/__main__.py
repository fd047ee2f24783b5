"""Many schedules, one after another.

make chaos                        # seeds 0 to 79, and 20 from each of 400, 500, 600, 700 and 800
make chaos ARGS="--seed 17"       # one of them again
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import click

from tests.chaos.network import why_no_networks
from tests.chaos.nursery import ROOT, Cold, Nursery, Starter
from tests.chaos.play import Played, play
from tests.chaos.schedules import BEHIND, BESIDE, MIRRORED, PAUSED, TABLED, TIMEOUT_S, draw

COLD_TIMEOUT_S = 24.0
"""Where each process imports everything anew."""


DEFAULT = (
    *range(80),
    *(first + number for first in (PAUSED, BESIDE, BEHIND, TABLED, MIRRORED) for number in range(20)),
)


@click.command()
@click.option(
    "--seed",
    "seeds",
    type=int,
    multiple=True,
    help="This schedule; may be repeated. Default: 0 to 79, and 20 from each of 400, 500, 600, 700 and 800.",
)
@click.option("--count", type=click.IntRange(1), help="So many seeds from --from.")
@click.option("--from", "first", type=int, default=0, show_default=True, help="The first seed.")
@click.option("--networks/--no-networks", default=True, help="Let links fail, where this machine can do that.")
@click.option("--standbys/--no-standbys", default=True, help="Give some of the jobs standbys.")
@click.option("--cold", is_flag=True, help="Start each process from nothing, as people do; slower.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    default=ROOT / "runs" / "chaos",
    help="Folder for the logs of schedules that are broken.",
)
def main(
    seeds: tuple[int, ...], count: int | None, first: int, networks: bool, standbys: bool, cold: bool, keep: Path
) -> None:
    """Play schedules of kills, pauses and partitions; exit code 1 where one is broken."""
    reason = why_no_networks() if networks else "--no-networks"
    if reason:
        click.echo(f"no links fail: {reason}")
    # Networks and processes are taken away on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if count is not None:
        seeds = (*seeds, *range(first, first + count))
    wanted = seeds or DEFAULT
    start_s = time.monotonic()
    timeout_s = COLD_TIMEOUT_S if cold else TIMEOUT_S
    with Cold() if cold else Nursery() as starter:
        broken = list(_play_all(wanted, starter, keep, networks=not reason, standbys=standbys, timeout_s=timeout_s))
    minutes = (time.monotonic() - start_s) / 60
    click.echo(
        f"{len(wanted) - len(broken)} of {len(wanted)} schedules held, in {minutes:.1f} minutes"
        + (f"; broken: {', '.join(map(str, broken))}" if broken else "")
    )
    sys.exit(1 if broken else 0)


def _play_all(
    seeds: Iterable[int], starter: Starter, keep: Path, *, networks: bool, standbys: bool, timeout_s: float
) -> Iterable[int]:
    """Play each; yields the broken ones."""
    for seed in seeds:
        schedule = draw(seed, networks=networks, standbys=standbys)
        click.echo(str(schedule))
        folder = keep / f"seed-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            click.echo(f"  held, {_told(play(schedule, folder, starter, timeout_s=timeout_s))}")
        except AssertionError as error:
            click.echo(f"  BROKEN: {error}\n  logs: {folder}\n  again: make chaos ARGS='--seed {seed}'")
            yield seed
        else:
            shutil.rmtree(folder)


def _told(played: Played) -> str:
    found = played.summary
    rolled = sum(recovery["lost"] for recovery in found["recoveries"])
    return (
        f"{played.seconds:.0f} s: {len(found['recoveries'])} recoveries with {rolled} steps made again, "
        f"{found['chief_restarts']} chief restarts, {found['repeated_batches']} batches repeated, "
        f"{found['lost_updates']} updates lost"
    )


if __name__ == "__main__":
    main()

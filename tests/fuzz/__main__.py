"""make fuzz: ten thousand calls, thousands of things to load, a million payloads per codec.

python -m tests.fuzz --seed 7 --only calls
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from tests.fuzz.runs import plan


@click.command(help=__doc__)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--calls", type=click.IntRange(1), default=10_000, show_default=True, help="Handshakes included.")
@click.option("--loads", type=click.IntRange(1), default=1_000, show_default=True, help="Of each kind.")
@click.option("--payloads", type=click.IntRange(1), default=1_000_000, show_default=True, help="Of each codec.")
@click.option(
    "--lies", type=click.IntRange(1), default=100_000, show_default=True, help="What tasks say of themselves."
)
@click.option("--only", multiple=True, help="Runs whose name begins so.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON with the figures.")
def main(seed: int, calls: int, loads: int, payloads: int, lies: int, only: tuple[str, ...], out: Path | None) -> None:
    """Run, print; exit code 1 at the first finding of a run, after the others have run."""
    failed, figures = [], {}
    counts = {"call_count": calls, "load_count": loads, "payload_count": payloads}
    counts["lie_count"] = lies
    for name, run in plan(seed, **counts).items():
        if only and not name.startswith(only):
            continue
        try:
            figures[name] = run()
        except AssertionError as error:
            failed.append(name)
            click.echo(f"{name}: FOUND, seed {seed}: {error}")
        else:
            click.echo(f"{name}: {json.dumps(figures[name])}")
    if out is not None:
        out.write_text(json.dumps({"seed": seed, "failed": failed, "runs": figures}, indent=2) + "\n", encoding="utf-8")
    click.echo(f"{len(failed)} of {len(failed) + len(figures)} runs found something")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

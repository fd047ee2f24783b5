"""Run sets of benchmarks; write JSON and PNG, print the bars.

    python -m benchmarks.run --only data-plane --repeats 5

As root the loopback sets run in a network namespace of their own under cubic; else as the machine is. The JSON says
which.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks import machine, plots, report
from benchmarks.contenders import QUICK, Bench, Scale
from benchmarks.figures import AT_LEAST, Row
from benchmarks.network import loopback
from benchmarks.report import RESULTS
from benchmarks.sets import ALL


def sentence(row: Row) -> str:
    """A row for the terminal."""
    reached = "not measured" if row.value is None else f"{row.value:.4g} {row.unit}"
    against = ", ".join(f"{rival} {value:.4g}" for rival, value in row.against.items())
    verdict = ""
    if row.ratio is not None:
        sign = "at least" if row.sense == AT_LEAST else "at most"
        bar = "" if row.bar is None else f" ({sign} {row.bar:g}: {'met' if row.met else 'NOT MET'})"
        verdict = f", ratio {row.ratio:.3f}{bar}"
    return f"{row.work}: {reached}{f' beside {against}' if against else ''}{verdict}" + (
        f" [{row.note}]" if row.note else ""
    )


def write(
    folder: Path,
    name: str,
    about: str,
    rows: Sequence[Row],
    *,
    samples: dict[str, list[dict[str, Any]]],
    failures: dict[str, str],
    around: dict[str, Any],
) -> None:
    """Write NAME.json and NAME.png, which are kept in the repository, and NAME.samples.json, which is not."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        "set": name,
        "about": about,
        **around,
        "rows": [row.to_json() for row in rows],
        "not_run": failures,
    }
    (folder / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (folder / f"{name}.samples.json").write_text(json.dumps(samples) + "\n", encoding="utf-8")
    plots.draw(folder / f"{name}.png", about, rows)


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(list(ALL)), help="This set; may be repeated. Default: all.")
@click.option("--repeats", type=click.IntRange(1), help="Of each contender, interleaved.")
@click.option("--steps", type=click.IntRange(1), help="Of each run, after the warm-up.")
@click.option("--warmup", type=click.IntRange(0))
@click.option("--megabytes", type=click.FloatRange(min=0.1), help="Instead of 64, where a set doesn't say otherwise.")
@click.option("--quick", is_flag=True, help="Just enough to see that everything runs.")
@click.option("--peers/--no-peers", default=True, help="Rivals too.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(only: tuple[str, ...], quick: bool, peers: bool, out: Path, **changes: float | None) -> None:
    """Parse, run, write, print."""
    # Ended from outside, it still takes its namespaces and processes with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    given = {name: value for name, value in changes.items() if value is not None}
    scale: Scale = replace(QUICK if quick else Scale(), peers=peers, **given)  # type: ignore[arg-type]
    described = machine.describe()
    summary: list[tuple[str, Row]] = []
    with loopback() as here:
        bench = Bench(scale=scale, loopback=here, say=lambda text: print(text, flush=True))
        for name in only or tuple(ALL):
            chosen = ALL[name]
            print(f"{name}: {chosen.ABOUT}", flush=True)
            start_s = time.monotonic()
            samples, failures = chosen.measure(bench)
            rows = chosen.rows(samples)
            around = {
                "machine": described,
                "network": {
                    "congestion_control": here.congestion_control,
                    "namespace": bool(here.namespace),
                    "links": "netns-lab, cubic" if name in ("links", "scaling", "fan-in", "overlap") else "loopback",
                },
                "scale": vars(scale),
                "quick": quick,
                "seconds": round(time.monotonic() - start_s, 1),
            }
            write(out, name, chosen.ABOUT, rows, samples=samples, failures=failures, around=around)
            summary += [(name, row) for row in rows]
    if out.resolve() == RESULTS:
        report.PAGE.write_text(report.page(report.read(RESULTS)), encoding="utf-8")
    for name, row in summary:
        print(f"{name}: {sentence(row)}")
    missed = [row.work for _, row in summary if row.met is False]
    print(f"{len(missed)} bars not met" + (f": {'; '.join(missed)}" if missed else "") + f"; figures in {out}")


if __name__ == "__main__":
    sys.exit(main())

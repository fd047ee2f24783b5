"""What each mode and cadence is for: real runs with a slow worker, with pauses now and then, and on a slow link.

Passes sleep (benchmarks/simulated_job.py), so that four workers share few cores unhindered. The unit is gradients per
second: a synchronous step takes one of each replica, an asynchronous one a single one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import AT_LEAST, Row, Samples, median
from benchmarks.simulated import Run, gradients_per_s, real

NAME = "modes"
ABOUT = "gradients per second of modes and cadences: a slow worker, pauses, a slow link"
WORKERS = 4
SLOW, SLOW_BAR, LINK_BAR = 5.0, 2.0, 20.0
MEAN_S = 0.1
EVERY = 50


def slow_name(mode: str) -> str:
    """One of four workers is slower, always."""
    return f"{mode}, one of {WORKERS} workers {SLOW:g}x slower"


def pauses_name(mode: str) -> str:
    """Any worker is slower now and then."""
    return f"{mode}, one pass of ten {SLOW:g}x slower"


def link_name(cadence: str) -> str:
    """Two workers on a slow link."""
    return f"{cadence}, 2 workers, 4 MB, 100 Mbit/s"


MODES = ("sync", "sync:spares=1", "ssp:slack=3", "async")
CADENCES = ("every-step", f"diloco:every={EVERY}")


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    steps = max(4, bench.scale.steps)
    contenders = []
    for mode in MODES:
        each = steps if mode.startswith("sync") else steps * WORKERS
        plain = {"workers": WORKERS, "steps": each, "consistency": mode, "mean_s": MEAN_S}
        contenders.append(_contender(slow_name(mode), Run(name=mode, slow=SLOW, **plain)))
        contenders.append(_contender(pauses_name(mode), Run(name=mode, pauses=SLOW, **plain)))
    for cadence in CADENCES:
        count = steps if cadence == "every-step" else max(3, steps // 5)
        run = Run(name=cadence, workers=2, steps=count, cadence=cadence, link="100mbit", width=512, mean_s=0.01)
        contenders.append(_contender(link_name(cadence), run))
    return collect(contenders, bench.scale.repeats, bench.say)


def _contender(name: str, run: Run) -> Contender:
    return Contender(name=name, run=lambda: sample(run))


def sample(run: Run) -> dict[str, Any]:
    """Gradients per second of one run."""
    with tempfile.TemporaryDirectory(prefix="shardline-bench-") as folder:
        out = Path(folder) / "out"
        real(run, out)
        return {"gradients_per_s": gradients_per_s(out)}


def rows(samples: Samples) -> list[Row]:
    """Gradients per second over those of sync, or of every-step."""
    found = []
    for mode in MODES[1:]:
        # A worker that is always slow ends up holding back the others under bounded staleness too.
        bar = None if mode.startswith("ssp") else SLOW_BAR
        found.append(_row(samples, slow_name(mode), slow_name("sync"), bar))
        found.append(_row(samples, pauses_name(mode), pauses_name("sync"), None))
    found.append(_row(samples, link_name(CADENCES[1]), link_name(CADENCES[0]), LINK_BAR))
    return found


def _row(samples: Samples, name: str, beside: str, bar: float | None) -> Row:
    ours, theirs = (median(samples, one, "gradients_per_s") for one in (name, beside))
    return Row(
        work=name,
        value=ours,
        unit="gradients/s",
        against={} if theirs is None else {beside: theirs},
        ratio=ours / theirs if ours is not None and theirs else None,
        bar=bar,
        sense=AT_LEAST,
    )

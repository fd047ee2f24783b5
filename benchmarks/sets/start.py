"""How long `shardline train` of the digits takes to begin and to end: 6 processes, beside the import of torch."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import AT_MOST, Row, Samples, median
from benchmarks.process import HERE, ROOT, Prefix, timed

NAME = "start"
ABOUT = "from the command to the first step and from the last one to the exit: digits, 6 processes, 30 steps"
IMPORT, TRAIN = "import torch", "shardline train"
STEPS = 30
FIRST_BAR = 2.5
"""Times the import of torch."""
END_BAR_S = 1.0
DIGITS = ROOT / "examples" / "digits" / "job.py"
STAMPED = """

import dataclasses
import pathlib
import time


def stamped(model, batch):
    with (pathlib.Path(__file__).parent / "stamps").open("a") as stamps:
        stamps.write(f"{time.time()}\\n")
    return loss(model, batch)


job = dataclasses.replace(job, loss=stamped)
"""
"""At the end of the job file: when each forward pass begins."""


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    prefix = bench.loopback.prefix
    contenders = [
        Contender(name=IMPORT, run=lambda: imported(prefix)),
        Contender(name=TRAIN, run=lambda: trained(prefix)),
    ]
    return collect(contenders, bench.scale.repeats, bench.say)


def imported(prefix: Prefix = HERE) -> dict[str, Any]:
    """Seconds of `python -c 'import torch'`."""
    start_s, end_s = timed([*prefix, sys.executable, "-c", "import torch"])
    return {"seconds": end_s - start_s}


def trained(prefix: Prefix = HERE) -> dict[str, Any]:
    """Seconds from the command to the first forward pass, from the last one to the exit, and in all."""
    with tempfile.TemporaryDirectory(prefix="shardline-bench-") as name:
        folder = Path(name)
        (folder / "job.py").write_text(DIGITS.read_text() + STAMPED)
        command = [sys.executable, "-m", "shardline", "train", str(folder / "job.py"), "--ps", "2", "--workers", "2"]
        command += ["--evaluators", "1", "--steps", str(STEPS), "--out", str(folder / "out")]
        start_s, end_s = timed([*prefix, *command])
        stamps = [float(line) for line in (folder / "stamps").read_text().splitlines()]
    return {"first_s": min(stamps) - start_s, "end_s": end_s - max(stamps), "seconds": end_s - start_s}


def rows(samples: Samples) -> list[Row]:
    """The two bars, and the whole run."""
    import_s = median(samples, IMPORT, "seconds")
    first_s, end_s, whole_s = (median(samples, TRAIN, name) for name in ("first_s", "end_s", "seconds"))
    return [
        Row(
            work="from the command to the first step",
            value=first_s,
            unit="s",
            against={} if import_s is None else {IMPORT: import_s},
            ratio=first_s / import_s if first_s is not None and import_s is not None else None,
            bar=FIRST_BAR,
            sense=AT_MOST,
        ),
        Row(
            work="from the last step to the exit",
            value=end_s,
            unit="s",
            ratio=end_s,
            bar=END_BAR_S,
            sense=AT_MOST,
            note="with the last checkpoint and its score",
        ),
        Row(work=f"the whole run of {STEPS} steps", value=whole_s, unit="s", note="reported"),
    ]

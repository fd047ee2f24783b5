"""Dense tensors among the workers and tables on a server, beside all of it on a server, or all among the workers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.cluster import on_hosts, train
from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import Row, Samples, speed_row
from benchmarks.network import lab
from benchmarks.process import ContenderError
from benchmarks.sets.tables import JOB, Work as Tables

NAME = "hybrid"
WORKERS, BATCH, HIDDEN, WHOLE_STEPS = 4, 256, 1024, 4
ABOUT = (
    f"the click model with 166 MB of tables and 8 MB of other parameters, {WORKERS} workers and 1 ps at 1 Gbit/s: "
    "rows of tables by the ps and the rest by all-reduce, beside whole tables, all by the ps or all by all-reduce"
)
HYBRID = "hybrid"
SERVED = "rows and the rest on the ps"
RIVALS = {"whole tables, all on the ps": False, "whole tables, all by all-reduce": True}
"""By name: among the workers."""
WORSE_BAR, BETTER_BAR = 3.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Work(Tables):
    """Flags of tables_job.py."""

    hidden: int = HIDDEN


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    scale = bench.scale
    rows = Work(model="clicks", batch=BATCH, steps=scale.steps, warmup=scale.warmup, workers=WORKERS)
    whole = Work(model="dense", batch=BATCH, steps=min(WHOLE_STEPS, scale.steps), warmup=1, workers=WORKERS)
    try:
        with lab(WORKERS + 1, "1gbit") as hosts:
            run = partial(train, places=on_hosts(hosts, WORKERS), job=JOB, lane="tcp")
            contenders = [
                Contender(name=HYBRID, run=partial(run, rows, own=True)),
                Contender(name=SERVED, run=partial(run, rows)),
                *(
                    Contender(name=name, run=partial(run, whole, own=own, served=not own))
                    for name, own in RIVALS.items()
                ),
            ]
            return collect(contenders, scale.repeats, bench.say)
    except ContenderError as error:
        bench.say(f"  {error}")
        return {}, {HYBRID: str(error)}


def rows(samples: Samples) -> list[Row]:
    """Steps per second over those of each way of moving everything alike."""
    served, reduced = RIVALS
    return [
        speed_row(samples, HYBRID, HYBRID, [served], WORSE_BAR),
        speed_row(samples, HYBRID, HYBRID, [reduced], BETTER_BAR),
        speed_row(samples, HYBRID, HYBRID, [SERVED], None),
    ]

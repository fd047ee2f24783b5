"""4 MB and 400 MB: data-plane's rows at these sizes, and memory within what the plan adds up to."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import AT_MOST, Row, Sample, Samples, median
from benchmarks.sets import data_plane

NAME = "sizes"
ABOUT = "the same work with small and large models, and the memory it takes"
SPARE_MB = 200.0
MIB_MB = 2**20 / 1e6
"""The system counts in MiB."""
FEWER = 2.5
"""A large step takes seconds on some lanes: so many times fewer of them in a run."""


def keyed(name: str, megabytes: float) -> str:
    """A contender's name at one size."""
    return f"{name}, {megabytes:g} MB"


def contenders(bench: Bench) -> list[Contender]:
    """Ours and the rivals of data-plane at both sizes."""
    scale = bench.scale
    fewer = replace(scale, steps=max(1, int(scale.steps / FEWER)), warmup=int(scale.warmup / FEWER))
    return [
        Contender(name=keyed(contender.name, megabytes), run=contender.run)
        for megabytes, sized in (
            (scale.small_megabytes, bench),
            (scale.large_megabytes, replace(bench, scale=fewer)),
        )
        for contender in data_plane.contenders(sized, megabytes, whole=False)
    ]


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    return collect(contenders(bench), bench.scale.repeats, bench.say)


def spare_mb(sample: Sample) -> float:
    """What a ps held at most beyond an idle one, the sum that it printed at start (parameters twice, state, staging),
    and the segments of its workers.
    """
    peak = float(sample["peak_mb"]["ps"]) * MIB_MB
    return peak - float(sample["idle_mb"]["ps"]) * MIB_MB - float(sample["planned_ps_mb"]) - float(sample["mapped_mb"])


def rows(samples: Samples) -> list[Row]:
    """The bars of data-plane at each size found, and the memory of the ps."""
    sizes = sorted({float(name.rsplit(", ", 1)[1].removesuffix(" MB")) for name in samples})
    found = []
    for megabytes in sizes:
        found += data_plane.rows_at(samples, functools.partial(keyed, megabytes=megabytes), megabytes)
        found += [memory_row(samples, keyed(name, megabytes)) for name in data_plane.LANES]
    return found


def memory_row(samples: Samples, contender: str) -> Row:
    """Memory of the ps beyond its plan, in MB."""
    measured = {contender: [{"spare": spare_mb(sample)} for sample in samples.get(contender, ())]}
    value = median(measured, contender, "spare")
    return Row(
        work=f"{contender}: memory of the ps beyond its plan",
        value=value,
        unit="MB",
        ratio=value,
        bar=SPARE_MB,
        sense=AT_MOST,
    )

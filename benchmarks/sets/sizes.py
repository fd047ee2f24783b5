"""4 MB and 400 MB: the same ratios or better, and memory within what the plan adds up to."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import AT_MOST, Row, Sample, Samples, median, speed_row
from benchmarks.sets import data_plane

NAME = "sizes"
ABOUT = "the same work with small and large models, and the memory it takes"
SPARE_MB = 200.0


def keyed(name: str, megabytes: float) -> str:
    """A contender's name at one size."""
    return f"{name}, {megabytes:g} MB"


def contenders(bench: Bench) -> list[Contender]:
    """Everything of data-plane at both sizes."""
    return [
        Contender(name=keyed(contender.name, megabytes), run=contender.run)
        for megabytes in (bench.scale.small_megabytes, bench.scale.large_megabytes)
        for contender in data_plane.contenders(bench, megabytes)
    ]


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    return collect(contenders(bench), bench.scale.repeats, bench.say)


def spare_mb(sample: Sample) -> float:
    """What a ps held at most beyond an idle one and what its plan adds up to (parameters twice, state, staging)."""
    return float(sample["peak_mb"]["ps"]) - float(sample["idle_mb"]["ps"]) - float(sample["planned_ps_mb"])


def rows(samples: Samples) -> list[Row]:
    """The bars of data-plane at each size found, and the memory of the ps."""
    sizes = sorted({float(name.rsplit(", ", 1)[1].removesuffix(" MB")) for name in samples})
    found = []
    for megabytes in sizes:
        for name, (rivals, bar) in data_plane.BARS.items():
            named = [keyed(rival, megabytes) for rival in rivals]
            own = keyed(name, megabytes)
            found.append(speed_row(samples, own, own, named, bar, note="" if bar else "reported"))
            found.append(memory_row(samples, own))
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

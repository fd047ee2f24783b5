"""From samples to rows: medians, ratios against rivals, and whether a bar is met. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Sample = Mapping[str, Any]
"""What a contender printed; `median_s` is the median of its steps."""
Samples = Mapping[str, Sequence[Sample]]
"""By contender, in the order of the repeats; a contender that could not run is absent or has none."""

AT_LEAST = "at least"
AT_MOST = "at most"


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the steps after the warm-up; at least one."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median step."""
        return statistics.median(self.seconds)

    def summary(self) -> dict[str, Any]:
        """Fields of a sample."""
        return {
            "steps": len(self.seconds),
            "median_s": self.median_s,
            "best_s": min(self.seconds),
            "worst_s": max(self.seconds),
            "steps_per_s": 1 / self.median_s,
            "seconds": [round(value, 6) for value in self.seconds],
        }


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table of bars."""

    work: str
    value: float | None
    """What was measured, in `unit`; None where the contender could not run."""
    unit: str
    bar: float | None = None
    """None = reported only."""
    sense: str = AT_LEAST
    ratio: float | None = None
    """What is compared with the bar."""
    against: Mapping[str, float] = field(default_factory=dict)
    """Rivals and what they reached, in `unit`."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None where there is none, or nothing to compare."""
        if self.bar is None or self.ratio is None:
            return None
        return self.ratio >= self.bar if self.sense == AT_LEAST else self.ratio <= self.bar

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "work": self.work,
            "value": self.value,
            "unit": self.unit,
            "against": dict(self.against),
            "ratio": self.ratio,
            "sense": self.sense,
            "bar": self.bar,
            "met": self.met,
            "note": self.note,
        }


def median(samples: Samples, contender: str, field_name: str = "median_s") -> float | None:
    """Median over the repeats; None where there are none."""
    values = [float(sample[field_name]) for sample in samples.get(contender, ())]
    return statistics.median(values) if values else None


def steps_per_s(samples: Samples, contender: str) -> float | None:
    """Median steps per second over the repeats."""
    found = median(samples, contender)
    return None if found is None else 1 / found


def speed_row(
    samples: Samples, work: str, contender: str, rivals: Sequence[str], bar: float | None, *, note: str = ""
) -> Row:
    """Steps per second against the fastest of some rivals. A rival that could not run is named in the note."""
    own = steps_per_s(samples, contender)
    reached = {rival: steps_per_s(samples, rival) for rival in rivals}
    against = {rival: value for rival, value in reached.items() if value is not None}
    missing = [rival for rival, value in reached.items() if value is None]
    notes = [note] if note else []
    if missing:
        notes.append(f"not measured: {', '.join(missing)}")
    ratio = own / max(against.values()) if own is not None and against else None
    return Row(work=work, value=own, unit="steps/s", bar=bar, ratio=ratio, against=against, note="; ".join(notes))


def spread(samples: Samples, contender: str) -> tuple[float, float] | None:
    """Lowest and highest steps per second of the repeats."""
    values = [1 / float(sample["median_s"]) for sample in samples.get(contender, ())]
    return (min(values), max(values)) if values else None

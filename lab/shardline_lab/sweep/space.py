"""The settings of a sweep's models: grids, draws, and how far each model trains. Pure."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardline import methods
from shardline.errors import UsageError

Point = tuple[tuple[str, str], ...]
"""Fields of a job and their values as text, as `--set` takes them."""
ALONE = {*methods.FIELDS, "error_memory", "loaders", "prefetch"} - {"consistency", "rule"}
"""Fields that say how tasks work together, or how batches are read: they change nothing in one that trains alone."""
_RANGE = re.compile(r"(.+?)\.\.(.+?)(:log)?")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, drawn evenly, or their logarithms are. whole: whole numbers, with both ends."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def text(self, share: float) -> str:
        """The number at this share of the way, from 0 to 1."""
        if self.log:
            return self.shown(self.low * (self.high / self.low) ** share)
        if self.whole:
            return str(min(int(self.low + share * (self.high - self.low + 1)), int(self.high)))
        return self.shown(self.low + share * (self.high - self.low))

    def shown(self, value: float) -> str:
        """A number as text, with four digits."""
        return str(round(value)) if self.whole else repr(float(f"{min(max(value, self.low), self.high):.4g}"))


def grid(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Values by field, of --grid KEY=V1,V2,... Raises UsageError, JobError for a field that no job has."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        field, listed = _field("--grid", text, "lr=0.1,0.01", found)
        values = tuple(listed.split(","))
        if "" in values:
            raise UsageError(f"--grid {text} has an empty value; give them as {field}=V1,V2")
        for value in values:
            if values.count(value) > 1:
                raise UsageError(f"--grid {text} has {value} {values.count(value)} times; give it once")
            methods.check_override(field, value)
        found[field] = values
    return found


def ranges(texts: Sequence[str], beside: Iterable[str] = ()) -> dict[str, Range]:
    """Ranges by field, of --over KEY=LOW..HIGH[:log]. beside: fields of the grid. Raises UsageError, JobError."""
    found: dict[str, Range] = {}
    for text in texts:
        field, span = _field("--over", text, "lr=1e-4..0.1:log", {*beside, *found})
        match = _RANGE.fullmatch(span)
        if match is None:
            raise UsageError(f"--over {text} is no range; give it as {field}=LOW..HIGH or {field}=LOW..HIGH:log")
        kind = methods.OVERRIDES[field]
        if kind not in (int, float):
            raise UsageError(f"--over {text}: {field} is no number; list its values with --grid {field}=...")
        for end in match.groups()[:2]:
            methods.check_override(field, end)
        low, high = float(match[1]), float(match[2])
        if not low < high or math.isinf(high - low):
            raise UsageError(f"--over {text}: the first number must be below the second, and both finite")
        if match[3] and low <= 0:
            raise UsageError(f"--over {text}: a logarithmic range begins above 0; begin it there, or leave :log out")
        found[field] = Range(low, high, log=bool(match[3]), whole=kind is int)
    return found


def _field(flag: str, text: str, example: str, known: Iterable[str]) -> tuple[str, str]:
    """The field of KEY=VALUES, and its values. Raises UsageError, JobError."""
    name, equals, values = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{flag} {text} is not of the form KEY=VALUES, such as {flag} {example}")
    field = name.replace("-", "_")
    if field not in methods.OVERRIDES:
        methods.override(field, values)
    if field in ALONE:
        raise UsageError(
            f"{flag} {text}: {field} changes nothing here, since each model of a sweep trains alone in one process; "
            "compare clusters with shardline train"
        )
    if field in known:
        raise UsageError(f"{flag} {text}: {field} is given twice; give it once")
    return field, values


def drawn(over: Mapping[str, Range], count: int, seed: int) -> list[Point]:
    """Points at random; fewer than `count` where whole numbers repeat."""
    generator = random.Random(seed)
    points = (tuple((field, one.text(generator.random())) for field, one in over.items()) for _ in range(count))
    return list(dict.fromkeys(points))


def product(fields: Mapping[str, Sequence[str]]) -> list[Point]:
    """All combinations of a grid."""
    return [tuple(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]


def halves(count: int, steps: int) -> list[tuple[int, float]]:
    """(models, share of their steps that they have then made) of each round of successive halving.

    Each round takes the best half of the one before twice as far, up to one model and all steps (Jamieson and
    Talwalkar, AISTATS 2016). steps: of the shortest training. Raises UsageError.
    """
    rounds = count.bit_length() - 1
    if not rounds:
        raise UsageError(f"--halving compares models, and this sweep has {count}; give more values, or leave it out")
    if steps < 1 << rounds:
        raise UsageError(
            f"--halving of {count} models takes {rounds + 1} rounds, each to twice the step of the one before, but the "
            f"job has {steps} steps; give it at least {1 << rounds}, or fewer models"
        )
    return [(count >> number, 2.0 ** (number - rounds)) for number in range(rounds + 1)]

"""Lines of the chief's log files: strict JSON, which has no NaN and no infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

NOT_FINITE = "not_finite"
"""Field that says what a number was that is null: {"loss": "nan"}."""


def to_line(fields: Mapping[str, Any]) -> str:
    """A line for these fields, without its end. Numbers that are not finite are null, and are named in NOT_FINITE."""
    lost: dict[str, str] = {}

    def without(value: Any, path: str) -> Any:
        if not isinstance(value, float) or math.isfinite(value):
            return value
        lost[path] = str(value)
        return None

    found = _each(fields, without)
    return json.dumps({**found, NOT_FINITE: lost} if lost else found, default=str, allow_nan=False)


def restored(line: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line, with the numbers that are not finite in their places."""
    lost = line.pop(NOT_FINITE, None)
    if isinstance(lost, dict):
        known = {path: float(what) for path, what in lost.items() if what in ("nan", "inf", "-inf")}
        line = _each(line, lambda value, path: known.get(path) if value is None else value)
    return line


def _each(value: Any, change: Callable[[Any, str], Any], path: str = "") -> Any:
    """A value with what `change` makes of each single one in it, given its path."""
    before = f"{path}." if path else ""
    if isinstance(value, Mapping):
        return {name: _each(item, change, f"{before}{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_each(item, change, f"{before}{number}") for number, item in enumerate(value)]
    return change(value, path)

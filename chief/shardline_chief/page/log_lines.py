"""Lines of the chief's log files: strict JSON, which has no NaN and no infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

NOT_FINITE = "not_finite"
"""Field that says what a number was that is null: {"loss": "nan"}."""


def to_line(fields: Mapping[str, Any]) -> str:
    """A line for these fields, without its end. Numbers that are not finite are null, and are named in NOT_FINITE."""
    lost: dict[str, str] = {}
    found = _without(fields, "", lost)
    return json.dumps({**found, NOT_FINITE: lost} if lost else found, default=str, allow_nan=False)


def restored(line: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line, with the numbers that are not finite in their places."""
    lost = line.get(NOT_FINITE)
    if not isinstance(lost, dict):
        return line
    found: dict[str, Any] = _with({name: value for name, value in line.items() if name != NOT_FINITE}, "", lost)
    return found


def _without(value: Any, path: str, lost: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        lost[path] = str(value)
        return None
    if isinstance(value, Mapping):
        return {name: _without(item, _joined(path, name), lost) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without(item, _joined(path, number), lost) for number, item in enumerate(value)]
    return value


def _with(value: Any, path: str, lost: Mapping[str, Any]) -> Any:
    if value is None and lost.get(path) in ("nan", "inf", "-inf"):
        return float(lost[path])
    if isinstance(value, dict):
        return {name: _with(item, _joined(path, name), lost) for name, item in value.items()}
    if isinstance(value, list):
        return [_with(item, _joined(path, number), lost) for number, item in enumerate(value)]
    return value


def _joined(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)

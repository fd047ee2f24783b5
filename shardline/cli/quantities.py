"""Durations, bandwidths and amounts of memory as people write them."""

from __future__ import annotations

import math
import re

from shardline.errors import UsageError

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BITS = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "Mbit": 125e3, "Gbit": 125e6}
BYTES_PER_S = {**BITS, "kB": 1e3, "MB": 1e6, "GB": 1e9}
"""Capitals count: 1Gb could mean bits or bytes."""
BYTES = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_NUMBER = re.compile(r"([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*([a-z]*)(?:/s)?", re.IGNORECASE)


def seconds(text: str, option: str) -> float:
    """A duration such as 80ms, 1.5s, 2min or 1h; a number alone is in seconds. Raises UsageError."""
    return _read(text, option, {**SECONDS, "": 1.0}, "a duration such as 80ms, 1.5s or 2min")


def bytes_per_s(text: str, option: str) -> float:
    """A bandwidth such as 100Mbit, 1Gbit or 25MB, per second; "none" = no limit. Raises UsageError."""
    found = math.inf if text == "none" else _read(text, option, BYTES_PER_S, "a bandwidth: none, 100Mbit, 1Gbit, 25MB")
    if found <= 0.0:
        raise UsageError(f"{option}: a bandwidth of 0 bytes/s; give one above 0")
    return found


def byte_count(text: str, option: str) -> float:
    """An amount of memory such as 8GB or 500MB; "none" = no limit. Raises UsageError."""
    found = math.inf if text == "none" else _read(text, option, BYTES, "an amount of memory: none, 500MB, 8GB")
    if found <= 0.0:
        raise UsageError(f"{option}: 0 bytes; give an amount above 0")
    return found


def _read(text: str, option: str, units: dict[str, float], form: str) -> float:
    found = _NUMBER.fullmatch(text.strip())
    unit = None if found is None else units.get(found[2])
    if found is None or unit is None:
        raise UsageError(f"{option}: {text!r} is not {form}")
    return float(found[1]) * unit

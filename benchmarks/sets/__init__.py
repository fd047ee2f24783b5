"""The sets of benchmarks, by name. Each module has NAME, ABOUT, measure(bench) and the pure function rows(samples)."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

from benchmarks.contenders import Bench
from benchmarks.figures import Row, Samples
from benchmarks.sets import (
    adamw,
    advised,
    auto,
    bubbles,
    codecs,
    data_plane,
    fan_in,
    fixed_price,
    growing,
    hooks,
    hybrid,
    links,
    mirrored,
    modes,
    overhead,
    overlap,
    pipelines,
    placement,
    scaling,
    sizes,
    small_tensors,
    start,
    tables,
    tensors,
    workers,
)

Collected = tuple[dict[str, list[dict[str, Any]]], dict[str, str]]
"""Samples by contender, and why some have none."""


class Set(Protocol):
    """One set."""

    NAME: str
    ABOUT: str

    def measure(self, bench: Bench) -> Collected:
        """Run everything; at least Scale.repeats times, interleaved."""
        ...

    def rows(self, samples: Samples) -> Sequence[Row]:
        """The bars. Pure."""
        ...


ALL: dict[str, ModuleType] = {
    module.NAME: module
    for module in (
        data_plane,
        adamw,
        sizes,
        fixed_price,
        small_tensors,
        workers,
        mirrored,
        links,
        scaling,
        fan_in,
        placement,
        growing,
        advised,
        overlap,
        overhead,
        start,
        tables,
        hybrid,
        tensors,
        modes,
        codecs,
        auto,
        hooks,
        pipelines,
        bubbles,
    )
}

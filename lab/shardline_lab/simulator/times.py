"""How long virtual workers compute: distributions, and what real runs have measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardline.errors import UsageError

Numbers = npt.NDArray[np.float64]
AT_ONCE = 1024
"""Times drawn in one call of numpy."""


class Times(Protocol):
    """A distribution of the seconds that one pass (forward and backward) over one replica's batch takes."""

    @property
    def mean_s(self) -> float:
        """Mean, in seconds."""

    def draw(self, generator: np.random.Generator, count: int) -> Numbers:
        """Independent times, all above 0."""


@dataclass(frozen=True)
class Gamma:
    """Gamma distributed, as in much of the literature. cv: standard deviation over mean; 0 = always the mean."""

    mean_s: float
    cv: float = 0.0

    def __post_init__(self) -> None:
        if not self.mean_s > 0.0:
            raise UsageError(f"a pass takes {self.mean_s} s; give a time above 0")
        if not 0.0 <= self.cv <= 10.0:
            raise UsageError(f"the coefficient of variation is {self.cv}; give a number from 0 to 10")

    def draw(self, generator: np.random.Generator, count: int) -> Numbers:
        if not self.cv:
            return np.full(count, self.mean_s)
        shape = 1.0 / self.cv**2
        return np.maximum(generator.gamma(shape, self.mean_s / shape, count), 1e-9)


@dataclass(frozen=True)
class Measured:
    """Values that were measured, and between them. largest_of: each is the largest of so many independent times.

    Then what is drawn are the single times: with U uniform on [0, 1], the largest of n has the quantile U where a
    single one has U^(1/n), so a single one is drawn as the largest one's quantile U^n.
    """

    values: tuple[float, ...]
    largest_of: int = 1

    def __post_init__(self) -> None:
        if not self.values or not min(self.values) > 0.0:
            raise UsageError(f"{len(self.values)} measured times; give at least one, and only times above 0 s")

    @property
    def mean_s(self) -> float:
        return float(np.quantile(self.values, np.linspace(0.0, 1.0, 4097)[:-1] ** self.largest_of).mean())

    def draw(self, generator: np.random.Generator, count: int) -> Numbers:
        return np.quantile(self.values, generator.random(count) ** self.largest_of)


def draws(times: Times, seed: int, worker: int, passes: int = 1) -> Iterator[float]:
    """One worker's times of so many passes: a function of the seed and the worker's number."""
    generator = np.random.Generator(np.random.PCG64([seed, worker]))
    while True:
        yield from times.draw(generator, AT_ONCE * passes).reshape(AT_ONCE, passes).sum(1).tolist()

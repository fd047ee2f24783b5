"""Which ids of a table get a row, and which rows it gives up: by steps, ids and rows alone, as bits are.

One occurrence of an id is a step in which it has a gradient, however many samples, workers and layers name it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardline.core.rows import PARTS, hashed
from shardline.errors import JobError
from shardline.seams import Resident

if TYPE_CHECKING:
    from shardline.storage.rows import RowStore

Counters = npt.NDArray[np.uint8]

_PER_ID, _LEAST = 9, 64
"""Counters per expected id, and those of a part of the table at least."""
_NUMBERS: npt.NDArray[np.uint64] = np.arange(5).astype(np.uint64)
"""Of the counters that an id has."""
_LOW = np.uint64(0xFFFFFFFF)
TOUCHED = "touched"
"""Name of a row's state: the last step in which it had a gradient, the bits of an int32."""


def _check(what: str, resident: Resident, setting: str, least: float, most: float = float("inf")) -> None:
    value = getattr(resident, setting)
    whole = isinstance(getattr(type(resident), setting), int)
    if isinstance(value, bool) or (whole and not isinstance(value, int)) or not least <= value <= most:
        valid = f"at least {least}" if most == float("inf") else f"from {least} to {most}"
        raise JobError(
            f"{what} {resident.name}: {setting} is {value}; give a {'whole ' if whole else ''}number {valid}"
        )


@dataclass(frozen=True)
class Admission(Resident, ABC):
    """Base of admissions: which ids that have a gradient, and no row yet, get one."""

    @property
    def width(self) -> int:
        """Counters (uint8) that are kept for each part of the table."""
        return 0

    @abstractmethod
    def admits(self, table: str, ids: Tensor, step: int, parts: Tensor, counters: Counters) -> Tensor:
        """The ids that get a row now: bool [U].

        ids: int64 [U], distinct, without a row; parts: the row of each in `counters`, uint8 [parts, width], which are
        changed.
        """


@dataclass(frozen=True)
class Always(Admission):
    """Every id gets a row with its first gradient."""

    name: ClassVar[str] = "always"

    def admits(self, table: str, ids: Tensor, step: int, parts: Tensor, counters: Counters) -> Tensor:
        return torch.ones(len(ids), dtype=torch.bool)


@dataclass(frozen=True)
class After(Admission):
    """An id gets its row in the `count`-th step that names it; 9 bytes for each of `ids` different ids count them.

    A counting Bloom filter (Fan et al., "Summary Cache", 2000) with conservative update (Estan and Varghese, 2002): an
    id is never late. Of new ones at most 1.5 % are a step early, until more than `ids` have been seen.
    """

    name: ClassVar[str] = "after"
    count: int = 3
    ids: int = 1_000_000

    def __post_init__(self) -> None:
        _check("admission", self, "count", 1, 255)
        _check("admission", self, "ids", 1, 1 << 38)

    @property
    def width(self) -> int:
        return max(_LEAST, -(-_PER_ID * self.ids // PARTS))

    def admits(self, table: str, ids: Tensor, step: int, parts: Tensor, counters: Counters) -> Tensor:
        # The upper bits of one hash are the part's: all ids of a part have them.
        mixed = hashed(torch.from_numpy(hashed(ids).view(np.int64)))
        start, stride = mixed >> np.uint64(32), mixed & _LOW | np.uint64(1)
        places = (start[:, None] + stride[:, None] * _NUMBERS) & _LOW
        places = places * np.uint64(self.width) >> np.uint64(32)
        at, flat = places.view(np.int64) + (parts.numpy() * self.width)[:, None], counters.reshape(-1)
        # Counted beside each other: what an id finds does not depend on the others of the step.
        times = np.minimum(flat[at].min(1), self.count - 1) + np.uint8(1)
        np.maximum.at(flat, at, times[:, None])
        return torch.from_numpy(times >= self.count)


@dataclass(frozen=True)
class Probability(Admission):
    """An id gets its row with probability `p` in each step that names it: as the seed, table, id and step decide."""

    name: ClassVar[str] = "probability"
    p: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        _check("admission", self, "p", 0, 1)

    def admits(self, table: str, ids: Tensor, step: int, parts: Tensor, counters: Counters) -> Tensor:
        digest = hashlib.blake2b(f"admit:{self.seed}:{step}:{table}".encode(), digest_size=8).digest()
        start = np.uint64(int.from_bytes(digest, "little"))
        drawn = hashed(torch.from_numpy((hashed(ids) ^ start).view(np.int64))) >> np.uint64(11)
        return torch.from_numpy(drawn < self.p * 2.0**53)


@dataclass(frozen=True)
class Eviction(Resident, ABC):
    """Base of evictions: which rows are removed at the end of a step."""

    states: ClassVar[Mapping[str, int]] = {}
    """TOUCHED: 1, if it is kept with each row."""

    def due(self, step: int) -> bool:
        """Tell if rows are looked at in this step."""
        return False

    @abstractmethod
    def evicts(self, store: RowStore, slots: Tensor, step: int) -> Tensor:
        """The rows to be removed: bool [U]. slots: int64 [U]."""


@dataclass(frozen=True)
class Never(Eviction):
    """Rows stay."""

    name: ClassVar[str] = "never"

    def evicts(self, store: RowStore, slots: Tensor, step: int) -> Tensor:
        return torch.zeros(len(slots), dtype=torch.bool)


@dataclass(frozen=True)
class PeriodicEviction(Eviction):
    """Base of evictions that look at all rows in every `every`-th step."""

    every: int = 1000

    def __post_init__(self) -> None:
        _check("eviction", self, "every", 1)

    def due(self, step: int) -> bool:
        return (step + 1) % self.every == 0


@dataclass(frozen=True)
class Age(PeriodicEviction):
    """Rows without a gradient in the last `steps` steps are removed, in every `every`-th step."""

    name: ClassVar[str] = "age"
    states: ClassVar[Mapping[str, int]] = {TOUCHED: 1}
    steps: int = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("eviction", self, "steps", 1)

    def evicts(self, store: RowStore, slots: Tensor, step: int) -> Tensor:
        return store.states[TOUCHED].view(torch.int32)[slots, 0] <= step - self.steps


@dataclass(frozen=True)
class Norm(PeriodicEviction):
    """Rows whose L2 norm is below `least` are removed, in every `every`-th step."""

    name: ClassVar[str] = "norm"
    least: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("eviction", self, "least", 0)

    def evicts(self, store: RowStore, slots: Tensor, step: int) -> Tensor:
        squares = np.square(store.values.numpy()[slots.numpy()], dtype=np.float64)
        return torch.from_numpy(np.sqrt(squares.sum(1)) < self.least)

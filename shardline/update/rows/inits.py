"""First values of rows: a function of (seed, table, id, column) alone, with the same bits on every machine.

Whole numbers, and float32 operations that are exact or round once: no library's generator, logarithm or cosine.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardline.core.rows import hashed
from shardline.errors import JobError
from shardline.native import rows as native
from shardline.seams import Resident

Bits = npt.NDArray[np.uint64]

_CHUNK = 1 << 15
"""Values made at a time: their bits stay in the nearest caches."""
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""SplitMix64's step from one number to the next, see shardline.core.rows.hashed()."""
_LARGEST = 1e30


@dataclass(frozen=True)
class RowInit(Resident, ABC):
    """Base of first values."""

    @abstractmethod
    def rows(self, table: str, ids: Tensor, dim: int) -> Tensor:
        """First values of rows: float32 [U, dim]; none depends on the others. ids: int64 [U]."""


@dataclass(frozen=True)
class RandomInit(RowInit):
    """Base of first values that are made of 64 random bits each: SplitMix64's, from one start per row."""

    seed: int = field(default=0, kw_only=True)

    @property
    @abstractmethod
    def unit(self) -> float:
        """The number, rounded to float32, of which values are whole multiples."""

    @abstractmethod
    def units(self, bits: Bits) -> npt.NDArray[np.int32]:
        """How many units a value is, made of random bits element by element."""

    def check(self, name: str) -> None:
        value = getattr(self, name)
        if not 0 <= value <= _LARGEST:
            raise JobError(f"row init {self.name}: {name} is {value}; give a number from 0 to {_LARGEST}")

    def rows(self, table: str, ids: Tensor, dim: int) -> Tensor:
        digest = hashlib.blake2b(f"{self.seed}:{table}".encode(), digest_size=8).digest()
        start = int.from_bytes(digest, "little")
        made = native.first_values(self.name, ids, dim, start, self.unit)
        if made is not None:
            return made
        starts = hashed(ids.contiguous()) ^ np.uint64(start)
        columns = np.arange(dim, dtype=np.uint64) * _GAMMA
        values, step = np.empty((len(starts), dim), np.float32), max(1, _CHUNK // dim)
        for at in range(0, len(starts), step):
            counters = (starts[at : at + step, None] + columns).view(np.int64)
            values[at : at + step] = self.units(hashed(torch.from_numpy(counters)))
        return torch.from_numpy(values * np.float32(self.unit))


@dataclass(frozen=True)
class Uniform(RandomInit):
    """Uniform between -scale and scale, of 24 random bits each."""

    name: ClassVar[str] = "uniform"
    scale: float = 0.05

    def __post_init__(self) -> None:
        self.check("scale")

    @property
    def unit(self) -> float:
        return self.scale * 2.0**-23

    def units(self, bits: Bits) -> npt.NDArray[np.int32]:
        return (bits >> np.uint64(40)).astype(np.int32) - np.int32(1 << 23)


@dataclass(frozen=True)
class Normal(RandomInit):
    """Normal with mean 0 and standard deviation std, cut off at 6.6 of them.

    The number of ones among 40 random bits, plus the difference of two numbers in [0, 1) of 12 bits each: its
    distribution function is within 0.001 of the normal one.
    """

    name: ClassVar[str] = "normal"
    std: float = 0.01

    def __post_init__(self) -> None:
        self.check("std")

    @property
    def unit(self) -> float:
        # The variance of the ones is 40 / 4, that of the difference nearly 1 / 6.
        return self.std * (2.0**-12 / math.sqrt(10 + (1 - 2.0**-24) / 6))

    def units(self, bits: Bits) -> npt.NDArray[np.int32]:
        ones: npt.NDArray[np.int32] = np.bitwise_count(bits >> np.uint64(24)).astype(np.int32) - np.int32(20)
        low = bits.astype(np.uint32).view(np.int32)
        fine = (low & np.int32(0xFFF)) - (low >> np.int32(12) & np.int32(0xFFF))
        return (ones << np.int32(12)) + fine


@dataclass(frozen=True)
class Zeros(RowInit):
    """Zeros."""

    name: ClassVar[str] = "zeros"

    def rows(self, table: str, ids: Tensor, dim: int) -> Tensor:
        return torch.zeros(len(ids), dim)

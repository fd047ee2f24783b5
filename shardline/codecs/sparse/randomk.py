"""Random-k: entries chosen at random by a number that travels along, with error memory."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shardline.codecs.base import Memory, Part, Turn
from shardline.codecs.parts import Lossy, check_ratio, check_size, share
from shardline.codecs.random import splitmix
from shardline.codecs.sparse.entries import Indices
from shardline.core.tensor_bytes import Buffer

SEED = struct.Struct("<Q")


@dataclass(frozen=True)
class RandomK(Lossy):
    """Entries chosen at random, `ratio` of them, without indices on the wire. With error memory.

    k = ceil(ratio * d) entries of d, sent exactly and not scaled up (Stich, Cordonnier and Jaggi, "Sparsified SGD with
    Memory", NeurIPS 2018, section 2). One is drawn from each of k runs of neighbours of equal length, so they are
    spread evenly, in order and never the same. The 8-byte seed of the draws is in the payload.

    A contraction on average, with delta = k / d where k divides d, otherwise at least 1 / ceil(d / k).
    """

    name: ClassVar[str] = "randomk"
    memory = Memory.RESTORED
    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self, self.ratio)

    def error_bound(self, elements: int) -> float:
        return 1.0 - 1.0 / -(-elements // share(self.ratio, elements))

    def max_part_bytes(self, part: Part) -> int:
        """The exact size of a part that is finite: the seed, and k values."""
        return SEED.size + share(self.ratio, part.elements) * part.dtype.itemsize

    def write(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        seed = turn.seed_of(part)
        return SEED.pack(seed) + values.numpy()[drawn(seed, share(self.ratio, part.elements), part.elements)].tobytes()

    def read(self, payload: memoryview, part: Part) -> torch.Tensor:
        check_size(payload, self.max_part_bytes(part), part)
        (seed,) = SEED.unpack_from(payload)
        found = torch.zeros(part.elements, dtype=part.dtype)
        values = np.frombuffer(payload[SEED.size :], found.numpy().dtype)
        found.numpy()[drawn(seed, len(values), part.elements)] = values
        return found


def drawn(seed: int, count: int, elements: int) -> Indices:
    """`count` ascending indices below `elements`, one from each of as many runs of neighbours.

    A function of the numbers alone, on any machine.
    """
    runs = np.arange(count + 1, dtype=np.int64) * elements // count
    lengths = np.diff(runs).astype(np.uint64)
    return runs[:-1] + (splitmix(seed, count) % lengths).astype(np.int64)

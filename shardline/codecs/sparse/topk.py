from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from shardline.codecs.base import Memory, Part, Turn
from shardline.codecs.parts import ERROR, NOT_FINITE, Lossy, check_ratio, share
from shardline.codecs.sparse.entries import (
    entries_at,
    entries_bytes,
    fewest_entries,
    largest,
    most_entries,
    read_entries,
    write_entries,
)
from shardline.core.tensor_bytes import Buffer


@dataclass(frozen=True)
class TopK(Lossy):
    """The largest entries of each quantum of rows, `ratio` of them. With error memory.

    k = ceil(ratio * d) entries of d, sent exactly (Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS
    2018, section 2 and algorithm 1; Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP
    2017). In parts beyond 65,536 elements, which only a row of more elements makes, their number is 0.8 k to 1.3 k.

    A contraction, with delta = k / d (0.8 k / d in those).
    """

    name: ClassVar[str] = "topk"
    memory = Memory.RESTORED
    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self, self.ratio)

    def error_bound(self, elements: int) -> float:
        return 1.0 - fewest_entries(share(self.ratio, elements), elements) / elements

    def _most(self, part: Part) -> int:
        return most_entries(share(self.ratio, part.elements), part.elements)

    def max_part_bytes(self, part: Part) -> int:
        """For each of k entries its value and 2 bytes, or as many values and a bit per element."""
        return entries_bytes(self._most(part), part)

    def write(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        """The entries in ascending order of their indices; zeros are left out."""
        found = largest(values.numpy(), share(self.ratio, part.elements))
        return write_entries(values, found, part)

    def remembered(
        self, values: torch.Tensor, wanted: torch.Tensor, data: Buffer | None, part: Part, turn: Turn
    ) -> Mapping[str, torch.Tensor]:
        """See PartCodec: what was not sent, which is all else, so nothing has to be decoded."""
        if data is None or len(data) == len(NOT_FINITE):
            return super().remembered(values, wanted, data, part, turn)
        error = wanted.clone()
        error.numpy()[entries_at(memoryview(data), part)] = 0.0
        return {ERROR: error}

    def read(self, payload: memoryview, part: Part) -> torch.Tensor:
        return read_entries(payload, self._most(part), part)

"""Deep Gradient Compression: top-k of gradients with momentum correction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from shardline.codecs.base import Codec, Layout, Memory, Part, Turn
from shardline.codecs.parts import ERROR, Lossy, check_ratio, check_setting, check_size, is_large, share
from shardline.codecs.sparse.entries import (
    entries_bytes,
    fewest_entries,
    largest,
    most_entries,
    read_entries,
    write_entries,
)
from shardline.core.spec import TensorSpec
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes

MOMENTUM = "momentum"
"""Name of the memory of momentum, u in the paper. v, the sum of what is left to be sent, is the error memory."""
STAGES = 5
"""Stages of the warm-up, each with a quarter of the entries of the one before, at first of all."""
LARGE = 1e30


@dataclass(frozen=True)
class DGC(Lossy):
    """Deep Gradient Compression: momentum on the worker, and the largest entries of what it has added up.

    u = momentum * u + g; v = v + u; the largest `ratio` of v of each quantum of rows are sent, and both u and v become
    zero there (momentum correction and momentum factor masking: Lin et al., "Deep Gradient Compression: Reducing the
    Communication Bandwidth for Distributed Training", ICLR 2018, sections 3.2 and 3.3). The servers run
    plain SGD. During the first `warmup` steps more is sent: 25 %, 6.25 %, 1.6 %, 0.4 %, 0.1 %, a fifth of them each
    (section 3.3). `clip` above 0 limits the l2 norm of a tensor's gradient before (section 3.2; the paper divides
    the limit by the square root of the number of workers); each quantum has its share of the limit, by its size.
    Vectors and small tensors are sent whole, with momentum.

    The choice of entries is a contraction of v, with delta = k / d as in topk.
    """

    name: ClassVar[str] = "dgc"
    memory = Memory.RESTORED
    ratio: float = 0.001
    momentum: float = 0.9
    clip: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        check_ratio(self, self.ratio)
        check_setting(self, "momentum", 0.0, 0.9999)
        check_setting(self, "clip", 0.0, LARGE)
        check_setting(self, "warmup", 0, LARGE)

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0.0

    def takes(self, tensor: TensorSpec) -> bool:
        """All trained float tensors, since all need momentum."""
        return Codec.takes(self, tensor)

    def error_bound(self, elements: int) -> float:
        return 1.0 - fewest_entries(share(self.ratio, elements), elements) / elements

    def ratio_at(self, step: int) -> float:
        if step >= self.warmup:
            return self.ratio
        return max(self.ratio, 0.25 ** (1 + step * STAGES // self.warmup))

    def _most(self, part: Part) -> int:
        return most_entries(share(self.ratio_at(0), part.elements), part.elements)

    def usual_bytes(self, layout: Layout) -> int:
        """See Codec.usual_bytes: the share that is sent after the warm-up."""
        return replace(self, warmup=0).sizes(layout)[1]

    def max_part_bytes(self, part: Part) -> int:
        """As topk with the largest share of the warm-up; all of a vector or small tensor."""
        if not is_large(part.tensor):
            return super().max_part_bytes(part)
        return entries_bytes(self._most(part), part)

    def wanted(self, values: torch.Tensor, part: Part, turn: Turn) -> torch.Tensor:
        """V, before it is sent; u for a vector or small tensor."""
        velocity = self._velocity(values, part, turn)
        before = turn.memory.get((part.tensor.name, part.first_row, ERROR))
        return velocity if before is None else before + velocity

    def left(
        self, values: torch.Tensor, wanted: torch.Tensor, sent: torch.Tensor, part: Part, turn: Turn
    ) -> Mapping[str, torch.Tensor]:
        """V and u after it."""
        velocity = self._velocity(values, part, turn)
        if not is_large(part.tensor):
            return {MOMENTUM: velocity}
        return {ERROR: wanted - sent, MOMENTUM: velocity.masked_fill_(sent != 0.0, 0.0)}

    def _velocity(self, values: torch.Tensor, part: Part, turn: Turn) -> torch.Tensor:
        """The next u, a new tensor."""
        if self.clip:
            limit = self.clip * math.sqrt(part.elements / part.tensor.elements)
            norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
            values = values * min(1.0, limit / norm) if norm else values
        before = turn.memory.get((part.tensor.name, part.first_row, MOMENTUM))
        # As torch.optim.SGD computes it, to the bit.
        return values.clone() if before is None else before.mul(self.momentum).add_(values)

    def write(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        """The entries as topk writes them; all of a vector or small tensor."""
        if not is_large(part.tensor):
            return bytes(tensor_bytes(values))
        found = largest(values.numpy(), share(self.ratio_at(turn.step), part.elements))
        return write_entries(values, found, part)

    def read(self, payload: memoryview, part: Part) -> torch.Tensor:
        if is_large(part.tensor):
            return read_entries(payload, self._most(part), part)
        check_size(payload, self.max_part_bytes(part), part)
        return tensor_from_bytes(bytes(payload), part.tensor.dtype)

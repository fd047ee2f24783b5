"""1-bit Adam: momentum on the workers, sent in one bit per value once the second moments are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from shardline.codecs.base import AtServer, Codec, Layout, Memory, Part, Turn
from shardline.codecs.parts import ERROR, Lossy, PartCodec, check_setting, check_size, is_large
from shardline.codecs.quantizing.onebit import OneBit
from shardline.core.spec import TensorSpec
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes

MOMENTUM = "momentum"
"""Name of the memory of the running mean of a replica's gradients."""
MOST_STEPS = 1e9
_SIGNS = OneBit()


@dataclass(frozen=True)
class OneBitAdam(Lossy):
    """Gradients for `warmup` steps; from then on each worker's momentum, as onebit sends it, with error memory.

    Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021,
    algorithm 1. m = momentum * m + (1 - momentum) * g on each replica, from the first step on; the servers run Adam
    during the warm-up, and freeze its second moments then (update rule onebit-adam, which this codec brings along). In
    the paper each m starts from the mean of all workers' m in every step; here it is the replica's own, whose mean is
    the same but for what has not been sent yet. Vectors and small tensors are sent whole, as gradients and as momentum.

    The signs are a contraction of the momentum, as in onebit.
    """

    name: ClassVar[str] = "onebit-adam"
    memory = Memory.RESTORED
    has_momentum = True
    warmup: int = 100
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_setting(self, "warmup", 1, MOST_STEPS)
        check_setting(self, "momentum", 0.0, 0.9999)

    @property
    def at_server(self) -> AtServer:
        return AtServer(rule=f"onebit-adam:warmup={self.warmup},momentum={self.momentum}")

    def takes(self, tensor: TensorSpec) -> bool:
        """All trained float tensors, since all need momentum."""
        return Codec.takes(self, tensor)

    def error_bound(self, elements: int) -> float:
        return _SIGNS.error_bound(elements)

    def usual_bytes(self, layout: Layout) -> int:
        return _SIGNS.sizes(layout)[1]

    def wanted(self, values: torch.Tensor, part: Part, turn: Turn) -> torch.Tensor:
        """The gradient; after the warm-up the momentum and what is left of it to be sent."""
        if turn.step < self.warmup:
            return values
        return PartCodec.wanted(self, self._moved(values, part, turn), part, turn)

    def left(
        self, values: torch.Tensor, wanted: torch.Tensor, sent: torch.Tensor, part: Part, turn: Turn
    ) -> Mapping[str, torch.Tensor]:
        found = {MOMENTUM: self._moved(values, part, turn)}
        if turn.step >= self.warmup and is_large(part.tensor):
            found[ERROR] = wanted - sent
        return found

    def _moved(self, values: torch.Tensor, part: Part, turn: Turn) -> torch.Tensor:
        before = turn.memory.get((part.tensor.name, part.first_row, MOMENTUM))
        return torch.lerp(torch.zeros_like(values) if before is None else before, values, 1.0 - self.momentum)

    def write(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        if turn.step < self.warmup or not is_large(part.tensor):
            return bytes(tensor_bytes(values))
        return _SIGNS.encode_part(values, part, turn)

    def read(self, payload: memoryview, part: Part) -> torch.Tensor:
        """As its length says: no part has as many bytes of its own as it has in one bit per value."""
        if is_large(part.tensor) and len(payload) == _SIGNS.max_part_bytes(part):
            return _SIGNS.read(payload, part)
        check_size(payload, self.max_part_bytes(part), part)
        return tensor_from_bytes(bytes(payload), part.tensor.dtype)

"""Sign vote: workers send signs, and servers go where most of them point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shardline.codecs.base import AtServer, Codec, Direction, Part, Scope, Turn
from shardline.codecs.parts import NOT_FINITE, PartCodec, check_size, values_like
from shardline.codecs.quantizing.base import pack, packed_bytes, unpack
from shardline.codecs.random import uniforms
from shardline.core.reduce import is_finite
from shardline.core.spec import TensorSpec
from shardline.core.tensor_bytes import Buffer

BITS = 1


@dataclass(frozen=True)
class SignVote(PartCodec):
    """The sign of each value; servers apply the sign of the sum of all workers' signs. No error memory.

    signSGD with majority vote: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018,
    algorithm 3. Every value moves by the learning rate in every step, so that has to be small: 0.0001 to 0.001. A tie
    moves nothing. One bit can't say zero: a zero's sign is drawn at random. Momentum on the servers (Signum sends that
    of momentum) comes after the vote. All trained float tensors are encoded, vectors too.
    """

    name: ClassVar[str] = "sign-vote"
    direction = Direction.PUSH
    scope = Scope.QUANTUM
    # The sign of the majority, 0 for a tie.
    at_server = AtServer(combine=torch.sign)

    def takes(self, tensor: TensorSpec) -> bool:
        """All trained float tensors: others would move by their gradients, at a learning rate for signs."""
        return Codec.takes(self, tensor)

    def max_part_bytes(self, part: Part) -> int:
        return max(packed_bytes(part.elements, BITS), len(NOT_FINITE) + 1)

    def encode_part(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        if not is_finite(values):
            return NOT_FINITE
        negative = values.numpy() < 0.0
        zero = values.numpy() == 0.0
        if zero.any():
            drawn = uniforms(turn.seed_of(part), int(np.count_nonzero(zero))).numpy() < 0.5
            negative[zero] = drawn
        codes = bytes(pack(negative.view(np.uint8), BITS))
        # Longer than the marker of a part that is not finite.
        return codes.ljust(self.max_part_bytes(part), b"\0")

    def decode_part(self, payload: Buffer, part: Part) -> torch.Tensor:
        """See PartCodec. A part that was not finite comes back as NaN everywhere."""
        view = memoryview(payload)
        if view == NOT_FINITE:
            return values_like(part, float("nan"))
        check_size(view, self.max_part_bytes(part), part)
        negative = unpack(view[: packed_bytes(part.elements, BITS)], BITS, part.elements)
        return torch.from_numpy(1.0 - 2.0 * negative.astype(np.float32)).to(part.dtype)

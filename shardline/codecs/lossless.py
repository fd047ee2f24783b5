"""Lossless compression of a bucket: bytes of equal significance together, then Zstandard."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import zstandard

from shardline.codecs.base import Codec, Fidelity, Layout, Turn
from shardline.core.spec import DTYPES, TensorSpec, itemsize
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes
from shardline.errors import JobError, ProtocolError

LEVELS = range(1, 20)
AMPLE_BYTES, MOST_TIMES = 64 << 20, 256
"""A larger bucket is compressed to a 256th at most, and sent as it is where it would get smaller: a receiver, who may
not know its sender, opens no payload that stands for more."""


@dataclass(frozen=True)
class Lossless(Codec):
    """Exact: the bytes of equal significance together, compressed with Zstandard at `level`.

    Signs and exponents of neighbouring floats are alike and their low bits are not, so each goes into a plane of its
    own (the byte shuffle of Blosc: Alted, "Why Modern CPUs Are Starving and What Can Be Done about It", Computing in
    Science & Engineering 12(2), 2010). A bucket that gets no smaller is sent as it is.
    """

    name: ClassVar[str] = "lossless"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    level: int = 1

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise JobError(f"codec lossless: level is {self.level}; give a whole number from 1 to {LEVELS[-1]}")

    def takes(self, tensor: TensorSpec) -> bool:
        return True

    def sizes(self, layout: Layout) -> tuple[int, int]:
        nbytes = layout.bucket.nbytes
        return nbytes // MOST_TIMES if nbytes > AMPLE_BYTES else 0, nbytes

    def coder(self, layout: Layout) -> LosslessCoder:
        return LosslessCoder(layout, self.level, self.sizes(layout)[0])


class LosslessCoder:
    """Encoder and decoder of one bucket. A payload as long as the bucket is the bucket's own bytes."""

    def __init__(self, layout: Layout, level: int, least: int) -> None:
        self._least = least
        self._bucket = layout.bucket
        self._size = itemsize(layout.bucket.dtype)
        self._level = level

    def encode(self, values: torch.Tensor, turn: Turn) -> Buffer:
        """One Zstandard frame of the planes, or a copy of the bytes."""
        octets = np.frombuffer(tensor_bytes(values), np.uint8)
        planes = np.ascontiguousarray(octets.reshape(-1, self._size).T)
        # One per thread: its memory is large, and two threads can't share it.
        held: dict[int, zstandard.ZstdCompressor] = _OF_THREAD.__dict__.setdefault("compressors", {})
        if self._level not in held:
            held[self._level] = zstandard.ZstdCompressor(level=self._level)
        data = held[self._level].compress(planes)  # type: ignore[arg-type]  # an array is a buffer
        return data if self._least <= len(data) < octets.nbytes else octets.tobytes()

    def decode(self, payload: Buffer, turn: Turn) -> torch.Tensor:
        """The same bits. A frame that says that it has another size than the bucket is refused unread."""
        bucket = self._bucket
        if len(payload) == bucket.nbytes:
            return tensor_from_bytes(payload, bucket.dtype)
        try:
            frame = zstandard.get_frame_parameters(payload)
            if frame.content_size != bucket.nbytes or frame.dict_id:
                raise ProtocolError(f"frame of {frame.content_size} bytes for a bucket of {bucket.nbytes}")
            data = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ProtocolError(f"payload of {len(payload)} bytes is no Zstandard frame: {error}") from None
        planes = np.frombuffer(data, np.uint8).reshape(self._size, -1)
        return torch.from_numpy(planes.T.copy().reshape(-1)).view(DTYPES[bucket.dtype])


_OF_THREAD = threading.local()

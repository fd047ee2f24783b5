"""What a codec makes of a gradient: bytes, error and speed, on one core of this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from shardline.codecs.auto import CodecSpeed
from shardline.codecs.base import Codec, Turn
from shardline.codecs.coding import Coding, parsed
from shardline.core.gradients import flat_bucket
from shardline.core.plan import Plan, make_plan
from shardline.core.spec import TensorSpec
from shardline.core.tensor_bytes import Buffer

SAMPLE_ELEMENTS = 1 << 20
LATE = 10**9
"""The step that is measured: codecs that begin with more bytes have ended that."""
MEASURED_S = 0.3
"""Seconds for each figure; at least one pass over all buckets."""


@dataclass(frozen=True, kw_only=True)
class CodecFigures:
    """Of one contribution of the whole model. Bytes are those of all buckets, without the messages around them."""

    codec: str
    raw_bytes: int
    wire_bytes: int
    relative_error: float
    """L2 norm of what is not sent, over that of what is to be sent, a gradient or momentum. Error memory is empty."""
    encode_s: float
    decode_s: float

    @property
    def ratio(self) -> float:
        """Bytes in memory per byte sent."""
        return self.raw_bytes / max(1, self.wire_bytes)

    def sent_s(self, bytes_per_s: float) -> float:
        """Seconds from a gradient to its sum at the server over such a link, if nothing overlaps."""
        return self.encode_s + self.wire_bytes / bytes_per_s + self.decode_s


def measure_codec(codec: Codec, plan: Plan, values: Mapping[str, torch.Tensor]) -> CodecFigures:
    """Encode and decode gradients, by name, as one shard of this plan. Raises JobError if the plan does not suit it."""
    coding = Coding(codec, plan)
    flats = [flat_bucket(plan, bucket, values) for bucket in plan.shards[0].buckets]
    coders = [coding.bucket(0, number) for number in range(len(flats))]

    def encode() -> list[Buffer]:
        # Without the memory of earlier steps, each pass does the same work.
        return [coder.coder.encode(flat, Turn(LATE)) for coder, flat in zip(coders, flats, strict=True)]

    def decode() -> list[torch.Tensor]:
        return [coder.coder.decode(data, Turn(LATE)) for coder, data in zip(coders, payloads, strict=True)]

    encode_s = _median_s(encode)
    # As they lie in a server's memory.
    payloads = [bytearray(data) for data in encode()]
    decode_s = _median_s(decode)
    for number, flat in enumerate(flats):
        turn = Turn(LATE)
        coding.measure(0, number, flat, coders[number].coder.encode(flat, turn), turn)
    return CodecFigures(
        codec=str(codec),
        raw_bytes=sum(bucket.nbytes for bucket in plan.shards[0].buckets),
        wire_bytes=sum(map(len, payloads)),
        relative_error=coding.relative_error or 0.0,
        encode_s=encode_s,
        decode_s=decode_s,
    )


def measure_speeds(names: Iterable[str]) -> dict[str, CodecSpeed]:
    """How fast codecs with default settings are, on SAMPLE_ELEMENTS normally distributed float32 values."""
    tensor = TensorSpec(name="sample", shape=(SAMPLE_ELEMENTS // 1024, 1024), dtype="float32")
    plan = make_plan([tensor], 1)
    values = {"sample": torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))}
    found = {}
    for name in names:
        figures = measure_codec(parsed(name), plan, values)
        raw = figures.raw_bytes
        found[name] = CodecSpeed(
            share=figures.wire_bytes / raw, encode_s=figures.encode_s / raw, decode_s=figures.decode_s / raw
        )
    return found


def _median_s(act: Callable[[], object]) -> float:
    act()
    found: list[float] = []
    ends_s = time.monotonic() + MEASURED_S
    while not found or time.monotonic() < ends_s:
        begun_s = time.perf_counter()
        act()
        found.append(time.perf_counter() - begun_s)
    return statistics.median(found)

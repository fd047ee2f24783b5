"""The lossless codec: the same bits for every dtype, smaller where there is anything to gain, no bombs."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
import zstandard

from shardline.codecs import CODECS
from shardline.codecs.base import PLAIN_TURN
from shardline.codecs.coding import BucketCoding
from shardline.core.spec import DTYPES
from shardline.core.tensor_bytes import tensor_bytes
from shardline.errors import JobError, ProtocolError
from tests.support.codecs import first, model


def written(dtype: str = "float32", text: str = "lossless") -> BucketCoding:
    return first(CODECS.parse(text), model(dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_pattern_of_bits_comes_back(dtype: str) -> None:
    bucket = written(dtype)
    elements, generator = bucket.layout.bucket.elements, torch.Generator().manual_seed(1)
    patterns = torch.randint(0, 256, (elements * DTYPES[dtype].itemsize,), generator=generator, dtype=torch.uint8)
    for values in (patterns.view(DTYPES[dtype]), torch.full((elements,), float("nan"), dtype=DTYPES[dtype])):
        payload = bytes(bucket.coder.encode(values, PLAIN_TURN))
        assert len(payload) <= bucket.max_bytes == bucket.layout.bucket.nbytes
        back = bucket.coder.decode(payload, PLAIN_TURN)
        assert bytes(tensor_bytes(back)) == bytes(tensor_bytes(values))


def test_gradients_get_smaller_and_noise_is_sent_as_it_is() -> None:
    bucket = written()
    values = torch.randn(bucket.layout.bucket.elements, generator=torch.Generator().manual_seed(1)) * 1e-3
    assert len(bucket.coder.encode(values, PLAIN_TURN)) < 0.95 * bucket.layout.bucket.nbytes
    noise = torch.randint(-(2**31), 2**31 - 1, (len(values),), generator=torch.Generator().manual_seed(1))
    payload = bucket.coder.encode(noise.to(torch.int32).view(torch.float32), PLAIN_TURN)
    assert len(payload) == bucket.layout.bucket.nbytes


@pytest.mark.parametrize("says_its_size", [True, False])
def test_a_bomb_is_refused_before_it_takes_memory(says_its_size: bool) -> None:
    bucket = written()
    compressor = zstandard.ZstdCompressor(write_content_size=says_its_size)
    bomb = compressor.compress(bytes(32 << 20))
    assert len(bomb) < bucket.layout.bucket.nbytes
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"for a bucket of {bucket.layout.bucket.nbytes}"):
            bucket.coder.decode(bomb, PLAIN_TURN)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    bucket = written()
    nbytes = bucket.layout.bucket.nbytes
    small, large = (zstandard.ZstdCompressor().compress(bytes(size)) for size in (nbytes, 32 << 20))
    # The large frame's blocks behind the header of the small one.
    head = zstandard.frame_header_size
    lie = small[: head(small)] + large[head(large) :]
    with pytest.raises(ProtocolError, match="no Zstandard frame"):
        bucket.coder.decode(lie, PLAIN_TURN)
    for bad in (small + b"\x00", small[:-1], b"", b"\x28\xb5\x2f\xfd", small + small):
        with pytest.raises(ProtocolError):
            bucket.coder.decode(bad, PLAIN_TURN)


@pytest.mark.parametrize("level", [0, 20, -3])
def test_a_level_out_of_range_is_refused(level: int) -> None:
    with pytest.raises(JobError, match=f"codec lossless: level is {level}; give a whole number from 1 to 19"):
        CODECS.parse(f"lossless:level={level}")

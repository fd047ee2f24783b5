"""Tensors to bytes and back: every dtype, shape and layout, to the bit."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, strategies as st

from shardline.core.spec import DTYPES, itemsize
from shardline.core.tensor_bytes import (
    FINGERPRINT_BYTES,
    FINGERPRINT_STRIDE,
    digest,
    fingerprint,
    memory_of,
    tensor_bytes,
    tensor_from_bytes,
)
from shardline.errors import ProtocolError

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def from_bits(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of these very bits, NaN payloads included; for bool only 0 and 1 are values."""
    if dtype == "bool":
        data = bytes(value & 1 for value in data)
    if not data:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(DTYPES[dtype]).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, torch.Tensor]:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(SHAPES)
    count = 1
    for size in shape:
        count *= size
    size = count * itemsize(dtype)
    tensor = from_bits(draw(st.binary(min_size=size, max_size=size)), dtype, shape)
    match draw(st.sampled_from(["as it is", "transposed", "strided", "offset"])):
        case "transposed":
            tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
        case "strided" if tensor.dim():
            tensor = tensor[::2]
        case "offset" if tensor.dim():
            tensor = tensor[1:]
    return dtype, tensor


@given(tensors())
def test_every_tensor_comes_back_to_the_bit(case: tuple[str, torch.Tensor]) -> None:
    dtype, tensor = case
    data = tensor_bytes(tensor)
    assert len(data) == tensor.numel() * itemsize(dtype)
    for payload in (data, bytes(data), bytearray(data)):
        back = tensor_from_bytes(payload, dtype)
        assert back.dtype == tensor.dtype and back.shape == (tensor.numel(),)
        assert bits(back) == bits(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_dimensional_and_empty_tensors_have_one_element_and_none(dtype: str) -> None:
    assert len(tensor_bytes(torch.ones((), dtype=DTYPES[dtype]))) == itemsize(dtype)
    assert tensor_from_bytes(tensor_bytes(torch.ones((), dtype=DTYPES[dtype])), dtype).tolist() == [1]
    assert tensor_bytes(torch.ones((3, 0), dtype=DTYPES[dtype])) == b""
    assert tensor_from_bytes(b"", dtype).shape == (0,)


def test_bytes_are_little_endian_and_in_row_order() -> None:
    tensor = torch.tensor([[1.5, 2.0], [-3.0, 0.25]])
    assert bytes(tensor_bytes(tensor)) == struct.pack("<4f", 1.5, 2.0, -3.0, 0.25)
    assert bytes(tensor_bytes(tensor.t())) == struct.pack("<4f", 1.5, -3.0, 2.0, 0.25)
    assert bytes(tensor_bytes(torch.tensor([258], dtype=torch.int16))) == b"\x02\x01"
    assert bytes(tensor_bytes(torch.tensor(1.0, dtype=torch.bfloat16))) == b"\x80\x3f"


def test_a_contiguous_tensor_is_not_copied_either_way() -> None:
    tensor = torch.zeros(4, requires_grad=True)
    view = tensor_bytes(tensor)
    with torch.no_grad():
        tensor[0] = 1.0
    assert bytes(view[:4]) == struct.pack("<f", 1.0)
    memory = bytearray(8)
    back = tensor_from_bytes(memory, "float32")
    memory[:4] = struct.pack("<f", 3.0)
    assert back.tolist() == [3.0, 0.0]
    octets = torch.zeros(4, dtype=torch.uint8)
    memory_of(octets)[2] = 9
    assert octets.tolist() == [0, 0, 9, 0]


def test_a_partial_element_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"7 bytes are not a multiple of the float32 element size, 4 bytes"):
        tensor_from_bytes(bytes(7), "float32")


@given(st.binary(max_size=100), st.integers(0, 99), st.integers(1, 255))
def test_a_digest_is_never_0_and_tells_one_changed_byte(data: bytes, position: int, change: int) -> None:
    assert 0 < digest(data) < 1 << 64
    assert digest(data) == digest(bytearray(data)) == digest(memoryview(data))
    if data:
        other = bytearray(data)
        other[position % len(data)] ^= change
        assert digest(other) != digest(data)


@pytest.mark.parametrize(
    "size", [0, 1, 2048, FINGERPRINT_BYTES - 1, FINGERPRINT_BYTES, FINGERPRINT_BYTES + 2049, 1 << 20]
)
def test_a_fingerprint_tells_bytes_apart_that_differ_all_over(size: int) -> None:
    data = bytes(number * 7 % 251 for number in range(size))
    found = fingerprint(data)
    assert 0 < found < 1 << 64
    assert found == fingerprint(memoryview(bytearray(data)))
    if size:
        assert found != fingerprint(bytes(octet ^ 1 for octet in data))
        # The last bytes, which may be less than a stride, are looked at too.
        assert found != fingerprint(data[: size // FINGERPRINT_STRIDE * FINGERPRINT_STRIDE - 1])

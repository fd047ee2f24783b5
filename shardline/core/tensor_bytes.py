"""Tensors to bytes and back, without copies where memory allows it."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import xxhash

from shardline.core.spec import DTYPES
from shardline.errors import ProtocolError
from shardline.native import kernels

Buffer = bytes | bytearray | memoryview
FINGERPRINT_BYTES = 64 << 10
"""Of fewer all are looked at."""
FINGERPRINT_STRIDE = 2 << 10
FINGERPRINT_LINE = 64


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The little-endian bytes of a CPU tensor as a view of its memory (a copy where it is not contiguous).

    Works for every dtype, 0-d and empty tensors. The view is valid as long as the tensor is unchanged.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    # One element counts as contiguous whatever its stride, but can't be viewed as bytes with another than 1.
    return memory_of(flat.as_strided(flat.shape, (1,)).view(torch.uint8))


def memory_of(octets: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-d uint8 CPU tensor, writable."""
    return memoryview(octets.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers; its stubs say so from 3.12 on


def tensor_from_bytes(data: Buffer, dtype: str) -> torch.Tensor:
    """1-d tensor over (not a copy of) writable bytes, a copy of read-only ones; ProtocolError on a partial element."""
    size = DTYPES[dtype].itemsize
    if len(data) % size:
        raise ProtocolError(f"{len(data)} bytes are not a whole number of {dtype} elements ({size} bytes each)")
    if len(data) == 0:
        return torch.empty(0, dtype=DTYPES[dtype])
    view = memoryview(data)
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.uint8).view(DTYPES[dtype])


def borrowed_tensor(data: Buffer, dtype: str) -> torch.Tensor:
    """1-d tensor over (not a copy of) any bytes, read-only ones too: it must not be written to.

    A copy where the bytes don't lie at a multiple of the element's size. ProtocolError on a partial element.
    """
    view, size = memoryview(data), DTYPES[dtype].itemsize
    if not view.readonly or len(view) == 0 or len(view) % size:
        return tensor_from_bytes(data, dtype)
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    if address % size:
        return tensor_from_bytes(data, dtype)
    # torch warns of read-only buffers; over an array of ctypes it knows nothing of that.
    memory = (ctypes.c_char * len(view)).from_address(address)
    memory.owner = view  # type: ignore[attr-defined]  # an array of ctypes takes attributes; keeps the bytes alive
    return torch.frombuffer(memory, dtype=torch.uint8).view(DTYPES[dtype])


def copy_bytes(target: memoryview, source: Buffer) -> None:
    """Copy bytes of the same length; other threads run meanwhile, which a slice assignment doesn't let them."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def fingerprint(data: Buffer) -> int:
    """xxh3-64 of a sample of encoded bytes, a cache line of each 2 KiB, and of few bytes all; never 0.

    Tells contributions that were computed twice with other bits apart at an eighth of a digest's price: other threads,
    kernels or machines round all over a tensor, not in one place.
    """
    octets = np.frombuffer(data, np.uint8)
    if octets.nbytes < FINGERPRINT_BYTES:
        return digest(data)
    known = kernels.fingerprint(data)
    if known is not None:
        return known
    rows = octets[: octets.nbytes // FINGERPRINT_STRIDE * FINGERPRINT_STRIDE].reshape(-1, FINGERPRINT_STRIDE)
    found = xxhash.xxh3_64(rows[:, :FINGERPRINT_LINE].tobytes())
    found.update(octets[rows.nbytes :].tobytes())
    return found.intdigest() or 1


def digest(data: Buffer) -> int:
    """xxh3-64 of encoded bytes; never 0, which means "not sent"."""
    return xxhash.xxh3_64_intdigest(data) or 1

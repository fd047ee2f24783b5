"""Tensors to bytes and back, without copies if possible."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
import xxhash

from shardline.core.spec import DTYPES
from shardline.errors import ProtocolError
from shardline.native import kernels

Buffer = bytes | bytearray | memoryview
FEW_BYTES = 64 << 10
"""Copying them takes a few microseconds, as giving up the interpreter's lock and getting it back does."""
FINGERPRINT_BYTES = 64 << 10
"""Below this, a fingerprint reads all bytes."""
FINGERPRINT_STRIDE = 2 << 10
FINGERPRINT_LINE = 64


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The little-endian bytes of a CPU tensor as a view of its memory (a copy if it is not stored like that).

    Works for every dtype, 0-d and empty tensors. The view is valid as long as the tensor is unchanged.
    """
    if kernels.is_plain(tensor) and tensor.numel() and not tensor.is_complex():
        # A fifth of what the operations of torch take.
        memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
        # Of its own, since the tensor may get other memory; otherwise as in borrowed_tensor().
        memory.owner = tensor.detach()  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    # A single element counts as contiguous with any stride, but can be viewed as bytes only with stride 1.
    return memory_of(flat.as_strided(flat.shape, (1,)).view(torch.uint8))


# Not part of torch's interface.
count_memory: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _storage: -1)


def memory_uses(tensor: torch.Tensor) -> int:
    """Number of references to a tensor's memory, all of them counted alike; -1 if torch can't tell."""
    return count_memory(tensor.untyped_storage()._cdata)


def is_stored(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are in memory in the order of their indices, each as it is read.

    Views that torch negates or conjugates when they are read have other signs there.
    """
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bytes: 0.0 is not -0.0, a NaN equals itself."""
    return bool(torch.equal(_octets(a), _octets(b)))


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def memory_of(octets: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-d uint8 CPU tensor, writable."""
    return memoryview(octets.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers; its stubs say so from 3.12 on


def tensor_from_bytes(data: Buffer, dtype: str) -> torch.Tensor:
    """1-d tensor over (not a copy of) writable bytes, a copy of read-only ones; ProtocolError for a partial element."""
    size = DTYPES[dtype].itemsize
    if len(data) % size:
        raise ProtocolError(f"{len(data)} bytes are not a multiple of the {dtype} element size, {size} bytes")
    if len(data) == 0:
        return torch.empty(0, dtype=DTYPES[dtype])
    view = memoryview(data)
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=DTYPES[dtype])


def borrowed_tensor(data: Buffer, dtype: str) -> torch.Tensor:
    """1-d tensor over (not a copy of) any bytes, including read-only ones: it must not be written to.

    A copy if the bytes are not aligned to the element's size. Raises ProtocolError for a partial element.
    """
    view, size = memoryview(data), DTYPES[dtype].itemsize
    if not view.readonly or len(view) == 0 or len(view) % size:
        return tensor_from_bytes(data, dtype)
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    if address % size:
        return tensor_from_bytes(data, dtype)
    # torch warns about read-only buffers; for a ctypes array it can't tell.
    memory = (ctypes.c_char * len(view)).from_address(address)
    memory.owner = view  # type: ignore[attr-defined]  # an array of ctypes takes attributes; keeps the bytes alive
    return torch.frombuffer(memory, dtype=DTYPES[dtype])


def copy_bytes(target: memoryview, source: Buffer) -> None:
    """Copy bytes of the same length. Other threads run meanwhile, unless they are few."""
    if len(target) <= FEW_BYTES:
        target[:] = source
        return
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def fingerprint(data: Buffer) -> int:
    """xxh3-64 of a sample of encoded bytes, one cache line per 2 KiB, or of all bytes if there are few; never 0.

    Distinguishes contributions that were computed twice with different bits, at an eighth of a digest's cost: other
    threads, kernels or machines round differently all over a tensor, not in one place.
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


def params_sha256(params: Mapping[str, torch.Tensor | Iterable[torch.Tensor]]) -> str:
    """sha256 in hex over the tensors' little-endian bytes, one tensor after another in the order of their names.

    params: every parameter once, under its first name (including frozen ones; no aliases of tied weights, no buffers),
    and of each table `<table>.ids` and `<table>.rows`, whole or piece by piece. Names and shapes are not hashed, so any
    tool that reads the exported file can check it.
    """
    found = hashlib.sha256()
    for name in sorted(params):
        held = params[name]
        for piece in (held,) if isinstance(held, torch.Tensor) else held:
            found.update(tensor_bytes(piece.cpu()))
    return found.hexdigest()

"""A batch on its way from a loader to its worker: tensors in shared memory, the rest pickled.

Both ends are one program: the loader is a fork of the worker, and nobody else holds their socket.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

ALIGNMENT = 64
"""Of tensors in the memory, in bytes: enough for every dtype and instruction."""


@dataclass
class _Span:
    """Bytes [start, end) of a tensor's storage, which go to `at` of the memory."""

    storage: torch.UntypedStorage
    start: int
    end: int
    at: int = 0

    def bytes(self) -> torch.Tensor:
        """The bytes, uint8, not copied."""
        return _in_storage(self.storage, torch.uint8, self.start, (self.end - self.start,), (1,))


@dataclass(frozen=True)
class _Shape:
    """How a tensor lies in the memory. at: byte of its storage's part. offset: elements from there."""

    at: int
    nbytes: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


@dataclass
class PackedBatch:
    """A packed batch: `head` travels as bytes, `memory` as a file descriptor; -1 = a batch without tensors."""

    head: bytes
    memory: int = -1

    def close(self) -> None:
        """Close the descriptor. Repeatable."""
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1


@dataclass
class _Content:
    """A pickled batch, and what of it lies in the memory."""

    pickled: bytes
    shapes: list[_Shape]
    buffers: list[tuple[int, int]] = field(default_factory=list)
    """(byte of the memory, length) of numpy's arrays."""
    nbytes: int = 0


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep_buffer)
        self.tensors: list[torch.Tensor] = []
        self.buffers: list[pickle.PickleBuffer] = []
        self._numbers: dict[int, int] = {}

    def _keep_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.buffers.append(buffer)

    def persistent_id(self, value: Any) -> int | None:
        """Number of a plain tensor; None for what is pickled by itself."""
        if type(value) is not torch.Tensor or not _is_plain(value):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)]


class _Unpacker(pickle.Unpickler):
    def __init__(self, content: _Content, memory: memoryview) -> None:
        buffers = [memory[at : at + length] for at, length in content.buffers]
        super().__init__(io.BytesIO(content.pickled), buffers=buffers)
        self._content = content
        self._memory = memory
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, number: int) -> torch.Tensor:
        """The tensor, in the memory."""
        if number not in self._made:
            shape = self._content.shapes[number]
            storage = self._storages.get(shape.at)
            if storage is None:
                part = torch.frombuffer(self._memory, dtype=torch.uint8, offset=shape.at, count=shape.nbytes)
                storage = self._storages[shape.at] = part.untyped_storage()
            made = _in_storage(storage, shape.dtype, shape.offset, shape.size, shape.stride)
            self._made[number] = made.requires_grad_(shape.requires_grad)
        return self._made[number]


def _in_storage(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """A tensor of its own in a storage, no view of another. offset: in elements."""
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storage, offset, size, stride)
    return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but elements in host memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def pack(batch: Any) -> PackedBatch:
    """A batch as it is sent. Raises what pickle raises for an object that it can't write, OSError without memory."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(batch)
    spans = _spans(packer.tensors)
    end = 0
    for span in spans.values():
        span.at, end = end, _aligned(end + span.end - span.start)
    content = _Content(file.getvalue(), [_shape(tensor, spans) for tensor in packer.tensors])
    views = [buffer.raw() for buffer in packer.buffers]
    for view in views:
        content.buffers.append((end, view.nbytes))
        end = _aligned(end + view.nbytes)
    content.nbytes = end
    memory = _filled(end, list(spans.values()), list(zip(content.buffers, views, strict=True))) if end else -1
    return PackedBatch(pickle.dumps(content, protocol=5), memory)


def unpack(packed: PackedBatch) -> Any:
    """The batch; its tensors keep the memory."""
    content: _Content = pickle.loads(packed.head)
    memory = memoryview(mmap.mmap(packed.memory, content.nbytes)) if content.nbytes else memoryview(b"")
    return _Unpacker(content, memory).load()


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _part(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes [start, end) of the storage that a tensor's elements lie in."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + (int(last) + 1) * tensor.itemsize


def _key(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor's storage."""
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


def _spans(tensors: Sequence[torch.Tensor]) -> dict[tuple[int, int], _Span]:
    """The parts of storages that the tensors need: those that share a storage still do afterwards."""
    found: dict[tuple[int, int], _Span] = {}
    for tensor in tensors:
        start, end = _part(tensor)
        span = found.setdefault(_key(tensor), _Span(tensor.untyped_storage(), start, end))
        # A multiple of every dtype's size.
        span.start = min(span.start, start) // ALIGNMENT * ALIGNMENT
        span.end = max(span.end, end)
    return found


def _shape(tensor: torch.Tensor, spans: dict[tuple[int, int], _Span]) -> _Shape:
    span = spans[_key(tensor)]
    return _Shape(
        at=span.at,
        nbytes=span.end - span.start,
        dtype=tensor.dtype,
        offset=int(tensor.storage_offset()) - span.start // tensor.itemsize,
        size=tuple(tensor.size()),
        stride=tensor.stride(),
        requires_grad=tensor.requires_grad,
    )


def _filled(nbytes: int, spans: Sequence[_Span], buffers: Sequence[tuple[tuple[int, int], memoryview]]) -> int:
    """Descriptor of new memory with these bytes. Raises OSError if there is not enough."""
    fd = os.memfd_create("shardline-batch", os.MFD_CLOEXEC)
    try:
        # All of it at once, so that a lack of memory is an error here and no signal later.
        os.posix_fallocate(fd, 0, nbytes)
        memory = mmap.mmap(fd, nbytes)
        octets = np.frombuffer(memory, np.uint8)
        for span in spans:
            np.copyto(octets[span.at : span.at + span.end - span.start], span.bytes().numpy())
        for (at, length), view in buffers:
            np.copyto(octets[at : at + length], np.frombuffer(view, np.uint8))
    except BaseException:
        os.close(fd)
        raise
    return fd

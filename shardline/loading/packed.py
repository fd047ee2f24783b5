"""A batch on its way from a loader to its worker, in memory that the one fills and the other maps.

The memory holds the bytes of tensors and arrays, each at a multiple of ALIGNMENT, then the rest, pickled, then the
length of that. Both ends are one program: the loader is a fork of the worker, and nobody else holds their socket.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from typing import Any

import torch

ALIGNMENT = 64
"""In bytes: enough for every dtype and instruction."""
_LENGTH = struct.Struct("<q")


class _Storage:
    """The storage of one or more of a batch's tensors: those that share it still do afterwards."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.buffer = pickle.PickleBuffer(_tensor(storage, torch.uint8, 0, (storage.nbytes(),), (1,)).numpy().data)
        self.start, self.end = storage.nbytes(), 0
        """The bytes that its tensors use, which may be few of it."""

    def use(self, tensor: torch.Tensor) -> None:
        """Have the tensor's bytes sent."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        offset = int(tensor.storage_offset())
        self.start = min(self.start, offset * tensor.itemsize)
        self.end = max(self.end, (offset + int(last) + 1) * tensor.itemsize)

    def __reduce__(self) -> tuple[Any, ...]:
        return _storage_of, (self.buffer,)


class _Pickler(pickle.Pickler):
    """Leaves out the bytes of tensors and arrays."""

    def __init__(self, file: io.BytesIO) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.storages: dict[tuple[int, int], _Storage] = {}
        """By address and bytes."""
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)

    def reducer_override(self, value: Any) -> Any:
        """How to pickle a plain tensor; all else is pickled as it wants to be."""
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        storage = value.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in self.storages:
            self.storages[key] = _Storage(storage)
        self.storages[key].use(value)
        place = value.storage_offset(), tuple(value.size()), value.stride()
        return _tensor, (self.storages[key], value.dtype, *place, value.requires_grad)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but elements in host memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _storage_of(buffer: memoryview) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
) -> torch.Tensor:
    """A tensor of its own in a storage, no view of another. offset: in elements."""
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, stride).requires_grad_(requires_grad)


def pack(value: Any) -> int:
    """Descriptor of new memory that holds it.

    Raises what pickle raises for an object that it can't write, and OSError without memory.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    used = {id(storage.buffer): (storage.start, storage.end) for storage in pickler.storages.values()}
    fd = os.memfd_create("shardline-batch", os.MFD_CLOEXEC)
    try:
        places: list[tuple[int, int]] = []
        end = 0
        for buffer in pickler.buffers:
            view = buffer.raw()
            start, stop = used.get(id(buffer), (0, view.nbytes))
            # What is not written takes no memory, however large the storage is.
            _write(fd, view[start:stop], end + start)
            places.append((end, view.nbytes))
            end += -(-view.nbytes // ALIGNMENT) * ALIGNMENT
        rest = pickle.dumps((file.getvalue(), places))
        _write(fd, memoryview(rest + _LENGTH.pack(len(rest))), end)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def opened(fd: int) -> memoryview:
    """The memory of a descriptor, which this closes: a user may keep more batches than files may be open.

    Raises RuntimeError if it can't be mapped.
    """
    try:
        path, nbytes = f"/proc/self/fd/{fd}", os.fstat(fd).st_size
        # Other than an mmap of Python's, this keeps no descriptor.
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu").numpy().data
    finally:
        os.close(fd)


def unpack(view: memoryview) -> Any:
    """What was packed; its tensors and arrays keep the memory."""
    end = len(view) - _LENGTH.size
    (length,) = _LENGTH.unpack(view[end:])
    pickled, places = pickle.loads(view[end - length : end])
    return pickle.loads(pickled, buffers=[view[at : at + count] for at, count in places])

"""Host memory in the place of a GPU's: allocated by one process, mapped by another through a handle.

As a plugin (--plugin tests/support/device_memory.py) it lets real processes use lane cuda without a GPU.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator

import torch

from shardline.host import device_memory
from shardline.host.device_memory import HANDLE, DeviceMemoryError

_PLACE = struct.Struct("<qq")
DEVICE = b"the host".ljust(64, b"\0")


class _Mapping(mmap.mmap):
    """A mapping that keeps its descriptor, by which others find it, until its last view is gone."""

    fd = -1

    def __del__(self) -> None:
        os.close(self.fd)


class HostMemory:
    """See DeviceMemory. The handle names the descriptor of the process that made it."""

    def __init__(self, fd: int, nbytes: int, handle: bytes) -> None:
        self.handle = handle
        mapping = _Mapping(fd, nbytes)
        mapping.fd = fd
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> HostMemory:
        fd = os.memfd_create("shardline-device")
        os.ftruncate(fd, nbytes)
        return cls(fd, nbytes, HANDLE.pack(_PLACE.pack(os.getpid(), fd), DEVICE, nbytes))

    @classmethod
    def adopt(cls, handle: bytes, device: torch.device) -> HostMemory:
        place, owner, nbytes = HANDLE.unpack(handle)
        if owner != DEVICE:
            raise DeviceMemoryError("the memory is on another device")
        process, number = _PLACE.unpack(place[: _PLACE.size])
        try:
            fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise DeviceMemoryError(f"the memory of process {process} can't be mapped: {error}") from error
        if os.fstat(fd).st_size != nbytes:
            os.close(fd)
            raise DeviceMemoryError(f"the memory of process {process} hasn't {nbytes:,} bytes")
        return cls(fd, nbytes, handle)


def install() -> None:
    device_memory.KINDS["cpu"] = HostMemory


@contextlib.contextmanager
def played() -> Iterator[None]:
    """Let lane cuda share host memory within the block."""
    install()
    try:
        yield
    finally:
        del device_memory.KINDS["cpu"]


if not __name__.startswith("tests."):
    install()

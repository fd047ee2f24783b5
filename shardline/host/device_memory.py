"""Memory of a device that two processes of one host use: allocated by one, exported as a handle, mapped by the other.

CUDA IPC. The memory comes from cudaMalloc and not from torch's allocator, whose blocks are shared with other tensors
and, with expandable segments, can't be exported at all. It is not counted by --gpu-memory-fraction, which limits
torch's allocator.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

import torch

from shardline.host.segments import SegmentError

HANDLE = struct.Struct("<64s64sQ")
"""What names an allocation to another process: its kind's own handle, its device's identity, its bytes."""
GRANULE_BYTES = 2 << 20
"""CUDA exports memory in pieces of this size: nothing else may be in one."""


class DeviceMemoryError(SegmentError):
    """Memory of a device can't be allocated, exported or mapped; the message says why. Another lane is used instead."""


class DeviceMemory(Protocol):
    """One allocation, here or in another process. Its memory lives as long as any view of `tensor`."""

    tensor: torch.Tensor
    """All of it: uint8, 1-d, zeros when created."""
    handle: bytes
    """HANDLE.size bytes with which another process of this host maps it."""

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> Self:
        """Allocate memory. Raises DeviceMemoryError."""

    @classmethod
    def adopt(cls, handle: bytes, device: torch.device) -> Self:
        """Map another process's memory, for reading and writing. Raises DeviceMemoryError."""


class _Block:
    """Device memory at an address, as torch.as_tensor takes it. Freed with the last tensor over it."""

    def __init__(self, pointer: int, nbytes: int, device: torch.device, free: Callable[[int], Any]) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
            "strides": None,
        }
        self._pointer, self._device, self._free = pointer, device, free

    def __del__(self) -> None:
        try:
            with torch.cuda.device(self._device):
                # A kernel that reads it may still be queued.
                torch.cuda.synchronize()
                self._free(self._pointer)
        except (RuntimeError, TypeError, AttributeError):
            # The device has failed, which its user has seen; or the interpreter is ending.
            return


class CudaMemory:
    def __init__(self, block: _Block, handle: bytes, device: torch.device) -> None:
        self.tensor = torch.as_tensor(block, device=device)
        self.handle = handle

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> Self:
        runtime = _runtime()
        with _on(device):
            room = -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES
            pointer = int(_checked(runtime.cudaMalloc(room), f"allocate {nbytes:,} bytes on {device}"))
            made = _Block(pointer, nbytes, device, runtime.cudaFree)
            exported = _checked(runtime.cudaIpcGetMemHandle(pointer), f"export memory of {device}")
            found = cls(made, HANDLE.pack(bytes(exported.reserved), identity(device), nbytes), device)
            found.tensor.zero_()
            settle(device)
        return found

    @classmethod
    def adopt(cls, handle: bytes, device: torch.device) -> Self:
        exported, owner, nbytes = HANDLE.unpack(handle)
        runtime = _runtime()
        with _on(device):
            if owner != (own := identity(device)):
                theirs, ours = (name.rstrip(b"\0").decode(errors="replace") for name in (owner, own))
                raise DeviceMemoryError(f"the memory is on the GPU {theirs}, and {device} is {ours}")
            there = runtime.cudaIpcMemHandle_t()
            there.reserved = exported
            flag = runtime.cudaIpcMemLazyEnablePeerAccess
            pointer = int(_checked(runtime.cudaIpcOpenMemHandle(there, flag), f"map memory of {device}"))
            return cls(_Block(pointer, nbytes, device, runtime.cudaIpcCloseMemHandle), handle, device)


KINDS: dict[str, type[DeviceMemory]] = {"cuda": CudaMemory}
"""By the device's type. A machine without a GPU can play the same protocol with memory of its own."""


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Make a device the current one. Raises DeviceMemoryError for what torch says of it."""
    try:
        with torch.cuda.device(device):
            torch.cuda.init()  # type: ignore[no-untyped-call]
            yield
    except RuntimeError as error:
        raise DeviceMemoryError(str(error)) from error


def identity(device: torch.device) -> bytes:
    """The GPU's UUID, 64 bytes: processes may number the same GPU differently."""
    return str(torch.cuda.get_device_properties(device).uuid).encode().ljust(64, b"\0")


def settle(device: torch.device) -> None:
    """Wait until what this thread has enqueued on a device is done, so that other processes see its results."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def reads_locked_pages(device: torch.device) -> bool:
    """Whether a device can read page-locked memory that this process may not write to."""
    try:
        runtime = _runtime()
        asked = runtime.cudaDeviceAttr.cudaDevAttrHostRegisterReadOnlySupported
        return bool(_checked(runtime.cudaDeviceGetAttribute(asked, device.index or 0), f"ask {device}"))
    except (DeviceMemoryError, AttributeError):
        return False


def _runtime() -> Any:
    """NVIDIA's binding of the CUDA runtime, which torch's CUDA builds bring along. Raises DeviceMemoryError."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise DeviceMemoryError(f"the package cuda-bindings is missing ({error})") from error
    return runtime


def _checked(result: tuple[Any, ...], what: str) -> Any:
    """The value of a CUDA call. Raises DeviceMemoryError."""
    error, *values = result
    if int(error):
        raise DeviceMemoryError(f"can't {what}: {getattr(error, 'name', error)}")
    return values[0] if values else None

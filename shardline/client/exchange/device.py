"""Copies between a GPU and host memory: pinned buffers, side streams, events instead of waiting for the device.

Gradients: on a separate stream, the copy waits for an event recorded when the gradient was complete; the sending thread
waits for the copy. Parameters: a copy waits for the fence, which is recorded on the computing stream when the model may
be written to (everything enqueued before it, such as the backward pass, still reads the old values); the thread
that asks for a parameter waits for its copy, since torch can't tell which stream will read it. Pinned memory is
refilled only after the copy out of it.

If worker and server share memory, the segment from which the server reads gradients is page-locked, and the device
copies into it directly. The server's publications are not: they would have to stay unchanged until the device has read
them, which only our own buffer can guarantee.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from shardline.division import Key
from shardline.host.device_memory import reads_locked_pages
from shardline.host.segments import Segment

log = logging.getLogger("shardline.device")
READ_ONLY = 8
"""cudaHostRegisterReadOnly."""

Copy = Callable[[list[torch.Tensor], list[torch.Tensor]], float | None]
"""(targets, sources): copies pairwise and returns when the targets contain the values.

Returns their largest magnitude, not finite where an element isn't; None = nobody has looked.
"""


class HostPath:
    """Copies between one CUDA device and host memory. Any thread may call it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._fence: torch.cuda.Event | None = None
        self._loading: dict[Key, torch.cuda.Event] = {}
        """The last copy out of each bucket's host memory."""
        self._unjoined: dict[Key, torch.cuda.Event] = {}
        """Loads that nobody has waited for yet."""
        self._reads_locked = reads_locked_pages(device)
        self._locked: weakref.WeakKeyDictionary[Segment, bool] = weakref.WeakKeyDictionary()
        """Shared segments, and whether their pages could be locked."""

    def pinned(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in page-locked host memory, shape (elements,), which the device can access directly."""
        return torch.zeros(elements, dtype=dtype, pin_memory=True)

    def lock_pages(self, memory: memoryview) -> bool:
        """Page-lock, once, the shared segment that this memory belongs to; returns whether the device may access it.

        Memory that this process only reads is locked for reading, where the device can do that. It stays locked until
        the segment is released. A refusal (such as a limit on locked memory) is logged once per segment.
        """
        segment = Segment.of(memory)
        # Locking a private mapping would copy its pages.
        if segment is None or segment.private or (segment.memory.readonly and not self._reads_locked):
            return False
        with self._lock:
            if segment not in self._locked:
                self._locked[segment] = self._register(segment, READ_ONLY if segment.memory.readonly else 0)
            return self._locked[segment]

    def _register(self, segment: Segment, flags: int) -> bool:
        address = segment.address
        with torch.cuda.device(self.device):
            error = int(torch.cuda.cudart().cudaHostRegister(address, segment.nbytes, flags))  # type: ignore[no-untyped-call]
        if error:
            log.warning(
                "%d bytes of shared memory can't be page-locked for %s (CUDA error %d): %s need one more copy; "
                "check the limit on locked memory (ulimit -l)",
                segment.nbytes,
                self.device,
                error,
                "parameters" if flags else "gradients",
            )
            return False
        segment.at_end(functools.partial(_unregister, self.device, address))
        return True

    def mark(self) -> torch.cuda.Event:
        """An event after everything enqueued so far on this thread's current stream."""
        return torch.cuda.current_stream(self.device).record_event()  # type: ignore[no-any-return]

    # Gradients

    @contextlib.contextmanager
    def after(self, events: Sequence[torch.cuda.Event]) -> Iterator[Copy]:
        """Let what is enqueued within the block wait for these events; gives a function that copies and waits.

        The copies are to pinned memory or on the device.
        """
        with self._on(self._out):
            for event in events:
                self._out.wait_event(event)
            yield self._copy_out

    def _copy_out(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> float | None:
        # The sources are referenced until the end, so the allocator can't reuse their memory.
        if targets and targets[0].device == self.device:
            torch._foreach_copy_(targets, sources)
        else:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        if sources and (sources[0].is_floating_point() or sources[0].is_complex()):
            # Reading it waits for the copies too.
            return device_magnitude(sources)
        self._out.synchronize()
        return None

    # Parameters

    def fence(self) -> None:
        """Allow writing to the model after everything enqueued so far on this thread's current stream."""
        with self._lock:
            self._fence = self.mark()

    def load(self, key: Key, copy: Callable[[], None]) -> None:
        """Enqueue a bucket's copies into the model after the fence; returns without waiting for them."""
        with self._on(self._in):
            with self._lock:
                fence = self._fence
            if fence is not None:
                self._in.wait_event(fence)
            copy()
            loaded = self._in.record_event()
        with self._lock:
            self._loading[key] = self._unjoined[key] = loaded

    def await_host_memory(self, key: Key) -> None:
        """Wait until nothing is being copied out of the bucket's host memory."""
        with self._lock:
            loaded = self._loading.pop(key, None)
        if loaded is not None:
            loaded.synchronize()

    @property
    def unjoined(self) -> bool:
        return bool(self._unjoined)

    def join(self, keys: Iterable[Key]) -> None:
        """Wait for the loads of these buckets, so that every stream may read them."""
        for key in keys:
            with self._lock:
                loaded = self._unjoined.pop(key, None)
            if loaded is not None:
                loaded.synchronize()

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield


def device_magnitude(tensors: list[torch.Tensor]) -> float:
    """The largest magnitude in some tensors of one device, not finite where an element isn't; waits for it once."""
    held = [tensor for tensor in tensors if tensor.numel()]
    if not held:
        return 0.0
    norms = torch._foreach_norm(held, float("inf"))
    return float(torch.stack([norm.to(torch.float64) for norm in norms]).max().item())


def _unregister(device: torch.device, address: int) -> None:
    try:
        with torch.cuda.device(device):
            # A copy that was given up may still be running.
            torch.cuda.synchronize()
            error = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
        if error:
            log.warning("can't unlock the shared memory of %s: CUDA error %d", device, error)
    except RuntimeError as failure:
        # An earlier failure on the device is raised here again; the computing code has already seen it.
        log.warning("can't unlock the shared memory of %s: %s", device, failure)


def host_path(tensors: Iterable[torch.Tensor]) -> HostPath | None:
    """A HostPath for a model on one GPU; None if it is on no GPU, or on several: copies then wait for each device."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    return HostPath(devices.pop()) if len(devices) == 1 else None

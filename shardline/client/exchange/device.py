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
from shardline.host.segments import Segment

log = logging.getLogger("shardline.device")

Copy = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""(targets, sources): copies pairwise and returns when the targets contain the values."""


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
        self._locked: weakref.WeakKeyDictionary[Segment, bool] = weakref.WeakKeyDictionary()
        """Shared segments, and whether their pages could be locked."""

    def pinned(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in page-locked host memory, shape (elements,), which the device can access directly."""
        return torch.zeros(elements, dtype=dtype, pin_memory=True)

    def lock_pages(self, memory: memoryview) -> bool:
        """Page-lock, once, the shared segment that this memory belongs to; returns whether the device may copy into it.

        It stays locked until the segment is released. A refusal (such as a limit on locked memory) is logged once per
        segment.
        """
        segment = Segment.of(memory)
        if segment is None or memory.readonly:
            return False
        with self._lock:
            if segment not in self._locked:
                self._locked[segment] = self._register(segment)
            return self._locked[segment]

    def _register(self, segment: Segment) -> bool:
        address = segment.address
        with torch.cuda.device(self.device):
            error = int(torch.cuda.cudart().cudaHostRegister(address, segment.nbytes, 0))  # type: ignore[no-untyped-call]
        if error:
            log.warning(
                "%d bytes of shared memory can't be page-locked for %s (CUDA error %d): gradients need one more copy; "
                "check the limit on locked memory (ulimit -l)",
                segment.nbytes,
                self.device,
                error,
            )
            return False
        segment.at_end(functools.partial(_unregister, self.device, address))
        return True

    def mark(self) -> torch.cuda.Event:
        """An event after everything enqueued so far on this thread's current stream."""
        return torch.cuda.current_stream(self.device).record_event()  # type: ignore[no-any-return]

    # Gradients

    def copier(self, after: Sequence[torch.cuda.Event]) -> Copy:
        """A function that copies to pinned memory once all events of `after` have happened."""
        return functools.partial(self._copy_out, after)

    def _copy_out(
        self, after: Sequence[torch.cuda.Event], targets: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> None:
        with self._on(self._out):
            for event in after:
                self._out.wait_event(event)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            copied = self._out.record_event()
        # The sources are referenced until here, so the allocator can't reuse their memory.
        copied.synchronize()

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

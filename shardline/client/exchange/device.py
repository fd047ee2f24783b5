"""Between a GPU and host memory: pinned buffers, copies on side streams, events instead of waiting for the device.

Gradients: the copy waits, on a stream of its own, for an event recorded where the gradient was completed; the thread
that sends it waits for the copy. Parameters: a copy waits for the fence, which is recorded on the computing stream when
the model may be written to (everything enqueued before it, such as the backward pass, still reads the old values); the
computing stream waits for the copy before the first read. Pinned memory is filled again only after the copy out of it.

Where worker and server share memory, the segment that the server reads gradients from is page-locked, and the device
copies into it by itself. What the server publishes is not: it must stay as it is until the device has read it, which
only a buffer of our own can promise.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from shardline.client.exchange.arrivals import Key
from shardline.host.segments import Segment

log = logging.getLogger("shardline.device")

Copy = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""(targets, sources): copies pairwise and returns when the targets hold the values."""


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
        """Loads that the computing stream doesn't wait for yet."""
        self._locked: weakref.WeakKeyDictionary[Segment, bool] = weakref.WeakKeyDictionary()
        """Shared segments, and whether their pages could be locked."""

    def pinned(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in page-locked host memory, which the device copies from and to by itself."""
        return torch.zeros(elements, dtype=dtype, pin_memory=True)

    def lock_pages(self, memory: memoryview) -> bool:
        """Page-lock the shared segment that this is a part of, once; whether the device may copy into it by itself.

        Until nobody holds the segment any more. A refusal (a limit on locked memory, say) is logged once per segment.
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
                "%d bytes of shared memory can't be page-locked for %s (CUDA error %d): gradients take one more copy "
                "on their way; check the limit on locked memory (ulimit -l)",
                segment.nbytes,
                self.device,
                error,
            )
            return False
        segment.at_end(functools.partial(_unregister, self.device, address))
        return True

    def mark(self) -> torch.cuda.Event:
        """Everything that has been enqueued on the current stream of this thread."""
        return torch.cuda.current_stream(self.device).record_event()  # type: ignore[no-any-return]

    # Gradients

    def copier(self, after: Sequence[torch.cuda.Event]) -> Copy:
        """Copies to pinned memory that begin when all of `after` has happened."""
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
        # The sources are referred to until here, so the allocator can't give their memory away.
        copied.synchronize()

    # Parameters

    def fence(self) -> None:
        """The model may be written to after what the current stream of this thread has been given so far."""
        with self._lock:
            self._fence = self.mark()

    def load(self, key: Key, copy: Callable[[], None]) -> None:
        """Run a bucket's copies into the model behind the fence; returns when they are enqueued."""
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
        """Return when nothing is copied out of the bucket's host memory any more."""
        with self._lock:
            loaded = self._loading.pop(key, None)
        if loaded is not None:
            loaded.synchronize()

    @property
    def unjoined(self) -> bool:
        """Whether join() has anything to do."""
        return bool(self._unjoined)

    def join(self, keys: Iterable[Key]) -> None:
        """What the current stream of this thread is given from now on sees these buckets loaded."""
        stream = torch.cuda.current_stream(self.device)
        for key in keys:
            with self._lock:
                loaded = self._unjoined.pop(key, None)
            if loaded is not None:
                stream.wait_event(loaded)

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield


def _unregister(device: torch.device, address: int) -> None:
    try:
        with torch.cuda.device(device):
            # A copy that was given up may still be under way.
            torch.cuda.synchronize()
            error = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
        if error:
            log.warning("shared memory stays page-locked for %s: CUDA error %d", device, error)
    except RuntimeError as failure:
        # What failed on the device before is told here once more; whoever computed there has heard of it.
        log.warning("shared memory stays page-locked for %s: %s", device, failure)


class OnHost:
    """For a model in host memory: nothing runs by itself, so there is nothing to wait for."""

    unjoined = False

    def fence(self) -> None:
        """See HostPath."""

    def join(self, keys: Iterable[Key]) -> None:
        """See HostPath."""


ON_HOST = OnHost()


def host_path(tensors: Iterable[torch.Tensor]) -> HostPath | None:
    """For a model on one GPU; None if there is none, or several: copies then wait for each device."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    return HostPath(devices.pop()) if len(devices) == 1 else None

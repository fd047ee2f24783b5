"""What every task's process does alike: signals, launcher pipes, devices."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil
import torch

from shardline.errors import UsageError

log = logging.getLogger("shardline.host.process")


class Termination:
    """SIGTERM and SIGINT as an event. A second signal changes nothing: ending has its own deadlines."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.signal: int | None = None
        self._callbacks: list[Callable[[], None]] = []

    def install(self) -> None:
        """Take both signals; only the main thread may."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def call(self, callback: Callable[[], None]) -> None:
        """Call this when the first signal comes, on a thread of its own."""
        self._callbacks.append(callback)
        if self.event.is_set():
            threading.Thread(target=callback, name="termination", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.event.is_set():
            return
        self.signal = number
        self.event.set()
        # A handler runs between two bytecodes of the main thread, which may hold any lock: leave at once.
        for callback in self._callbacks:
            threading.Thread(target=callback, name="termination", daemon=True).start()


def tell_ready(ready_fd: int | None, address: str) -> None:
    """Tell the launcher the bound address on the pipe that it asked for it on; None = it didn't."""
    if ready_fd is not None:
        with os.fdopen(ready_fd, "w") as pipe:
            pipe.write(f"{address}\n")


def resolve_device(name: str, memory_fraction: float | None = None) -> torch.device:
    """The device of --device; CUDA is touched only when it is named. CUDA_VISIBLE_DEVICES is torch's to respect.

    memory_fraction: share of the device's memory this process may take (--gpu-memory-fraction).
    Raises UsageError where there is no such device.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UsageError(f"--device {name}: use cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if torch.version.cuda is None:
        raise UsageError(
            f"--device {name}: this torch ({torch.__version__}) is a CPU build; install a CUDA build (an image gets it "
            "by TORCH=cuda), or use --device cpu"
        )
    if index >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise UsageError(
            f"--device {name}: torch sees {count} CUDA device{'' if count == 1 else 's'}"
            + (f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else "")
            + "; check that nvidia-smi shows it, in a container too, or use --device cpu"
        )
    device = torch.device("cuda", index)
    if memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(memory_fraction, device)
    return device


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that this process may still take: the machine's, or its container's where that has less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        held = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return free
    if not limit.isdigit():
        return free
    # What is cached of files gives way.
    return max(0, min(free, int(limit) - int(held.get("anon", 0)) - int(held.get("shmem", 0))))


def memory_limit(device: torch.device, memory_fraction: float | None) -> int | None:
    """Bytes this process may take on a CUDA device; None on a CPU."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return int(total * (memory_fraction if memory_fraction is not None else 1.0))

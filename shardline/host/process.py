"""Shared by all task processes: signals, launcher pipes, devices, threads."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TypeVar

import psutil
import torch

from shardline.errors import UsageError

log = logging.getLogger("shardline.host.process")


class Termination:
    """SIGTERM and SIGINT as an event. A second signal changes nothing: the shutdown has its own deadlines.

    Forked children don't inherit it: a signal for one of them says nothing about the task.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.signal: int | None = None
        self._callbacks: list[Callable[[], None]] = []

    def install(self) -> None:
        """Handle both signals. On another thread than the main one this does nothing: the process is not the task's."""
        if threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def call(self, callback: Callable[[], None]) -> None:
        """Call this on a thread of its own when the first signal arrives."""
        self._callbacks.append(callback)
        if self.event.is_set():
            threading.Thread(target=callback, name="termination", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.event.is_set():
            return
        self.signal = number
        self.event.set()
        # The handler interrupts the main thread, which may hold any lock: return at once.
        for callback in self._callbacks:
            threading.Thread(target=callback, name="termination", daemon=True).start()


class OwnProcess:
    """The process that holds a task. Its forked children have copies, which must not speak for the task."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.ended = False
        """The task has ended, so a child may do as it likes."""
        self.steps_in: threading.Thread | None = None
        """The thread that made the last step."""
        self._pid = os.getpid()

    @property
    def elsewhere(self) -> bool:
        """True if this is a forked child's copy."""
        return not self.ended and os.getpid() != self._pid

    def check(self) -> None:
        """Before a step: raise UsageError in a forked child, or once the task has ended."""
        if self.ended:
            raise UsageError(
                f"{self.task}: this session is closed, so no step can be made; close it after the last one"
            )
        if self.elsewhere:
            raise UsageError(
                f"process {os.getpid()} is a forked child of {self.task} (process {self._pid}), which alone may train; "
                "make steps there only"
            )
        self.steps_in = threading.current_thread()


S = TypeVar("S", bound=socket.socket)

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def kept_from_children(sock: S) -> S:
    """The socket, which forked children close: a copy would keep a connection open that the task has closed."""
    _sockets.add(sock)
    return sock


def _be_a_child() -> None:
    """In a forked child: give up the task's sockets, and end at signals, as without its parent's handlers.

    What is garbage in the parent ends there: a finalizer here, of a server of gRPC, say, would wait for its threads.
    """
    gc.freeze()
    for sock in list(_sockets):
        sock.close()
    for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if isinstance(getattr(signal.getsignal(number), "__self__", None), Termination):
            signal.signal(number, usual)


os.register_at_fork(after_in_child=_be_a_child)


def tell_ready(ready_fd: int | None, address: str) -> None:
    """Send the bound address to the launcher on the pipe it passed; None = no pipe."""
    if ready_fd is not None:
        with os.fdopen(ready_fd, "w") as pipe:
            pipe.write(f"{address}\n")


LOCAL_INDEXES = ("LOCAL_RANK", "SLURM_LOCALID")
"""Variables with a process's number on its machine, as torchrun and Slurm set them; the first that is set counts."""


def device_index(environ: Mapping[str, str], neighbours: int, count: int) -> int:
    """Number of the GPU for --device cuda: the process's number on its machine, modulo the number of GPUs.

    neighbours: number of tasks before it on its machine, for processes without a variable of LOCAL_INDEXES. Raises
    UsageError.
    """
    name = next((name for name in LOCAL_INDEXES if environ.get(name)), "")
    text = environ.get(name, str(neighbours))
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"--device cuda: {name} is {text!r}; it must be a number, or name the GPU with --device cuda:N"
        )
    return int(text) % count


def check_device(name: str, flag: str = "--device") -> int:
    """Number of CUDA devices that torch sees if `name` is one of them, 0 if it is the CPU.

    flag: the one that gave the name. Raises UsageError if this machine, or its torch, has no such device.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return 0
    if device.type != "cuda":
        raise UsageError(f"{flag} {name}: use cpu, cuda or cuda:N")
    if torch.version.cuda is None:
        raise UsageError(
            f"{flag} {name}: this torch ({torch.__version__}) is a CPU build; install a CUDA build (for an image, "
            f"build with TORCH=cuda), or use {flag} cpu"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise UsageError(
            f"{flag} {name}: torch sees {count} CUDA device{'' if count == 1 else 's'}"
            + (f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else "")
            + f"; check that nvidia-smi shows it, also in the container, or use {flag} cpu"
        )
    return count


def resolve_device(name: str, memory_fraction: float | None = None, *, neighbours: int = 0) -> torch.device:
    """The device for --device; CUDA is initialized only if it is named. torch itself honours CUDA_VISIBLE_DEVICES.

    memory_fraction: share of the device's memory that this process may allocate (--gpu-memory-fraction). neighbours:
    see device_index(). Raises UsageError if there is no such device.
    """
    count = check_device(name)
    if count == 0:
        return torch.device(name)
    index = torch.device(name).index
    if index is None:
        index = device_index(os.environ, neighbours, count)
    device = torch.device("cuda", index)
    if memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(memory_fraction, device)
    return device


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory still available to this process: the machine's, or its container's if that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        held = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return free
    if not limit.isdigit():
        return free
    # File caches make room.
    return max(0, min(free, int(limit) - int(held.get("anon", 0)) - int(held.get("shmem", 0))))


def memory_limit(device: torch.device, memory_fraction: float | None) -> int | None:
    """Bytes that this process may allocate on a CUDA device; None on a CPU."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return int(total * (memory_fraction if memory_fraction is not None else 1.0))


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute with this number of threads within the block: the last bits of some results depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

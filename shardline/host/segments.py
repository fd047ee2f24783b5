"""Memory shared by two processes on one host: sealed, without a name, freed with the last of them. PROTOCOL 1.9.

A segment is a memfd, passed as a file descriptor over a unix socket: that proves both have the same kernel, and the
kernel names the peer's user. Seals ensure that mapped memory can't be truncated (which would end the reader with
SIGBUS), and that others can map what a server publishes read-only. Linux only.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import secrets
import socket
import struct
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardline.errors import ProtocolError
from shardline.host.addresses import MADV_POPULATE_READ, address_of, advise, map_file, pages_of, reserve

ALIGNMENT_BYTES = 64
"""Offsets within a segment are multiples of a cache line."""
FIRST_BYTES = 2 << 10
"""Offset of a segment's first piece, away from the beginning of a page. What a socket sends, the kernel copies to pages
that it fills from their beginning; pieces sent one after another, each with a byte behind it, would soon be copied to a
few bytes beyond their own place in a page, where processors copy at a tenth of their speed."""
SEAL_FUTURE_WRITE = 0x0010
"""F_SEAL_FUTURE_WRITE in linux/fcntl.h, Linux 5.1; missing from Python's fcntl."""
PAGE_PRESENT, PAGE_SWAPPED, PAGE_OF_FILE = 1 << 63, 1 << 62, 1 << 61
"""Bits of /proc/PID/pagemap, see the kernel's admin-guide/mm/pagemap."""
FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if sys.platform == "linux" else 0
"""Seals of every segment: neither its length nor its seals can change."""
MAX_FDS = 3
TOKEN_BYTES = 32
_MAGIC = b"shardln1"
_KNOCK = struct.Struct(f"<8s{TOKEN_BYTES}sQ")
_WELCOME = struct.Struct("<BBQQ")
KNOCK_BYTES = _KNOCK.size


def layout(sizes: Sequence[int]) -> tuple[int, ...]:
    """Offsets of pieces of these sizes in bytes from FIRST_BYTES, each aligned, followed by the total length."""
    aligned = (-(-n // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for n in sizes)
    return tuple(itertools.accumulate(aligned, initial=FIRST_BYTES))


_LIVE: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
"""Segments by the id of their mapping."""


class SegmentError(Exception):
    """A segment can't be created or used; the message says why. Another lane is used instead."""


class Segment:
    """One mapped piece of shared memory. It lives as long as this object or any view of `memory`."""

    def __init__(self, fd: int, memory: memoryview, *, private: bool = False) -> None:
        self.nbytes = len(memory)
        self._fd = fd
        self.memory = memory
        """Writable if created here or adopted privately, else read-only."""
        self.address = address_of(memory)
        """Of the mapping in this process; a multiple of HUGE_BYTES if it is private."""
        self.private = private
        """What is written to it stays in this process."""
        self._at_end: list[Callable[[], None]] = []
        _LIVE[id(memory.obj)] = self

    @staticmethod
    def of(view: memoryview) -> Segment | None:
        segment = _LIVE.get(id(view.obj))
        return segment if segment is not None and segment.memory.obj is view.obj else None

    def at_end(self, call: Callable[[], None]) -> None:
        """Call this when the object is no longer referenced, while its memory is still mapped. It must not raise."""
        self._at_end.append(call)

    @property
    def fd(self) -> int:
        """Descriptor to pass on, if created here; -1 if adopted, since a mapping keeps a descriptor of its own."""
        return self._fd

    @classmethod
    def create(cls, nbytes: int, *, name: str, read_only: bool = False) -> Segment:
        """New zeroed memory of nbytes. read_only: others can only map it read-only.

        All of it is allocated at once, so that a lack of memory is an error here and no signal later. Raises
        SegmentError.
        """
        if sys.platform != "linux":
            raise SegmentError(f"shared segments need Linux; this is {sys.platform}")
        if nbytes <= 0:
            raise SegmentError(f"can't map a segment of {nbytes} bytes")
        fd = -1
        room = available_bytes()
        if room is not None and nbytes > room:
            # Otherwise the kernel would kill some process, perhaps this one.
            raise SegmentError(f"a shared segment of {nbytes:,} bytes doesn't fit: {room:,} bytes of memory are left")
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)
            mapped = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            # After our writable mapping, which stays; no further one can be made.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FIXED | (SEAL_FUTURE_WRITE if read_only else 0))
        except (OSError, ValueError) as error:
            if fd >= 0:
                os.close(fd)
            raise SegmentError(f"can't make a shared segment of {nbytes:,} bytes: {error}") from error
        return cls(fd, memoryview(mapped))

    @classmethod
    def adopt(cls, fd: int, nbytes: int, *, private: bool = False) -> Segment:
        """Map another process's segment for reading; takes the descriptor. Raises SegmentError if it isn't safe.

        private: it may be written to as well. A page that is written to is copied: the write stays in this process and
        hides what the other writes there, until forget_writes(). Where the system has no memory to promise for such
        copies, it is mapped read-only all the same.
        """
        try:
            _check(fd, nbytes)
            own = _private(fd, nbytes) if private else None
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            memory = memoryview(mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ)) if own is None else own
        except (OSError, ValueError) as error:
            os.close(fd)
            raise SegmentError(f"can't map a segment of {nbytes:,} bytes: {error}") from error
        except SegmentError:
            os.close(fd)
            raise
        os.close(fd)
        return cls(-1, memory, private=own is not None)

    def forget_writes(self) -> int:
        """Show the other process's bytes again wherever this one has written; returns the number of pages.

        For a segment adopted privately. Costs about 1 ms for 64 MB that nobody has written to.
        """
        written = np.flatnonzero(_is_copied(self.address, self.nbytes))
        for run in np.split(written, np.flatnonzero(np.diff(written) > 1) + 1) if len(written) else ():
            start = self.address + int(run[0]) * mmap.PAGESIZE
            advise(start, len(run) * mmap.PAGESIZE, mmap.MADV_DONTNEED)
        return len(written)

    def __del__(self) -> None:
        # The mapping ends with its last view; the descriptor can be closed now.
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1
        for call in getattr(self, "_at_end", ()):
            call()


def _private(fd: int, nbytes: int) -> memoryview | None:
    """A mapping whose pages are copied when they are written to; None where the system doesn't promise the memory."""
    try:
        memory = reserve(nbytes)
        map_file(memory, fd)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return None
    # An older kernel maps the pages as they are read. MAP_POPULATE would copy them all.
    with contextlib.suppress(OSError):
        advise(address_of(memory), len(memory), MADV_POPULATE_READ)
    return memory[:nbytes]


def _is_copied(address: int, nbytes: int) -> NDArray[np.bool_]:
    """For each page of a private mapping, whether it is this process's own copy; True where that can't be seen."""
    pages = pages_of(nbytes)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * pages, address // mmap.PAGESIZE * 8), np.uint64)
    except OSError:
        entries = np.empty(0, np.uint64)
    if len(entries) < pages:
        return np.ones(pages, np.bool_)
    copied: NDArray[np.bool_] = entries & np.uint64(PAGE_PRESENT | PAGE_SWAPPED) != 0
    copied &= entries & np.uint64(PAGE_OF_FILE) == 0
    return copied


def _check(fd: int, nbytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise SegmentError(f"the descriptor passed is not sealable memory ({error})") from error
    if seals & FIXED != FIXED:
        raise SegmentError(f"the segment's seals are {seals:#x}: it could still be truncated; {FIXED:#x} are needed")
    size = os.fstat(fd).st_size
    if size != nbytes or nbytes <= 0:
        raise SegmentError(f"the segment has {size:,} bytes; {nbytes:,} were agreed")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of memory still available to this process: the machine's, or its control group's if that is less.

    root: folder that contains proc and sys. None if neither limit is known.
    """
    found = [_number(line.split()[1]) for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    rooms = [kilobytes * 1024 for kilobytes in found if kilobytes is not None]
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        # In a container the group may be mounted at the root, whatever its name outside.
        for folder in (path.strip("/"), "") if kinds in ("", "memory") else ():
            room = _group_room(root / "sys/fs/cgroup" / kinds / folder, legacy=kinds == "memory")
            rooms += [room] if room is not None else []
    return min(rooms, default=None)


def _group_room(group: Path, *, legacy: bool) -> int | None:
    """Bytes left under a control group's limit, file cache counted as free; None without a visible limit."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if legacy else ("memory.max", "memory.current")
    limit, used = (_number("".join(_lines(group / name)).strip()) for name in names)
    if limit is None or used is None:
        return None
    caches = ("total_inactive_file", "total_active_file") if legacy else ("inactive_file", "active_file")
    pairs = [line.split() for line in _lines(group / "memory.stat")]
    cached = sum(_number(pair[1]) or 0 for pair in pairs if len(pair) == 2 and pair[0] in caches)
    return max(0, limit - used + cached)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


# Passing segments over a unix socket


def check_user(sock: socket.socket) -> None:
    """Raise SegmentError if the peer of a unix socket is another user's process."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid != os.geteuid():
        raise SegmentError(
            f"the process at the other end of the socket belongs to user {uid}, this one to user {os.geteuid()}"
        )


def new_address(run_dir: Path | None) -> str:
    """An unused address: "@name" in the kernel's abstract namespace, or a path in run_dir."""
    name = f"shardline-{secrets.token_hex(12)}"
    return f"@{name}" if run_dir is None else str(run_dir / f"{name}.sock")


def to_kernel(address: str) -> str:
    """The address as socket calls need it. Raises SegmentError if it is invalid."""
    if not 2 <= len(address.encode()) <= 100:
        raise SegmentError(f"{address!r} is not the address of a unix socket of at most 100 bytes")
    return "\0" + address[1:] if address.startswith("@") else address


def connect(sock: socket.socket, address: str, *, timeout_s: float) -> None:
    """Connect to a unix socket; waits while its queue is full. SegmentError on timeout, OSError without a listener."""
    # With Python's timeout the connect would fail at once on a full queue; a blocking socket with the kernel's waits.
    seconds, rest = divmod(max(timeout_s, 0.001), 1.0)
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(seconds), int(rest * 1e6)))
    try:
        sock.connect(to_kernel(address))
    except BlockingIOError as error:
        raise SegmentError(f"the server's socket did not accept a connection within {timeout_s:.1f} s") from error


def knock(sock: socket.socket, token: bytes, segment: Segment) -> None:
    """Send a worker's first and only message: its token and its segment."""
    message = _KNOCK.pack(_MAGIC, token, segment.nbytes)
    if socket.send_fds(sock, [message], [segment.fd]) != len(message):
        raise SegmentError("the unix socket accepted only part of a message")


def hear_knock(sock: socket.socket) -> tuple[bytes, int, list[int]]:
    """Receive a worker's message: (token, bytes of the segment, descriptors).

    Raises ProtocolError, BlockingIOError, or ConnectionError if it left without a message. The caller must close the
    descriptors.
    """
    message, fds, truncated = _receive(sock, KNOCK_BYTES)
    if not message and not fds:
        raise ConnectionAbortedError("disconnected without sending anything")
    try:
        if len(message) != KNOCK_BYTES or truncated:
            raise ProtocolError(f"its message has {len(message)} bytes; expected {KNOCK_BYTES}")
        magic, token, nbytes = _KNOCK.unpack(message)
        if magic != _MAGIC or len(fds) != 1:
            raise ProtocolError(f"not a worker of this version: magic {magic!r}, {len(fds)} descriptors")
    except ProtocolError:
        close_all(fds)
        raise
    return token, nbytes, fds


def welcome(sock: socket.socket, areas: list[Segment], replies: Segment | None) -> None:
    """Answer a worker: what the shard publishes, and the worker's own replies if it needs them."""
    segments = [*areas, *([replies] if replies is not None else [])]
    sizes = (areas[0].nbytes if areas else 0, replies.nbytes if replies is not None else 0)
    socket.send_fds(sock, [_WELCOME.pack(1, len(areas), *sizes)], [segment.fd for segment in segments])


def refuse(sock: socket.socket) -> None:
    sock.send(_WELCOME.pack(0, 0, 0, 0))


def hear_welcome(sock: socket.socket, *, private: bool = True) -> tuple[list[Segment], Segment | None]:
    """(areas, replies) from a server. private: map the areas so that this process may write to them, see adopt().

    Raises SegmentError, or OSError if the socket breaks or times out.
    """
    message, fds, truncated = _receive(sock, _WELCOME.size)
    left = fds
    try:
        if len(message) != _WELCOME.size or truncated:
            raise SegmentError("the server disconnected or sent an unexpected reply")
        accepted, count, area_bytes, reply_bytes = _WELCOME.unpack(message)
        if not accepted:
            raise SegmentError("the server refused the token or the segment; its log says why at level debug")
        if len(left) != count + bool(reply_bytes):
            raise SegmentError(f"the server passed {len(left)} segments; {count + bool(reply_bytes)} were announced")
        areas = [Segment.adopt(left.pop(0), area_bytes, private=private) for _ in range(count)]
        replies = Segment.adopt(left.pop(0), reply_bytes) if reply_bytes else None
    finally:
        close_all(left)
    return areas, replies


def _receive(sock: socket.socket, nbytes: int) -> tuple[bytes, list[int], bool]:
    """(message, descriptors, whether either was truncated); child processes don't inherit the descriptors.

    socket.recv_fds ignores its flags in some versions of Python.
    """
    fds = array.array("i")
    message, ancillary, flags, _ = sock.recvmsg(
        nbytes, socket.CMSG_SPACE(MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return message, list(fds), bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def is_gone(error: OSError) -> bool:
    """Whether the error means that nothing listens at a unix socket's address."""
    return error.errno in (errno.ECONNREFUSED, errno.ENOENT)

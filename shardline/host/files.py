"""Files named by a user: read without blocking and within limits, and replaced atomically.

A path may be a FIFO that nobody writes to, an endless device, or 300 MB of something else. Only regular files are read,
and none that is too large. Everything here raises OSError, whose `strerror` says what the path is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from shardline.errors import UsageError

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_PROC_FD = Path("/proc/self/fd")


LEAST_OPEN = 64
"""Files that a task of a small cluster has open at once."""


def check_descriptors() -> None:
    """Raise this process's limit of open files where that is too low; gRPC would abort.

    Raises UsageError if it may not be raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_OPEN:
        return
    if hard != resource.RLIM_INFINITY and hard < LEAST_OPEN:
        raise UsageError(
            f"this process may have {hard} files open, but at least {LEAST_OPEN} are needed; raise the limit, for "
            "example with: ulimit -n 1024"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_OPEN, hard))


class UnsuitableFileError(OSError):
    """The path is not a regular file, or the file is too large."""

    def __init__(self, path: Path, sentence: str) -> None:
        super().__init__(None, sentence, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_regular(path: Path) -> int:
    """File descriptor for reading. Raises OSError if it is not a regular file; never blocks."""
    # Before opening: merely opening a device can have effects.
    _check_regular(path, os.stat(path))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    return _regular(path, fd)


def open_binary(path: Path) -> BinaryIO:
    return os.fdopen(open_regular(path), "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    """The whole file. Raises OSError if it has more than `limit` bytes."""
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(path, size, limit)
        data = file.read(size + 1)
        if len(data) > size:
            # The file has grown, or is in /proc, where all sizes are 0.
            data += file.read(limit)
    _check_size(path, len(data), limit)
    return data


def read_text(path: Path, limit: int) -> str:
    """The same as UTF-8 text. Raises OSError, and UnicodeDecodeError."""
    return read_bytes(path, limit).decode("utf-8")


@contextlib.contextmanager
def pinned(path: Path) -> Iterator[Path]:
    """A path for libraries that open files themselves: within the block it refers to this regular file, even if the
    name is changed. Without /proc it is the path itself, checked just before. Raises OSError.
    """
    fd = open_regular(path)
    try:
        proc = _PROC_FD / str(fd)
        yield proc if proc.exists() else path
    finally:
        os.close(fd)


@contextlib.contextmanager
def in_memory(data: bytes) -> Iterator[Path]:
    """A path of a file with these bytes, in memory alone, for libraries that read only files. Raises OSError."""
    fd = os.memfd_create("shardline", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
        yield _PROC_FD / str(fd)
    finally:
        os.close(fd)


def append_fd(path: Path) -> int:
    """Descriptor for appending to a file, created if missing. Raises OSError if not a regular file; never blocks."""
    return _write_fd(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def update_fd(path: Path, *, create: bool = False) -> int:
    """Descriptor for reading and changing a file in place. Raises OSError like append_fd()."""
    return _write_fd(path, os.O_RDWR | (os.O_CREAT if create else 0))


def _write_fd(path: Path, flags: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        _check_regular(path, os.stat(path))
    return _regular(path, os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o666))


def open_append(path: Path) -> TextIO:
    return os.fdopen(append_fd(path), "a", encoding="utf-8")


def replace(path: Path, content: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace a file atomically: readers see the old content or the new. Raises OSError.

    A symbolic link at the path is replaced, not followed, and none can be planted at the temporary name. durable: on
    disk when this returns.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _regular(path: Path, fd: int) -> int:
    """The descriptor if it is a regular file's; otherwise closes it and raises OSError."""
    try:
        _check_regular(path, os.fstat(fd))
        # O_NONBLOCK was only needed for opening.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise UnsuitableFileError(path, f"it is {kind}, not a regular file")


def _check_size(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise UnsuitableFileError(path, f"it has more than {limit:,} bytes; is it the right file?")

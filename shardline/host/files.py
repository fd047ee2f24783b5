"""Files that a person names: read without waiting and within bounds, written so that nobody sees half of one.

What stands at a path may be a FIFO that nobody writes to, a device without an end, or 300 MB of something else. Only
regular files are read, and no byte of one that is too large. Everything here raises OSError, whose `strerror` says what
is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_PROC_FD = Path("/proc/self/fd")


class UnsuitableFileError(OSError):
    """What stands at the path is no regular file, or too large."""

    def __init__(self, path: Path, sentence: str) -> None:
        super().__init__(None, sentence, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_regular(path: Path) -> int:
    """File descriptor for reading. Raises OSError where there is no regular file, and never waits for anything else."""
    # Before it is opened: to open a device can do something already.
    _check_regular(path, os.stat(path))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    return _regular(path, fd)


def open_binary(path: Path) -> BinaryIO:
    """The same as a buffered file."""
    return os.fdopen(open_regular(path), "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    """The whole file, of at most `limit` bytes. Raises OSError."""
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(path, size, limit)
        data = file.read(size + 1)
        if len(data) > size:
            # It has grown since, or is one of /proc, where all have size 0.
            data += file.read(limit)
    _check_size(path, len(data), limit)
    return data


def read_text(path: Path, limit: int) -> str:
    """The same as UTF-8 text. Raises OSError, and UnicodeDecodeError."""
    return read_bytes(path, limit).decode("utf-8")


@contextlib.contextmanager
def pinned(path: Path) -> Iterator[Path]:
    """A path for libraries that open files themselves: within the block it is this regular file, whatever becomes of
    the name. Where there is no /proc it is the path itself, looked at just before. Raises OSError.
    """
    fd = open_regular(path)
    try:
        proc = _PROC_FD / str(fd)
        yield proc if proc.exists() else path
    finally:
        os.close(fd)


def append_fd(path: Path) -> int:
    """Descriptor of a file to append to, made where there is none. Raises OSError where there is something else; never
    waits.
    """
    return _write_fd(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def update_fd(path: Path, *, create: bool = False) -> int:
    """Descriptor of a file to read and to change in place. Raises OSError as append_fd() does."""
    return _write_fd(path, os.O_RDWR | (os.O_CREAT if create else 0))


def _write_fd(path: Path, flags: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        _check_regular(path, os.stat(path))
    return _regular(path, os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o666))


def open_append(path: Path) -> TextIO:
    """The same as a text file."""
    return os.fdopen(append_fd(path), "a", encoding="utf-8")


def replace(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file so that readers see the old content or the new one, never a part. Raises OSError.

    A link at the path is replaced, not followed, and nobody can place one at the temporary name beforehand. durable: on
    disk when this returns.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
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
    """Make a file's bytes durable, or the names in a folder. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _regular(path: Path, fd: int) -> int:
    """The descriptor, if it is a regular file's; else it is closed."""
    try:
        _check_regular(path, os.fstat(fd))
        # Only opening was not to wait.
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

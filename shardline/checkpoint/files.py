"""File operations for checkpoints: durable when they return. Tests substitute failing ones."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shardline.errors import CheckpointError
from shardline.host import files

READ_BYTES = 4 << 20


class Files:
    """Operations on real files. All raise OSError; `explained` converts that to an error message."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def write(self, path: Path, chunks: Iterable[Any]) -> tuple[int, str]:
        """Create a file from chunks (byte buffers) and fsync it. Returns its expected (bytes, sha256)."""
        digest, size = hashlib.sha256(), 0
        fd = self.create(path)
        try:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                digest.update(view)
                size += len(view)
                while len(view):
                    view = view[self.write_some(fd, view) :]
            self.sync(fd)
            # Re-reading should test the disk, not the page cache. Only advice, so a refusal doesn't matter.
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        finally:
            os.close(fd)
        return size, digest.hexdigest()

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write_some(self, fd: int, view: memoryview) -> int:
        """Write the start of view; returns the number of bytes written."""
        return os.write(fd, view)

    def sync(self, fd: int) -> None:
        """Make a file or folder durable."""
        os.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename within one file system; replaces a file, never a folder with content."""
        os.rename(source, target)

    def remove_tree(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def replace(self, path: Path, content: bytes) -> None:
        """Replace a small file atomically: readers see the old content or the new."""
        temporary = path.with_name(f".{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        self.write(temporary, [content])
        self.rename(temporary, path)
        self.sync_folder(path.parent)


def file_digest(path: Path) -> tuple[int, str]:
    """(bytes, sha256) of a regular file at the time of the call. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with files.open_binary(path) as file:
        # Don't wait for anything appended meanwhile.
        end = os.fstat(file.fileno()).st_size
        while size < end and (block := file.read(min(READ_BYTES, end - size))):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


@contextlib.contextmanager
def explained(doing: str, path: Path, consequence: str) -> Iterator[None]:
    """Convert an OSError within the block to a CheckpointError with path, cause and consequence."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{doing} {error.filename or path} failed: {os_text(error)}; {consequence}") from error


def os_text(error: OSError) -> str:
    """The cause, such as "No space left on device (ENOSPC)"."""
    name = errno.errorcode.get(error.errno, "") if error.errno is not None else ""
    text = error.strerror or str(error) or type(error).__name__
    return f"{text} ({name})" if name else text


def try_lock(path: Path) -> int | None:
    """Lock a folder exclusively; returns its descriptor, or None if a living process has the lock.

    Raises OSError on file systems that can't lock folders (NFS). The lock ends with its process, and moves with the
    folder in a rename: an unlocked folder belongs to a dead writer.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd

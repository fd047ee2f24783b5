"""One run at a time in a folder: who writes to --out holds its lock, from before the first byte until its end.

The lock is flock's, on OUT/chief/.lock, so it goes with the processes that hold it, however they end. It belongs to the
open file: `shardline train` takes it, and each chief that it starts inherits the descriptor and holds it too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from shardline.errors import UsageError
from shardline.host import files

NAME = ".lock"
ROOM = 1 << 18
"""Bytes without which a run need not begin: its journal and its logs would be all that there is."""


class RunLock:
    """A lock that is held; close() lets it go, unless another process inherited it."""

    def __init__(self, fd: int) -> None:
        """fd: a descriptor that holds the lock, inherited or of take()."""
        self.fd = fd
        os.set_inheritable(fd, False)

    @classmethod
    def take(cls, folder: Path) -> RunLock:
        """Take the lock of `folder`, OUT/chief, which is made where it is not there.

        Raises UsageError where another run holds it, its disk has no room for the beginning of a run, or the folder
        can't be written at all; nothing is changed then.
        """
        made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
        try:
            return cls._of(folder)
        except OSError as error:
            for path in made:
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise unwritable(folder.parent, error) from error

    @classmethod
    def _of(cls, folder: Path) -> RunLock:
        """See take(); raises OSError where that can't be, and leaves no lock that was not there."""
        path = folder / NAME
        new = not os.path.lexists(path)
        while True:
            lock = cls(_opened(folder))
            try:
                fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.stands(path):
                    _find_room(folder)
                    lock.sign()
                    return lock
            except BlockingIOError:
                holder = os.pread(lock.fd, 32, 0).decode(errors="replace").strip() or "unknown"
                lock.close()
                raise UsageError(
                    f"{folder.parent} is in use by another run (process {holder}); wait for its end, stop it, or "
                    "choose another --out"
                ) from None
            except OSError:
                if new:
                    # Before it is let go, so that nobody else holds it.
                    path.unlink()
                lock.close()
                raise
            lock.close()

    def stands(self, path: Path) -> bool:
        """Whether the locked file is still the one at `path`: another start that failed may have removed it."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.fd), os.stat(path))
        return False

    def sign(self) -> None:
        """Leave this process's id for those who find the lock taken. Raises OSError."""
        name = str(os.getpid()).encode()
        # Never shorter than a name in between: a reader finds this one or the one before.
        os.pwrite(self.fd, name, 0)
        os.ftruncate(self.fd, len(name))

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1


def _opened(folder: Path) -> int:
    """The lock's file, made only where it is not there."""
    path = folder / NAME
    with contextlib.suppress(FileNotFoundError):
        return files.update_fd(path)
    folder.mkdir(parents=True, exist_ok=True)
    return files.update_fd(path, create=True)


def _find_room(folder: Path) -> None:
    """Raise OSError where the disk has no room for the beginning of a run; leaves nothing."""
    path = folder / ".room"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, ROOM)
    except OSError as error:
        # A file system that can't be asked.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    finally:
        path.unlink()
        os.close(fd)


def unwritable(out: Path, error: OSError) -> UsageError:
    """The sentence about an --out in which nothing can be written."""
    what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return UsageError(f"--out {out} can't be written: {what}; name a folder that you may write to, on a disk with room")


def ever_begun(out: Path) -> bool:
    """Whether OUT is the folder of a run; the lock alone is left by a start that came to nothing."""
    folder = out / "chief"
    return folder.is_dir() and os.listdir(folder) != [NAME]

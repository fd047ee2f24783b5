"""One run at a time in a folder: a run holds the lock of its --out from before its first byte until its end.

The lock is an flock on OUT/chief/.lock, so it ends with the processes that hold it, however they end. It belongs to the
open file: `shardline train` takes it, and each chief that it starts inherits the descriptor and holds the lock too.
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
"""Free bytes needed to begin a run: with less there would be room for journal and logs only."""


class RunLock:
    """A lock that is held; close() releases it, unless another process inherited it."""

    def __init__(self, fd: int) -> None:
        """fd: a descriptor that holds the lock, inherited or from take()."""
        self.fd = fd
        os.set_inheritable(fd, False)

    @classmethod
    def take(cls, folder: Path) -> RunLock:
        """Take the lock of `folder`, OUT/chief, which is created if missing.

        Raises UsageError if another run holds it, the disk has too little room, or the folder can't be written to;
        nothing is changed then.
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
        """See take(). Raises OSError on failure, and leaves no new lock file behind."""
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
                    f"{folder.parent} is in use by another run (process {holder}); wait for it to end, stop it, or "
                    "choose another --out"
                ) from None
            except OSError:
                if new:
                    # Unlinked before it is released, so that no one else can hold it.
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
        """Write this process's id for others who find the lock taken. Raises OSError."""
        name = str(os.getpid()).encode()
        # Never shorter than an id in between: a reader sees this one or the previous one.
        os.pwrite(self.fd, name, 0)
        os.ftruncate(self.fd, len(name))

    def close(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1


def _opened(folder: Path) -> int:
    """Open the lock file, creating it if missing."""
    path = folder / NAME
    with contextlib.suppress(FileNotFoundError):
        return files.update_fd(path)
    folder.mkdir(parents=True, exist_ok=True)
    return files.update_fd(path, create=True)


def _find_room(folder: Path) -> None:
    """Raise OSError if the disk has no room for the beginning of a run; leaves nothing behind."""
    path = folder / ".room"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, ROOM)
    except OSError as error:
        # The file system doesn't support the query.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    finally:
        path.unlink()
        os.close(fd)


def unwritable(out: Path, error: OSError) -> UsageError:
    """The error for an --out that can't be written to."""
    what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if error.filename and os.path.islink(error.filename) and not os.path.exists(error.filename):
        what = f"{error.filename} is a link to {os.readlink(error.filename)}, which does not exist"
    if isinstance(error, NotADirectoryError):
        what = next((f"{path} is a file" for path in Path(error.filename).parents if path.is_file()), what)
    return UsageError(
        f"--out {out} can't be written: {what}; choose a folder that you can write to, on a disk with free space"
    )


def ever_begun(out: Path) -> bool:
    """Whether OUT is the folder of a run; a failed start leaves only the lock."""
    folder = out / "chief"
    return folder.is_dir() and os.listdir(folder) != [NAME]

"""Text that may be lost: a disk that is full or fails costs lines of a log, never the process that writes them.

Where a task's output goes to a file, print() in a person's code would otherwise raise OSError and end the job.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from shardline.host import files

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def unheard(error: OSError) -> None:
    """For what can't be told anybody."""


class LossyFile(io.FileIO):
    """A file for writing that drops what its disk does not take, and says so once: on_loss(error)."""

    def __init__(self, file: str | int, *, on_loss: Callable[[OSError], None] = unheard) -> None:
        """file: a path to append to, or a descriptor that stays open."""
        # A FIFO at that name would hold the process up until somebody reads it.
        opener = (lambda name, _: files.append_fd(Path(name))) if isinstance(file, str) else None
        super().__init__(file, "a", closefd=isinstance(file, str), opener=opener)
        self._on_loss = on_loss
        self._told = False

    def write(self, data: object) -> int:
        """Take everything, whatever becomes of it."""
        rest = memoryview(data).cast("B")  # type: ignore[arg-type]
        size = len(rest)
        try:
            while rest:
                rest = rest[os.write(self.fileno(), rest) :]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not self._told:
                self._told = True
                self._on_loss(error)
        return size


def lossy_text(file: str | int, *, on_loss: Callable[[OSError], None] = unheard) -> TextIO:
    """A text stream over a LossyFile, each write passed on at once."""
    raw = LossyFile(file, on_loss=on_loss)
    # A raw file has all that is asked of a buffer here.
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def protect_output() -> None:
    """Make this process's standard output and error lossy where they are files."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            number = stream.fileno()
            if stat.S_ISREG(os.fstat(number).st_mode):
                stream.flush()
                setattr(sys, name, lossy_text(number))
        except (AttributeError, OSError, ValueError):
            # No stream, or one without a descriptor, as where a test looks on.
            continue

"""Text that may be lost: a full or failing disk costs log lines, never the process that writes them.

If a task's output goes to a file, print() in user code would otherwise raise OSError and end the job.
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
    """Ignore a loss that can't be reported."""


class LossyFile(io.FileIO):
    """A writable file that drops what can't be written, and reports that once: on_loss(error)."""

    def __init__(self, file: str | int, *, on_loss: Callable[[OSError], None] = unheard) -> None:
        """file: a path to append to, or a descriptor that stays open."""
        # A plain open of a FIFO would block until someone reads it.
        opener = (lambda name, _: files.append_fd(Path(name))) if isinstance(file, str) else None
        super().__init__(file, "a", closefd=isinstance(file, str), opener=opener)
        self._on_loss = on_loss
        self._told = False

    def write(self, data: object) -> int:
        """Accept everything, written or not."""
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
    """A text stream over a LossyFile; each write is passed on at once."""
    raw = LossyFile(file, on_loss=on_loss)
    # A raw file supports everything that is needed of a buffer here.
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def protect_output() -> None:
    """Make this process's stdout and stderr lossy if they are files."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            number = stream.fileno()
            if stat.S_ISREG(os.fstat(number).st_mode):
                stream.flush()
                setattr(sys, name, lossy_text(number))
        except (AttributeError, OSError, ValueError):
            # No stream, or one without a descriptor, as in a test.
            continue

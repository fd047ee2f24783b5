"""The chief's durable memory in out/chief: one chief at a time, a term per start, decisions noted before they are done.

The folder's lock (host.run_lock) is held as long as the process lives. `term-N` is created with O_EXCL: no two
chiefs share a term.
`journal-N.jsonl` has a JSON object per line; a line is on disk (fsync) before the act it describes. A crash may leave
the last line torn: that act was never begun, so the line is dropped on reading.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from shardline.errors import UsageError
from shardline.host import files
from shardline.host.run_lock import RunLock

LINE_BYTES = 256 << 20
"""Of an entry: that of a plan has as much to say as a checkpoint's manifest."""
_TERM = re.compile(r"^term-(\d+)$")


class Journal:
    """Open with a folder; every act goes through write() first."""

    def __init__(self, folder: Path, lock: RunLock | None = None) -> None:
        """lock: the folder's, where it is held already; else it is taken, which raises UsageError where it can't be."""
        self.folder = folder
        self.term = 0
        self._file: int | None = None
        self._torn = False
        self._lock = lock or RunLock.take(folder)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def last_term(self) -> int:
        """Highest term begun in this folder; 0 = none."""
        return max((int(m[1]) for p in self.folder.iterdir() if (m := _TERM.match(p.name))), default=0)

    def begin_term(self) -> int:
        """Begin and return the next term: above all on disk."""
        term = 1 + self.last_term()
        while True:
            try:
                handle = os.open(self.folder / f"term-{term}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
                break
            except FileExistsError:
                term += 1
            except OSError as error:
                raise UsageError(f"the chief can't write to {self.folder}: {error.strerror}") from error
        os.fsync(handle)
        os.close(handle)
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self.term = term
        self._torn = False
        path = self.folder / f"journal-{term}.jsonl"
        # A term is nobody else's, and so is its journal.
        flags = os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o644)
            files.sync(self.folder)
        except OSError as error:
            raise UsageError(f"the chief can't write to {path}: {error.strerror}; choose another --out") from error
        return term

    def write(self, kind: str, **fields: Any) -> None:
        """Append one entry and bring it to the disk. Raises OSError: then the act must not be done."""
        self.write_all([(kind, fields)])

    def write_all(self, entries: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """The same of several (kind, fields) at the price of one."""
        if self._file is None:
            raise UsageError("the journal has no term yet: begin_term comes first")
        head = {"term": self.term, "time": round(time.time(), 3)}
        line = "".join(
            json.dumps({"kind": kind, **head, **fields}, separators=(",", ":")) + "\n" for kind, fields in entries
        )
        # A write that failed (full disk) may have left half a line: what follows must not be glued to it.
        data = memoryview((("\n" if self._torn else "") + line).encode())
        self._torn = True
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)
        self._torn = False

    def read(self) -> Iterator[dict[str, Any]]:
        """All entries of all terms, oldest first; torn lines are left out."""
        found = ((int(path.stem.partition("-")[2]), path) for path in self.folder.glob("journal-*.jsonl"))
        for _, path in sorted(found):
            for line in _lines(path):
                entry = _parsed(line)
                if entry is not None:
                    yield entry

    def close(self) -> None:
        """Let the lock go."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._lock.close()


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a journal. Raises UsageError where it can't be one."""
    try:
        with files.open_binary(path) as file:
            while line := file.readline(LINE_BYTES):
                if len(line) == LINE_BYTES:
                    raise UsageError(
                        f"{path} is not a journal: it has a line of {LINE_BYTES:,} bytes or more; choose another --out"
                    )
                yield line
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}; choose another --out") from error


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "kind" in entry else None

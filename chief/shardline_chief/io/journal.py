"""The chief's durable memory in out/chief: one chief at a time, a term per start, decisions recorded before they act.

The folder's lock (host.run_lock) is held for the life of the process. `term-N` is created with O_EXCL: no two chiefs
share a term.
`journal-N.jsonl` has one JSON object per line; a line is on disk (fsync) before the action it describes. A crash may
leave the last line incomplete: its action was never begun, so the line is ignored on reading.
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
from shardline_chief.rules.replay import replay
from shardline_chief.rules.state.settings import ReplayedRun

LINE_BYTES = 256 << 20
"""Most bytes of an entry: a plan's is about as long as a checkpoint's manifest."""
_TERM = re.compile(r"^term-(\d+)$")


class Journal:
    """The journal in a folder; every action is recorded with write() first."""

    def __init__(self, folder: Path, lock: RunLock | None = None) -> None:
        """lock: the folder's lock, if held already; otherwise it is taken, which raises UsageError on failure."""
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
        """Begin and return the next term, above all on disk.

        Raises UsageError if the folder can't be written to.
        """
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
        # The term is this chief's alone, and so is its journal.
        flags = os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o644)
            files.sync(self.folder)
        except OSError as error:
            raise UsageError(f"the chief can't write to {path}: {error.strerror}; choose another --out") from error
        return term

    def write(self, kind: str, **fields: Any) -> None:
        """Append one entry and sync it to disk. Raises OSError; the action must then not be done."""
        self.write_all([(kind, fields)])

    def write_all(self, entries: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Like write, for several (kind, fields) with a single sync."""
        if self._file is None:
            raise UsageError("the journal has no term yet: call begin_term first")
        head = {"term": self.term, "time": round(time.time(), 3)}
        line = "".join(
            json.dumps({"kind": kind, **head, **fields}, separators=(",", ":")) + "\n" for kind, fields in entries
        )
        # A failed write (full disk) may have left half a line: don't append to it.
        data = memoryview((("\n" if self._torn else "") + line).encode())
        self._torn = True
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)
        self._torn = False

    def read(self) -> Iterator[dict[str, Any]]:
        """All entries of all terms, oldest first; skips incomplete lines. Raises UsageError if a file can't be read."""
        yield from read_entries(self.folder)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._lock.close()


def read_entries(folder: Path, *, remedy: str = "choose another --out") -> Iterator[dict[str, Any]]:
    """All entries of a folder's journals; see Journal.read(). The run may still go on. remedy: for errors."""
    found = ((int(path.stem.partition("-")[2]), path) for path in folder.glob("journal-*.jsonl"))
    for _, path in sorted(found):
        for line in _lines(path, remedy):
            entry = _parsed(line)
            if entry is not None:
                yield entry


def _lines(path: Path, remedy: str) -> Iterator[bytes]:
    """The lines of a journal. Raises UsageError if it can't be read or isn't one."""
    try:
        with files.open_binary(path) as file:
            while line := file.readline(LINE_BYTES):
                if len(line) == LINE_BYTES:
                    raise UsageError(
                        f"{path} is not a journal: it has a line of {LINE_BYTES:,} bytes or more; {remedy}"
                    )
                yield line
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}; {remedy}") from error


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "kind" in entry else None


def run_to_replay(folder: Path) -> ReplayedRun:
    """The newest run in an output folder. Raises UsageError if there is none."""
    known = replay(read_entries(folder / "chief", remedy="give --replay the --out of another run"))
    if known.job is None:
        raise UsageError(f"--replay {folder}: there is no run in it; give the --out of a run")
    return ReplayedRun(str(folder), known.job, known.choices, known.earlier)

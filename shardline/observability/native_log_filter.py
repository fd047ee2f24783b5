"""Passes on what native code writes to stderr; repeated lines of gRPC once per cause and minute, with a count.

A separate program, which native_log.py starts for a task: it reads the pipe (fd 0) and writes to the task's real stderr
(fd 1). It outlives the task until the pipe is empty, so the last output before an abort gets through.
It imports few modules, all from the standard library: each task that serves with TLS has one beside it.
"""

from __future__ import annotations

import os
import re
import select
import time

WINDOW_S = 60.0
TEXTS = 16
"""Causes distinguished per source line. Strangers can influence the texts, so all further ones count as one cause."""
HELD_BYTES = 16 << 10
"""Most bytes held of an unfinished line; a longer one is passed on."""
HELD_S = 1.0
"""Seconds that the beginning of a line is held."""
READ_BYTES = 64 << 10

# Severity, month and day, time, thread, source file and line: absl's format, which gRPC's core uses for its log.
_LINE = re.compile(rb"([IWE])\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ ([^ :\]]+:\d+)\] (.*)", re.DOTALL)
_BEGINNING = re.compile(rb"[IWE](\d{0,4}|\d{4} [^\n]*)")
_NUMBER = re.compile(rb"(0x)?[0-9A-Fa-f]*[0-9][0-9A-Fa-f]*")

Cause = tuple[bytes, bytes]
"""Source file and line with the severity, and the text without its numbers."""


class _Window:
    """One minute of one cause, after a line that was passed on."""

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.last = b""
        self.count = 0


class Repeats:
    """Decides what is passed on and when. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._windows: dict[Cause, _Window] = {}

    def take(self, line: bytes, now_s: float) -> bytes:
        """What to write now for a complete line: the line, or nothing if it is only counted."""
        cause = self._cause(line)
        if cause is None:
            return line
        window = self._windows.get(cause)
        if window is None:
            self._windows[cause] = _Window(now_s + WINDOW_S)
            return line
        window.last = line
        window.count += 1
        return b""

    def due(self, now_s: float) -> bytes:
        """The counts of elapsed minutes."""
        found = []
        for cause, window in list(self._windows.items()):
            if window.until_s > now_s:
                continue
            if window.count:
                found.append(_counted(window))
                self._windows[cause] = _Window(now_s + WINDOW_S)
            else:
                del self._windows[cause]
        return b"".join(found)

    def rest(self) -> bytes:
        """The counts of all minutes, at the end."""
        found = [_counted(window) for window in self._windows.values() if window.count]
        self._windows.clear()
        return b"".join(found)

    def next_s(self) -> float | None:
        """Time at which due() has something to do; None = not before another line."""
        return min((window.until_s for window in self._windows.values()), default=None)

    def _cause(self, line: bytes) -> Cause | None:
        """The cause of a line of gRPC's; None for other lines, and for fatal ones, which must not be dropped."""
        match = _LINE.match(line)
        if match is None:
            return None
        source = match[1] + b" " + match[2]
        cause = (source, _NUMBER.sub(b"#", match[3]))
        known = cause in self._windows or sum(other == source for other, _ in self._windows) < TEXTS
        return cause if known else (source, b"")


def _counted(window: _Window) -> bytes:
    more = f" [{window.count:,} more of this kind within {WINDOW_S:.0f} s]\n"
    return window.last.rstrip(b"\n") + more.encode()


class Stream:
    """Bytes in, bytes out."""

    def __init__(self) -> None:
        self._repeats = Repeats()
        self._held = b""
        self._held_until_s = 0.0

    def take(self, data: bytes, now_s: float) -> bytes:
        """What to write for these bytes and for elapsed minutes."""
        *lines, end = (self._held + data).split(b"\n")
        found = b"".join(self._repeats.take(line + b"\n", now_s) for line in lines)
        self._held = b""
        if len(end) <= HELD_BYTES and _BEGINNING.fullmatch(end):
            self._held, self._held_until_s = end, now_s + HELD_S
        else:
            # Some prompt or progress bar: don't hold it.
            found += end
        return found + self.tick(now_s)

    def tick(self, now_s: float) -> bytes:
        """What to write because time has passed."""
        late = b""
        if self._held and now_s >= self._held_until_s:
            late, self._held = self._held, b""
        return late + self._repeats.due(now_s)

    def end(self) -> bytes:
        """What to write at the end of the input."""
        held, self._held = self._held, b""
        return held + self._repeats.rest()

    def next_s(self) -> float | None:
        """Time at which tick() has something to do; None = not before more input."""
        times = [self._repeats.next_s(), self._held_until_s if self._held else None]
        return min((at for at in times if at is not None), default=None)


def _write(fd: int, data: bytes) -> None:
    """Write all of it. What can't be written is dropped: reading must continue, or the task's threads would block."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except OSError:
            return


def main() -> None:
    """Pass on from fd 0 to fd 1 until all writers are gone."""
    stream = Stream()
    while True:
        due_s = stream.next_s()
        wait_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        readable, _, _ = select.select([0], [], [], wait_s)
        if not readable:
            _write(1, stream.tick(time.monotonic()))
            continue
        data = os.read(0, READ_BYTES)
        if not data:
            break
        _write(1, stream.take(data, time.monotonic()))
    _write(1, stream.end())


if __name__ == "__main__":
    main()

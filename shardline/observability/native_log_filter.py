"""Passes on what native code writes to stderr; of lines that gRPC repeats, one per cause and minute, with a count.

A program of its own, which native_log.py starts for a task: it reads the pipe (fd 0) and writes to the task's real
stderr (fd 1). It outlives the task by what is still in the pipe, so the last words before an abort get through.
It imports the standard library alone, and little of that: each task that serves with TLS has one beside it.
"""

from __future__ import annotations

import os
import re
import select
import time

WINDOW_S = 60.0
TEXTS = 16
"""Causes told apart for one line of source. A stranger may have a say in the texts: further ones count as one cause."""
HELD_BYTES = 16 << 10
"""Of a line without an end. A longer one passes on."""
HELD_S = 1.0
"""How long the beginning of a line waits for its end."""
READ_BYTES = 64 << 10

# Severity, month and day, time, thread, source file and line: absl's format, in which gRPC's core logs.
_LINE = re.compile(rb"([IWE])\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ ([^ :\]]+:\d+)\] (.*)", re.DOTALL)
_BEGINNING = re.compile(rb"[IWE](\d{0,4}|\d{4} [^\n]*)")
_NUMBER = re.compile(rb"(0x)?[0-9A-Fa-f]*[0-9][0-9A-Fa-f]*")

Cause = tuple[bytes, bytes]
"""Source file and line with the severity, and the text without its numbers."""


class _Window:
    """A minute of one cause, after a line that was passed on."""

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.last = b""
        self.count = 0


class Repeats:
    """Decides what is passed on and when. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._windows: dict[Cause, _Window] = {}

    def take(self, line: bytes, now_s: float) -> bytes:
        """What to write now for a line with its newline: itself, or nothing where it is counted."""
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
        """The counts of the minutes that are over."""
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
        """When due() has something to do; None = not before another line."""
        return min((window.until_s for window in self._windows.values()), default=None)

    def _cause(self, line: bytes) -> Cause | None:
        """The cause of a line of gRPC's; None for another's, and for one that nobody may miss (fatal)."""
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
        """What to write for these bytes and for the minutes that are over."""
        *lines, end = (self._held + data).split(b"\n")
        found = b"".join(self._repeats.take(line + b"\n", now_s) for line in lines)
        self._held = b""
        if len(end) <= HELD_BYTES and _BEGINNING.fullmatch(end):
            self._held, self._held_until_s = end, now_s + HELD_S
        else:
            # Somebody's prompt or progress bar: not to be waited for.
            found += end
        return found + self.tick(now_s)

    def tick(self, now_s: float) -> bytes:
        """What to write because time has passed."""
        late = b""
        if self._held and now_s >= self._held_until_s:
            late, self._held = self._held, b""
        return late + self._repeats.due(now_s)

    def end(self) -> bytes:
        """What to write when nothing more comes."""
        held, self._held = self._held, b""
        return held + self._repeats.rest()

    def next_s(self) -> float | None:
        """When tick() has something to do."""
        times = [self._repeats.next_s(), self._held_until_s if self._held else None]
        return min((at for at in times if at is not None), default=None)


def _write(fd: int, data: bytes) -> None:
    """Write all of it. What can't be written is lost: reading must go on, or the task's threads would wait."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except OSError:
            return


def main() -> None:
    """Pass on from fd 0 to fd 1 until all writers have gone."""
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

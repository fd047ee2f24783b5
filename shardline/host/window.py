"""Memory at a fixed address that shows segments in turn, without copying.

A segment's pages are moved into the window, and moved back when another one follows: the page tables move, the bytes
stay where they are. For 64 MB this takes 0.1 ms, a copy 8 ms, and mapping the pages anew 6 ms. Whoever holds an address
within the window sees every change, as in ordinary memory, and may write to it: a page that is written to is copied,
and the copy lasts until another segment is shown there. A small window is copied into, which takes less time.

A child process made by fork() gets ordinary memory: otherwise it would see what the segments' owner writes later.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Iterable

import numpy as np

from shardline.host.addresses import MADV_POPULATE_WRITE, address_of, advise, move_pages, pages_of, reserve
from shardline.host.segments import Segment

Run = tuple[int, int]
"""Pages [first, end)."""
OWN = -1
COPIED_BYTES = 256 << 10
"""Windows up to this size are copied into: two moves take as long, and finding out what was written to longer still."""
_lock = threading.Lock()
"""Held while pages move, and while the process forks."""
_windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()
"""By address."""


class Window:
    """One range of addresses. Any thread may call its methods; see the module.

    Raises OSError if the system lacks what it needs (Linux before 5.14) or the memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = reserve(nbytes)
        """Whole pages, at first zeros. A view keeps the memory, not what is shown there: see keep()."""
        self.address = address_of(self.memory)
        self.copies = nbytes <= COPIED_BYTES
        """Segments are copied into it, not shown."""
        # What _keep() may need has to be there.
        advise(self.address, mmap.PAGESIZE, MADV_POPULATE_WRITE)
        self._shown = np.full(pages_of(nbytes), OWN, np.int8)
        """For each page the number of the segment that it is from; OWN = the window's own."""
        self._segments: list[Segment] = []
        self._used: set[Segment] = set()
        """Segments that got pages back, perhaps written to, and were not shown since."""
        _windows[self.address] = self

    @staticmethod
    def at(address: int) -> Window | None:
        return _windows.get(address)

    @property
    def shows(self) -> bool:
        """Whether any page is a segment's."""
        return not self.copies and bool((self._shown != OWN).any())

    def show(self, segment: Segment, runs: Iterable[Run]) -> None:
        """Show these pages of a segment in place of what is there; what was written there is gone.

        Whoever reads meanwhile sees the old values or the new ones. Pages that can't be moved are copied.
        """
        with _lock:
            runs = list(runs)
            if self.copies:
                for first, end in runs:
                    start, stop = first * mmap.PAGESIZE, end * mmap.PAGESIZE
                    self._copy(start, segment.memory[start:stop])
                return
            number = self._number(segment)
            for run in runs:
                self._give_back(*run)
            self._forget(segment)
            for first, end in runs:
                start, stop = first * mmap.PAGESIZE, end * mmap.PAGESIZE
                try:
                    if not segment.private:
                        raise OSError("mapped for reading only")
                    move_pages(segment.address + start, self.address + start, stop - start)
                except OSError:
                    self._copy(start, segment.memory[start:stop])
                else:
                    self._shown[first:end] = number

    def fill(self, start: int, values: memoryview) -> None:
        """Write bytes at an offset, as into ordinary memory."""
        with _lock:
            self._copy(start, values)

    def _copy(self, start: int, values: memoryview) -> None:
        if self.copies:
            self.memory[start : start + len(values)] = values
            return
        # Other threads run meanwhile.
        np.copyto(np.frombuffer(self.memory, np.uint8)[start : start + len(values)], np.frombuffer(values, np.uint8))

    def _number(self, segment: Segment) -> int:
        if segment in self._segments:
            return self._segments.index(segment)
        for number in range(len(self._segments)):
            if not (self._shown == number).any():
                self._segments[number] = segment
                return number
        self._segments.append(segment)
        return len(self._segments) - 1

    def _give_back(self, first: int, end: int) -> None:
        shown = self._shown[first:end]
        cuts = [] if (shown == shown[0]).all() else (np.flatnonzero(np.diff(shown)) + first + 1).tolist()
        for start, stop in zip([first, *cuts], [*cuts, end], strict=True):
            number = int(self._shown[start])
            if number == OWN:
                continue
            segment = self._segments[number]
            offset = start * mmap.PAGESIZE
            # Otherwise the pages are freed, and the segment's own mapping gets new ones when it is read.
            with contextlib.suppress(OSError):
                move_pages(self.address + offset, segment.address + offset, (stop - start) * mmap.PAGESIZE)
                self._used.add(segment)

    def forget(self) -> None:
        """Do ahead of time what show() would: drop what was written to pages that segments got back.

        About 1 ms for 64 MB, however little was written.
        """
        with _lock:
            for segment in list(self._used):
                self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        if segment in self._used:
            segment.forget_writes()
            self._used.discard(segment)

    def keep(self) -> None:
        """Make all of it this process's own memory with its current values; it stays where it is."""
        with _lock:
            self._keep()

    def _keep(self) -> None:
        if not self.shows:
            return
        own = reserve(self.nbytes)
        np.copyto(np.frombuffer(own, np.uint8), np.frombuffer(self.memory, np.uint8))
        try:
            move_pages(address_of(own), self.address, len(own))
        except OSError:
            # Copies each page where it is, which the segment's file outlives.
            advise(self.address, len(self.memory), MADV_POPULATE_WRITE)
        self._shown[:] = OWN
        self._segments.clear()
        self._used.clear()


def _before_fork() -> None:
    _lock.acquire()
    for window in list(_windows.values()):
        window._keep()


os.register_at_fork(before=_before_fork, after_in_parent=_lock.release, after_in_child=_lock.release)

"""A window shows segments at one address: nothing is copied, writes stay here, readers never meet a gap."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shardline.host import addresses, window
from shardline.host.segments import Segment
from shardline.host.window import Window
from tests.support.waiting import wait_for

PAGE = mmap.PAGESIZE
PAGES = 1100
"""More than 4 MB, so that whole tables of pages move too."""
NBYTES = PAGES * PAGE - 100


class Areas:
    """Two segments of a server, as it and a worker map them."""

    def __init__(self) -> None:
        self.theirs = [Segment.create(NBYTES, name="test-area", read_only=True) for _ in range(2)]
        self.ours = [Segment.adopt(os.dup(one.fd), NBYTES, private=True) for one in self.theirs]

    def publish(self, step: int) -> None:
        np.frombuffer(self.theirs[step & 1].memory, np.uint8)[:] = step

    def show(self, shown: Window, step: int) -> None:
        self.publish(step)
        shown.show(self.ours[step & 1], [(0, PAGES)])


def octets(shown: Window) -> NDArray[np.uint8]:
    return np.frombuffer(shown.memory, np.uint8)[:NBYTES]


def mappings_in(shown: Window) -> int:
    starts = [int(line.split("-")[0], 16) for line in Path("/proc/self/maps").read_text().splitlines()]
    return sum(shown.address <= start < shown.address + NBYTES for start in starts)


@pytest.fixture
def areas() -> Areas:
    return Areas()


def test_an_address_follows_every_step_and_shows_the_memory_of_the_server_itself(areas: Areas) -> None:
    shown = Window(NBYTES)
    alias = octets(shown)
    for step in range(1, 6):
        areas.show(shown, step)
        assert shown.shows and (alias == step).all()
        # What the server writes to the area is seen, so it is no copy; to the other one is not.
        areas.theirs[step & 1].memory[12345] = 99
        areas.theirs[~step & 1].memory[12345] = 98
        assert alias[12345] == 99


def test_writes_stay_here_and_are_gone_with_the_next_step(areas: Areas) -> None:
    shown, random_ = Window(NBYTES), random.Random(5)
    for step in range(1, 8):
        areas.show(shown, step)
        assert (octets(shown) == step).all()
        for _ in range(20):
            octets(shown)[random_.randrange(NBYTES)] = 255
        assert (np.frombuffer(areas.theirs[step & 1].memory, np.uint8) == step).all()
        if step % 3 == 0:
            shown.forget()
            assert 255 in octets(shown)
    # The same step once more.
    areas.show(shown, 7)
    assert (octets(shown) == 7).all()


def test_a_step_may_come_in_any_runs_of_pages(areas: Areas) -> None:
    shown, random_ = Window(NBYTES), random.Random(6)
    for step in range(1, 12):
        areas.publish(step)
        cuts = sorted(random_.sample(range(1, PAGES), 7))
        runs = list(zip([0, *cuts], [*cuts, PAGES], strict=True))
        random_.shuffle(runs)
        left = set(range(PAGES))
        for first, end in runs:
            shown.show(areas.ours[step & 1], [(first, end)])
            left -= set(range(first, end))
            new = octets(shown)[::PAGE] == step
            assert {page for page in range(PAGES) if not new[page]} == left
        # Neighbours join again: the number of mappings of a process is limited.
        assert mappings_in(shown) == 1


def test_what_is_kept_is_private_memory_at_the_same_address(areas: Areas) -> None:
    shown = Window(NBYTES)
    areas.show(shown, 1)
    alias = octets(shown)
    alias[7] = 200
    shown.keep()
    areas.publish(3)
    assert not shown.shows and alias[7] == 200 and (np.delete(alias, 7) == 1).all()
    alias[:] = 9
    areas.show(shown, 4)
    assert (alias == 4).all()


def test_the_memory_of_a_server_is_freed_once_its_values_are_kept(areas: Areas) -> None:
    shown = Window(NBYTES)
    areas.show(shown, 1)
    areas.ours.clear()
    shown.keep()
    areas.theirs.clear()
    gc.collect()
    assert "test-area" not in Path("/proc/self/maps").read_text()
    assert (octets(shown) == 1).all()


def test_a_segment_that_is_new_takes_the_place_of_one_that_is_gone(areas: Areas) -> None:
    shown, others = Window(NBYTES), Areas()
    areas.show(shown, 1)
    areas.ours.clear()
    shown.show(others.ours[0], [(0, 3)])
    for step in range(2, 6):
        others.show(shown, step)
        assert (octets(shown) == step).all()


def test_a_reader_meets_the_old_values_or_the_new_ones_and_no_gap(areas: Areas) -> None:
    shown, seen, over = Window(NBYTES), set[int](), threading.Event()
    areas.publish(0)
    areas.publish(1)

    def read() -> None:
        while not over.is_set():
            seen.update(np.unique(octets(shown)[::1000]).tolist())

    shown.show(areas.ours[0], [(0, PAGES)])
    reader = threading.Thread(target=read)
    reader.start()
    for step in range(200):
        shown.show(areas.ours[step & 1], [(0, PAGES)])
        if step % 50 == 0:
            shown.keep()
    wait_for(lambda: len(seen) == 2, "the reader to see both steps")
    over.set()
    reader.join(20.0)
    assert not reader.is_alive() and seen == {0, 1}


def test_a_child_of_fork_has_ordinary_memory(areas: Areas) -> None:
    shown = Window(NBYTES)
    areas.show(shown, 1)
    octets(shown)[5] = 77
    read_fd, write_fd = os.pipe()
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing but this: the child of a process with threads may do little.
        os.read(go_read, 1)
        mine = octets(shown)
        os.write(write_fd, bytes([mine[4], mine[5], mine[-1]]))
        os._exit(0)
    # The parent's training goes on, and the server overwrites what was shown.
    areas.show(shown, 2)
    areas.publish(3)
    os.write(go_write, b"x")
    assert os.read(read_fd, 3) == bytes([1, 77, 1])
    os.waitpid(child, 0)
    assert (octets(shown) == 2).all()
    for fd in (read_fd, write_fd, go_read, go_write):
        os.close(fd)


def test_where_pages_cannot_be_moved_they_are_copied(areas: Areas, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, move = Window(NBYTES), addresses.move_pages
    calls: list[int] = []

    def sometimes(source: int, target: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) % 3 != 0:
            raise OSError(errno.ENOMEM, "too many mappings")
        move(source, target, nbytes)

    monkeypatch.setattr(window, "move_pages", sometimes)
    for step in range(1, 10):
        areas.show(shown, step)
        assert (octets(shown) == step).all()
        octets(shown)[::5000] = 255
        if step % 4 == 0:
            shown.keep()
            areas.publish(step + 2)
            assert set(np.unique(octets(shown)).tolist()) == {step, 255}
    assert len(calls) > 10


def test_a_segment_that_is_mapped_for_reading_only_is_copied(areas: Areas) -> None:
    shown = Window(NBYTES)
    areas.publish(1)
    shown.show(Segment.adopt(os.dup(areas.theirs[1].fd), NBYTES), [(0, PAGES)])
    octets(shown)[0] = 5
    assert not shown.shows and (octets(shown)[1:] == 1).all()


def test_a_kernel_without_what_it_needs_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(address: int, nbytes: int, advice: int) -> None:
        raise OSError(errno.EINVAL, "madvise: Invalid argument")

    monkeypatch.setattr(window, "advise", unknown)
    with pytest.raises(OSError, match="madvise"):
        Window(NBYTES)


def test_a_range_begins_where_page_tables_do_and_calls_say_why_they_fail() -> None:
    for nbytes in (1, PAGE, 3 << 20):
        memory = addresses.reserve(nbytes)
        assert addresses.address_of(memory) % addresses.HUGE_BYTES == 0
        assert len(memory) % PAGE == 0 and len(memory) >= nbytes
    with pytest.raises(OSError, match="mremap: "):
        addresses.move_pages(0, addresses.address_of(memory), PAGE)
    with pytest.raises(OSError, match="madvise: "):
        addresses.advise(addresses.address_of(memory) + 1, PAGE, mmap.MADV_DONTNEED)
    with pytest.raises(OSError, match="mmap: "):
        addresses.map_file(memory, -1)

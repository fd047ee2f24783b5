"""Freed memory goes back to the system where there is too much of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest
import torch

from shardline.host import allocator
from shardline_ps.memory.heap_trimmer import GROWN_BYTES, LATEST_S, LOOK_S, SPARE_BYTES, HeapTrimmer, Rule
from shardline_ps.store import ParameterStore

MB = 1 << 20
START = 300 * MB


def test_holes_are_too_many_when_they_pass_what_is_spare_and_what_staging_may_take() -> None:
    rule = Rule(spare=10)
    assert not rule.too_many(10, 0) and rule.too_many(11, 0)
    assert not rule.too_many(15, 5) and rule.too_many(16, 5)
    # Staging may be over its limit by a bucket of each stream.
    assert rule.too_many(11, -100) and not rule.too_many(10, -100)


def test_what_can_not_be_given_back_is_no_hole_until_it_is_gone() -> None:
    rule = Rule(spare=10, left=30)
    assert not rule.too_many(40, 0) and rule.too_many(41, 0)
    assert not rule.too_many(5, 0) and rule.left == 5
    assert rule.too_many(16, 0)
    assert not rule.too_many(-50, 0) and rule.left == 0


class System:
    """A process with an allocator, and a clock."""

    def __init__(self) -> None:
        self.taken, self.holes, self.other = 100 * MB, 0, START - 100 * MB
        self.stuck = 0
        """Of the holes, what can't be given back."""
        self.now_s = 50.0
        self.measured = 0
        self.room = 0

    def private_bytes(self) -> int:
        return self.taken + self.holes + self.other

    def taken_bytes(self) -> int:
        self.measured += 1
        return self.taken

    def give_back(self) -> bool:
        self.holes = min(self.holes, self.stuck)
        return True

    def watched(self) -> HeapTrimmer:
        return HeapTrimmer(
            lambda: self.room,
            private=self.private_bytes,
            taken=self.taken_bytes,
            trim=self.give_back,
            now_s=lambda: self.now_s,
        )

    def look(self, trimmer: HeapTrimmer, *, after_s: float = LOOK_S) -> None:
        self.now_s += after_s
        trimmer.look()


def test_holes_that_grow_are_given_back_before_they_are_more_than_may_be() -> None:
    system = System()
    trimmer = system.watched()
    most = 0
    for _ in range(1000):
        system.taken += MB
        system.holes += 3 * MB
        most = max(most, system.holes)
        system.look(trimmer)
    assert most <= SPARE_BYTES + GROWN_BYTES + 3 * MB
    # A thousand looks, and few of them are dear.
    assert 20 < trimmer.given_back < 60 and system.measured < 800


def test_what_a_server_holds_is_no_hole_however_much_it_is() -> None:
    system = System()
    trimmer = system.watched()
    for _ in range(100):
        system.taken += 100 * MB
        system.look(trimmer, after_s=LATEST_S)
    assert trimmer.given_back == 0


def test_what_is_freed_without_any_growth_is_found_within_a_second() -> None:
    system = System()
    trimmer = system.watched()
    system.taken += 1000 * MB
    system.look(trimmer)
    system.taken, system.holes = system.taken - 900 * MB, 900 * MB
    for _ in range(int(LATEST_S / LOOK_S) + 1):
        system.look(trimmer)
    assert trimmer.given_back == 1 and system.holes == 0


def test_room_that_staging_may_take_again_is_left_to_it() -> None:
    system = System()
    trimmer = system.watched()
    system.room, system.holes = 500 * MB, 500 * MB
    system.look(trimmer, after_s=LATEST_S)
    assert trimmer.given_back == 0
    system.room = 300 * MB
    system.look(trimmer, after_s=LATEST_S)
    assert trimmer.given_back == 1


def test_what_stays_is_not_given_back_over_and_over() -> None:
    system = System()
    trimmer = system.watched()
    system.holes = system.stuck = 400 * MB
    for _ in range(20):
        system.look(trimmer, after_s=LATEST_S)
    assert trimmer.given_back == 1


def test_nobody_looks_twice_within_a_moment() -> None:
    system = System()
    trimmer = system.watched()
    system.look(trimmer)
    before = system.measured
    for _ in range(10):
        system.holes += 100 * MB
        trimmer.look()
    assert system.measured == before and trimmer.given_back == 0


@pytest.mark.parametrize("lacks", ["private", "taken"])
def test_a_system_that_can_not_tell_is_left_alone(lacks: str) -> None:
    system = System()
    system.holes = 900 * MB
    measures = {"private": system.private_bytes, "taken": system.taken_bytes, lacks: lambda: None}
    trimmer = HeapTrimmer(lambda: 0, trim=system.give_back, **measures)  # type: ignore[arg-type]
    assert not trimmer.known
    trimmer.look()
    trimmer.give_back()
    assert trimmer.given_back == 0 and system.holes == 900 * MB


def test_tensor_work_is_followed_by_a_look() -> None:
    async def main() -> None:
        store = ParameterStore(device=torch.device("cpu"), pool_threads=1)
        looks: list[str] = []
        store.heap_trimmer.look = lambda: looks.append("look")  # type: ignore[method-assign]
        assert await store.work(lambda: 3) == 3 and len(looks) == 1
        assert await store.work_whole(lambda: 4, lambda: looks.append("after")) == 4
        assert looks == ["look", "after", "look"]
        store.close()

    asyncio.run(main())


def test_work_that_a_closed_pool_never_begins_ends_and_is_followed_by_its_after() -> None:
    async def main() -> None:
        store = ParameterStore(device=torch.device("cpu"), pool_threads=1)
        gate, ends = threading.Event(), []
        first = store.work_whole(lambda: gate.wait(20.0), lambda: ends.append("first"))
        second = store.work_whole(lambda: True, lambda: ends.append("second"))
        closing = asyncio.get_running_loop().run_in_executor(None, store.close)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(second, 20.0)
        gate.set()
        await closing
        assert await asyncio.wait_for(first, 20.0) and sorted(ends) == ["first", "second"]

    asyncio.run(main())


def test_the_allocator_tells_what_is_taken_and_gives_back_what_is_freed() -> None:
    """In a process of its own, with blocks that glibc keeps, and one after them that keeps the heap's end in use."""
    if not os.confstr("CS_GNU_LIBC_VERSION") or allocator.taken_bytes() is None:
        pytest.skip("the C library is not glibc, or older than 2.33")
    code = """
from shardline.host import allocator
assert allocator.tune_allocator()
size = 64 << 20
blocks = [bytearray(b"1") * size for _ in range(3)]
last = bytes(1 << 16)
private, taken = allocator.private_bytes(), allocator.taken_bytes()
blocks.clear()
freed = allocator.taken_bytes() - taken
assert -3.1 * size < freed < -2.9 * size, freed
kept = allocator.private_bytes() - private
assert kept > -0.1 * size, kept
assert allocator.give_back()
left = allocator.private_bytes() - private
assert left < -2.8 * size, left
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_another_c_library_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _name: object())
    assert allocator.taken_bytes() is None and allocator.give_back() is False

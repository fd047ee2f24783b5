"""Passes over much memory with several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from shardline.client.step.staging import WORTH_BYTES, ParallelMap

DEADLINE_S = 10.0


@pytest.fixture
def several() -> Iterator[ParallelMap]:
    made = ParallelMap(3)
    yield made
    made.close()


@pytest.mark.parametrize("items", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("nbytes", [0, WORTH_BYTES])
def test_results_come_in_the_order_of_the_items(items: int, nbytes: int, several: ParallelMap) -> None:
    for _ in range(3):
        assert several.each(lambda number: number * number, range(items), nbytes) == [n * n for n in range(items)]


def test_several_threads_work_at_the_same_time(several: ParallelMap) -> None:
    meeting = threading.Barrier(3)

    def act(number: int) -> str:
        meeting.wait(DEADLINE_S)
        return threading.current_thread().name

    assert len(set(several.each(act, range(3), WORTH_BYTES))) == 3


def test_little_is_done_by_the_caller_alone(several: ParallelMap) -> None:
    names = several.each(lambda number: threading.current_thread().name, range(9), WORTH_BYTES - 1)
    assert set(names) == {threading.current_thread().name}


def test_the_first_error_is_raised_when_nothing_is_under_way_any_more(several: ParallelMap) -> None:
    running = 0
    lock = threading.Lock()
    failed = threading.Event()

    def act(number: int) -> int:
        nonlocal running
        with lock:
            running += 1
        try:
            if number == 1:
                failed.set()
                raise ValueError("number 1")
            # The others are still at it when it fails.
            failed.wait(DEADLINE_S)
            return number
        finally:
            with lock:
                running -= 1

    with pytest.raises(ValueError, match="number 1"):
        several.each(act, range(50), WORTH_BYTES)
    assert running == 0
    # And it can be used again.
    assert several.each(lambda number: number, range(4), WORTH_BYTES) == [0, 1, 2, 3]


def test_each_item_is_done_once(several: ParallelMap) -> None:
    done: list[int] = []
    note: Callable[[int], None] = done.append
    several.each(note, range(1000), WORTH_BYTES)
    assert sorted(done) == list(range(1000))

"""Memory that comes back by itself."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from shardline.core.tensor_bytes import borrowed_tensor
from shardline.server.buffers import LEAST_BYTES, Buffers

SIZE = 1 << 20


def address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def test_memory_is_used_again_once_its_last_view_is_gone() -> None:
    buffers = Buffers(lambda: 4 * SIZE)
    first = buffers.take(SIZE)
    place, tensor, part = address(first), borrowed_tensor(first, "float32"), first[100:200]
    del first
    assert address(buffers.take(SIZE)) != place
    del tensor
    assert address(buffers.take(SIZE)) != place
    del part
    assert place in {address(view) for view in [buffers.take(SIZE), buffers.take(SIZE)]}


def test_a_tensor_of_the_memory_keeps_it_whatever_comes_after() -> None:
    buffers = Buffers(lambda: 4 * SIZE)
    kept = borrowed_tensor(buffers.take(SIZE), "float32").fill_(3.0)
    for _ in range(10):
        buffers.take(SIZE)[:] = bytes(SIZE)
    assert bool((kept == 3.0).all())


def test_no_more_is_kept_than_the_limit() -> None:
    buffers = Buffers(lambda: 3 * SIZE)
    held = [buffers.take(SIZE) for _ in range(8)]
    assert buffers.held_bytes == 8 * SIZE
    held.clear()
    gc.collect()
    assert buffers.held_bytes == 3 * SIZE


def test_idle_memory_of_other_sizes_makes_room() -> None:
    buffers = Buffers(lambda: 4 * SIZE)
    held = [buffers.take(SIZE) for _ in range(4)]
    held.clear()
    held = [buffers.take(2 * SIZE)]
    assert buffers.held_bytes == 4 * SIZE
    held.append(buffers.take(2 * SIZE))
    assert buffers.held_bytes == 4 * SIZE


def test_what_the_limit_is_used_for_elsewhere_leaves_less_to_lie_idle() -> None:
    elsewhere = 0
    buffers = Buffers(lambda: 4 * SIZE, lambda: elsewhere)
    held = [buffers.take(SIZE) for _ in range(4)]
    held.clear()
    assert buffers.held_bytes == 4 * SIZE
    elsewhere = 3 * SIZE
    buffers.fit()
    assert buffers.held_bytes == SIZE
    elsewhere = 5 * SIZE
    buffers.fit()
    assert buffers.held_bytes == 0
    held = [buffers.take(SIZE)]
    held.clear()
    assert buffers.held_bytes == 0


def test_memory_that_came_back_unseen_is_let_go_too_when_others_take_its_room() -> None:
    elsewhere = 0
    buffers = Buffers(lambda: 2 * SIZE, lambda: elsewhere)
    held = [buffers.take(SIZE), buffers.take(SIZE)]
    kept = weakref.ref(held[0].obj)
    held.clear()
    assert kept() is None
    elsewhere = SIZE
    buffers.fit()
    # No other way: held_bytes would let the memory go itself.
    assert buffers._idle_bytes == SIZE and buffers._used_bytes == 0


def test_what_is_spoken_for_and_taken_here_counts_once() -> None:
    spoken_for = 0
    buffers = Buffers(lambda: 4 * SIZE, lambda: spoken_for)
    held = [buffers.take(SIZE) for _ in range(4)]
    places = {address(view) for view in held}
    held.clear()
    for number in range(1, 5):
        spoken_for = number * SIZE
        held.append(buffers.take(SIZE))
        assert address(held[-1]) in places
        assert buffers.held_bytes == 4 * SIZE


def test_memory_that_the_system_refuses_counts_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    buffers = Buffers(lambda: 2 * SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            buffers.take(SIZE)
    held = [buffers.take(SIZE), buffers.take(SIZE)]
    held.clear()
    assert buffers.held_bytes == 2 * SIZE and buffers._used_bytes == 0


def test_small_memory_and_none_at_all_are_the_allocators() -> None:
    buffers = Buffers(lambda: 4 * SIZE)
    views = [buffers.take(0), buffers.take(LEAST_BYTES - 1)]
    assert [len(view) for view in views] == [0, LEAST_BYTES - 1]
    assert not any(view.readonly for view in views[1:])
    assert buffers.held_bytes == 0


def test_threads_never_share_memory() -> None:
    buffers = Buffers(lambda: 4 * SIZE)
    wrong: list[int] = []

    def use(mark: int) -> None:
        for _ in range(200):
            tensor = borrowed_tensor(buffers.take(LEAST_BYTES), "float32").fill_(mark)
            if not bool((tensor == mark).all()):
                wrong.append(mark)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    gc.collect()
    assert not wrong
    # Each has the next before it lets go of the last.
    assert buffers.held_bytes <= 8 * LEAST_BYTES

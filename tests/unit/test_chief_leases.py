from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, strategies as st

from shardline.errors import CheckpointError
from shardline_chief.rules.state.leases import MAX_BATCHES, Leases


def test_one_worker_gets_the_batches_in_order() -> None:
    leases = Leases(200)
    order: list[int] = []
    while (lease := leases.take(1, workers=1)) is not None:
        order.extend(range(lease.first, lease.end))
        assert leases.finish(lease.number, 1)
    assert order == list(range(200))
    assert leases.all_done
    assert leases.repeated == 0


def test_leases_grow_small_towards_the_end_so_that_workers_end_together() -> None:
    leases = Leases(100)
    sizes = []
    while (lease := leases.take(1, workers=4)) is not None:
        sizes.append(lease.count)
    assert sizes[0] > 1
    assert max(sizes) <= MAX_BATCHES
    assert sizes[-4:] == [1, 1, 1, 1]


def test_leases_of_a_dead_worker_are_handed_out_again_first_and_counted() -> None:
    leases = Leases(64)
    lost = leases.take(1, workers=2)
    kept = leases.take(2, workers=2)
    assert lost is not None
    assert kept is not None
    assert leases.fence(1) == [lost]
    assert leases.repeated == lost.count
    again = leases.take(2, workers=2)
    assert again is not None
    assert again.first == lost.first


def test_a_fenced_worker_can_not_finish_its_lease() -> None:
    leases = Leases(8)
    lease = leases.take(1, workers=1)
    assert lease is not None
    leases.fence(1)
    assert not leases.finish(lease.number, 1)
    assert leases.done == 0


def test_a_lease_is_finished_once_and_only_by_its_holder() -> None:
    leases = Leases(8)
    lease = leases.take(1, workers=1)
    assert lease is not None
    assert not leases.finish(lease.number, 2)
    assert leases.finish(lease.number, 1)
    assert not leases.finish(lease.number, 1)
    assert leases.done == lease.count


def test_cursor_is_json_and_brings_back_what_was_not_done() -> None:
    leases = Leases(40)
    first = leases.take(1, workers=1)
    second = leases.take(1, workers=1)
    assert first is not None
    assert second is not None
    leases.finish(second.number, 1)
    cursor = json.loads(json.dumps(leases.cursor()))
    resumed = Leases.resumed(cursor, 40)
    assert resumed.done == second.count
    again = resumed.take(9, workers=1)
    assert again is not None
    assert again.first == first.first
    assert again.end <= second.first


def test_resuming_with_more_steps_goes_on_behind_the_old_end() -> None:
    resumed = Leases.resumed({"steps": 10, "done": [[0, 10]], "repeated": 2}, 20)
    lease = resumed.take(1, workers=1)
    assert lease is not None
    assert lease.first == 10
    assert resumed.repeated == 2


@pytest.mark.parametrize("done", [[[3, 1]], [[-1, 4]], [["x", 4]], [5]])
def test_a_cursor_that_is_none_is_refused(done: object) -> None:
    with pytest.raises(CheckpointError, match="cursor"):
        Leases.resumed({"done": done}, 10)


@given(st.integers(1, 120), st.integers(0, 10_000))
def test_every_batch_is_issued_whatever_dies(steps: int, seed: int) -> None:
    rng = random.Random(seed)
    leases = Leases(steps)
    issued: set[int] = set()
    incarnation = 1
    for _ in range(20 * steps + 100):
        if leases.all_done:
            break
        if rng.random() < 0.2:
            leases.fence(incarnation)
            incarnation += 1
        lease = leases.take(incarnation, workers=rng.randint(1, 4))
        if lease is None:
            leases.fence(incarnation)
            continue
        issued.update(range(lease.first, lease.end))
        if rng.random() < 0.8:
            assert leases.finish(lease.number, incarnation)
        if rng.random() < 0.1:
            leases = Leases.resumed(leases.cursor(), steps)
    assert leases.all_done
    assert issued == set(range(steps))

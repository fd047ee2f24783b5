from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardline.consistency.assignment import assign, replicas_of

WORKERS = [f"worker/{i}" for i in range(8)]


def counts(assignment: dict[int, str]) -> list[int]:
    return sorted(list(assignment.values()).count(worker) for worker in set(assignment.values()))


def test_first_assignment_is_contiguous_and_aligned() -> None:
    assert assign({}, WORKERS[:2], 4) == {0: "worker/0", 1: "worker/0", 2: "worker/1", 3: "worker/1"}


def test_workers_beyond_the_replicas_are_spares() -> None:
    assert set(assign({}, WORKERS[:4], 2).values()) == {"worker/0", "worker/1"}


def test_replicas_of_a_dead_worker_go_to_the_others_and_theirs_stay() -> None:
    before = assign({}, WORKERS[:3], 6)
    after = assign(before, ["worker/0", "worker/2"], 6)
    assert replicas_of(after, "worker/0")[:2] == (0, 1)
    assert set(replicas_of(before, "worker/2")) <= set(replicas_of(after, "worker/2"))
    assert counts(after) == [3, 3]


def test_a_spare_takes_the_place_of_a_dead_worker() -> None:
    before = assign({}, WORKERS[:3], 2)
    after = assign(before, ["worker/0", "worker/2"], 2)
    assert after == {0: "worker/0", 1: "worker/2"}
    # Who returns finds the places taken, and nothing moves.
    assert assign(after, WORKERS[:3], 2) == after


def test_a_worker_that_comes_later_gets_its_share_and_nothing_else_moves() -> None:
    before = assign({}, ["worker/0"], 4)
    after = assign(before, ["worker/0", "worker/1"], 4)
    assert after == {0: "worker/0", 1: "worker/0", 2: "worker/1", 3: "worker/1"}


def test_nobody_living_means_nothing_assigned() -> None:
    assert assign({0: "worker/0"}, [], 1) == {}


@given(
    st.integers(1, 9),
    st.lists(st.sets(st.sampled_from(WORKERS), min_size=1), min_size=1, max_size=6),
)
def test_every_replica_has_one_living_worker_and_counts_differ_by_one(replicas: int, history: list[set[str]]) -> None:
    assignment: dict[int, str] = {}
    for alive in history:
        living = sorted(alive)
        before = assignment
        assignment = assign(before, living, replicas)
        assert sorted(assignment) == list(range(replicas))
        assert set(assignment.values()) <= alive
        sizes = counts(assignment)
        assert sizes[-1] - sizes[0] <= 1
        assert len(sizes) == min(replicas, len(living))
        assert assign(assignment, living, replicas) == assignment

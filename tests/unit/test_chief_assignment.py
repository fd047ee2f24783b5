from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

import shardline_pipeline as pipeline
from shardline.consistency.assignment import assign, replicas_of
from shardline.core.placement import Post
from shardline.core.spec import JobSpec, TensorSpec
from shardline.core.spec_json import job_from_json, job_to_json
from shardline.errors import JobError
from shardline.fit import check_fit
from shardline.rpc.messages.convert import job_from_proto, job_to_proto
from shardline.update import rule
from shardline_chief.rules.state.state import Work
from shardline_pipeline.hosts import hosts_of

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


def test_a_worker_that_returns_gets_back_what_it_had() -> None:
    homes = assign({}, WORKERS[:3], 3)
    without = assign(homes, WORKERS[1:3], 3, homes)
    assert without == {0: "worker/1", 1: "worker/1", 2: "worker/2"}
    assert assign(without, WORKERS[:3], 3, homes) == homes
    # Two are lost, and return in another order than those that stand in for them.
    homes = assign({}, WORKERS[:4], 4)
    without = assign(homes, WORKERS[2:4], 4, homes)
    assert without == {0: "worker/2", 1: "worker/3", 2: "worker/2", 3: "worker/3"}
    assert assign(assign(without, WORKERS[1:4], 4, homes), WORKERS[:4], 4, homes) == homes


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


# Workers that a model in stages names


def job_in_stages(workers: Sequence[int | Sequence[int]], *, replicas: int, stages: int = 3) -> JobSpec:
    tensors = [TensorSpec(name=f"{stage}.w", shape=(4,), dtype="float32", fragment=stage) for stage in range(stages)]
    return JobSpec(
        name="j",
        tensors=tuple(tensors),
        rule=rule("SGD", ({"lr": 0.5},)),
        pipeline="flush",
        replicas=replicas,
        hosts=hosts_of(workers, stages),
    )


def test_replicated_stages_and_stages_that_are_not_neighbours_are_where_the_model_says() -> None:
    two_one_one = pipeline.assigned(job_in_stages([2, 1, 1], replicas=2), {}, WORKERS)
    assert [two_one_one[unit] for unit in range(6)] == [f"worker/{number}" for number in (0, 1, 2, 2, 3, 3)]
    mixed = pipeline.assigned(job_in_stages([[0], [1], [2], [0]], replicas=1, stages=4), {}, WORKERS)
    assert mixed == {0: "worker/0", 1: "worker/1", 2: "worker/2", 3: "worker/0"}


def test_units_of_a_worker_that_is_away_are_with_another_until_it_is_back() -> None:
    job = job_in_stages([2, 1, 1], replicas=2)
    before = pipeline.assigned(job, {}, WORKERS[:4])
    away = pipeline.assigned(job, before, ["worker/0", "worker/1", "worker/3"])
    assert {unit for unit in range(6) if away[unit] != before[unit]} == {2, 3}
    assert [away[2], away[3]] == ["worker/0", "worker/1"]
    # A spare worker comes: who stands in goes on, since a stage that moves costs a step.
    assert pipeline.assigned(job, away, ["worker/0", "worker/1", "worker/3", "worker/4"]) == away
    assert pipeline.assigned(job, away, WORKERS[:4]) == before
    assert pipeline.assigned(job, before, []) == {}


def test_workers_that_have_stages_of_several_replicas_bind_these_to_each_other() -> None:
    job = job_in_stages([], replicas=4, stages=2)
    # Stage 0 of the replicas, then stage 1.
    holders = [0, 0, 1, 2, 3, 4, 4, 5]
    posts = [Post(task=f"worker/{number}", address="h:1", incarnation=1, key=b"") for number in holders]
    assert [pipeline.bound(job, posts, [replica]) for replica in range(4)] == [[0, 1, 2]] * 3 + [[3]]
    assert pipeline.bound(job, (), [2]) == [2]


def test_without_a_flush_what_a_stage_s_worker_has_stays_together() -> None:
    job = replace(job_in_stages([2, 1, 1], replicas=4), pipeline="stash")
    before = pipeline.assigned(job, {}, WORKERS[:4])
    away = pipeline.assigned(job, before, ["worker/0", "worker/1", "worker/3"])
    assert [away[unit] for unit in range(4, 8)] == ["worker/0"] * 4
    assert pipeline.assigned(job, away, WORKERS[:4]) == before
    # Replicas 0 and 2 of stage 0 are worker/0's, the others worker/1's.
    alone = pipeline.assigned(job, before, ["worker/2", "worker/3"])
    assert [alone[unit] for unit in range(4)] == ["worker/2", "worker/3"] * 2


@given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=2, unique=True), min_size=1, max_size=5),
    st.lists(st.sets(st.sampled_from(WORKERS), min_size=1), min_size=1, max_size=6),
)
def test_every_unit_has_one_living_worker_and_the_planned_one_if_that_lives(
    hosts: list[list[int]], history: list[set[str]]
) -> None:
    job = job_in_stages(hosts, replicas=2, stages=len(hosts))
    assignment: dict[int, str] = {}
    for alive in history:
        assignment = pipeline.assigned(job, assignment, sorted(alive))
        assert sorted(assignment) == list(range(2 * len(hosts))) and set(assignment.values()) <= alive
        for unit, task in assignment.items():
            named = f"worker/{hosts[unit // 2][unit % 2 % len(hosts[unit // 2])]}"
            assert task == named or named not in alive
        assert pipeline.assigned(job, assignment, sorted(alive)) == assignment


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        ([2, 1], r"workers is \[2, 1\], which is 2 entries for 3 stages"),
        ([2, [2], [3]], "give a number of workers for every stage, or a list"),
        ([2, 0, 1], "stage 1 needs at least one worker"),
        ([[0], [1, 1], [2]], "stage 1 needs at least one worker, each named once"),
        ([[0], [-1], [2]], "stage 1 needs at least one worker, each named once by its number, from 0 on"),
    ],
)
def test_workers_that_are_no_assignment_are_refused(workers: list[int | list[int]], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        hosts_of(workers, 3)


def test_workers_that_do_not_fit_the_job_or_the_cluster_are_refused_before_training() -> None:
    check_fit(job_in_stages([2, 1, 1], replicas=4), workers=4)
    with pytest.raises(JobError, match="stage 0 of the pipeline has 2 workers for the job's 3 replicas"):
        check_fit(job_in_stages([2, 1, 1], replicas=3))
    with pytest.raises(JobError, match="stage 2 of the pipeline is for worker/3, but there are 3 workers; start 4"):
        check_fit(job_in_stages([2, 1, 1], replicas=2), workers=3)
    with pytest.raises(JobError, match="are not those of 3 stages"):
        check_fit(replace(job_in_stages([], replicas=1), hosts=((0,), ())))


def test_the_workers_of_stages_come_through_the_wire() -> None:
    job = job_in_stages([[0, 4], [1], [0, 2]], replicas=2)
    assert job_from_proto(job_to_proto(job)) == job and job_from_json(job_to_json(job)) == job


def test_every_change_of_posts_is_numbered_also_one_that_is_taken_back() -> None:
    job, work, numbers = job_in_stages([], replicas=1), Work(), []
    for lives in ({"worker/0": 1}, {"worker/0": 1}, {"worker/0": 1, "worker/1": 2}, {"worker/0": 1}, {"worker/0": 3}):
        work.reassign(lives, job, machines=dict.fromkeys(lives, "here"), own=False)
        numbers.append(work.postings)
    assert numbers == [1, 1, 2, 3, 4]
    assert set(work.assignment.values()) == {"worker/0"}

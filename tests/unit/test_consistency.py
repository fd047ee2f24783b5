"""The pure rules of consistency, one line per case."""

from __future__ import annotations

import pytest

from shardline.consistency import numbered_pushes, replica_steps
from shardline.core.outcome import Outcome
from shardline.core.reduce import Block


@pytest.mark.parametrize(
    ("step", "counted", "block", "outcome", "reason"),
    [
        (5, set(), Block(0, 1), Outcome.COUNTED, ""),
        (5, set(), Block(0, 6), Outcome.COUNTED, ""),
        (5, {0, 1, 2}, Block(4, 2), Outcome.COUNTED, ""),
        (4, set(), Block(0, 1), Outcome.DUPLICATE, "step 4 is closed; the bucket is at step 5"),
        (0, {0}, Block(0, 4), Outcome.DUPLICATE, "step 0 is closed; the bucket is at step 5"),
        (5, {2}, Block(2, 1), Outcome.DUPLICATE, "replicas 2 were already counted in step 5"),
        (5, {0, 1, 2, 3}, Block(0, 2), Outcome.DUPLICATE, "replicas 0-1 were already counted in step 5"),
        (5, {1}, Block(0, 2), Outcome.SPLIT, "1 of 2 replicas of 0-1 were already counted in step 5"),
        (5, {0, 1, 3}, Block(0, 4), Outcome.SPLIT, "3 of 4 replicas of 0-3 were already counted in step 5"),
        (6, set(), Block(0, 1), Outcome.REFUSED, "step 6 is ahead of the bucket, which is at step 5"),
        (5, set(), Block(0, 7), Outcome.REFUSED, "block 0-6 is outside the job's 6 replicas"),
        (5, set(), Block(6, 1), Outcome.REFUSED, "block 6 is outside the job's 6 replicas"),
        (5, set(), Block(0, 0), Outcome.REFUSED, "block 0--1 is outside the job's 6 replicas"),
        (5, set(), Block(-1, 1), Outcome.REFUSED, "block -1 is not a node of the sum over 6 replicas"),
        (5, set(), Block(1, 2), Outcome.REFUSED, "block 1-2 is not a node of the sum over 6 replicas"),
        (5, set(), Block(2, 4), Outcome.REFUSED, "block 2-5 is not a node of the sum over 6 replicas"),
        (4, set(), Block(1, 2), Outcome.REFUSED, "block 1-2 is not a node of the sum over 6 replicas"),
    ],
)
def test_a_push_to_a_bucket_at_step_5_of_6_replicas(
    step: int, counted: set[int], block: Block, outcome: Outcome, reason: str
) -> None:
    before = set(counted)
    decision = replica_steps.admit_push(step, counted, block, bucket_step=5, replicas=6)
    assert (decision.outcome, decision.reason) == (outcome, reason)
    assert counted == before


@pytest.mark.parametrize(
    ("want", "bucket_step", "oldest", "outcome"),
    [
        (5, 5, 0, Outcome.SERVED),
        (4, 5, 0, Outcome.SERVED),
        (6, 5, 0, Outcome.WAITING),
        (60, 5, 0, Outcome.WAITING),
        (3, 5, 0, Outcome.OVERTAKEN),
        (0, 0, 0, Outcome.SERVED),
        (-1, 0, 0, Outcome.OVERTAKEN),
        # Restored at 5: theta_4 was never here, the second buffer is empty.
        (5, 5, 5, Outcome.SERVED),
        (4, 5, 5, Outcome.OVERTAKEN),
        (5, 6, 5, Outcome.SERVED),
        (4, 6, 5, Outcome.OVERTAKEN),
        (5, 7, 5, Outcome.OVERTAKEN),
    ],
)
def test_a_pull_of_an_exact_step(want: int, bucket_step: int, oldest: int, outcome: Outcome) -> None:
    assert replica_steps.serve_pull(want, bucket_step=bucket_step, oldest=oldest) is outcome


@pytest.mark.parametrize(("counted", "step"), [(False, 5), (True, 6)])
def test_progress_sends_a_replica_to_the_first_step_it_is_missing_in(counted: bool, step: int) -> None:
    assert replica_steps.progress(5, counted) == step


@pytest.mark.parametrize(
    ("seq", "last_seq", "skip", "outcome", "reason"),
    [
        (1, 0, False, Outcome.APPLIED, ""),
        (8, 7, False, Outcome.APPLIED, ""),
        (8, 7, True, Outcome.SKIPPED, ""),
        (7, 7, False, Outcome.DUPLICATE, "push 7 was already applied; the shard is at 7"),
        (1, 7, False, Outcome.DUPLICATE, "push 1 was already applied; the shard is at 7"),
        (7, 7, True, Outcome.DUPLICATE, "push 7 was already applied; the shard is at 7"),
        (9, 7, False, Outcome.OUT_OF_SEQUENCE, "push 9 arrived; expected 8"),
        (9, 7, True, Outcome.OUT_OF_SEQUENCE, "push 9 arrived; expected 8"),
        (2, 0, False, Outcome.OUT_OF_SEQUENCE, "push 2 arrived; expected 1"),
        (0, 0, False, Outcome.REFUSED, "the sequence number is 0; numbers start at 1"),
        (-3, 7, True, Outcome.REFUSED, "the sequence number is -3; numbers start at 1"),
    ],
)
def test_an_asynchronous_push_by_its_number(seq: int, last_seq: int, skip: bool, outcome: Outcome, reason: str) -> None:
    decision = numbered_pushes.admit_push(seq, last_seq=last_seq, skip=skip)
    assert (decision.outcome, decision.reason) == (outcome, reason)


@pytest.mark.parametrize(
    ("seq", "last_seq", "number"),
    [
        (10, 8, None),  # the one before it is lost with the shard's memory
        (10, 0, None),
        (10, 9, 10),  # nothing is lost
        (10, 10, 10),  # the shard holds it: it will be answered DUPLICATE
        (10, 12, 10),
    ],
)
def test_an_open_push_keeps_its_number_or_is_computed_anew(seq: int, last_seq: int, number: int | None) -> None:
    assert numbered_pushes.resume(seq, last_seq=last_seq) == number


@pytest.mark.parametrize(("version", "base", "staleness"), [(7, 7, 0), (8, 7, 1), (25, 17, 8), (3, 9, 0)])
def test_staleness_counts_the_updates_between_pull_and_apply(version: int, base: int, staleness: int) -> None:
    # A shard that went back to a cut may be behind the version its worker pulled; that isn't a negative staleness.
    assert numbered_pushes.staleness(version, base) == staleness

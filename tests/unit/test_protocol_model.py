"""The protocol under thousands of random schedules: deaths, zombies, late messages, rollbacks, cuts, votes.

Seeds are fixed, so a failure names a schedule that can be played again: Model(setup(seed, ...)).run().
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from shardline.consistency import replica_steps
from shardline.core.outcome import Decision, Outcome
from tests.protocol_model.asynchronous import AsyncCounts, AsyncModel, AsyncSetup
from tests.protocol_model.numbers import Broken, Setup
from tests.protocol_model.paced import PacedCounts, PacedModel, PacedSetup
from tests.protocol_model.synchronous import Model
from tests.protocol_model.tasks import Counts
from tests.support.covering import number_of_schedules

SHAPES = [(1,), (3,), (1, 1), (2, 3), (2, 1, 2), (1, 1, 1, 1)]


def setup(seed: int, *, kills: int = 20, **fixed: Any) -> Setup:
    """A cluster drawn from the seed: shards, buckets, replicas, workers and how many workers will die."""
    draw = random.Random(-1 - seed)
    replicas = draw.randint(1, 5)
    return Setup(
        seed=seed,
        shards=draw.choice(SHAPES),
        replicas=replicas,
        workers=draw.randint(1, replicas),
        kills=draw.randint(0, kills),
        **fixed,
    )


def play(schedules: int, **options: Any) -> Counts:
    total = Counts()
    for seed in range(schedules):
        try:
            total.add(Model(setup(seed, **options)).run())
        except Broken as broken:
            broken.add_note(f"play it again: Model({setup(seed, **options)}).run()")
            raise
    return total


def broken_schedules(schedules: int, **options: Any) -> int:
    def fails(seed: int) -> bool:
        try:
            Model(setup(seed, **options)).run()
        except Broken:
            return True
        return False

    return sum(map(fails, range(schedules)))


@number_of_schedules(50, 3000)
def test_steps_end_in_the_same_bits_whoever_dies_and_whatever_comes_late(schedules: int) -> None:
    counts = play(schedules)
    # The promises mean little unless the schedules were as rough as they claim to be.
    assert counts.kills > schedules * 20 / 3
    assert counts.duplicates > schedules * 50 / 3
    assert counts.splits > schedules / 3
    assert counts.fenced > schedules * 5 / 3
    assert counts.overtaken == 0


@number_of_schedules(30, 200)
def test_a_job_without_deaths_needs_no_repetition_of_steps(schedules: int) -> None:
    counts = play(schedules, kills=0)
    assert counts.kills == counts.fenced == counts.overtaken == 0


@number_of_schedules(40, 600)
def test_without_fences_a_zombie_can_overtake_the_living_yet_bits_stay_equal(schedules: int) -> None:
    counts = play(schedules, fencing=False)
    assert counts.fenced == 0
    assert counts.overtaken > 0


@number_of_schedules(20, 500)
def test_voted_steps_end_in_the_same_bits_with_clipping_skips_and_lost_verdicts(schedules: int) -> None:
    counts = play(schedules, voted=True)
    assert counts.skipped_steps > schedules
    assert counts.kills > 6 * schedules
    assert counts.overtaken == 0


@number_of_schedules(13, 80)
@pytest.mark.parametrize("voted", [False, True])
def test_every_cut_taken_while_training_is_the_state_of_its_step(voted: bool, schedules: int) -> None:
    counts = Counts()
    for every in (1, 2, 3):
        counts.add(play(schedules, steps=7, cut_every=every, voted=voted))
    assert counts.cuts > 6 * schedules
    assert counts.discarded_cuts > schedules / 4


@number_of_schedules(25, 90)
@pytest.mark.parametrize("voted", [False, True])
def test_shards_that_die_take_all_back_to_a_cut_and_the_bits_stay_equal(voted: bool, schedules: int) -> None:
    counts = Counts()
    for every in (0, 1, 3):
        counts.add(play(schedules, steps=6, cut_every=every, voted=voted, ps_kills=3))
    assert counts.rollbacks > 5.5 * schedules
    assert counts.wrong_timeline > 2.7 * schedules
    # Rare where steps are voted on.
    assert counts.repeated_cuts > 0 or (voted and schedules < 90)


# What the model is worth: the same schedules under rules that are a little wrong.


def always_count(step: int, counted: Any, block: Any, *, bucket_step: int, replicas: int) -> Decision:
    """Counts a contribution of the open step again and again."""
    outcome = Outcome.COUNTED if step == bucket_step else Outcome.DUPLICATE
    return Decision(outcome)


def count_any_step(step: int, counted: Any, block: Any, *, bucket_step: int, replicas: int) -> Decision:
    """Takes a late contribution for one of the open step."""
    return replica_steps.admit_push(bucket_step, counted, block, bucket_step=bucket_step, replicas=replicas)


def count_overlaps(step: int, counted: Any, block: Any, *, bucket_step: int, replicas: int) -> Decision:
    """Counts a block that was counted in part."""
    decision = replica_steps.admit_push(step, counted, block, bucket_step=bucket_step, replicas=replicas)
    return Decision(Outcome.COUNTED) if decision.outcome is Outcome.SPLIT else decision


def serve_latest(want: int, *, bucket_step: int, oldest: int) -> Outcome:
    """Sends what there is instead of the exact step."""
    return Outcome.SERVED


def serve_newest_only(want: int, *, bucket_step: int, oldest: int) -> Outcome:
    """The exact step, of one published buffer."""
    return replica_steps.serve_pull(want, bucket_step=bucket_step, oldest=bucket_step)


def progress_optimist(bucket_step: int, replica_counted: bool) -> int:
    """Takes every replica for counted."""
    return bucket_step + 1


@number_of_schedules(45, 300)
@pytest.mark.parametrize("serve", [replica_steps.serve_pull, serve_newest_only])
def test_one_published_buffer_fails_in_a_third_of_the_schedules(serve: Callable[..., Outcome], schedules: int) -> None:
    assert broken_schedules(schedules, published=1, serve=serve) > schedules / 3


@number_of_schedules(20, 150)
@pytest.mark.parametrize(
    "wrong",
    [
        {"admit": always_count},
        {"admit": count_any_step},
        {"admit": count_overlaps},
        {"serve": serve_latest},
        {"canonical": False},
    ],
    ids=lambda wrong: next(getattr(value, "__name__", key) for key, value in wrong.items()),
)
def test_a_wrong_rule_is_found_out(wrong: dict[str, Any], schedules: int) -> None:
    assert broken_schedules(schedules, **wrong) > schedules / 10


@number_of_schedules(10, 60)
def test_a_replacement_that_takes_its_work_for_done_is_found_out(
    monkeypatch: pytest.MonkeyPatch, schedules: int
) -> None:
    monkeypatch.setattr(
        "tests.protocol_model.synchronous.LIMIT", 5000
    )  # nobody does the work, so the schedule is stuck
    assert broken_schedules(schedules, progress=progress_optimist) > schedules / 4


# Asynchronous pushes.


def play_async(schedules: int, **options: Any) -> AsyncCounts:
    total = AsyncCounts()
    for seed in range(schedules):
        try:
            total.add(AsyncModel(AsyncSetup(seed=seed, **options)).run())
        except Broken as broken:
            broken.add_note(f"play it again: AsyncModel(AsyncSetup(seed={seed}, **{options})).run()")
            raise
    return total


def broken_async(schedules: int, **options: Any) -> int:
    def fails(seed: int) -> bool:
        try:
            AsyncModel(AsyncSetup(seed=seed, **options)).run()
        except Broken:
            return True
        return False

    return sum(map(fails, range(schedules)))


@number_of_schedules(50, 400)
def test_no_asynchronous_push_counts_twice_or_is_lost_once_acknowledged(schedules: int) -> None:
    counts = play_async(schedules, kills=4, give_up=0.1)
    assert counts.duplicates > 25 * schedules
    assert counts.skipped > 2.5 * schedules
    assert counts.fenced > 2.5 * schedules
    assert counts.out_of_sequence == 0


@number_of_schedules(50, 400)
def test_a_shard_that_goes_back_alone_repeats_nothing_and_loses_only_what_its_cut_lacks(schedules: int) -> None:
    counts = play_async(schedules, kills=2, give_up=0.1, shard_losses=3)
    assert counts.wrong_timeline > 2.5 * schedules
    assert counts.lost_with_shard > schedules / 4


@number_of_schedules(30, 200)
def test_dense_numbers_hold_even_with_several_pushes_under_way(schedules: int) -> None:
    assert play_async(schedules, window=3, kills=2).out_of_sequence > 5 * schedules


def remember_the_highest(seq: int, *, last_seq: int, skip: bool) -> Decision:
    """The obvious rule: whatever is newer than the last one counts."""
    return Decision(Outcome.APPLIED if seq > last_seq else Outcome.DUPLICATE)


def next_number(seq: int, *, last_seq: int) -> int:
    """Gives an open push the next number even where the cut holds it."""
    return last_seq + 1


@number_of_schedules(20, 100)
@pytest.mark.parametrize(
    "wrong",
    [
        {"window": 3, "admit": remember_the_highest},
        {"shard_losses": 3, "new_timeline": False},
        {"shard_losses": 3, "resume": next_number},
    ],
    ids=["remember_the_highest", "same_timeline", "next_number"],
)
def test_a_wrong_asynchronous_rule_is_found_out(wrong: dict[str, Any], schedules: int) -> None:
    assert broken_async(schedules, **wrong) > schedules / 20


# Bounded staleness.


def play_paced(schedules: int, **options: Any) -> PacedCounts:
    total = PacedCounts()
    for seed in range(schedules):
        try:
            total.add(PacedModel(PacedSetup(seed=seed, **options)).run())
        except Broken as broken:
            broken.add_note(f"play it again: PacedModel(PacedSetup(seed={seed}, **{options})).run()")
            raise
    return total


@number_of_schedules(30, 1000)
@pytest.mark.parametrize(
    "options",
    [
        {"kills": 4},
        {"kills": 4, "losses": 3},
        {"kills": 3, "slow": 5},
        {"kills": 6, "losses": 2, "slack": 1, "shards": 3, "workers": 4},
        {"kills": 2, "slack": 1000},
        {"kills": 4, "losses": 2, "least": 1, "slack": 4, "slow": 3},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()),
)
def test_workers_that_wait_for_slower_ones_finish_every_batch(options: dict[str, int], schedules: int) -> None:
    counts = play_paced(schedules, **options)
    slack = options.get("slack", 2)
    assert counts.rests > schedules / 2
    assert counts.timelines == options.get("losses", 0) * schedules
    if slack < 1000:
        assert options.get("least", slack - 1) < counts.spread <= slack and (
            "least" in options or counts.spread == slack
        )
        assert counts.held > schedules
    else:
        assert counts.held == 0 < counts.spread


@number_of_schedules(10, 60)
@pytest.mark.parametrize(
    "wrong",
    [{"rests": False}, {"told": False, "kills": 10, "slack": 1, "batches": 100, "workers": 5}],
    ids=["a worker without work stays in the minimum", "each shard counts for itself"],
)
def test_a_wrong_way_to_wait_is_found_out(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], schedules: int
) -> None:
    monkeypatch.setattr("tests.protocol_model.paced.LIMIT", 15_000)

    def fails(seed: int) -> bool:
        try:
            PacedModel(PacedSetup(seed=seed, **wrong)).run()
        except Broken:
            return True
        return False

    assert sum(map(fails, range(schedules))) > schedules / 20

"""Spares: the pure rules, and shards that close a step with the first replicas at the lead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardline import consistency
from shardline.client.step.early_push import Expected, why_not_early
from shardline.consistency import Gives, spares
from shardline.consistency.choosing import KEPT_CHOICES, StepChoices, choose
from shardline.consistency.eager import EagerSteps
from shardline.consistency.spares import SpareSteps, needed
from shardline.core.choices import Choices, choice_of, members
from shardline.core.gradients import Gradient
from shardline.core.outcome import Decision, Outcome
from shardline.core.plan import make_plan
from shardline.core.reduce import Block, tree_sum
from shardline.core.spec import ConsistencySpec, TensorKind, TensorSpec
from shardline.errors import InternalError, JobError, ProtocolError
from shardline.fit import check_fit
from shardline.storage.shard import Observers
from shardline.update import rule
from shardline_ps.shard.shard import Shard
from tests.support.builders import make_job_spec, make_settings

TENSORS = (
    TensorSpec(name="w", shape=(3,), dtype="float32"),
    TensorSpec(name="v", shape=(40,), dtype="float32"),
    TensorSpec(name="stats", shape=(2,), dtype="float32", kind=TensorKind.BUFFER),
)
MOMENTUM = rule("SGD", ({"lr": 0.5, "momentum": 0.5},))


# Rules


@pytest.mark.parametrize(
    ("replicas", "chosen", "quorum", "count"),
    [
        (5, 1, 1.0, 4),
        (5, 4, 1.0, 1),
        (4, 0, 0.75, 3),
        (5, 0, 0.75, 4),
        (10, 0, 0.7, 7),
        (3, 0, 0.01, 1),
        (3, 0, 1.0, 3),
    ],
)
def test_the_number_of_gradients_that_close_a_step(replicas: int, chosen: int, quorum: float, count: int) -> None:
    assert needed(replicas, chosen, quorum) == count


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sync:spares=1,quorum=0.5", "spares=1 and quorum=0.5 both say how many replicas"),
        ("sync:spares=-1", "spares is -1; give a whole number >= 0"),
        ("sync:quorum=0", "quorum is 0.0; give a fraction above 0 and at most 1"),
        ("sync:quorum=1.5", "quorum is 1.5; give a fraction above 0 and at most 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        consistency.of(ConsistencySpec(mode=text))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"replicas": 2, "consistency": ConsistencySpec(mode="sync:spares=2")},
            "spares is 2, and the job has 2 replicas",
        ),
        (
            {"replicas": 4, "cadence": "easgd", "consistency": ConsistencySpec(mode="sync:spares=1")},
            "cadence easgd keeps parameters of each replica.* but consistency sync:spares=1 drops what comes too late",
        ),
    ],
)
def test_jobs_that_spares_do_not_fit_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        check_fit(make_job_spec(**changes))


def test_without_spares_it_is_the_plain_mode() -> None:
    for text in ("sync", "sync:spares=0", "sync:quorum=1"):
        mode = consistency.of(ConsistencySpec(mode=text))
        assert Gives.EVERY_GRADIENT in mode.gives and mode.intake.place(0) == 0
        assert type(Shard(0, make_settings(TENSORS, consistency=ConsistencySpec(mode=text))).mode) is EagerSteps


@pytest.mark.parametrize(
    ("counts", "step", "replica", "choice", "outcome"),
    [
        (Outcome.COUNTED, 5, 1, None, Outcome.COUNTED),
        (Outcome.COUNTED, 5, 1, 0b010, Outcome.COUNTED),
        (Outcome.COUNTED, 5, 1, 0b101, Outcome.LATE_DROPPED),
        (Outcome.DUPLICATE, 5, 1, None, Outcome.DUPLICATE),
        (Outcome.DUPLICATE, 4, 1, 0b010, Outcome.DUPLICATE),
        (Outcome.DUPLICATE, 4, 1, 0b101, Outcome.LATE_DROPPED),
        (Outcome.DUPLICATE, 2, 1, None, Outcome.LATE_DROPPED),
        (Outcome.REFUSED, 6, 1, None, Outcome.REFUSED),
    ],
)
def test_a_push_of_a_replica_to_a_bucket_at_step_5(
    counts: Outcome, step: int, replica: int, choice: int | None, outcome: Outcome
) -> None:
    found = spares.admit_spare(Decision(counts), step, replica, bucket_step=5, choice=choice)
    assert found.outcome is outcome


@pytest.mark.parametrize(
    ("counted", "choice", "step"), [(False, None, 5), (True, None, 6), (False, 0b010, 5), (False, 0b101, 6)]
)
def test_a_dropped_replica_goes_on_with_the_next_step(counted: bool, choice: int | None, step: int) -> None:
    assert spares.progress_of_spare(5, 1, counted=counted, choice=choice) == step


@pytest.mark.parametrize(("owned", "early"), [([1], True), ([0, 1], False)])
def test_gradients_leave_early_only_if_a_worker_has_one_replica(owned: list[int], early: bool) -> None:
    job = make_job_spec(replicas=3, consistency=ConsistencySpec(mode="sync:spares=1"))
    half = consistency.of(job.consistency).worker_half(job)
    assert (why_not_early(job, half, Expected(replica=1, owned=owned), first=False) == "") is early


def test_the_first_that_arrive_are_chosen() -> None:
    assert choose([3, 0], 3) is None
    assert choose([3, 0, 4, 1], 3) == choice_of([0, 3, 4])
    assert members(0b11001) == (0, 3, 4)


def test_choices_are_packed_and_joined() -> None:
    made = Choices(3, (0b1, 0b1000000001, 0b11))
    assert Choices.unpacked(3, made.width, made.packed(made.width)) == made
    assert [made.at(step) for step in (2, 3, 5, 6)] == [None, 1, 3, None]
    assert made.since(5) == Choices(5, (0b11,)) and made.since(9) == Choices(6)
    assert made.until(4) == Choices(3, (1,)) and made.until(3) == Choices(3) and made.until(0) == Choices(0)
    assert made.followed_by(Choices(5, (7, 8))) == Choices(3, (1, 0b1000000001, 7, 8))
    assert made.followed_by(Choices(7, (7,))) == Choices(7, (7,))
    with pytest.raises(ProtocolError, match="choices of 3 bytes; each has 2"):
        Choices.unpacked(0, 2, b"abc")


# Shards


class Job:
    """The shards of a job with spares, and what they report."""

    def __init__(self, replicas: int, shards: int = 1, *, mode: str = "sync:spares=1", **settings: Any) -> None:
        self.plan = make_plan(TENSORS, shards)
        self.events: list[tuple[int, int]] = []
        spec = ConsistencySpec(mode=mode)
        fields = {"rule": MOMENTUM, "consistency": spec, "replicas": replicas, **settings}
        self.shards = [
            Shard(
                number,
                make_settings(self.plan, **fields),
                observers=Observers(on_complete=lambda step, number=number: self.events.append((number, step))),  # type: ignore[misc]
            )
            for number in range(len(self.plan.shards))
        ]
        for shard in self.shards:
            for bucket in shard.buckets:
                shard.initialize(bucket.number, torch.full((bucket.spec.elements,), 2.0))

    @staticmethod
    def gradient(replica: int, step: int, elements: int) -> torch.Tensor:
        return torch.randn(elements, generator=torch.Generator().manual_seed(100 * step + replica))

    def push(self, replica: int, step: int, shard: int = 0, buckets: int | None = None) -> set[Outcome]:
        """A replica's contribution to all buckets of a shard, or to the first ones."""
        held = self.shards[shard]
        found = set()
        for bucket in held.buckets[:buckets]:
            values = self.gradient(replica, step, bucket.spec.elements)
            made = Gradient(values, (True,) * len(bucket.spec.slices))
            found.add(held.contribute(bucket.number, step, Block(replica, 1), made).outcome)
        return found

    def apply(self, shard: int = 0) -> None:
        """What the shard's next event leads to: the vote and its verdict."""
        number, step = self.events.pop(0)
        assert number == shard
        voted = self.shards[shard].mode.vote(step)
        assert voted is not None
        self.shards[shard].mode.apply_verdict(voted[1], scale=1.0, skip=False)

    def choices(self, shard: int = 0) -> StepChoices:
        mode = self.shards[shard].mode
        assert isinstance(mode, SpareSteps)
        return mode.known


def values(shard: Shard) -> list[torch.Tensor]:
    images = [bucket.image() for bucket in shard.buckets]
    return [tensor for image in images for _, tensor in sorted(image.tensors.items())]


def test_a_step_closes_with_the_nth_arrival_and_is_the_mean_over_the_choice() -> None:
    job = Job(3)
    assert job.push(2, 0, buckets=1) == {Outcome.STAGED}
    assert job.push(1, 0) == {Outcome.STAGED} and not job.events
    job.push(2, 0)
    assert job.events == [(0, 0)], "the second replica that is whole closes the step"
    # What comes between the choice and the update is told, and changes nothing.
    assert job.push(0, 0) == {Outcome.LATE_DROPPED}
    job.apply()
    for bucket in job.shards[0].buckets:
        parts = [job.gradient(replica, 0, bucket.spec.elements) for replica in (1, 2)]
        total = tree_sum(parts)
        assert total is not None
        parameter = torch.nn.Parameter(torch.full((bucket.spec.elements,), 2.0))
        parameter.grad = total / 2
        torch.optim.SGD([parameter], lr=0.5, momentum=0.5).step()
        # Of buffers, those of the lowest chosen replica are taken.
        expected = parts[0] if bucket.spec.kind is TensorKind.BUFFER else parameter.detach()
        for piece in bucket.spec.slices:
            span = slice(piece.offset, piece.end)
            assert torch.equal(bucket.values[span], expected[span])
    assert job.choices().made() == Choices(0, (0b110,))
    assert job.shards[0].partial_bytes == 0


def test_a_late_push_leaves_every_bit_as_it_is() -> None:
    job = Job(3)
    for step in range(3):
        job.push(step % 3, step)
        job.push((step + 1) % 3, step)
        job.apply()
        before = values(job.shards[0])
        version = job.shards[0].version
        assert job.push((step + 2) % 3, step) == {Outcome.LATE_DROPPED}
        # A repetition of what counts is told as such, also by another worker.
        assert job.push(step % 3, step) == {Outcome.DUPLICATE}
        assert all(torch.equal(one, other) for one, other in zip(before, values(job.shards[0]), strict=True))
        assert (job.shards[0].version, job.shards[0].partial_bytes) == (version, 0)


def test_a_dropped_replica_is_told_the_next_step() -> None:
    job = Job(3)
    for replica in (0, 1):
        job.push(replica, 0)
    assert [job.shards[0].mode.progress(replica) for replica in range(3)] == [1, 1, 1]
    assert job.shards[0].mode.waiting_for() == []
    job.apply()
    assert [job.shards[0].mode.progress(replica) for replica in range(3)] == [1, 1, 1]


def test_another_shard_asks_as_soon_as_it_has_enough_and_waits_for_the_chosen() -> None:
    job = Job(3, shards=2)
    for replica in (1, 2):
        job.push(replica, 0, shard=1)
    assert job.events == [(1, 0)], "it has enough, and wants to know whose count"
    assert job.shards[1].mode.vote(0) is None
    for replica in (0, 1):
        job.push(replica, 0)
    assert job.events == [(1, 0), (0, 0)]
    job.events.clear()
    choice = job.choices().of(0)
    assert choice == 0b011
    job.choices(1).adopt(0, choice)
    assert not job.events and job.shards[1].mode.waiting_for() == [0]
    assert job.push(2, 0, shard=1) == {Outcome.LATE_DROPPED}
    assert job.push(0, 0, shard=1) == {Outcome.STAGED}
    job.apply(1)
    assert job.shards[1].step_min == 1
    with pytest.raises(InternalError, match=r"replicas \(0, 2\) were chosen according to another shard, \(0, 1\)"):
        job.choices(1).adopt(0, 0b101)


def test_several_replicas_are_never_pushed_as_one() -> None:
    job = Job(4)
    bucket = job.shards[0].buckets[0]
    made = Gradient(torch.ones(bucket.spec.elements), (True,) * len(bucket.spec.slices))
    found = job.shards[0].contribute(0, 0, Block(0, 2), made)
    assert found.outcome is Outcome.REFUSED and "with spares each is pushed alone" in found.reason


def test_a_copy_of_the_lead_chooses_when_it_has_heard_all_and_keeps_what_it_is_told() -> None:
    job = Job(3)
    job.shards[0].mode.recall((), None)
    for replica in (0, 1):
        job.push(replica, 0)
    # The choice is wanted, but the old lead may have made one.
    assert job.events == [(0, 0)] and job.choices().of(0) is None
    job.events.clear()
    job.choices().adopt(0, 0b110)
    assert not job.events
    job.push(2, 0)
    job.apply()
    for replica in (0, 1):
        job.push(replica, 1)
    job.events.clear()
    job.choices().heard_all()
    job.apply()
    assert job.choices().made() == Choices(0, (0b110, 0b011))


def test_a_replayed_choice_waits_for_its_replicas() -> None:
    job = Job(3, replayed=Choices(0, (0b101, 0b110)))
    for replica in (0, 1):
        job.push(replica, 0)
    assert not job.events
    job.push(2, 0)
    job.apply()
    assert job.choices().made() == Choices(0, (0b101,))


def test_a_restored_shard_chooses_anew_and_a_choice_of_before_is_forgotten() -> None:
    job = Job(3)
    images = [bucket.image() for bucket in job.shards[0].buckets]
    for replica in (0, 1):
        job.push(replica, 0)
    job.apply()
    job.push(2, 1)
    job.shards[0].restore(images)
    assert job.choices().made() == Choices(0) and job.choices().newest() == (0, 0)
    for replica in (1, 2):
        assert job.push(replica, 0) == {Outcome.STAGED}
    job.apply()
    assert job.choices().made() == Choices(0, (0b110,))


def test_choices_are_kept_until_the_chief_has_noted_them_but_not_for_ever() -> None:
    job = Job(3)
    known = job.choices()
    for step in range(KEPT_CHOICES + 5):
        with job.shards[0].storage.lock:
            known.closed_held(step, 0b11)
    assert (known.made().first, known.made().end) == (5, KEPT_CHOICES + 5)
    known.noted(KEPT_CHOICES)
    assert known.made() == Choices(KEPT_CHOICES, (0b11,) * 5)
    # A repeated or early message changes nothing.
    known.noted(3)
    assert known.made().first == KEPT_CHOICES
    known.noted(KEPT_CHOICES + 9)
    assert known.made() == Choices(KEPT_CHOICES + 5)


def test_a_standby_inherits_the_choices_of_before_its_copy() -> None:
    known = Job(3).choices()
    with Job(3).shards[0].storage.lock:
        known.closed_held(7, 0b110)
    known.inherit(Choices(5, (0b011, 0b101, 0b110)))
    assert known.made() == Choices(5, (0b011, 0b101, 0b110))
    empty = Job(3).choices()
    empty.inherit(Choices(5, (0b011,)))
    assert empty.made() == Choices(5, (0b011,))


def test_a_step_is_voted_on_once_though_its_choice_becomes_known_between_report_and_vote() -> None:
    job = Job(4, shards=1)
    (shard,) = job.shards
    # As a standby that has become the lead: it must not choose yet.
    shard.mode.recall((), None)
    for replica in (0, 1, 2):
        job.push(replica, 0)
    assert shard.mode.choices is not None
    shard.mode.choices.heard_all()
    assert shard.mode.vote(0) is not None
    assert shard.mode.vote(0) is None

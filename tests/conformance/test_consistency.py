"""Every consistency in the table, with and without a job's options, on one shard and its standby.

Residents from files named in SHARDLINE_PLUGINS are in the table too, and run the same suite.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tests.conformance.toys.toy_dssp  # noqa: F401  # it is in the table from here on
from shardline import consistency
from shardline.consistency import CONSISTENCIES, Clock, Gives
from shardline.consistency.intake import BOTH_STEPS
from shardline.consistency.server import NumberedPush, StepWanted
from shardline.consistency.voted import choices
from shardline.core.contributions import none_present
from shardline.core.gradients import Gradient
from shardline.core.outcome import Decision, Outcome
from shardline.core.records import Begin
from shardline.core.reduce import Block
from shardline.core.spec import ConsistencySpec, TensorKind, TensorSpec
from shardline.seams import settings_of
from shardline.storage.shard import Observers
from shardline.update import rule
from shardline_ps.shard.shard import Shard
from shardline_ps.standby.record_log import RecordLog, copied_image
from shardline_ps.standby.standby import Standby
from tests.support.builders import make_job_spec, make_settings

TENSORS = (
    TensorSpec(name="w", shape=(3,), dtype="float32"),
    TensorSpec(name="v", shape=(40,), dtype="float32"),
    TensorSpec(name="stats", shape=(2,), dtype="float32", kind=TensorKind.BUFFER),
)
COUNTED = (Outcome.COUNTED, Outcome.STAGED, Outcome.APPLIED)
ENOUGH = 64
"""Contributions after which every mode should have made an update."""

OTHERS = ("softsync:n=2", "ssp:slack=0", "sync:spares=1", "async:in_stages=true", "ssp:in_stages=true")
"""Settings under which a mode is another one."""
SPECS = [
    ConsistencySpec(mode=mode, clip_norm=clip_norm, nan_policy=nan_policy)
    for mode in (*CONSISTENCIES.names, *OTHERS)
    for clip_norm, nan_policy in ((0.0, "stop"), (100.0, "stop"), (0.0, "skip"))
]
each = pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.mode}-{s.clip_norm:.0f}-{s.nan_policy}")


class Job:
    """A shard, and two workers that contribute to it as its mode requires."""

    def __init__(self, spec: ConsistencySpec, shard: Shard | None = None) -> None:
        self.mode = consistency.of(spec)
        self.complete: list[int] = []
        observers = Observers(on_complete=self.complete.append)
        momentum = rule("SGD", ({"lr": 0.5, "momentum": 0.5},))
        settings = make_settings(TENSORS, rule=momentum, consistency=spec, replicas=self.mode.contributors(2))
        self.shard = Shard(0, settings, observers=observers) if shard is None else shard
        self.shard.storage.observers = observers
        self.shard.mode.members_changed(["worker/0", "worker/1"])
        if (known := choices(self.shard.mode)) is not None:
            # There is no other shard that could know more.
            known.heard_all()
        if shard is None:
            for bucket in self.shard.buckets:
                self.shard.initialize(bucket.number, torch.full((bucket.spec.elements,), 2.0))

    def gradients(self, amount: float) -> dict[int, Gradient]:
        return {
            bucket.number: Gradient(
                torch.full((bucket.spec.elements,), amount), (True,) * len(bucket.spec.slices), fingerprint=1
            )
            for bucket in self.shard.buckets
        }

    def contribute(
        self,
        worker: int,
        amount: float = 1.0,
        *,
        again: bool = False,
        guard: Callable[[], Decision | None] = lambda: None,
    ) -> set[Outcome]:
        """A whole contribution of one worker; again: repeat the previous one. Returns the outcomes for its buckets."""
        shard = self.shard
        if self.mode.intake.number(1) is not None:
            task = f"worker/{worker}"
            seq = shard.mode.last_push(task, 1) + (not again)
            push = NumberedPush(task=task, incarnation=1, seq=seq, base_version=shard.version, clock=seq)
            decision, _ = shard.push(push, self.gradients(amount), guard=guard)
            return {decision.outcome}
        step, found = shard.mode.progress(worker), set()
        if self.stages:
            # Where it goes on in the middle of a timeline, each worker knows by itself.
            step = min(bucket.counted[worker] for bucket in shard.buckets)
        step -= again
        for number, gradient in self.gradients(amount).items():
            spec = shard.buckets[number].spec
            brings = worker == 0 or spec.kind is not TensorKind.BUFFER
            part = gradient if brings else Gradient(None, none_present(spec))
            found.add(shard.contribute(number, step, Block(worker, 1), part, guard=guard).outcome)
        while self.complete:
            voted = shard.mode.vote(self.complete.pop(0))
            assert voted is not None
            shard.mode.apply_verdict(voted[1], scale=1.0, skip=False)
        return found

    @property
    def stages(self) -> bool:
        """Whether each replica's contribution to a bucket is an update of its own."""
        return Gives.WHOLE_PUSHES not in self.mode.gives

    def update(self, amount: float = 1.0) -> None:
        """Contributions of both workers, alternating, until there is one more update."""
        version = self.shard.version
        for turn in range(ENOUGH):
            assert self.contribute(turn % 2, amount) <= {*COUNTED}
            if self.shard.version > version:
                return
        raise AssertionError(f"{ENOUGH} contributions made no update")

    def values(self) -> list[torch.Tensor]:
        return [bucket.values.clone() for bucket in self.shard.buckets]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("resident", list(CONSISTENCIES), ids=lambda resident: resident.name)
def test_a_choice_is_read_back_from_its_text(resident: type[consistency.Consistency]) -> None:
    choice = resident()
    assert CONSISTENCIES.parse(str(choice)) == choice
    assert (resident.__doc__ or "").strip(), "the first line of its docstring is its line in --help"
    assert set(settings_of(resident)) <= set(vars(choice))


@each
def test_what_a_mode_gives_to_others_fits_together(spec: ConsistencySpec) -> None:
    mode = consistency.of(spec)
    common = mode.clock is Clock.STEP
    assert mode.contributors(6) >= 1
    # What is kept until its commit is no part of a sum, and its worker is to see it in what it pulls.
    numbered = mode.intake.number(1) is not None
    assert not (numbered and (mode.intake.sums(0, 6) or common))
    # Common steps: a worker replaced in mid-step needs the previous one, and all shards go back together.
    assert common is (Gives.COMMON_STEPS in mode.gives)
    assert not common or (mode.assigns_replicas and mode.publishing is BOTH_STEPS)
    assert (Gives.ONE_STEP_CUTS in mode.gives) is (mode.cuts.last_step(5) == 5)
    # Batches that are leased are pushed by number: only then is one that comes twice recognized.
    assert mode.assigns_replicas is not numbered is bool(mode.batches.leased(make_job_spec()))
    worker = mode.worker_half(make_job_spec(consistency=spec))
    assert worker.shares_steps is not numbered
    assert (Gives.CLIPS_FIRST in mode.gives) is not worker.shares_steps


@each
def test_an_update_moves_every_bucket_by_one_step_and_one_version(spec: ConsistencySpec) -> None:
    job = Job(spec)
    for number in range(1, 4):
        before = job.values()
        job.update()
        assert {(bucket.step, bucket.version) for bucket in job.shard.buckets} == {(number, number)}
        assert not any(torch.equal(old, new) for old, new in zip(before, job.values(), strict=True) if number == 1)
        assert job.shard.partial_bytes == 0
    assert torch.isfinite(torch.cat(job.values())).all()


@each
def test_the_bits_of_an_update_do_not_depend_on_the_run(spec: ConsistencySpec) -> None:
    ends = []
    for _ in range(2):
        job = Job(spec)
        for amount in (1.0, 0.1, -3.0):
            job.update(amount)
        ends.append(job.values())
    assert same(*ends)


@each
def test_a_contribution_counts_once(spec: ConsistencySpec) -> None:
    once, twice = Job(spec), Job(spec)
    for job in (once, twice):
        assert job.contribute(0) <= {*COUNTED}
    assert twice.contribute(0, again=True) == {Outcome.DUPLICATE}
    for job in (once, twice):
        job.contribute(1)
        job.update()
    assert same(once.values(), twice.values())


@each
def test_what_a_guard_refuses_changes_nothing(spec: ConsistencySpec) -> None:
    job, untouched = Job(spec), Job(spec)
    fenced = Decision(Outcome.FENCED, "gone")
    assert job.contribute(0, 5.0, guard=lambda: fenced) == {Outcome.FENCED}
    for each_job in (job, untouched):
        each_job.update()
    assert same(job.values(), untouched.values())


@each
def test_a_pull_gets_what_is_there_waits_for_what_comes_and_is_told_what_is_gone(spec: ConsistencySpec) -> None:
    job = Job(spec)
    for _ in range(3):
        job.update()
    mode, bucket = job.shard.mode, job.shard.buckets[0]
    outcomes = {step: mode.serve(bucket, StepWanted(step=step, task="worker/0")) for step in range(5)}
    previous = Outcome.SERVED if job.mode.publishing is BOTH_STEPS else Outcome.OVERTAKEN
    assert outcomes == {
        0: Outcome.OVERTAKEN,
        1: Outcome.OVERTAKEN,
        2: previous,
        3: Outcome.SERVED,
        4: Outcome.WAITING,
    }
    assert mode.serve(bucket, StepWanted(step=1, at_least=True, task="worker/0")) is Outcome.SERVED
    # Of stages that is asked with the puller's own steps: see test_a_replica_that_is_too_far_ahead_waits.
    later = Outcome.SERVED if job.stages and job.mode.name == "async" else Outcome.WAITING
    assert mode.serve(bucket, StepWanted(step=4, at_least=True, task="worker/0")) is later
    assert mode.serve(bucket, StepWanted(step=None, task="worker/0")) is Outcome.SERVED


@each
def test_contributions_of_before_a_restore_leave_no_trace(spec: ConsistencySpec) -> None:
    job, other = Job(spec), Job(spec)
    for each_job in (job, other):
        each_job.update()
    assert job.shard.request_cut(1, stop=False) == (False, 1)
    cut = job.shard.cuts.whole(1)
    assert cut is not None
    job.contribute(0, 9.0)
    job.shard.restore(cut.in_order(), cut.sequences)
    assert job.shard.partial_bytes == 0
    assert same(job.values(), other.values())
    for each_job in (job, other):
        each_job.update()
    assert same(job.values(), other.values())


@each
def test_a_restored_shard_goes_on_with_the_same_bits(spec: ConsistencySpec) -> None:
    job = Job(spec)
    for _ in range(2):
        job.update()
    assert job.shard.request_cut(2, stop=False) == (False, 2)
    cut = job.shard.cuts.whole(2)
    assert cut is not None
    job.update()
    ends = job.values()
    fresh = Job(spec)
    fresh.update(7.0)
    for again in (fresh, job):
        again.shard.restore(cut.in_order(), cut.sequences)
        assert {(bucket.step, bucket.version) for bucket in again.shard.buckets} == {(2, 2)}
        again.update()
        assert same(again.values(), ends)


@each
def test_nothing_counts_after_a_stop(spec: ConsistencySpec) -> None:
    job = Job(spec)
    job.update()
    job.shard.request_cut(1, stop=True)
    before = job.values()
    # Where other buckets may still need what it has computed, nobody stops before being told.
    assert job.contribute(0) == {Outcome.LATE_DROPPED if job.stages else Outcome.STOPPED}
    assert same(before, job.values())


@each
def test_a_standby_takes_over_with_the_same_bits(spec: ConsistencySpec) -> None:
    job, alone = Job(spec), Job(spec)
    for each_job in (job, alone):
        each_job.update()
    standby, link = copy_to_standby(job)
    for _ in range(3):
        for turn in range(2):
            for each_job in (job, alone):
                each_job.contribute(turn, 0.5)
            link()
    assert same(job.values(), alone.values())
    assert standby.synced and standby.promote(0) == ""
    heir = Job(spec, standby.shard)
    assert same(heir.values(), job.values())
    assert heir.shard.mode.settle() == job.shard.mode.settle()
    mine, theirs = choices(job.shard.mode), choices(heir.shard.mode)
    if mine is not None and theirs is not None:
        assert theirs.made() == mine.made()
    for each_job in (heir, alone):
        each_job.update()
    assert same(heir.values(), alone.values())


@each
def test_what_is_published_waits_for_the_standby_or_its_answers_do(spec: ConsistencySpec) -> None:
    job = Job(spec)
    _, link = copy_to_standby(job)
    version = job.shard.version
    for turn in range(ENOUGH):
        job.contribute(turn % 2)
        log = job.shard.log
        assert log is not None
        if log.waits:
            break
    publishes_after = job.mode.publishing is BOTH_STEPS
    if publishes_after:
        assert job.shard.version == version
        link()
        assert job.shard.version == version + 1
    assert log.waits is not publishes_after
    link()
    assert not log.waits


def copy_to_standby(job: Job) -> tuple[Standby, Callable[[], None]]:
    """A standby with the shard's content, and a function that sends it everything recorded since."""
    heir, shard = Job(job.shard.settings.consistency), job.shard
    heir.shard.storage.observers = Observers()
    standby, log = Standby(heir.shard), RecordLog(on_entry=lambda: None, run=lambda release: release())

    def link() -> None:
        while (entry := log.take()) is not None:
            standby.take(entry.frame)  # type: ignore[arg-type]
            log.acknowledge(1, entry.number)

    shard.storage.log = log
    standby.take(Begin(1))
    log.restart(1)
    for bucket in shard.buckets:
        with shard.storage.order:
            shard.mode.settle()
            with bucket.lock:
                assert log.image(1, bucket.number, copied_image(bucket))
        link()
    with shard.storage.order:
        pushes, verdict = shard.mode.remembered()
        known = choices(shard.mode)
        log.mark(1, pushes=pushes, verdict=verdict, choices=known.made() if known is not None else None)
    link()
    return standby, link


@each
def test_members_may_change_at_any_time(spec: ConsistencySpec) -> None:
    job = Job(spec)
    for members in ([], ["worker/0"], ["worker/0", "worker/1", "worker/7"]):
        job.shard.mode.members_changed(members)
        job.update()
    assert job.shard.version == 3

"""A bucket's two published buffers, what it says is unchanged, and what one shard makes of contributions."""

from __future__ import annotations

import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shardline.codecs import coding_of
from shardline.consistency.server import NumberedPush, StepWanted
from shardline.core.contributions import Contributions, Partial
from shardline.core.gradients import Gradient
from shardline.core.image import VALUE, BucketImage
from shardline.core.outcome import Decision, Outcome
from shardline.core.plan import Plan, make_plan
from shardline.core.records import Applied
from shardline.core.reduce import Block
from shardline.core.spec import ConsistencySpec, RuleSpec, ScheduleSpec, TensorKind, TensorSpec
from shardline.errors import CheckpointError, NonFiniteError, ProtocolError
from shardline.server.pull_sender import Encoded, encode_bucket
from shardline.server.signals import Signal
from shardline.storage.bucket import Bucket
from shardline.storage.publication import PlainPublication, num_areas
from shardline.storage.shard import Observers
from shardline.update import bucket_rule, rule
from shardline_ps.shard.shard import Shard
from tests.support.builders import make_shard, roll_back

TENSORS = (
    TensorSpec(name="w", shape=(3,), dtype="float32"),
    TensorSpec(name="v", shape=(2,), dtype="float32"),
    TensorSpec(name="frozen", shape=(2,), dtype="float32", kind=TensorKind.FROZEN),
    TensorSpec(name="stats", shape=(2,), dtype="float32", kind=TensorKind.BUFFER),
)
SGD = rule("SGD", ({"lr": 1.0, "momentum": 0.5},))
PARAM, FROZEN, STATS = range(3)


def plan() -> Plan:
    return make_plan(TENSORS, 1)


def make_bucket(number: int = PARAM, *, double: bool = True, spec: RuleSpec = SGD) -> Bucket:
    made = plan()
    held = made.shards[0].buckets[number]
    memory = PlainPublication(made.shards[0], torch.device("cpu"))
    first = memory.tensor(0, number)
    second = memory.tensor(1, number) if num_areas(held, keeps_previous=double) == 2 else first
    make_rule = functools.partial(bucket_rule, spec, ScheduleSpec(), held, made.tensors)
    return Bucket(0, number, held, made.tensors, make_rule, contributions=Contributions(held, 1), pub=(first, second))


def flat(*numbers: float) -> torch.Tensor:
    """w in the first slice, v in the second."""
    values = torch.zeros(128)
    values[: min(3, len(numbers))] = torch.tensor(numbers[:3])
    values[64 : 64 + max(0, len(numbers) - 3)] = torch.tensor(numbers[3:])
    return values


def gradient(*numbers: float, present: tuple[bool, bool] = (True, True)) -> Partial:
    return Partial(flat(*numbers), present)


def shard_of_kinds(*, replicas: int = 1, observers: Observers | None = None, **terms: Any) -> Shard:
    """With a bucket of each kind of tensor."""
    return make_shard(TENSORS, rule=SGD, consistency=ConsistencySpec(**terms), replicas=replicas, observers=observers)


def whole(shard: Shard, step: int, *numbers: float, replica: int = 0, **more: Any) -> list[Decision]:
    """One replica's contribution to every bucket."""
    parts = {PARAM: Gradient(flat(*numbers), (True, True))}
    nothing = {FROZEN: Gradient(None, (False,)), STATS: Gradient(None, (False,))}
    return [
        shard.contribute(number, step, Block(replica, 1), part, **more)
        for number, part in sorted({**parts, **nothing}.items())
    ]


def test_the_plan_keeps_the_kinds_apart() -> None:
    kinds = [bucket.kind for bucket in plan().shards[0].buckets]
    assert kinds == [TensorKind.PARAM, TensorKind.FROZEN, TensorKind.BUFFER]


def test_the_step_before_stays_readable_while_the_next_is_published() -> None:
    bucket = make_bucket()
    bucket.initialize(flat(1.0, 2.0, 3.0))
    seen = [bucket.values_at(0).clone()]
    for step in range(4):
        bucket.apply(gradient(1.0, 1.0, 1.0))
        assert bucket.step == step + 1 == bucket.version
        assert torch.equal(bucket.values_at(step), seen[step])
        assert not torch.equal(bucket.values_at(step + 1), seen[step])
        seen.append(bucket.values_at(step + 1).clone())
    # Momentum 0.5: updates of 1, 1.5, 1.75, 1.875.
    assert bucket.values[:3].tolist() == [1.0 - 6.125, 2.0 - 6.125, 3.0 - 6.125]


def test_first_values_are_taken_once_and_padding_is_zeroed() -> None:
    bucket = make_bucket()
    assert bucket.initialize(torch.ones(128))
    assert not bucket.initialize(torch.zeros(128))
    for step in (0, 1):
        assert bucket.values_at(step)[:3].tolist() == [1.0] * 3
        assert float(bucket.values_at(step).sum()) == 5.0


def test_a_step_without_any_gradient_keeps_the_values_and_says_they_are_unchanged() -> None:
    bucket = make_bucket()
    bucket.initialize(flat(1.0))
    bucket.apply(gradient(1.0))
    assert (bucket.step, bucket.version, bucket.changed_step) == (1, 1, 1)
    bucket.apply(Partial(None, (False, False)))
    bucket.apply(gradient(5.0, present=(False, False)))
    assert (bucket.step, bucket.version, bucket.changed_step) == (3, 3, 1)
    assert torch.equal(bucket.values_at(2), bucket.values_at(3))
    bucket.apply(gradient(1.0))
    assert bucket.changed_step == 4
    # The older buffer had to be brought up to date before the rule ran in it.
    assert bucket.values[0] == 1.0 - 1.0 - 1.5


def test_a_skipped_step_advances_the_step_and_not_the_version() -> None:
    bucket = make_bucket()
    bucket.initialize(flat(1.0))
    bucket.apply(gradient(float("nan")), skip=True)
    assert (bucket.step, bucket.version, bucket.changed_step) == (1, 0, 0)
    assert bucket.values[0] == 1.0


def test_a_scale_below_one_clips() -> None:
    bucket = make_bucket()
    bucket.initialize(flat(1.0))
    bucket.apply(gradient(1.0), scale=0.25)
    assert bucket.values[0] == 0.75


def test_absent_slices_keep_value_and_momentum() -> None:
    bucket = make_bucket()
    bucket.initialize(flat(1.0, 1.0, 1.0, 1.0, 1.0))
    bucket.apply(gradient(1.0, 1.0, 1.0, 1.0, 1.0))
    bucket.apply(gradient(1.0, 1.0, 1.0, 9.0, 9.0, present=(True, False)))
    assert bucket.values[64:66].tolist() == [0.0, 0.0]
    bucket.apply(gradient(0.0, 0.0, 0.0, 1.0, 1.0))
    assert bucket.values[64:66].tolist() == [-1.5, -1.5]


def test_a_buffer_is_assigned_slice_by_slice() -> None:
    bucket = make_bucket(STATS)
    values = torch.zeros(64)
    values[:2] = torch.tensor([0.5, 7.0])
    bucket.apply(Partial(values, (True,)))
    assert bucket.values[:2].tolist() == [0.5, 7.0]
    bucket.apply(Partial(None, (False,)))
    assert bucket.values[:2].tolist() == [0.5, 7.0]


def test_frozen_and_asynchronous_buckets_hold_one_buffer_only() -> None:
    assert make_bucket(FROZEN).nbytes == 64 * 4
    assert make_bucket(PARAM).nbytes == 2 * 128 * 4
    single = make_bucket(PARAM, double=False)
    assert single.nbytes == 128 * 4
    single.initialize(flat(1.0))
    for _ in range(3):
        single.apply(gradient(1.0))
    assert single.values[0] == 1.0 - 1.0 - 1.5 - 1.75


def test_an_image_brings_back_values_state_and_numbers() -> None:
    bucket = make_bucket()
    bucket.initialize(flat(1.0, 2.0, 3.0, 4.0, 5.0))
    bucket.apply(gradient(1.0, 1.0, 1.0, 1.0, 1.0))
    bucket.apply(gradient(1.0), skip=True)
    image = bucket.image()
    assert (image.step, image.version) == (2, 1)
    other = make_bucket()
    other.restore(image, other.rule_of(image))
    assert (other.step, other.version, other.oldest, other.changed_step) == (2, 1, 2, 2)
    for one in (bucket, other):
        one.apply(gradient(1.0, 2.0, 3.0, 4.0, 5.0))
    assert torch.equal(bucket.values, other.values)
    assert image.tensors[VALUE].data_ptr() != bucket.values.data_ptr()


def test_an_image_that_does_not_fit_is_refused() -> None:
    bucket = make_bucket()
    good = bucket.image()
    for tensors, error, sentence in (
        ({VALUE: torch.zeros(64)}, ProtocolError, "image of 64 torch.float32 elements; the plan says 128 float32"),
        ({VALUE: torch.zeros(128, dtype=torch.float64)}, ProtocolError, "128 torch.float64 elements"),
        ({VALUE: torch.zeros(128), "exp_avg": torch.zeros(128)}, CheckpointError, "unknown state 'exp_avg'"),
    ):
        image = BucketImage(shard=0, bucket=0, step=1, version=1, tensors=tensors, scalars=good.scalars)
        with pytest.raises(error, match=sentence):
            bucket.rule_of(image)


# What a pull gets


def encoded(shard: Shard, number: int, step: int | None, have: int | None = None) -> Encoded | Outcome:
    return encode_bucket(shard, number, StepWanted(step=step, have=have), coding_of("raw", shard.settings.plan).pull)


def test_a_pull_of_an_exact_step_is_served_from_either_buffer() -> None:
    shard = shard_of_kinds()
    assert encoded(shard, PARAM, 1) is Outcome.WAITING
    for step in range(3):
        whole(shard, step, 1.0)
    assert encoded(shard, PARAM, 1) is Outcome.OVERTAKEN
    before, now = encoded(shard, PARAM, 2), encoded(shard, PARAM, 3)
    assert isinstance(before, Encoded) and isinstance(now, Encoded)
    assert (before.state.step, now.state.step) == (2, 3)
    assert torch.frombuffer(bytearray(before.payload), dtype=torch.float32)[0] == -2.5
    assert torch.frombuffer(bytearray(now.payload), dtype=torch.float32)[0] == -4.25


def test_the_step_before_first_values_or_a_restore_is_never_served() -> None:
    shard = shard_of_kinds()
    whole(shard, 0, 1.0)
    whole(shard, 1, 1.0)
    images = [bucket.image() for bucket in shard.buckets]
    other = shard_of_kinds()
    other.restore(images)
    assert encoded(shard, PARAM, 1) is not Outcome.OVERTAKEN
    for number in (PARAM, FROZEN, STATS):
        assert encoded(other, number, 1) is Outcome.OVERTAKEN
        assert isinstance(encoded(other, number, 2), Encoded)
    whole(other, 2, 1.0)
    assert isinstance(encoded(other, PARAM, 2), Encoded)


@pytest.mark.parametrize(
    ("step", "have", "unchanged"),
    [(3, 3, True), (3, 2, True), (3, 1, True), (3, 0, False), (2, 1, True), (2, 0, False), (3, None, False)],
)
def test_a_holder_of_equal_values_needs_no_bytes(step: int, have: int | None, unchanged: bool) -> None:
    shard = shard_of_kinds()
    whole(shard, 0, 1.0)
    for open_step in (1, 2):
        for number in range(3):
            shard.contribute(number, open_step, Block(0, 1), Gradient(None, (False,) * (2 if number == 0 else 1)))
    answer = encoded(shard, PARAM, step, have)
    assert isinstance(answer, Encoded)
    assert answer.state.unchanged is unchanged
    assert (len(answer.payload) == 0) is unchanged


def test_a_change_in_the_last_step_is_sent_to_holders_of_the_step_before() -> None:
    shard = shard_of_kinds()
    whole(shard, 0, 1.0)
    whole(shard, 1, 1.0)
    for step, have, unchanged in ((2, 1, False), (1, 0, False), (2, 2, True), (1, 1, False)):
        answer = encoded(shard, PARAM, step, have)
        assert isinstance(answer, Encoded) and answer.state.unchanged is unchanged, (step, have)
    frozen = encoded(shard, FROZEN, 2, 0)
    assert isinstance(frozen, Encoded) and frozen.state.unchanged


def test_an_asynchronous_shard_serves_exactly_the_present_step() -> None:
    shard = shard_of_kinds(mode="async")
    for seq in (1, 2):
        shard.push(
            NumberedPush(task="w", incarnation=1, seq=seq, base_version=0), {PARAM: Gradient(flat(1.0), (True, True))}
        )
    assert encoded(shard, PARAM, 1) is Outcome.OVERTAKEN
    assert encoded(shard, PARAM, 3) is Outcome.WAITING
    answer = encoded(shard, PARAM, 2)
    assert isinstance(answer, Encoded) and answer.state.step == 2


# What a shard makes of contributions


def test_a_guard_is_asked_under_the_lock_and_its_answer_stands() -> None:
    shard = shard_of_kinds()

    def guard() -> Decision | None:
        assert [bucket.lock.locked() for bucket in shard.buckets].count(True) == 1
        return Decision(Outcome.FENCED, "gone")

    assert {decision.outcome for decision in whole(shard, 0, 1.0, guard=guard)} == {Outcome.FENCED}
    assert shard.step_max == 0 and shard.mode.waiting_for() == [0]


def test_a_guarded_asynchronous_push_takes_no_number() -> None:
    shard = shard_of_kinds(mode="async")
    gone = Decision(Outcome.FENCED, "gone")
    parts = {PARAM: Gradient(flat(1.0), (True, True))}
    assert shard.push(NumberedPush(task="w", incarnation=1, seq=1, base_version=0), parts, guard=lambda: gone) == (
        gone,
        0,
    )
    decision, _ = shard.push(NumberedPush(task="w", incarnation=1, seq=1, base_version=0), parts)
    assert decision.outcome is Outcome.APPLIED


def test_a_vote_on_contributions_that_were_dropped_is_none() -> None:
    complete: list[int] = []
    shard = shard_of_kinds(nan_policy="skip", observers=Observers(on_complete=complete.append))
    whole(shard, 0, 1.0)
    assert complete == [0]
    roll_back(shard)
    assert shard.mode.vote(0) is None
    whole(shard, 0, 1.0)
    assert complete == [0, 0]
    voted = shard.mode.vote(0)
    assert voted is not None
    vote, staged = voted
    assert [value for _, value in vote.sums] == [1.0, 0.0]
    shard.mode.apply_verdict(staged, scale=1.0, skip=False)
    assert (shard.step_min, shard.version) == (1, 1)


def test_a_verdict_of_before_a_rollback_changes_nothing() -> None:
    shard = shard_of_kinds(clip_norm=1.0)
    whole(shard, 0, 1.0)
    voted = shard.mode.vote(0)
    assert voted is not None
    roll_back(shard)
    shard.mode.apply_verdict(voted[1], scale=1.0, skip=False)
    assert shard.step_max == 0


def test_a_verdict_of_before_a_restore_is_not_known_after_it() -> None:
    shard = shard_of_kinds(clip_norm=1.0)
    image = [bucket.image() for bucket in shard.buckets]
    whole(shard, 0, 1.0)
    voted = shard.mode.vote(0)
    assert voted is not None
    shard.restore(image)
    shard.mode.apply_verdict(voted[1], scale=1.0, skip=True)
    assert (shard.step_max, shard.mode.last_verdict, shard.tally.skipped_steps) == (0, None, 0)


def test_a_step_that_is_closed_late_leaves_the_verdict_of_the_next_one_known() -> None:
    """A new lead is told of the last one; with the one before it would wait for a vote that nobody gives again."""
    made: list[Shard] = []

    def next_step(bucket: int) -> None:
        shard = made[0] if made else None
        if shard is not None and shard.step_min == 1 and bucket == len(shard.buckets) - 1:
            whole(shard, 1, 1.0)
            assert shard.mode.vote(1) is not None
            shard.mode.last_verdict = Applied(step=1, scale=0.5, skip=False)

    shard = shard_of_kinds(clip_norm=1.0, observers=Observers(on_publish=next_step))
    made.append(shard)
    whole(shard, 0, 1.0)
    first = shard.mode.vote(0)
    assert first is not None
    shard.mode.apply_verdict(first[1], scale=1.0, skip=False)
    assert shard.mode.last_verdict == Applied(step=1, scale=0.5, skip=False)
    assert shard.mode.waiting_for() == []


def test_nan_flags_count_only_with_the_contribution_they_came_with() -> None:
    shard = shard_of_kinds(replicas=2, nan_policy="skip")
    whole(shard, 1, 1.0, nonfinite=["w"])
    whole(shard, 0, 1.0, replica=7, nonfinite=["w"])
    whole(shard, 0, 1.0, replica=0)
    whole(shard, 0, 1.0, replica=0, nonfinite=["w"])
    whole(shard, 0, 1.0, replica=1)
    voted = shard.mode.vote(0)
    assert voted is not None and voted[0].nonfinite == ()


def test_a_nan_that_only_arises_in_the_sum_is_voted_on() -> None:
    shard = shard_of_kinds(replicas=2, nan_policy="skip")
    whole(shard, 0, float("inf"), replica=0)
    whole(shard, 0, -float("inf"), replica=1)
    voted = shard.mode.vote(0)
    assert voted is not None and voted[0].nonfinite == ("w",)


def test_a_nan_under_the_policy_stop_leaves_the_bucket_as_it_was() -> None:
    shard = shard_of_kinds(replicas=2)
    with pytest.raises(NonFiniteError, match="gradient of 'w' from replicas 0 has NaN or infinity"):
        whole(shard, 0, float("nan"))
    assert shard.mode.waiting_for() == [0, 1]


def test_a_late_cut_request_restores_the_stop_step_of_before() -> None:
    shard = shard_of_kinds()
    assert shard.request_cut(5, stop=True) == (False, 0)
    for step in range(3):
        whole(shard, step, 1.0)
    assert shard.request_cut(2, stop=True) == (True, 3)
    assert shard.stop_step == 5
    assert shard.cuts.status() == []


# Several threads


def two_buckets() -> Shard:
    tensors = [TensorSpec(name=name, shape=(64,), dtype="float32", group=group) for group, name in enumerate("ab")]
    return make_shard(tensors, rule=rule("SGD", ({"lr": 1.0}, {"lr": 1.0})), replicas=2)


def test_different_buckets_are_summed_and_applied_at_the_same_time() -> None:
    shard = two_buckets()
    # Each apply waits until the other one is in its own: where a lock kept them apart the barrier would break.
    together = threading.Barrier(2, timeout=10.0)
    for bucket in shard.buckets:
        assert bucket.rule is not None
        apply = bucket.rule.apply

        def meet(*args: Any, apply: Any = apply, **more: Any) -> bool:
            together.wait()
            return bool(apply(*args, **more))

        bucket.rule.apply = meet  # type: ignore[method-assign]

    def push(number: int) -> None:
        for step in range(3):
            for replica in range(2):
                shard.contribute(number, step, Block(replica, 1), Gradient(torch.ones(64), (True,)))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(push, number) for number in range(2)]:
            done.result(timeout=30.0)
    assert [bucket.values.tolist() for bucket in shard.buckets] == [[-3.0] * 64] * 2
    assert shard.tally.pushes == 6


def test_the_other_buckets_of_a_push_stay_out_of_the_shards_lock() -> None:
    shard = two_buckets()
    with shard.storage.lock, ThreadPoolExecutor(1) as pool:
        decision = pool.submit(shard.contribute, 1, 0, Block(0, 1), Gradient(torch.ones(64), (True,)))
        assert decision.result(timeout=10.0).outcome is Outcome.COUNTED


# Signals


def test_a_signal_wakes_those_who_wait_and_says_when_the_time_is_up() -> None:
    async def run() -> None:
        signal = Signal(asyncio.get_running_loop())
        waiter = signal.arm()
        signal.notify()
        assert await signal.wait(waiter, 5.0)
        assert not await signal.wait(signal.arm(), 0.01)
        assert not signal.waiters

    asyncio.run(run())


def test_a_signal_after_its_loop_has_closed_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    signal = Signal(loop)
    loop.close()
    signal.notify()

"""Whoever waits for an exchange does so with an end, and an interruption that came too early is said again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
import torch

from shardline.client.exchange import shard_exchange
from shardline.client.exchange.shard_exchange import Exchange, Interrupted, Running, ShardOutcome, ShardTask
from shardline.client.exchange.streaming_payloads import ReadyPayloads
from shardline.client.layout import ModelLayout
from shardline.client.step import weights
from shardline.client.step.weights import Arrivals, BucketSink
from shardline.codecs import coding_of
from shardline.core.identity import Identity
from shardline.core.outcome import Outcome
from shardline.core.plan import make_plan
from shardline.core.spec import TensorSpec
from shardline.core.timeouts import Timeouts
from shardline.errors import UnreachableError
from shardline.lanes.base import Lane
from shardline.rpc.messages import data
from shardline.waist import Ack, Exchanged, Payload, Push, Sender, Sink, Standing, Want

PATIENCE_S = 20.0
LOOK_S = 0.01
SENDER = Sender(job="j", timeline=1, plan_id="p", who=Identity("worker/0", 1))
TENSORS = (TensorSpec(name="w", shape=(64,), dtype="float32"),)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_exchange, "LOOK_S", LOOK_S)
    monkeypatch.setattr(weights, "LOOK_S", LOOK_S)


def running(shards: Sequence[int], *, grace_looks: float = 3.0) -> Running:
    return Running(
        shards,
        interrupt=lambda: None,
        interrupted=lambda: False,
        grace_s=grace_looks * LOOK_S,
        on_end=lambda: None,
    )


def outcome() -> ShardOutcome:
    return ShardOutcome(acks=(), began_s=0.0, pushed_s=0.0, first_s=0.0, ended_s=0.0)


def ended(found: Running, shard: int) -> None:
    future: Future[ShardOutcome] = Future()
    future.set_result(outcome())
    found.part_ended(shard, future)


def test_a_part_that_does_not_end_is_not_waited_for_without_an_end() -> None:
    found = running([0, 2])
    ended(found, 0)
    with pytest.raises(UnreachableError, match=r"the exchange with shard 2 is still running .* restart it"):
        found.wait()
    assert not found.ended and not found.join()


def test_as_many_looks_as_a_part_promised_pass_before_it_is_late() -> None:
    found = running([0], grace_looks=2.5)
    found.look()
    found.promise(0, 10 * LOOK_S)
    for _ in range(12):
        found.look()
    with pytest.raises(UnreachableError):
        found.look()
    # Somebody who promises again has been late only.
    found.promise(0, 0.0)
    found.look()
    ended(found, 0)
    assert found.wait() == {0: outcome()}
    # What has ended is never late, and promises of it mean nothing.
    found.promise(0, 0.0)
    for _ in range(5):
        found.look()


def test_buckets_that_never_come_are_not_waited_for_without_an_end() -> None:
    found, buckets = running([0]), Arrivals([(0, 0)])
    buckets.begin(hold=False)
    with pytest.raises(UnreachableError, match="is still running"):
        buckets.load([(0, 0)], found.look)


class ForgetfulLane(Lane):
    """A lane that is cancelled just before its call begins, and forgets that as it begins."""

    name = "forgetful"

    def __init__(self) -> None:
        self.entered, self.go_on, self.cancelled = threading.Event(), threading.Event(), threading.Event()

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        self.entered.set()
        assert self.go_on.wait(PATIENCE_S)
        self.cancelled.clear()
        assert self.cancelled.wait(PATIENCE_S), "the call was not cancelled again"
        raise UnreachableError("given up")

    def standing(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        raise AssertionError

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        pass


def test_a_call_that_began_as_it_was_interrupted_ends_all_the_same() -> None:
    lane = ForgetfulLane()
    layout = ModelLayout(make_plan(TENSORS, 1), {"w": torch.zeros(64)})
    found = Exchange(
        {0: lane}, {0: BucketSink(layout, 0, coding_of("raw", layout.plan))}, Timeouts(total_s=PATIENCE_S), index=0
    )
    under_way = found.start(SENDER, {0: ShardTask(shard=0, contributions=[], want=Want(step=1))})
    assert lane.entered.wait(PATIENCE_S)
    found.interrupt()
    lane.go_on.set()
    with pytest.raises(Interrupted):
        under_way.wait()
    found.close()


def test_nothing_of_an_exchange_happens_after_its_end_which_the_next_one_may_follow_at_once() -> None:
    ends: list[bool] = []
    found = Running(
        [0], interrupt=lambda: None, interrupted=lambda: False, grace_s=1.0, on_end=lambda: ends.append(found.ended)
    )
    ended(found, 0)
    found.wait()
    assert ends == [False]


class EchoLane(ForgetfulLane):
    """A lane that is cancelled just before its call begins, forgets that, and sends what it is given at once."""

    def __init__(self, interrupt: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.interrupt = interrupt
        self.threads: list[int] = []
        self.sent: list[Payload] = []

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        self.threads.append(threading.get_ident())
        self.interrupt()
        self.cancelled.clear()
        self.sent += [item for push in contributions for batch in push.payloads.batches() for item in batch]
        return Exchanged(acks=tuple(Ack(outcome=Outcome.COUNTED) for _ in contributions), end=None)


def exchange_over(lane: EchoLane) -> Exchange:
    layout = ModelLayout(make_plan(TENSORS, 1), {"w": torch.zeros(64)})
    sinks = {0: BucketSink(layout, 0, coding_of("raw", layout.plan))}
    return Exchange({0: lane}, sinks, Timeouts(total_s=PATIENCE_S), index=0)


def one_push(exchange: Exchange) -> dict[int, ShardTask]:
    item = Payload(bucket=0, dtype="float32", elements=1, present=b"", data=b"1234", raw_bytes=4, digest=1)
    payloads = ReadyPayloads([item], empty=(), in_place=False, interrupted=exchange.refusal)
    return {0: ShardTask(shard=0, contributions=[Push(payloads=payloads)], want=None)}


@pytest.mark.parametrize("quick_bytes", [0, 1 << 20])
def test_a_small_exchange_runs_on_the_thread_that_waits_for_it(
    quick_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "QUICK_BYTES", quick_bytes)
    lane = EchoLane()
    found = exchange_over(lane)
    meanwhile: list[bool] = []
    under_way = found.start(SENDER, one_push(found), lambda: None, lambda: meanwhile.append(True), here=True)
    assert under_way.wait()[0].acks[0].outcome is Outcome.COUNTED
    assert (lane.threads == [threading.get_ident()]) is (quick_bytes > 0)
    assert len(lane.sent) == 1 and meanwhile == [True]
    found.close()


def test_an_interruption_that_a_small_exchange_missed_keeps_its_push_from_leaving() -> None:
    lane = EchoLane()
    found = exchange_over(lane)
    lane.interrupt = found.interrupt
    under_way = found.start(SENDER, one_push(found), here=True)
    with pytest.raises(Interrupted):
        under_way.wait()
    assert lane.sent == []
    found.close()


def test_a_small_exchange_that_is_ended_from_outside_has_ended() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    found = exchange_over(EchoLane(stop))
    with pytest.raises(KeyboardInterrupt):
        found.start(SENDER, one_push(found), here=True)
    # Nothing is left to wait for.
    found.give_up()
    found.close()

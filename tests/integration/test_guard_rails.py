"""What must not wedge, hang or be lost when something small goes wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import torch

from shardline.client.exchange.shard_exchange import Exchange, Interrupted, ShardTask
from shardline.client.layout import ModelLayout, same_bits
from shardline.client.step.weights import BucketSink
from shardline.codecs import coding_of
from shardline.consistency.server import NumberedPush
from shardline.core.gradients import Gradient
from shardline.core.identity import Identity
from shardline.core.orders import Phase
from shardline.core.outcome import Outcome
from shardline.core.plan import make_plan
from shardline.core.reduce import Block
from shardline.core.spec import ConsistencySpec, TensorSpec
from shardline.core.timeouts import Timeouts
from shardline.errors import NonFiniteError, ProtocolError
from shardline.lanes.base import Lane
from shardline.rpc import link as link_module
from shardline.rpc.joining import Applicant
from shardline.rpc.link import ChiefLink
from shardline.rpc.server import RpcServer
from shardline.rpc.v1 import chief_pb2, chief_pb2_grpc
from shardline.storage.shard import Observers
from shardline.waist import End, Exchanged, Push, Sender, Sink, Standing, Want
from shardline_ps.shard.shard import Shard
from tests.support.builders import make_shard, roll_back
from tests.support.cluster import Orders

TENSORS = (TensorSpec(name="w", shape=(64,), dtype="float16"),)


def half_precision_shard(failures: list[Exception], mode: str = "sync") -> Shard:
    return make_shard(
        TENSORS,
        consistency=ConsistencySpec(mode=mode),
        replicas=2 if mode == "sync" else 1,
        observers=Observers(on_failure=failures.append),
    )


def gradient(value: float) -> Gradient:
    return Gradient(torch.full((64,), value, dtype=torch.float16), (True,))


def test_a_hyper_parameter_the_rule_lacks_is_refused_before_anything_counts() -> None:
    shard = half_precision_shard([])
    shard.contribute(0, 0, Block(1, 1), gradient(1.0))
    with pytest.raises(ProtocolError, match="'speed' is not a setting of SGD"):
        shard.contribute(0, 0, Block(0, 1), gradient(1.0), hyper={0: {"speed": 2.0}})
    assert shard.mode.waiting_for() == [0]
    assert shard.contribute(0, 0, Block(0, 1), gradient(1.0), hyper={0: {"lr": 0.5}}).outcome is Outcome.COUNTED
    assert shard.buckets[0].values[0] == -0.5


def test_an_asynchronous_push_with_a_wrong_hyper_parameter_keeps_its_number() -> None:
    shard = half_precision_shard([], mode="async")
    first = NumberedPush(task="worker/0", incarnation=1, seq=1, base_version=0)
    with pytest.raises(ProtocolError, match="'speed'"):
        shard.push(first, {0: gradient(1.0)}, hyper={0: {"speed": 2.0}})
    decision, _ = shard.push(first, {0: gradient(1.0)})
    assert decision.outcome is Outcome.APPLIED
    assert shard.version == 1


def test_finite_gradients_with_an_infinite_sum_are_never_applied_under_stop() -> None:
    failures: list[Exception] = []
    shard = half_precision_shard(failures)
    shard.contribute(0, 0, Block(0, 1), gradient(4e4))
    with pytest.raises(NonFiniteError, match="the sum of the gradients of 'w' over 2 replicas"):
        shard.contribute(0, 0, Block(1, 1), gradient(4e4))
    assert [type(failure) for failure in failures] == [NonFiniteError]
    assert torch.equal(shard.buckets[0].values, torch.zeros(64, dtype=torch.float16))
    assert (shard.version, shard.step_min, shard.mode.waiting_for()) == (0, 0, [0, 1])


def test_a_learning_rate_of_a_dropped_step_is_not_used_for_the_next() -> None:
    shard = half_precision_shard([])
    shard.contribute(0, 0, Block(0, 1), gradient(1.0), hyper={0: {"lr": 9.0}})
    roll_back(shard)
    shard.contribute(0, 0, Block(0, 1), gradient(1.0))
    shard.contribute(0, 0, Block(1, 1), gradient(1.0))
    assert shard.buckets[0].values[0] == -1.0


def test_bits_are_compared_not_values() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert same_bits(torch.tensor(True), torch.tensor(True))
    assert not same_bits(torch.tensor(1), torch.tensor(2))


class WaitingLane(Lane):
    """A shard whose step never completes."""

    name = "waiting"

    def __init__(self) -> None:
        self.calls = 0

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        self.calls += 1
        return Exchanged(acks=(), end=End(outcome=Outcome.WAITING, waiting_for=(1,)))

    def progress(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        raise AssertionError

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_wait_for_replicas_that_were_moved_here_meanwhile_ends() -> None:
    lane = WaitingLane()
    layout = ModelLayout(make_plan(TENSORS, 1), {"w": torch.zeros(64, dtype=torch.float16)})
    orders = Orders()
    # The interruption itself was lost; the orders are looked at all the same.
    orders.still_ordered = lambda: lane.calls < 3
    sinks = {0: BucketSink(layout, 0, coding_of("raw", layout.plan))}
    exchange = Exchange({0: lane}, sinks, Timeouts(total_s=10.0), index=0, observer=orders)
    sender = Sender(job="j", timeline=1, plan_id="p", who=Identity("worker/0", 1))
    with pytest.raises(Interrupted):
        exchange.start(sender, {0: ShardTask(shard=0, contributions=[], want=Want(step=1))}).wait()
    assert lane.calls == 3
    exchange.close()


def test_joining_ends_when_the_process_is_asked_to_end() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        cancelled = threading.Event()
        link = ChiefLink(
            f"127.0.0.1:{taken.getsockname()[1]}",
            Timeouts(total_s=600.0),
            Applicant(role="ps", index=0),
            cancelled=cancelled,
        )
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(link.join()), daemon=True)
        thread.start()
        cancelled.set()
        link.cancel_join()
        thread.join(timeout=30.0)
        assert answers == [False]
        link.fail("too late to matter", 1)
        link.close()


class QuietChief(chief_pb2_grpc.ChiefServicer):
    """Says its orders once per stream and then nothing, as a chief does whose orders don't change."""

    def __init__(self) -> None:
        self.streams = 0

    async def Join(self, request: Any, context: Any) -> chief_pb2.JoinReply:
        return chief_pb2.JoinReply(accepted=True, task="worker/0", incarnation=1, term=1)

    async def Heartbeat(self, request: Any, context: Any) -> AsyncIterator[chief_pb2.Orders]:
        self.streams += 1
        yield chief_pb2.Orders(version=1, phase=chief_pb2.PHASE_RUNNING)
        async for _ in request:
            pass


@pytest.fixture
def quiet_chief() -> Iterator[tuple[QuietChief, str]]:
    chief = QuietChief()
    server = RpcServer(
        "127.0.0.1:0", register=[lambda server: chief_pb2_grpc.add_ChiefServicer_to_server(chief, server)]
    )
    yield chief, server.start()
    server.close(grace_s=0.1)


def test_a_heartbeat_stream_that_reaches_its_deadline_is_followed_by_another(
    quiet_chief: tuple[QuietChief, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chief, address = quiet_chief
    # Longer than T: silence of that length must not be mistaken for the chief's death.
    monkeypatch.setattr(link_module, "STREAM_S", 2.5)
    link = ChiefLink(address, Timeouts(total_s=2.0), Applicant(role="worker", index=0))
    assert link.join()
    # Returns early only by raising what ends a task.
    assert not link.wait(lambda orders: orders.phase is Phase.ENDED, timeout_s=6.0)
    assert chief.streams >= 2
    assert link.lost is None
    link.close()

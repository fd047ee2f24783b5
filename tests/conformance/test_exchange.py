"""What holds for every ShardService of shardline/waist.py: a shard here, or a connection to one over any lane."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shardline.cluster import ClusterSpec
from shardline.core.identity import Identity
from shardline.core.orders import JobView
from shardline.core.outcome import Outcome
from shardline.core.placement import Placement, Post
from shardline.core.reduce import Block
from shardline.core.spec import JobSpec, RuleSpec
from shardline.errors import ProtocolError, ShardlineError
from shardline.lanes import LANES
from shardline.rpc.channel import Peer
from shardline.rpc.messages.convert import plan_from_proto
from shardline.waist import Exchanged, Payload, Push, Sender, ShardService, Sink, Standing, Want, Whole
from shardline_aggregator.aggregator import Aggregator
from tests.support.lanes import DEADLINE_S, SENDER, KindBench, Mapping, config, payload, usable
from tests.support.local_shard import LocalShard
from tests.support.plain_client import ELEMENTS, FIRST_W, FROZEN, RATE, STATS, TIMELINE, W, floats, plan
from tests.support.waiting import wait_for

MEMBERS = {"worker/0": 1, "worker/1": 1, "aggregator/0": 1}


@dataclass
class Subject:
    """A shard of two replicas, at step 0."""

    connect: Callable[[], Any]
    """Another connection to it."""
    stepped: Callable[[Sequence[float], float], list[float]]
    """Its weights after a step: from those before it and the sum of all elements' gradients."""
    first: Sequence[float]
    close: Callable[[], None]
    made: list[Any] = field(default_factory=list)

    @property
    def service(self) -> ShardService:
        if not self.made:
            self.another()
        return self.made[0]  # type: ignore[no-any-return]

    def another(self) -> ShardService:
        self.made.append(self.connect())
        return self.made[-1]  # type: ignore[no-any-return]

    def end(self) -> None:
        for one in self.made:
            if hasattr(one, "close"):
                one.close()
        self.close()


def trained(weights: Sequence[float], total: float) -> list[float]:
    return [value - RATE * total / 2 for value in weights]


def shard_of_a_ps(request: pytest.FixtureRequest) -> Subject:
    ps, client = request.getfixturevalue("ps"), request.getfixturevalue("client")
    client.start(replicas=2)
    return Subject(lambda: LocalShard(ps.store, 0), trained, FIRST_W, lambda: None)


def ps_over(name: str) -> Callable[[pytest.FixtureRequest], Subject]:
    def make(request: pytest.FixtureRequest) -> Subject:
        ps, client = request.getfixturevalue("ps"), request.getfixturevalue("client")
        bench = KindBench(name, ps)
        client.start(replicas=2)
        return Subject(bench.another, trained, FIRST_W, bench.close)

    return make


def behind(request: pytest.FixtureRequest, name: str) -> Aggregator:
    """An aggregator above which is a ps."""
    ps, client = request.getfixturevalue("ps"), request.getfixturevalue("client")
    client.start(replicas=2)
    held, cluster = plan_from_proto(plan()), ClusterSpec({"chief": ("127.0.0.1:1",), "ps": (ps.address,)})
    cluster = cluster.with_address("aggregator/0", "127.0.0.1:0")
    settings = dataclasses.replace(config(LANES.parse(name)), role="aggregator", cluster=cluster)
    rule = RuleSpec(name="SGD", groups=({"lr": RATE},))
    job = JobSpec(name="plain", tensors=held.tensors, rule=rule, replicas=2)
    place = Placement(shard=0, task=ps.task, address=ps.address)
    made = Aggregator(settings, "127.0.0.1:0")
    made.start()
    view = JobView(job=job, plan=held, placement=(place,), timeline=TIMELINE)
    members = [Post(task=task, address="", incarnation=life) for task, life in MEMBERS.items()]
    made.renew(view, Identity("aggregator/1", 1), members)
    # As members do: who has not pulled a step has nothing to push.
    pulled(LocalShard(made, 0), 0)
    return made


def aggregator(request: pytest.FixtureRequest) -> Subject:
    made = behind(request, "grpc")
    return Subject(lambda: LocalShard(made, 0), trained, FIRST_W, made.close)


def aggregator_over(name: str) -> Callable[[pytest.FixtureRequest], Subject]:
    def make(request: pytest.FixtureRequest) -> Subject:
        kind, made = LANES.parse(name), behind(request, name)
        peer = Peer("aggregator/0", made.server.address, config(kind).timeouts)

        def close() -> None:
            peer.close()
            made.close()

        spec = plan_from_proto(plan()).shards[0]
        return Subject(lambda: kind.connect(config(kind), peer, 0, spec), trained, FIRST_W, close)

    return make


SERVICES = {
    "ps": shard_of_a_ps,
    "aggregator": aggregator,
    **{f"ps over {name}": ps_over(name) for name in usable(LANES.names)},
    # It sums in memory of the host.
    **{f"aggregator over {name}": aggregator_over(name) for name in usable(LANES.names) if name != "cuda"},
}


@pytest.fixture(params=SERVICES)
def shard(request: pytest.FixtureRequest) -> Iterator[Subject]:
    made = SERVICES[request.param](request)
    yield made
    made.end()


def sender(index: int = 0, **changes: Any) -> Sender:
    return dataclasses.replace(SENDER, who=Identity(f"worker/{index}", 1), **changes)


def push(value: float, block: Block, step: int = 0, **changes: Any) -> Push:
    items = changes.pop("items", None) or [payload(floats([value] * 12))]
    return Push(payloads=Whole(items, (FROZEN, STATS)), step=step, block=block, **changes)


def exchange(
    service: ShardService,
    pushes: Sequence[Push] = (),
    want: Want | None = None,
    sink: Sink | None = None,
    *,
    who: Sender = SENDER,
) -> Exchanged:
    return service.exchange(who, pushes, want, sink or Mapping(), timeout_s=DEADLINE_S)


def pulled(service: ShardService, step: int) -> list[float]:
    sink = Mapping()
    done = exchange(service, want=Want(step=step, wait_s=5.0), sink=sink)
    assert done.end is not None and done.end.outcome is Outcome.SERVED
    return list(sink.weights())


def outcomes(done: Exchanged) -> list[Outcome]:
    return [ack.outcome for ack in done.acks]


ALL, LEFT, RIGHT = Block(0, 2), Block(0, 1), Block(1, 1)


def test_a_step_has_the_gradients_of_all_replicas_and_is_served_to_all(shard: Subject) -> None:
    left, right, weights = shard.service, shard.another(), list(shard.first)
    for step, (one, other) in enumerate([(1.0, 3.0), (0.5, -2.0), (10.0, 20.0)]):
        assert outcomes(exchange(left, [push(one, LEFT, step)])) == [Outcome.COUNTED]
        sink = Mapping()
        done = exchange(right, [push(other, RIGHT, step)], Want(step=step + 1, wait_s=5.0), sink, who=sender(1))
        assert outcomes(done) == [Outcome.COUNTED]
        assert done.end is not None and (done.end.outcome, done.end.step) == (Outcome.SERVED, step + 1)
        weights = shard.stepped(weights, one + other)
        assert list(sink.weights()) == weights == pulled(left, step + 1)
        assert sorted(arrival.bucket for arrival in sink.heads) == [W, FROZEN, STATS]


def test_pushes_of_one_exchange_are_counted_one_after_another(shard: Subject) -> None:
    sink = Mapping()
    done = exchange(shard.service, [push(1.0, LEFT), push(3.0, RIGHT)], Want(step=1, wait_s=5.0), sink)
    assert outcomes(done) == [Outcome.COUNTED] * 2
    assert list(sink.weights()) == shard.stepped(shard.first, 4.0)


def test_a_sum_of_several_replicas_is_a_push_like_any_other(shard: Subject) -> None:
    above = dataclasses.replace(SENDER, who=Identity("aggregator/0", 1))
    assert outcomes(exchange(shard.service, [push(4.0, ALL)], who=above)) == [Outcome.COUNTED]
    assert pulled(shard.service, 1) == shard.stepped(shard.first, 4.0)
    assert outcomes(exchange(shard.service, [push(1.0, LEFT)])) == [Outcome.DUPLICATE]


def test_a_push_made_again_counts_once(shard: Subject) -> None:
    assert outcomes(exchange(shard.service, [push(1.0, LEFT)])) == [Outcome.COUNTED]
    assert outcomes(exchange(shard.service, [push(1.0, LEFT)])) == [Outcome.DUPLICATE]
    exchange(shard.service, [push(3.0, RIGHT)])
    assert pulled(shard.service, 1) == shard.stepped(shard.first, 4.0)


def test_a_push_that_does_not_count_ends_the_exchange(shard: Subject) -> None:
    done = exchange(shard.service, [push(1.0, LEFT, 7), push(1.0, RIGHT, 7)], Want(step=1, wait_s=5.0))
    assert outcomes(done) == [Outcome.REFUSED] and done.end is None
    assert "step 7 is ahead" in done.acks[0].reason
    assert shard.service.standing(SENDER, [0, 1], timeout_s=DEADLINE_S).replicas == {0: 0, 1: 0}


def test_a_pull_waits_and_says_whom_it_waits_for(shard: Subject) -> None:
    exchange(shard.service, [push(1.0, RIGHT)])
    end = exchange(shard.service, want=Want(step=1, wait_s=0.2)).end
    assert end is not None and (end.outcome, end.waiting_for) == (Outcome.WAITING, (0,))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pulled, shard.service, 1)
        exchange(shard.another(), [push(2.0, LEFT)], who=sender(1))
        assert waiting.result(DEADLINE_S) == shard.stepped(shard.first, 3.0)


def test_buckets_come_in_the_order_asked_for_and_no_others(shard: Subject) -> None:
    sink = Mapping()
    exchange(shard.service, want=Want(step=0, buckets=(STATS, W), wait_s=5.0), sink=sink)
    assert [arrival.bucket for arrival in sink.heads] == [STATS, W]


def test_what_did_not_change_comes_without_bytes(shard: Subject) -> None:
    sink = Mapping()
    exchange(shard.service, [push(1.0, ALL)], Want(step=1, wait_s=5.0))
    exchange(shard.service, want=Want(step=1, have_step=1, wait_s=5.0), sink=sink)
    assert [arrival.unchanged for arrival in sink.heads] == [True] * 3 and not sink.memory


def test_all_buckets_may_bring_bytes(shard: Subject) -> None:
    items = [payload(floats([1.0] * 12)), payload(floats([5.0, 6.0]), STATS)]
    sink, both = Mapping(), Push(payloads=Whole(items, (FROZEN,)), block=ALL)
    done = exchange(shard.service, [both], Want(step=1, wait_s=5.0), sink)
    assert outcomes(done) == [Outcome.COUNTED]
    assert list(sink.weights()) == shard.stepped(shard.first, 1.0)
    assert sink.memory[STATS][:8] == floats([5.0, 6.0])[:8] and len(sink.memory[STATS]) == 4 * ELEMENTS


def test_the_standing_of_replicas_is_the_step_that_they_have_to_work_on(shard: Subject) -> None:
    exchange(shard.service, [push(1.0, RIGHT)])

    def asked() -> Standing:
        return shard.service.standing(SENDER, [0, 1], timeout_s=DEADLINE_S)

    # Behind an aggregator it is what the servers say, which get the sum a little later.
    wait_for(lambda: asked().replicas[1] == 1, "the push to be counted")
    found = asked()
    assert (found.outcome, dict(found.replicas)) == (Outcome.SERVED, {0: 0, 1: 1})
    assert (found.timeline, found.step_max, found.last_seq) == (TIMELINE, 0, 0)


def test_a_sender_that_is_not_admitted_gets_the_reason_whatever_it_asks(shard: Subject) -> None:
    stale = sender(timeline=7)
    done = exchange(shard.service, [push(1.0, LEFT)], Want(step=1), who=stale)
    (ack,) = done.acks
    assert not ack.accepted and done.end is None
    end = exchange(shard.another(), want=Want(step=0), who=stale).end
    assert end is not None and end.outcome is ack.outcome is not Outcome.SERVED
    assert shard.another().standing(stale, [0], timeout_s=DEADLINE_S).outcome is ack.outcome


def test_what_is_refused_changes_nothing(shard: Subject) -> None:
    bad = {
        "elements": dataclasses.replace(payload(floats([1.0] * 12)), elements=ELEMENTS + 1),
        "bytes": payload(floats([1.0] * 12) + bytes(4)),
    }
    for item in bad.values():
        with pytest.raises(ShardlineError, match=r"plan says|bytes announced|don.t fit"):
            exchange(shard.another(), [push(1.0, ALL, items=[item])], Want(step=1, wait_s=5.0))
    with pytest.raises(ProtocolError, match="single rows of a table"):
        exchange(shard.another(), want=Want(step=0, rows={W: torch.tensor([1])}))
    with pytest.raises(ProtocolError, match="lacks buckets"):
        exchange(shard.another(), [Push(payloads=Whole((), (STATS,)), block=ALL)])
    assert pulled(shard.another(), 0) == list(shard.first)
    assert outcomes(exchange(shard.another(), [push(1.0, ALL)])) == [Outcome.COUNTED]


class Reached:
    """An event of a device: what it guards is written when it is waited for."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def synchronize(self) -> None:
        self.then()


def test_a_payload_on_a_device_is_read_after_its_event(shard: Subject) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = torch.full((ELEMENTS,), torch.nan, device=device)
    item = Payload(
        bucket=W,
        dtype="float32",
        elements=ELEMENTS,
        present=b"",
        data=values,
        raw_bytes=values.nbytes,
        digest=0,
        ready=Reached(lambda: values.copy_(torch.tensor([1.0] * 12 + [0.0] * (ELEMENTS - 12)))),
    )
    assert outcomes(exchange(shard.service, [push(0.0, ALL, items=[item])])) == [Outcome.COUNTED]
    assert pulled(shard.service, 1) == shard.stepped(shard.first, 1.0)


def test_many_use_a_shard_at_once(shard: Subject) -> None:
    weights, gate = list(shard.first), threading.Barrier(2, timeout=DEADLINE_S)

    def work(index: int, service: ShardService) -> list[float]:
        sink = Mapping()
        for step in range(10):
            gate.wait()
            want = Want(step=step + 1, have_step=step, wait_s=5.0)
            done = exchange(service, [push(1.0 + index, Block(index, 1), step)], want, sink, who=sender(index))
            assert done.end is not None and done.end.outcome is Outcome.SERVED
        return list(sink.weights())

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(work, index, shard.another()) for index in range(2)]
        found = [run.result(DEADLINE_S) for run in runs]
    for _ in range(10):
        weights = shard.stepped(weights, 3.0)
    assert found == [weights] * 2


# The aggregator alone


def test_a_stranger_is_fenced_and_first_values_are_refused(request: pytest.FixtureRequest) -> None:
    made = aggregator(request)
    stranger = dataclasses.replace(SENDER, who=Identity("worker/0", 7))
    assert outcomes(exchange(made.service, [push(1.0, LEFT)], who=stranger)) == [Outcome.FENCED]
    first = Push(payloads=Whole([payload(floats([1.0] * 12), bucket) for bucket in range(3)]), init=True)
    with pytest.raises(ProtocolError, match="an aggregator takes no first values"):
        exchange(made.service, [first])
    made.end()

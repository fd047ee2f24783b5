"""What a pull without the lock may say of a bucket that is being written: never that torn or new bytes are the old."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from shardline.codecs import coding_of
from shardline.consistency.server import StepWanted
from shardline.core.contributions import none_present
from shardline.core.gradients import Gradient
from shardline.core.outcome import Outcome
from shardline.core.plan import make_plan
from shardline.core.reduce import Block
from shardline.core.spec import ConsistencySpec, ScheduleSpec, TensorKind, TensorSpec
from shardline.core.tensor_bytes import Buffer
from shardline.errors import ProtocolError
from shardline.lanes.attachments import Attachments
from shardline.rpc.messages.data import PullReader
from shardline.rpc.v1 import common_pb2, data_pb2, parameter_server_pb2
from shardline.server.pull_sender import Encoded, in_pull, pull, refer_bucket
from shardline.storage.bucket import Bucket
from shardline.update import rule
from shardline.waist import CHUNK_BYTES, Arrival
from shardline_ps.shard.shard import Shard
from shardline_ps.store import ParameterStore, PsConfiguration
from tests.support.builders import make_shard
from tests.support.pushes import configure

ELEMENTS = 1024


def shard_of_ones() -> Shard:
    """One bucket, one replica."""
    tensors = (TensorSpec(name="w", shape=(ELEMENTS,), dtype="float32"),)
    return make_shard(tensors, value=1.0, rule=rule("SGD", ({"lr": 0.5},)))


def step(shard: Shard, number: int) -> None:
    shard.contribute(0, number, Block(0, 1), Gradient(torch.ones(ELEMENTS), (True,)))


def referred(shard: Shard, wanted: int, have: int | None = None) -> Encoded:
    found = refer_bucket(shard, StepWanted(step=wanted, have=have), coding_of("raw", shard.settings.plan).pull, None, 0)
    assert isinstance(found, Encoded)
    return found


class Halfway:
    """A rule that stops in the middle of its target."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def apply(self, target: torch.Tensor, *args: Any, **more: Any) -> Any:
        half = target.numel() // 2
        before = target[half:].clone()
        result = self._rule.apply(target, *args, **more)
        after = target[half:].clone()
        target[half:] = before
        self.reached.set()
        assert self.go_on.wait(20.0)
        target[half:] = after
        return result


def test_bytes_of_a_step_that_is_being_written_over_are_not_called_intact() -> None:
    shard = shard_of_ones()
    bucket = shard.buckets[0]
    step(shard, 0)
    early = referred(shard, 0)
    assert early.intact()
    bucket.rule = halfway = Halfway(bucket.rule)  # type: ignore[assignment]
    writer = threading.Thread(target=step, args=(shard, 1), daemon=True)
    writer.start()
    assert halfway.reached.wait(20.0)
    # theta_2 takes the place of theta_0: half of it is there, and the step still says 1.
    assert bucket.step == 1 and bucket.overwritten == 0
    assert not early.intact()
    coding = coding_of("raw", shard.settings.plan).pull
    assert refer_bucket(shard, StepWanted(step=0), coding, None, 0) is Outcome.OVERTAKEN
    held = referred(shard, 1)
    halfway.go_on.set()
    writer.join(20.0)
    assert held.intact() and bytes(held.payload) == torch.full((ELEMENTS,), 0.5).numpy().tobytes()
    step(shard, 2)
    assert not held.intact()


def test_bytes_that_a_restore_has_replaced_are_not_called_intact() -> None:
    shard = shard_of_ones()
    image = shard.buckets[0].image()
    for number in range(5):
        step(shard, number)
    held = referred(shard, 5)
    shard.restore([image])
    assert shard.buckets[0].step == 0 and not held.intact()
    assert referred(shard, 0).intact()


def test_a_bucket_is_never_called_unchanged_between_two_of_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of_ones()
    said: list[bool | Outcome] = []

    def look(bucket: Bucket, name: str, value: object) -> None:
        # What a pull on the loop's thread would be told at every moment of the step.
        object.__setattr__(bucket, name, value)
        found = refer_bucket(shard, StepWanted(step=1, have=0), coding_of("raw", shard.settings.plan).pull, None, 0)
        said.append(found.state.unchanged if isinstance(found, Encoded) else found)

    monkeypatch.setattr(Bucket, "__setattr__", look)
    step(shard, 0)
    assert Outcome.WAITING in said and False in said and True not in said


# A torn bucket on its way


class Sink:
    """Keeps what is whole."""

    def __init__(self) -> None:
        self.complete: list[int] = []

    def buffer(self, arrival: Arrival) -> memoryview:
        return memoryview(bytearray(arrival.payload_bytes))

    def done(self, arrival: Arrival) -> None:
        self.complete.append(arrival.bucket)

    def whole(self, arrival: Arrival, payload: Buffer) -> None:
        self.done(arrival)

    def take(self, arrival: Arrival, memory: memoryview) -> None:
        raise AssertionError("nothing is mapped here")


def begun(elements: int) -> data_pb2.PullFrame:
    size = 4 * elements
    state = data_pb2.BucketState(bucket=0, step=3, elements=elements, payload_bytes=size, codec="raw")
    return data_pb2.PullFrame(bucket=state, chunk=data_pb2.Chunk(payload=bytes(size // 2)))


def test_an_answer_that_ends_within_a_bucket_says_why_and_is_asked_for_again() -> None:
    sink = Sink()
    reader = PullReader(sink, [ELEMENTS])
    reader.feed(begun(ELEMENTS))
    end = data_pb2.PullEnd(outcome=common_pb2.OUTCOME_OVERTAKEN, reason="step 3 of bucket 0 is no longer available")
    reader.feed(data_pb2.PullFrame(end=end))
    assert (
        reader.end is not None
        and reader.end.outcome is Outcome.OVERTAKEN
        and "is no longer available" in reader.end.reason
    )
    assert sink.complete == []


def test_an_answer_that_is_said_to_be_whole_may_not_end_within_a_bucket() -> None:
    reader = PullReader(Sink(), [ELEMENTS])
    reader.feed(begun(ELEMENTS))
    with pytest.raises(ProtocolError, match="ended within bucket 0"):
        reader.feed(data_pb2.PullFrame(end=data_pb2.PullEnd(outcome=common_pb2.OUTCOME_SERVED)))


def test_a_bucket_that_is_written_over_between_its_chunks_ends_the_pull_as_overtaken() -> None:
    elements = CHUNK_BYTES // 4 + 16384

    async def main() -> None:
        store = ParameterStore(device=torch.device("cpu"), pool_threads=1)
        plan = make_plan([TensorSpec(name="w", shape=(elements,), dtype="float32")], 1, bucket_bytes=2 * CHUNK_BYTES)
        configuration = PsConfiguration(
            job="j",
            timeline=1,
            plan=plan,
            shards=(0,),
            rule=rule("SGD", ({"lr": 0.5},)),
            schedule=ScheduleSpec(),
            consistency=ConsistencySpec(),
            replicas=1,
            cut_every=0,
            codec="raw",
        )
        configure(store, configuration, asyncio.get_running_loop())
        store.authority.active = True
        shard = store.shards[0]
        (bucket,) = shard.buckets
        shard.initialize(0, torch.ones(bucket.spec.elements))
        data = common_pb2.DataHeader(job="j", timeline=1, plan_id=plan.plan_id, task="worker/0", incarnation=1)
        request = data_pb2.PullRequest(data=data, exact_step=0)
        sink = Sink()
        reader = PullReader(sink, [bucket.spec.elements])
        gradient = Gradient(torch.ones(bucket.spec.elements), (True,) * len(bucket.spec.slices))
        chunks = 0
        async for reply in pull(store, Attachments(), request, new=in_pull):
            assert isinstance(reply, parameter_server_pb2.PullReply)
            chunks += reply.frame.HasField("chunk")
            reader.feed(reply.frame)
            for number in range(2 if chunks == 1 and reader.end is None else 0):
                shard.contribute(0, number, Block(0, 1), gradient)
        assert chunks == 1 and sink.complete == []
        assert reader.end is not None and reader.end.outcome is Outcome.OVERTAKEN
        assert "step 0 of bucket 0 is no longer available" in reader.end.reason
        store.close()

    asyncio.run(asyncio.wait_for(main(), 30.0))


def test_a_frozen_bucket_stays_intact_while_others_are_trained() -> None:
    tensors = (
        TensorSpec(name="w", shape=(4,), dtype="float32"),
        TensorSpec(name="f", shape=(4,), dtype="float32", kind=TensorKind.FROZEN),
    )
    shard = make_shard(tensors, value=1.0, rule=rule("SGD", ({"lr": 0.5},)))
    frozen = next(bucket for bucket in shard.buckets if bucket.spec.kind is TensorKind.FROZEN)
    held = frozen.writes.intact(0)
    for bucket in shard.buckets:
        present = () if bucket is frozen else (True,)
        values = None if bucket is frozen else torch.ones(bucket.spec.elements)
        shard.contribute(bucket.number, 0, Block(0, 1), Gradient(values, present or none_present(bucket.spec)))
    assert frozen.step == 1 and held()

"""What a worker says of its gradient's bytes, and what the shard makes of it without reading them once more."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import pytest
import torch

from shardline.client.step import staging as staging_module
from shardline.client.step.staging import Allocate, GradientStaging, PushTools, filled_payloads, no_memory
from shardline.codecs import coding_of
from shardline.codecs.coding import PushEncoders
from shardline.consistency.server import NumberedPush
from shardline.core import gradients
from shardline.core.gradients import Gradient
from shardline.core.identity import Identity
from shardline.core.outcome import Outcome
from shardline.core.plan import Plan, make_plan
from shardline.core.reduce import Block
from shardline.core.spec import ConsistencySpec, TensorSpec
from shardline.core.tensor_bytes import digest, fingerprint, tensor_bytes
from shardline.errors import JobError, NonFiniteError
from shardline.rpc.messages import data
from shardline.rpc.messages.data import Attached
from shardline.rpc.v1 import data_pb2
from shardline.server.buffers import Buffers
from shardline.server.conversation import is_soon_whole
from shardline.server.incoming_push import QUICK_BYTES, Slot, opened
from shardline.waist import Payload, Push, Sender, Want, Whole
from shardline_ps.shard.shard import Shard
from tests.support.builders import make_shard

ELEMENTS = 64
LARGEST = torch.finfo(torch.float32).max


def flat_shard(*, replicas: int = 1, mode: str = "sync", nan_policy: str = "stop") -> Shard:
    tensors = (TensorSpec(name="w", shape=(ELEMENTS,), dtype="float32"),)
    return make_shard(tensors, replicas=replicas, consistency=ConsistencySpec(mode=mode, nan_policy=nan_policy))


def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each gradient that a shard looks through, from now on."""
    seen: list[int] = []
    true = gradients.magnitude

    def magnitude(values: torch.Tensor) -> float:
        seen.append(values.numel())
        return true(values)

    monkeypatch.setattr(gradients, "magnitude", magnitude)
    return seen


@pytest.mark.parametrize(
    ("bound", "looked"), [(2.0, False), (math.inf, True), (math.nan, True), (LARGEST, True), (LARGEST / 4, False)]
)
def test_a_gradient_is_looked_through_where_its_sender_has_not_said_how_large_it_is(
    bound: float, looked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = looks(monkeypatch)
    shard = flat_shard()
    decision = shard.contribute(0, 0, Block(0, 1), Gradient(torch.ones(ELEMENTS), (True,), bound=bound))
    assert decision.outcome is Outcome.COUNTED
    assert bool(seen) is looked
    assert shard.buckets[0].values.tolist() == [-1.0] * ELEMENTS


def test_a_sum_that_may_leave_the_dtype_is_looked_through_though_its_parts_are_believed() -> None:
    shard = flat_shard(replicas=2)
    believed = Gradient(torch.full((ELEMENTS,), LARGEST * 0.45), (True,), bound=LARGEST * 0.45)
    shard.contribute(0, 0, Block(0, 1), believed)
    other = Gradient(torch.full((ELEMENTS,), LARGEST * 0.9), (True,))
    with pytest.raises(NonFiniteError, match="the sum of the gradients of 'w' over 2 replicas has NaN or infinity"):
        shard.contribute(0, 0, Block(1, 1), other)
    assert shard.step_min == 0


def test_an_asynchronous_push_that_is_known_to_be_finite_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = looks(monkeypatch)
    shard = flat_shard(mode="async")
    parts = {0: Gradient(torch.ones(ELEMENTS), (True,), bound=1.0)}
    decision, _ = shard.push(NumberedPush(task="worker/0", incarnation=1, seq=1, base_version=0), parts)
    assert decision.outcome is Outcome.APPLIED and not seen


def test_a_repetition_with_other_bits_is_told_by_what_its_sender_says_of_them() -> None:
    shard = flat_shard(replicas=2)
    shard.contribute(0, 0, Block(0, 1), Gradient(torch.ones(ELEMENTS), (True,), fingerprint=5))
    again = shard.contribute(0, 0, Block(0, 1), Gradient(torch.zeros(ELEMENTS), (True,), fingerprint=6))
    assert again.outcome is Outcome.DUPLICATE and "different bits" in again.reason
    assert shard.tally.duplicate_mismatches == 1


# From a slot


def slot_of(payload: bytes, codec: str = "raw", **more: object) -> Slot:
    plan = make_plan((TensorSpec(name="w", shape=(ELEMENTS,), dtype="float32"),), 1)
    coding = coding_of(codec, plan).push.bucket(0, 0)
    slot = Slot(0, coding.layout.bucket, coding, (), memoryview(payload), **more)  # type: ignore[arg-type]
    slot.size = len(payload)
    return slot


TAKE = Buffers(lambda: 1 << 20).take


def test_bytes_that_moved_are_marked_here_where_their_sender_has_not_marked_them() -> None:
    payload = torch.arange(ELEMENTS, dtype=torch.float32).numpy().tobytes()
    assert opened(slot_of(payload), TAKE, repeated=True).fingerprint == fingerprint(payload)
    assert opened(slot_of(payload), TAKE, repeated=False).fingerprint == 0
    assert opened(slot_of(payload, fingerprint=9), TAKE, repeated=True).fingerprint == 9
    assert opened(slot_of(payload, borrowed=True, moved=False), TAKE, repeated=True).fingerprint == 0
    assert opened(slot_of(payload, borrowed=True, moved=False, fingerprint=9), TAKE, repeated=True).fingerprint == 9


def test_a_bound_holds_for_the_bytes_that_were_sent_and_not_for_what_a_codec_makes_of_them() -> None:
    values = torch.ones(ELEMENTS)
    assert opened(slot_of(tensor_bytes(values).tobytes(), bound=1.0), TAKE, repeated=True).bound == 1.0
    half = tensor_bytes(values.half()).tobytes()
    assert opened(slot_of(half, codec="fp16", bound=1.0), TAKE, repeated=True).bound == math.inf


# What a worker says


def staged(
    gradients: Sequence[torch.Tensor], *, replicas: int, presum: bool = False, allocate: Allocate = no_memory
) -> tuple[Plan, GradientStaging]:
    plan = make_plan((TensorSpec(name="w", shape=(ELEMENTS,), dtype="float32"),), 1)
    staging = GradientStaging(plan, replicas, PushEncoders(coding_of("raw", plan).push), allocate)
    for replica, gradient in enumerate(gradients):
        staging.add(replica, {0: gradient}, {}, presum=presum)
    return plan, staging


def shared() -> Allocate:
    memory = {0: memoryview(bytearray(ELEMENTS * 4))}
    return lambda shard, bucket, nbytes: memory[bucket]


def test_a_worker_says_how_large_its_gradient_is() -> None:
    _, staging = staged([torch.full((ELEMENTS,), -3.0)], replicas=1)
    push = Push(payloads=Whole([staging.payload(Block(0, 1), 0, 0)]))
    sender = Sender(job="job", timeline=1, plan_id="plan", who=Identity("worker/0", 1))
    header = next(data.exchange_requests(sender, 0, [push], None)).push.bucket
    assert header.bound == 3.0
    # One replica is computed by one worker.
    assert header.fingerprint == 0


def test_of_a_sum_over_a_block_it_says_no_less_than_it_is() -> None:
    _, staging = staged([torch.full((ELEMENTS,), 3.0), torch.full((ELEMENTS,), -1.0)], replicas=2, presum=True)
    payload = staging.payload(Block(0, 2), 0, 0)
    assert payload.bound == 4.0
    assert payload.fingerprint == fingerprint(payload.data)


@pytest.mark.parametrize("presum", [False, True])
def test_where_the_shard_reads_the_bytes_in_place_they_are_marked_and_have_no_digest(presum: bool) -> None:
    _, staging = staged([torch.full((ELEMENTS,), 3.0)], replicas=2, presum=presum, allocate=shared())
    payload = staging.payload(Block(0, 1), 0, 0)
    assert payload.digest == 0
    assert payload.fingerprint == fingerprint(payload.data) != 0
    assert staging.in_place(0, [0])


def test_bytes_that_will_move_have_both() -> None:
    _, staging = staged([torch.full((ELEMENTS,), 3.0)], replicas=2)
    payload = staging.payload(Block(0, 1), 0, 0)
    assert payload.digest != 0 and payload.fingerprint == fingerprint(payload.data)
    assert not staging.in_place(0, [0])


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_that_are_in_their_place_go_in_one_batch(in_place: bool) -> None:
    rows = 4096
    plan = make_plan((TensorSpec(name="w", shape=(rows, 1024), dtype="float32"),), 1)
    sizes = [bucket.nbytes for bucket in plan.shards[0].buckets]
    assert len(sizes) > 4
    memory = [memoryview(bytearray(size)) for size in sizes]
    allocate: Allocate = (lambda shard, bucket, nbytes: memory[bucket]) if in_place else no_memory
    staging = GradientStaging(plan, 1, PushEncoders(coding_of("raw", plan).push), allocate)
    staging.add(0, {0: torch.ones(rows * 1024)}, {}, presum=False)
    tools = PushTools(plan=plan, staging=staging, interrupted=lambda: None)
    payloads = filled_payloads(tools, 0, Block(0, 1), range(len(sizes)), range(len(sizes)))
    batches = [len(batch) for batch in payloads.batches()]
    assert sum(batches) == len(sizes)
    assert (len(batches) == 1) is in_place


def test_the_first_error_of_several_threads_is_raised_when_nothing_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging_module, "usable_cores", lambda: 3)
    plan = make_plan((TensorSpec(name="w", shape=(4096, 1024), dtype="float32"),), 1)
    staging = GradientStaging(plan, 1, PushEncoders(coding_of("raw", plan).push))
    failed, others = threading.Event(), []

    def add_bucket(key: tuple[int, int], *args: object, **more: object) -> list[int]:
        if key == (0, 1):
            failed.set()
            raise ValueError("bucket 1")
        # The others are still at it when it fails.
        assert failed.wait(10.0)
        others.append(key)
        return []

    monkeypatch.setattr(staging, "add_bucket", add_bucket)
    with pytest.raises(ValueError, match="bucket 1"):
        staging.add(0, {0: torch.ones(4096 * 1024)}, {}, presum=False)
    assert len(others) == len(staging.keys) - 1 > 2
    staging.close()


def test_a_sparse_gradient_is_refused_with_its_tensor_and_what_to_do() -> None:
    table = torch.nn.Embedding(ELEMENTS // 4, 4, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    assert table.weight.grad is not None
    with pytest.raises(JobError, match=r"the gradient of 'w' has layout torch.sparse_coo; .*pass its to_dense"):
        staged([table.weight.grad], replicas=1)


@pytest.mark.parametrize("small", [True, False])
def test_bytes_that_were_to_stay_in_place_and_travel_after_all_have_a_digest(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SMALL_BYTES", 64 << 10 if small else 0)
    _, staging = staged([torch.full((ELEMENTS,), 3.0)], replicas=1, allocate=shared())
    payload = staging.payload(Block(0, 1), 0, 0)
    push = Push(payloads=Whole([payload]))
    sender = Sender(job="job", timeline=1, plan_id="plan", who=Identity("worker/0", 1))

    def referred(lane: str) -> list[int]:
        requests = data.referred_requests(
            sender, 0, [push], None, Attached(lane, 1, in_place=lane == "shm"), place=lambda item: 0
        )
        return [ref.digest for request in requests if request.push is not None for ref in request.push.refs]

    on_stream = [request.push for request in data.exchange_requests(sender, 0, [push], None)]
    ends = [frame.bucket_commit.digest for frame in on_stream if frame.HasField("bucket_commit")]
    # A worker whose shared memory can't be used any more makes the same push again, by another lane.
    assert ends == referred("tcp") == [digest(payload.data)]
    assert referred("shm") == [0]


@pytest.mark.parametrize(("lane", "in_place", "requests"), [("shm", True, 1), ("shm", False, 3), ("tcp", True, 3)])
def test_a_push_that_need_not_travel_is_one_request_whatever_its_size(lane: str, in_place: bool, requests: int) -> None:
    size = data.SMALL_BYTES + 4
    item = Payload(bucket=0, dtype="uint8", elements=size, present=b"", data=bytes(size), raw_bytes=size, digest=0)
    push = Push(payloads=Whole([item], in_place=in_place), block=Block(0, 1))
    made = list(
        data.referred_requests(
            Sender(job="j", timeline=1, plan_id="p", who=Identity("worker/0", 1)),
            0,
            [push],
            Want(step=1),
            data.Attached(lane, 1, in_place=lane == "shm"),
            place=lambda payload: 0,
        )
    )
    # The pull, the bucket and the commit.
    assert len(made) == requests
    assert [len(request.push.refs) for request in made if request.push is not None and request.push.refs] == [1]
    assert made[0].HasField("pull") and made[-1].push.HasField("commit")


@pytest.mark.parametrize("small", [True, False])
def test_bytes_of_a_push_at_hand_leave_behind_its_message_unless_they_are_few(small: bool) -> None:
    size = data.SMALL_BYTES + (0 if small else 4)
    item = Payload(bucket=0, dtype="uint8", elements=size, present=b"", data=bytes(size), raw_bytes=size, digest=0)
    sent: list[int] = []
    requests = data.referred_requests(
        Sender(job="j", timeline=1, plan_id="p", who=Identity("worker/0", 1)),
        0,
        [Push(payloads=Whole([item], at_once=True), block=Block(0, 1))],
        Want(step=1),
        data.Attached("tcp", 1),
        place=lambda payload: 0,
        after=lambda items: sent.extend(one.bucket for one in items),
    )
    assert next(iter(requests)).HasField("pull") and sent == ([0] if small else [])
    assert list(requests) == [] and sent == [0]


@pytest.mark.parametrize(
    ("sizes", "ends", "soon"),
    [([], True, True), ([QUICK_BYTES], True, True), ([QUICK_BYTES, 1], True, False), ([8], False, False)],
)
def test_a_pull_waits_for_the_push_that_it_came_with_where_that_is_over_at_once(
    sizes: list[int], ends: bool, soon: bool
) -> None:
    refs = [data_pb2.BucketRef(bucket=data_pb2.BucketHeader(payload_bytes=size)) for size in sizes]
    frame = data_pb2.PushFrame(refs=refs, commit=data_pb2.Commit() if ends else None)
    assert is_soon_whole(frame) is soon
    assert not is_soon_whole(None)

"""Activations between workers: what travels, what is kept, and what ends a wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from shardline.client.overlap.watching import StepAgain
from shardline.client.parcels.post import PostOffice
from shardline.core.orders import Orders
from shardline.core.placement import Post
from shardline.core.spec import JobSpec, TensorSpec
from shardline.core.timeouts import Timeouts
from shardline.errors import ProtocolError
from shardline.lanes.parcels import WORKER, register_worker
from shardline.observability.metrics import Metrics
from shardline.pipeline.parcel import Parcel, ParcelKey
from shardline.rpc.limits import PARCEL_CHUNK_BYTES
from shardline.rpc.messages.parcels import ParcelReader, parcel_frames
from shardline.rpc.server import RpcServer
from shardline.rpc.v1 import worker_pb2
from shardline.security import PLAIN
from shardline.update import rule

TIMEOUTS = Timeouts(total_s=15.0)
KEY = ParcelKey(step=3, replica=0, stage=1, microbatch=2, back=False)
JOB = JobSpec(
    name="j",
    tensors=tuple(
        TensorSpec(name=f"{stage}.weight", shape=(4,), dtype="float32", fragment=stage) for stage in range(2)
    ),
    rule=rule("SGD", ({"lr": 0.5},)),
    pipeline="flush",
    accumulate=4,
)


# Messages


def read(frames: Iterator[worker_pb2.ParcelFrame]) -> Parcel:
    first = next(frames)
    reader = ParcelReader(first.header)
    reader.add(first.payload)
    for frame in frames:
        reader.add(frame.payload)
    return reader.parcel()


@pytest.mark.parametrize(
    "values",
    [
        torch.randn(3, 4, 5),
        torch.randn(3, 4, 5).permute(2, 0, 1),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(5, 7, dtype=torch.float64).T,
        torch.randn(3, 2).to(torch.bfloat16),
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.randn(1, 4, 1),
        torch.randn(PARCEL_CHUNK_BYTES // 4 + 17),
    ],
    ids=lambda values: f"{tuple(values.shape)} {values.dtype}",
)
def test_a_tensor_arrives_with_its_bits_and_its_layout(values: torch.Tensor) -> None:
    found = read(parcel_frames("j", 5, Parcel(KEY, (values,), needs_grad=(True,), random_state=b"abc")))
    assert (found.key, found.needs_grad, found.places, found.random_state) == (KEY, (True,), (), b"abc")
    assert found.values[0].dtype == values.dtype and torch.equal(found.values[0], values)
    assert [s for s, n in zip(found.values[0].stride(), values.shape, strict=True) if n > 1] == [
        s for s, n in zip(values.stride(), values.shape, strict=True) if n > 1
    ]


def test_tensors_of_any_kind_travel_together() -> None:
    values = (
        torch.tensor([True, False, True]),
        torch.randn(PARCEL_CHUNK_BYTES // 4 + 1),
        torch.empty(0, 2),
        torch.arange(6, dtype=torch.int64).reshape(2, 3).T,
        torch.randn(5, dtype=torch.float64),
    )
    needs_grad, places = (False, True, False, False, True), (4, 0, 0, 1, 2, 3)
    found = read(parcel_frames("j", 5, Parcel(KEY, values, needs_grad, places)))
    assert (found.needs_grad, found.places) == (needs_grad, places)
    assert found.nbytes == sum(value.nbytes for value in values)
    for ours, theirs in zip(found.values, values, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("places", [(), (1,), (3, 0)])
def test_a_gradient_says_which_tensors_it_is_for(places: tuple[int, ...]) -> None:
    key = ParcelKey(step=3, replica=0, stage=1, microbatch=2, back=True)
    values = tuple(torch.full((2,), float(place)) for place in places)
    found = read(parcel_frames("j", 5, Parcel(key, values, places=places)))
    assert found.places == places and all(map(torch.equal, found.values, values))


def header(**changes: object) -> worker_pb2.ParcelHeader:
    made = next(parcel_frames("j", 5, Parcel(KEY, (torch.ones(2, 3),)))).header
    for name, value in changes.items():
        target = made.tensors[0] if name in ("dtype", "shape", "order") else made
        if isinstance(value, tuple):
            target.ClearField(name)  # type: ignore[arg-type]
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"shape": (2, 4)}, r"24 bytes announced for shapes \(2, 4\), which take 32"),
        ({"places": (1,)}, r"places \[1\] of 1 tensors"),
        ({"back": True}, r"places \[\] of 1 tensors"),
        ({"tensors": (), "payload_bytes": 0}, r"places \[\] of 0 tensors"),
        ({"tensors": (worker_pb2.ParcelTensor(),) * 4097}, "tensors: 4097 entries; the limit is 4096"),
        ({"shape": (1,) * 65}, "dimensions: 65 entries; the limit is 64"),
        ({"order": (0, 0)}, r"order \(0, 0\) of a tensor with 2 dimensions"),
        ({"order": (0, 7)}, "order"),
        ({"dtype": 999}, "dtype"),
        ({"shape": (1 << 40,), "payload_bytes": 4 << 40}, "the limit is 4294967296"),
    ],
)
def test_a_forged_header_is_refused_before_any_byte_is_taken(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        ParcelReader(header(**changes))


def test_a_parcel_is_kept_only_whole_and_with_its_digest_right() -> None:
    frame = next(parcel_frames("j", 5, Parcel(KEY, (torch.ones(2, 3),))))
    for cut in range(len(frame.payload)):
        reader = ParcelReader(frame.header)
        reader.add(frame.payload[:cut])
        with pytest.raises(ProtocolError, match=f"{cut} bytes of 24 came"):
            reader.parcel()
    reader = ParcelReader(frame.header)
    with pytest.raises(ProtocolError, match="more than the announced 24 bytes"):
        reader.add(frame.payload + b"x")
    reader = ParcelReader(frame.header)
    reader.add(b"\x01" + frame.payload[1:])
    with pytest.raises(ProtocolError, match="the digest does not match"):
        reader.parcel()


# The post office


def parcel(key: ParcelKey, value: float = 1.0) -> Parcel:
    return Parcel(key, (torch.full((4,), value),))


def orders(*addresses: str, timeline: int = 1) -> Orders:
    posts = [Post(task=f"worker/{n}", address=address, incarnation=n + 1) for n, address in enumerate(addresses)]
    return Orders(timeline=timeline, posts=tuple(posts))


@pytest.fixture
def office() -> Iterator[PostOffice]:
    made = PostOffice(
        "worker/1", TIMEOUTS, PLAIN, Metrics("worker", "worker/1"), still_open=lambda key: True, settle=lambda: None
    )
    made.begin(JOB, orders("127.0.0.1:1", "127.0.0.1:2"), 3)
    yield made
    made.close()


def key_of(**changes: int) -> ParcelKey:
    return ParcelKey(**{"step": 3, "replica": 0, "stage": 1, "microbatch": 2, "back": False, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "timeline", "key", "kept"),
    [
        ("j", 1, key_of(), True),
        ("j", 1, key_of(step=4), True),
        ("j", 2, key_of(step=0), True),
        ("j", 1, key_of(step=2), False),
        ("j", 0, key_of(step=9), False),
        ("other", 1, key_of(), False),
        ("j", 1, key_of(stage=2), False),
        ("j", 1, key_of(replica=1), False),
        ("j", 1, key_of(microbatch=4), False),
    ],
)
def test_only_parcels_that_a_pass_may_still_need_are_kept(
    office: PostOffice, job: str, timeline: int, key: ParcelKey, kept: bool
) -> None:
    assert office.deliver(job, timeline, parcel(key)) is kept
    assert office.here(key) is (kept and timeline == 1)


def test_a_step_that_is_over_takes_its_parcels_along(office: PostOffice) -> None:
    for step in (3, 4):
        assert office.deliver("j", 1, parcel(key_of(step=step)))
    office.begin(JOB, orders("127.0.0.1:1", "127.0.0.1:2"), 4)
    assert not office.here(key_of(step=3)) and office.here(key_of(step=4))


def test_a_parcel_for_a_stage_of_ones_own_is_there_at_once(office: PostOffice) -> None:
    office.send(parcel(KEY, 7.0))
    office.wait([KEY])
    assert float(office.take(KEY).values[0][0]) == 7.0 and not office.here(KEY)


def test_orders_end_a_wait_and_so_does_a_step_that_others_have_closed() -> None:
    still: list[bool] = [True]
    office = PostOffice(
        "worker/1", TIMEOUTS, PLAIN, Metrics("worker", "worker/1"), still_open=lambda key: still[0], settle=lambda: None
    )
    office.begin(JOB, orders("127.0.0.1:1", "127.0.0.1:2"), 3)
    timer = threading.Timer(0.1, office.interrupt)
    timer.start()
    with pytest.raises(StepAgain):
        office.wait([KEY])
    timer.join()
    office.arm()
    still[0] = False
    with pytest.raises(StepAgain):
        office.wait([KEY])
    office.close()


def serve(deliver: Callable[[str, int, Parcel], bool], address: str = "127.0.0.1:0") -> RpcServer:
    server = RpcServer(address, register=[register_worker(deliver)], service_names=[WORKER])
    server.start()
    return server


def test_parcels_reach_another_worker_once_it_is_up_and_in_order() -> None:
    came: list[int] = []
    done = threading.Event()

    def deliver(job: str, timeline: int, found: Parcel) -> bool:
        came.append(found.key.microbatch)
        if len(came) == 3:
            done.set()
        return True

    first = serve(lambda job, timeline, found: True)
    address = first.address
    first.close()
    office = PostOffice(
        "worker/1", TIMEOUTS, PLAIN, Metrics("worker", "worker/1"), still_open=lambda key: True, settle=lambda: None
    )
    office.begin(JOB, orders(address, "127.0.0.1:2"), 3)
    for number in range(3):
        office.send(parcel(key_of(stage=0, microbatch=number)))
    server = serve(deliver, address)
    assert done.wait(TIMEOUTS.total_s)
    office.close()
    server.close()
    assert came == [0, 1, 2]


def test_what_is_for_a_post_that_has_moved_is_not_sent_any_more() -> None:
    stale: list[int] = []
    came: list[int] = []
    done = threading.Event()

    def deliver(job: str, timeline: int, found: Parcel) -> bool:
        came.append(found.key.microbatch)
        done.set()
        return True

    def deliver_late(job: str, timeline: int, found: Parcel) -> bool:
        stale.append(found.key.microbatch)
        return True

    first = serve(deliver_late)
    address = first.address
    first.close()
    other = serve(deliver)
    office = PostOffice(
        "worker/1", TIMEOUTS, PLAIN, Metrics("worker", "worker/1"), still_open=lambda key: True, settle=lambda: None
    )
    office.begin(JOB, orders(address, "127.0.0.1:2"), 3)
    office.send(parcel(key_of(stage=0)))
    office.begin(JOB, orders(other.address, "127.0.0.1:2"), 3)
    office.send(parcel(key_of(stage=0, microbatch=1)))
    server = serve(deliver_late, address)
    assert done.wait(TIMEOUTS.total_s)
    office.close()
    server.close()
    other.close()
    assert (came, stale) == ([1], [])

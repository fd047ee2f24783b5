"""Activations between workers: what travels, what is kept, and what ends a wait."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pytest
import torch

from shardline.client.overlap.gate import StepAgain
from shardline.core.identity import Identity
from shardline.core.parcel import Parcel, ParcelKey
from shardline.errors import ForbiddenError, NonFiniteError, ProtocolError, UnreachableError
from shardline.lanes import call_frames
from shardline.lanes.parcels import WORKER, ParcelLine, register_worker
from shardline.rpc.limits import PARCEL_CHUNK_BYTES
from shardline.rpc.messages.convert import DTYPE_TO_PROTO
from shardline.rpc.messages.parcels import ParcelReader, packed, parcel_frames
from shardline.rpc.server import RpcServer
from shardline.rpc.v1 import worker_pb2
from shardline_pipeline.activation_coding import SHAPES, ActivationCoding
from shardline_pipeline.activations.post import PostOffice
from tests.support.parcel_workers import JOB, TIMEOUTS, Workers, identity, key, make_office, orders, parcel, workers

KEY = key()
WHO = identity(0)
ORDERS = orders("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")


# Messages


def test_answers_that_come_with_an_error_are_counted_before_it_is_raised() -> None:
    here, there = socket.socketpair()
    line = ParcelLine("tcp", here)
    with there:
        there.sendall(
            call_frames.frame(call_frames.Kind.DONE) * 2
            + call_frames.failure(grpc.StatusCode.INVALID_ARGUMENT, "no such pass")
        )
    # The third parcel is the one that was refused, and nothing else is said of those after it.
    assert line.answers() == 2
    for _ in range(2):
        with pytest.raises(ProtocolError, match="no such pass"):
            line.answers()
    line.close()


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
    made = packed("j", 5, Parcel(KEY, (values,), needs_grad=(True,), random_state=b"abc"))
    found = read(parcel_frames(made, WHO))
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
    found = read(parcel_frames(packed("j", 5, Parcel(KEY, values, needs_grad, places)), WHO))
    assert (found.needs_grad, found.places) == (needs_grad, places)
    assert found.nbytes == sum(value.nbytes for value in values)
    for ours, theirs in zip(found.values, values, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("places", [(), (1,), (3, 0)])
def test_a_gradient_says_which_tensors_it_is_for(places: tuple[int, ...]) -> None:
    values = tuple(torch.full((2,), float(place)) for place in places)
    found = read(parcel_frames(packed("j", 5, Parcel(key(back=True), values, places=places)), WHO))
    assert found.places == places and all(map(torch.equal, found.values, values))


@pytest.mark.parametrize("codec", ["bf16", "lossless", "int8", "sparse"])
def test_what_a_codec_has_encoded_arrives_in_its_form(codec: str) -> None:
    values = (
        torch.randn(2, 3, 16, 16).contiguous(memory_format=torch.channels_last),
        torch.arange(4),
        torch.zeros(64, 64).T,
    )
    coding = ActivationCoding(codec, 7)
    sent = coding.encoded(Parcel(KEY, values, (True, False, True), (0, 1, 2)), [True, False, True], "the output")
    made = packed("j", 5, sent)
    assert (made.nbytes, made.raw_bytes) == (sent.nbytes, sum(value.nbytes for value in values))
    assert sent.nbytes < made.raw_bytes and sent.forms[1] is None
    found = read(parcel_frames(made, WHO))
    assert found == replace(sent, values=found.values)
    for ours, theirs, value in zip(coding.decoded(found, ""), coding.decoded(sent, ""), values, strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == value.dtype
        assert torch.allclose(ours, value, atol=0.02) and ours.stride() == value.stride()


def encoded(codec: str = "int8", cut: int = 0) -> Parcel:
    sent = ActivationCoding(codec, 7).encoded(Parcel(KEY, (torch.ones(32, 64),), (True,)), [True], "the output")
    return replace(sent, values=(sent.values[0][: len(sent.values[0]) - cut],))


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (encoded(cut=1), "the output of stage 0, float32 .32, 64. in 2083 bytes of codec int8: .* claims 2080 bytes"),
        (encoded("bf16", cut=2), "codec_parcels is 'int8', which does not encode it so"),
        (encoded(cut=2084), "payload of 0 bytes ends before part"),
    ],
)
def test_bytes_that_no_codec_makes_of_a_tensor_are_told_with_it(sent: Parcel, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        ActivationCoding("int8", 7).decoded(sent, "the output of stage 0")


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_a_codec_can_t_write_is_told_with_its_layer(bad: float) -> None:
    sent = Parcel(KEY, (torch.full((32, 64), bad),), (True,))
    with pytest.raises(NonFiniteError, match=r"output of layer 3 has NaN or infinity in it, in step 3 .* codec int8"):
        ActivationCoding("int8", 7).encoded(sent, [True], "the output of layer 3")
    found = ActivationCoding("bf16", 7)
    (value,) = found.decoded(found.encoded(sent, [True], ""), "")
    assert not value.isfinite().any()


def test_numbers_that_a_codec_makes_infinite_are_told_with_their_layer() -> None:
    coding, large = ActivationCoding("fp16", 7), torch.full((32, 64), 65_504.0)
    assert coding.decoded(coding.encoded(Parcel(KEY, (large,), (True,)), [True], ""), "")[0].equal(large)
    sent = Parcel(KEY, (large * 2,), (True,))
    with pytest.raises(
        NonFiniteError, match=r"output of layer 3 has numbers up to 131008, in step 3 .* codec fp16 makes"
    ):
        coding.encoded(sent, [True], "the output of layer 3")
    ActivationCoding("bf16", 7).encoded(sent, [True], "")


def test_what_is_beyond_the_scales_of_a_codec_is_told_too() -> None:
    sent = Parcel(KEY, (torch.full((32, 64), 1e39, dtype=torch.float64),), (True,))
    with pytest.raises(NonFiniteError, match=r"numbers up to 1e\+39, in step 3 .* codec int8 makes infinity"):
        ActivationCoding("int8", 7).encoded(sent, [True], "")


def test_the_coders_of_few_shapes_are_kept() -> None:
    coding = ActivationCoding("int8", 7)
    for rows in range(100, 300):
        coding.encode(torch.ones(rows, 64), KEY, 0, "")
    assert coding.coder.cache_info().currsize == SHAPES


def test_random_rounding_depends_on_the_pass_and_not_on_torch_s_generator() -> None:
    values, coding = torch.randn(32, 64), ActivationCoding("int8:stochastic=true", 7)
    keys = [KEY, replace(KEY, step=4), replace(KEY, replica=1), replace(KEY, stage=2), replace(KEY, microbatch=0)]
    made = [coding.encode(values, one, number, "")[0] for one, number in [*((k, 0) for k in keys), (KEY, 1)]]
    assert len({bytes(one.numpy()) for one in made}) == len(made)
    torch.manual_seed(1)
    assert torch.equal(ActivationCoding("int8:stochastic=true", 7).encode(values, KEY, 0, "")[0], made[0])
    assert not torch.equal(ActivationCoding("int8:stochastic=true", 8).encode(values, KEY, 0, "")[0], made[0])


def header(**changes: object) -> worker_pb2.ParcelHeader:
    made = packed("j", 5, Parcel(KEY, (torch.ones(2, 3),))).header
    for name, value in changes.items():
        target = made.tensors[0] if name in worker_pb2.ParcelTensor.DESCRIPTOR.fields_by_name else made
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
        ({"dtype": DTYPE_TO_PROTO["int32"], "needs_grad": True}, "a gradient is asked for a tensor of int32"),
        (
            {"codec": "int8", "encoded_bytes": 25},
            r"25 bytes of codec 'int8' announced for float32 \(2, 3\), which is 24",
        ),
        ({"codec": "int8", "encoded_bytes": 20}, r"24 bytes announced for shapes \(2, 3\), which take 20"),
        ({"shape": (1 << 40,), "payload_bytes": 4 << 40}, "the limit is 4294967296"),
        (
            {"shape": (1 << 40,), "codec": "sparse", "encoded_bytes": 24},
            r"which take 24, 4398046511104 decoded; the limit is 4294967296",
        ),
    ],
)
def test_a_forged_header_is_refused_before_any_byte_is_taken(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        ParcelReader(header(**changes))


def test_a_parcel_is_kept_only_whole_and_with_its_digest_right() -> None:
    frame = next(parcel_frames(packed("j", 5, Parcel(KEY, (torch.ones(2, 3),))), WHO))
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


@pytest.fixture
def office() -> Iterator[PostOffice]:
    made = make_office(1)
    made.begin(JOB, ORDERS, 3, identity(1))
    yield made
    made.close()


def reader(job: str, timeline: int, key: ParcelKey) -> ParcelReader:
    return ParcelReader(packed(job, timeline, parcel(key)).header)


@pytest.mark.parametrize(
    ("timeline", "key", "wanted"),
    [
        (1, key(), True),
        (1, key(step=6), True),
        (1, key(back=True), True),
        (1, key(step=2), False),
        (0, key(step=9), False),
    ],
)
def test_a_parcel_is_wanted_if_a_pass_may_still_need_it(
    office: PostOffice, timeline: int, key: ParcelKey, wanted: bool
) -> None:
    assert office.mailbox.awaits(reader("j", timeline, key), wait_s=0.0) is wanted
    assert office.mailbox.deliver(WHO, timeline, parcel(key)) is wanted


@pytest.mark.parametrize(("timeline", "later"), [(1, key(step=7)), (2, key(step=0))])
def test_what_is_for_a_step_far_ahead_waits_at_its_sender(office: PostOffice, timeline: int, later: ParcelKey) -> None:
    with pytest.raises(UnreachableError, match=r"is at step 3 of timeline 1, so it can't take .* \(yet\)"):
        office.mailbox.awaits(reader("j", timeline, later), wait_s=0.0)
    timer = threading.Timer(0.1, lambda: office.begin(JOB, replace(ORDERS, timeline=timeline), later.step, identity(1)))
    timer.start()
    assert office.mailbox.awaits(reader("j", timeline, later), wait_s=10.0)
    timer.join()


def test_a_parcel_of_newer_orders_waits_until_its_receiver_begins_again_with_them(office: PostOffice) -> None:
    newer = ParcelReader(packed("j", 1, parcel(key()), posting=8).header)
    office.begin(JOB, replace(ORDERS, posting=7), 3, identity(1))
    with pytest.raises(UnreachableError, match=r"can't take the activation for stage 1 .* \(yet\)"):
        office.mailbox.awaits(newer, wait_s=0.0)
    assert office.mailbox.awaits(ParcelReader(packed("j", 1, parcel(key()), posting=6).header), wait_s=0.0)
    office.begin(JOB, replace(ORDERS, posting=8), 3, identity(1))
    assert office.mailbox.awaits(newer, wait_s=0.0)


@pytest.mark.parametrize(
    ("job", "key"),
    [
        ("other", key()),
        ("j", key(stage=3)),
        ("j", key(stage=0)),
        ("j", key(stage=2, back=True)),
        ("j", key(replica=1)),
        ("j", key(microbatch=4)),
    ],
)
def test_a_parcel_for_no_pass_is_refused(office: PostOffice, job: str, key: ParcelKey) -> None:
    with pytest.raises(ProtocolError, match="is for no pass of job 'j'"):
        office.mailbox.awaits(reader(job, 1, key), wait_s=0.0)


def test_a_parcel_of_another_codec_than_the_job_s_is_refused(office: PostOffice) -> None:
    made = ParcelReader(packed("j", 1, encoded("bf16")).header)
    with pytest.raises(ProtocolError, match="is encoded with codec 'bf16', but the job's codec_parcels is ''"):
        office.mailbox.awaits(made, wait_s=0.0)
    office.begin(replace(JOB, codec_parcels="bf16"), ORDERS, 3, identity(1))
    assert office.mailbox.awaits(made, wait_s=0.0)


def test_only_lives_that_compute_a_stage_may_send(office: PostOffice) -> None:
    office.mailbox.check_sender(identity(0))
    with pytest.raises(UnreachableError, match="knows no stage of worker/0, incarnation 0x2"):
        office.mailbox.check_sender(identity(0, 2))
    with pytest.raises(ForbiddenError, match="lacks the secret that the chief gave to incarnation 0x1 of it"):
        office.mailbox.check_sender(Identity("worker/0", 1, b"guessed"))
    fresh = make_office(1)
    with pytest.raises(UnreachableError, match="knows no stage"):
        fresh.mailbox.check_sender(identity(0))
    fresh.close()


def test_a_parcel_counts_only_from_the_life_that_computes_its_stage(office: PostOffice) -> None:
    for other in (identity(2), identity(0, 2)):
        assert office.mailbox.deliver(other, 1, parcel(KEY, 6.0))
        assert not office.here(KEY)
    assert office.mailbox.deliver(WHO, 1, parcel(KEY, 7.0)) and office.here(KEY)
    assert office.mailbox.deliver(identity(2), 1, parcel(KEY, 6.0))
    assert float(office.take(KEY).values[0][0]) == 7.0


def test_what_a_replaced_life_has_sent_counts_no_more(office: PostOffice) -> None:
    assert office.mailbox.deliver(WHO, 1, parcel(KEY)) and office.here(KEY)
    posts = (replace(ORDERS.posts[0], incarnation=2), *ORDERS.posts[1:])
    office.begin(JOB, replace(ORDERS, posts=posts), 3, identity(1))
    assert not office.here(KEY)
    assert office.mailbox.deliver(identity(0, 2), 1, parcel(KEY, 8.0))
    assert float(office.take(KEY).values[0][0]) == 8.0


def test_a_step_that_is_over_takes_its_parcels_along(office: PostOffice) -> None:
    for step in (3, 4):
        assert office.mailbox.deliver(WHO, 1, parcel(key(step=step)))
    office.begin(JOB, ORDERS, 4, identity(1))
    assert not office.here(key(step=3)) and office.here(key(step=4))


def test_a_parcel_for_a_stage_of_ones_own_is_there_at_once(office: PostOffice) -> None:
    posts = (ORDERS.posts[0], ORDERS.posts[1], replace(ORDERS.posts[1]))
    office.begin(JOB, replace(ORDERS, posts=posts), 3, identity(1))
    office.send(parcel(key(stage=2), 7.0))
    office.wait([key(stage=2)])
    assert float(office.take(key(stage=2)).values[0][0]) == 7.0 and not office.here(key(stage=2))


def test_orders_end_a_wait_and_so_does_a_step_that_others_have_closed() -> None:
    still: list[bool] = [True]
    office = make_office(1, still_open=lambda key: still[0])
    office.begin(JOB, ORDERS, 3, identity(1))
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


def test_whoever_waits_for_parcels_hears_that_parameters_have_come_or_orders_have_changed() -> None:
    settled = threading.Event()
    office = make_office(1, settled=settled.is_set)
    office.begin(JOB, ORDERS, 3, identity(1))
    # Nothing else can come.
    assert not office.comes_first([])

    def first(then: Callable[[], object]) -> bool:
        timer = threading.Timer(0.1, then)
        timer.start()
        begun_s = time.monotonic()
        found = office.comes_first([KEY])
        timer.join()
        assert time.monotonic() - begun_s < TIMEOUTS.suspect_s
        return found

    assert not first(office.interrupt)
    office.arm()

    def settle() -> None:
        settled.set()
        office.mailbox.look()

    assert not first(settle)
    settled.clear()
    assert first(lambda: office.mailbox.deliver(identity(0), 1, parcel(KEY)))
    settled.set()
    assert office.comes_first([KEY])
    office.close()


# Between workers


def test_parcels_reach_a_worker_once_it_has_begun_and_in_order() -> None:
    group = Workers("grpc")
    try:
        group.begin(0)
        for number in range(3):
            group.offices[0].send(parcel(key(microbatch=number), number))
        group.begin(1)
        for number in range(3):
            group.offices[1].wait([key(microbatch=number)])
            assert float(group.offices[1].take(key(microbatch=number)).values[0][0]) == number
    finally:
        group.close()


class Notes:
    """An inbox that notes what comes."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.first = threading.Event()

    def check_sender(self, who: Identity) -> None:
        """Anyone may send."""

    def awaits(self, parcel: ParcelReader, *, wait_s: float) -> bool:
        """Everything is wanted."""
        return True

    def deliver(self, who: Identity, timeline: int, parcel: Parcel) -> bool:
        """Note it."""
        self.came.append(parcel.key.microbatch)
        self.first.set()
        return True

    def serve(self, address: str = "127.0.0.1:0") -> RpcServer:
        """Take parcels by gRPC."""
        no_lane = worker_pb2.OpenParcelLaneReply()
        server = RpcServer(address, register=[register_worker(self, lambda lane, who: no_lane)], service_names=[WORKER])
        server.start()
        return server


def test_what_is_for_a_post_that_has_moved_is_not_sent_any_more() -> None:
    before, after = Notes(), Notes()
    first = before.serve()
    address = first.address
    first.close()
    other = after.serve()
    office = make_office(0)
    office.begin(JOB, orders("127.0.0.1:1", address, "127.0.0.1:3"), 3, identity(0))
    office.send(parcel(KEY))
    office.begin(JOB, orders("127.0.0.1:1", other.address, "127.0.0.1:3"), 3, identity(0))
    office.send(parcel(key(microbatch=1)))
    server = before.serve(address)
    assert after.first.wait(10.0)
    office.close()
    server.close()
    other.close()
    assert (after.came, before.came) == ([1], [])


def test_a_life_that_is_replaced_gets_lines_of_its_own() -> None:
    with workers("tcp") as group:
        group.offices[0].send(parcel(KEY))
        group.offices[1].wait([KEY])
        for index in (0, 1):
            group.begin(index, incarnation=2)
        assert not group.offices[1].here(KEY)
        group.offices[0].send(parcel(KEY, 5.0))
        group.offices[1].wait([KEY])
        assert float(group.offices[1].take(KEY).values[0][0]) == 5.0

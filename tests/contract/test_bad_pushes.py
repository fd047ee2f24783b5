"""Whatever is wrong with a message gets a status or an outcome with a sentence, and changes nothing."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from shardline.rpc.v1 import common_pb2, data_pb2, parameter_server_pb2, plan_pb2
from tests.support.cluster import Ps
from tests.support.plain_client import DEADLINE_S, FIRST_W, FROZEN, RATE, STATS, PlainClient, W, floats
from tests.support.refusals import BAD, OUTCOMES, refused, says, unchanged
from tests.support.waiting import wait_for

Frames = list[data_pb2.PushFrame]
HEADER, BUCKET, CHUNK, SECOND_CHUNK, THIRD_CHUNK, END, COMMIT = range(7)
"""Positions in the frames of client.gradient(): 256 bytes in chunks of 100."""
NAN, INFINITY = float("nan"), float("inf")


def edit(position: int, **fields: Any) -> Callable[[Frames], Frames]:
    """Set fields of the only part of one frame; a__b is a nested field."""

    def change(frames: Frames) -> Frames:
        part = frames[position].ListFields()[0][1]
        for name, value in fields.items():
            *outer, last = name.split("__")
            target = part
            for step in outer:
                target = getattr(target, step)
            if isinstance(value, list):
                getattr(target, last)[:] = value
            else:
                setattr(target, last, value)
        return frames

    return change


def without(*positions: int) -> Callable[[Frames], Frames]:
    return lambda frames: [frame for number, frame in enumerate(frames) if number not in positions]


def again(position: int) -> Callable[[Frames], Frames]:
    return lambda frames: [*frames[: position + 1], *frames[position:]]


def swapped(a: int, b: int) -> Callable[[Frames], Frames]:
    def change(frames: Frames) -> Frames:
        frames[a], frames[b] = frames[b], frames[a]
        return frames

    return change


def both(*changes: Callable[[Frames], Frames]) -> Callable[[Frames], Frames]:
    def change(frames: Frames) -> Frames:
        for one in changes:
            frames = one(frames)
        return frames

    return change


MALFORMED: dict[str, tuple[Callable[[Frames], Frames], str]] = {
    "unknown bucket": (edit(BUCKET, bucket=9), "shard 0 has 3 buckets; the push is for bucket 9"),
    "unknown empty bucket": (edit(HEADER, empty_buckets=[1, 2, 9]), "shard 0 has 3 buckets; the push is for bucket 9"),
    "bucket both empty and sent": (edit(HEADER, empty_buckets=[0, 1, 2]), "bucket 0 appears twice in one push"),
    "bucket sent twice": (
        lambda frames: [*frames[: END + 1], *frames[BUCKET : END + 1], frames[COMMIT]],
        "bucket 0 appears twice in one push",
    ),
    "wrong dtype": (
        edit(BUCKET, dtype=common_pb2.DTYPE_FLOAT64),
        r"bucket 0 \('w'\): pushed as 64 float64 elements; the plan says 64 float32\. Does the worker have another",
    ),
    "no dtype": (edit(BUCKET, dtype=0), "bucket 0: dtype number 0 is unknown; use one of float32"),
    "unknown dtype": (edit(BUCKET, dtype=77), "bucket 0: dtype number 77 is unknown; use one of float32"),
    "wrong element count": (edit(BUCKET, elements=12), "pushed as 12 float32 elements; the plan says 64 float32"),
    "absurd element count": (edit(BUCKET, elements=1 << 60), "the plan says 64 float32"),
    "lying length": (edit(BUCKET, payload_bytes=1 << 50), "announced, codec raw makes 256"),
    "short length": (edit(BUCKET, payload_bytes=255), "payload of 255 bytes announced, codec raw makes 256"),
    "bitmap of another length": (edit(BUCKET, present=b"\1\1"), "bitmap of 2 bytes for 1 entries"),
    "bitmap beyond the slices": (edit(BUCKET, present=b"\3"), "bitmap has entries beyond the 1 that exist"),
    "unknown codec": (edit(HEADER, codec="zip"), "shard 0: pushed with codec 'zip'; the job uses 'raw'"),
    "codec of another job": (edit(HEADER, codec="bf16"), "pushed with codec 'bf16'; the job uses 'raw'"),
    "overlapping chunk": (edit(SECOND_CHUNK, offset=50), "chunk of 100 bytes at 50; expected one at 100 within 256"),
    "gap between chunks": (without(SECOND_CHUNK), "chunk of 56 bytes at 200; expected one at 100 within 256"),
    "repeated chunk": (again(CHUNK), "chunk of 100 bytes at 0; expected one at 100"),
    "chunks out of order": (swapped(CHUNK, SECOND_CHUNK), "chunk of 100 bytes at 100; expected one at 0"),
    "chunk beyond the payload": (
        edit(THIRD_CHUNK, payload=b"x" * 57),
        "chunk of 57 bytes at 200; expected one at 200 within 256",
    ),
    "chunk at a huge offset": (edit(CHUNK, offset=2**64 - 1), "chunk of 100 bytes at 18446744073709551615"),
    "chunk of another bucket": (edit(CHUNK, bucket=1), "chunk of bucket 1 without a bucket header"),
    "chunk without a bucket header": (without(BUCKET), "chunk of bucket 0 without a bucket header"),
    "missing chunk": (without(THIRD_CHUNK), "committed with 256 bytes in 3 chunks, received 200 of 256 in 2"),
    "lying byte count": (edit(END, bytes=200), "committed with 200 bytes in 3 chunks, received 256 of 256 in 3"),
    "lying chunk count": (edit(END, chunks=4), "committed with 256 bytes in 4 chunks, received 256 of 256 in 3"),
    "wrong digest": (edit(END, digest=12345), "bucket 0: the digest of the received bytes differs"),
    "commit of another bucket": (edit(END, bucket=1), "bucket 1 was committed before it began"),
    "commit of a bucket that never began": (without(BUCKET, 2, 3, 4), "bucket 0 was committed before it began"),
    "bucket within a bucket": (again(BUCKET), "bucket 0 began before bucket 0 was committed"),
    "bucket left open": (without(END), "the push was committed while bucket 0 was open"),
    "missing bucket": (
        without(BUCKET, 2, 3, 4, END),
        r"the push lacks buckets \[0\]; it must cover every bucket \(list those without a contribution",
    ),
    "missing header": (without(HEADER), "a push must start with a header frame"),
    "header twice": (again(HEADER), "a new push began before the previous one was committed"),
    "missing commit": (without(COMMIT), "the push ended without a commit; only acknowledged buckets count"),
    "nothing at all": (lambda frames: [], "the push ended without a commit"),
    "two pushes in one Push": (lambda frames: frames + frames, "Push takes one push; use PushPull for several"),
    "reserved kind": (edit(HEADER, kind=data_pb2.PUSH_KIND_DELTA), "this ps does not support push kind number 3"),
    "unknown kind": (edit(HEADER, kind=99), "this ps does not support push kind number 99"),
    "weights": (edit(HEADER, weight=0.5), "weight 0.5: this job weights all gradients equally; send 0 or 1"),
    "no block": (edit(HEADER, block__count=0), "a synchronous push must name its block of replicas"),
    "hyper-parameter that is no number": (
        lambda frames: [
            data_pb2.PushFrame(
                header=data_pb2.PushHeader(
                    data=frames[0].header.data,
                    block=frames[0].header.block,
                    hyper=[data_pb2.GroupHyper(values={"lr": NAN})],
                )
            ),
            *frames[1:],
        ],
        "hyper-parameter 'lr' of group 0 is nan; it must be finite",
    ),
}
ONCE_TAKEN = {"missing commit", "two pushes in one Push", "bucket both empty and sent", "bucket sent twice"}
"""Whole buckets count when they have come, whatever comes after: sending them again is a duplicate."""


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_push_is_refused_with_a_sentence_and_changes_nothing(ready: PlainClient, case: str) -> None:
    change, sentence = MALFORMED[case]
    frames = change(ready.gradient())
    refused(BAD, sentence, lambda: ready.push(frames))
    if case not in ONCE_TAKEN:
        unchanged(ready)
        ready.complete()
    assert ready.status().failure == ""


@pytest.mark.parametrize("case", sorted(MALFORMED.keys() - ONCE_TAKEN - {"nothing at all"}))
def test_the_same_in_a_call_that_pulls_too(ready: PlainClient, case: str) -> None:
    change, sentence = MALFORMED[case]
    frames = change(ready.gradient())
    refused(BAD, sentence, lambda: ready.push_pull(frames, ready.pull_request(exact_step=1)))
    unchanged(ready)
    ready.complete()


BLOCKS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a future step": ({"step": 3}, "REFUSED", "step 3 is ahead of the bucket, which is at step 0"),
    "a block outside": ({"block": (1, 1)}, "REFUSED", "block 1 is outside the job's 1 replicas"),
    "a block of absurd size": ({"block": (0, 2**32 - 1)}, "REFUSED", "is outside the job's 1 replicas"),
}


@pytest.mark.parametrize("case", [*OUTCOMES, *BLOCKS])
def test_a_push_that_does_not_belong_here_is_told_why(ready: PlainClient, case: str) -> None:
    settings, outcome, sentence = {**OUTCOMES, **BLOCKS}[case]
    ack = ready.push(ready.gradient(**settings))
    assert ack.outcome == common_pb2.Outcome.Value(f"OUTCOME_{outcome}")
    assert says(ack.reason, sentence)
    unchanged(ready)
    ready.complete()


def test_bytes_that_are_no_message_are_refused(ready: PlainClient) -> None:
    for method, sentence in ((name, f"a message of {name} can't be parsed") for name in ("Push", "PushPull")):
        call = getattr(ready.channel, "stream_unary" if method == "Push" else "stream_stream")(
            f"/shardline.rpc.v1.ParameterServer/{method}",
            request_serializer=lambda data: data,
            response_deserializer=lambda data: data,
        )
        for junk in (b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 40, b"\x0f", b"\x0a\x03\x0a\x7f\x00"):

            def send(junk: bytes = junk, call: Any = call) -> None:
                reply = call(iter([junk]), timeout=DEADLINE_S)
                if not isinstance(reply, bytes):
                    list(reply)

            refused(BAD, sentence, send)
    unchanged(ready)
    ready.complete()


@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_a_nan_is_refused_by_name_where_the_job_stops_at_one(ready: PlainClient, value: float) -> None:
    refused(
        grpc.StatusCode.FAILED_PRECONDITION,
        "shard 0: gradient of 'w' from replicas 0 has NaN or infinity; nothing was changed",
        lambda: ready.push(ready.gradient(value)),
    )
    unchanged(ready)
    ready.complete()


@pytest.mark.parametrize("bound", [-1.0, NAN, INFINITY, 3e38])
def test_a_bound_that_says_nothing_is_not_believed(ready: PlainClient, bound: float) -> None:
    refused(
        grpc.StatusCode.FAILED_PRECONDITION,
        "shard 0: gradient of 'w' from replicas 0 has NaN or infinity; nothing was changed",
        lambda: ready.push(edit(BUCKET, bound=bound)(ready.gradient(NAN))),
    )
    unchanged(ready)
    ready.complete()


def test_a_fingerprint_is_the_senders_word(client: PlainClient) -> None:
    client.start(replicas=2)
    outcomes = []
    for mark, value in ((5, 1.0), (5, 1.0), (6, 1.0), (0, 1.0), (2**64 - 1, 1.0)):
        ack = client.push(edit(BUCKET, fingerprint=mark)(client.gradient(value)))
        outcomes.append((ack.outcome, "repeated step 0" in ack.reason))
    duplicate = common_pb2.OUTCOME_DUPLICATE
    # Where nothing is said the shard makes it of the bytes, and they are not those that were named 5.
    assert outcomes == [
        (common_pb2.OUTCOME_COUNTED, False),
        (duplicate, False),
        (duplicate, True),
        (duplicate, True),
        (duplicate, True),
    ]
    assert client.status().shards[0].duplicate_mismatches == 3


def test_a_frozen_tensor_takes_no_gradient(client: PlainClient) -> None:
    client.start(replicas=2)
    frames = client.frames({W: floats([1.0]), FROZEN: floats([1.0])})
    sentence = r"'frozen' is frozen \(requires_grad is False\) and can't have a gradient"
    refused(BAD, sentence, lambda: client.push(frames))
    values, _, end = client.pull()
    assert (values[W], values[FROZEN], end.step) == (FIRST_W, (7.0, 8.0), 0)
    assert client.progress(0).replicas[0].step == 0


def test_a_buffer_comes_from_replica_0_only(client: PlainClient) -> None:
    client.start(replicas=2)
    frames = client.frames({STATS: floats((1.0, 1.0))}, block=(1, 1))
    refused(BAD, "buffer 'stats' comes from replica 0, not from replicas 1", lambda: client.push(frames))
    assert client.pull()[0][STATS] == (0.5, 0.25)


@pytest.mark.parametrize(
    ("block", "sentence"), [((1, 2), "block 1-2 is not a node of the sum over 6"), ((4, 3), "outside")]
)
def test_a_block_that_is_no_node_of_the_sum_counts_nowhere(
    client: PlainClient, block: tuple[int, int], sentence: str
) -> None:
    client.start(replicas=6)
    ack = client.push(client.gradient(block=block))
    assert ack.outcome == common_pb2.OUTCOME_REFUSED and sentence in ack.reason
    assert list(client.status().shards[0].waiting_for) == list(range(6))


def test_a_block_of_which_a_part_is_counted_has_to_be_split(client: PlainClient) -> None:
    client.start(replicas=4)
    assert client.push(client.gradient(block=(1, 1))).outcome == common_pb2.OUTCOME_COUNTED
    assert client.push(client.gradient(block=(0, 2))).outcome == common_pb2.OUTCOME_SPLIT
    assert client.push(client.gradient(block=(1, 1))).outcome == common_pb2.OUTCOME_DUPLICATE
    other = client.push(client.gradient(9.0, block=(1, 1)))
    assert other.outcome == common_pb2.OUTCOME_DUPLICATE and "repeated step 0" in other.reason
    assert client.status().shards[0].duplicate_mismatches == 1
    assert client.push(client.gradient(block=(0, 1))).outcome == common_pb2.OUTCOME_COUNTED
    assert client.push(client.gradient(block=(2, 2))).outcome == common_pb2.OUTCOME_COUNTED
    assert client.weights() == tuple(value - 0.75 * RATE for value in FIRST_W)
    assert client.pull()[2].step == 1


def test_a_flag_of_nan_that_does_not_count_skips_nothing(client: PlainClient) -> None:
    client.start(consistency=plan_pb2.ConsistencySpec(mode="sync", nan_policy="skip"))
    for settings in ({"step": 1}, {"block": (0, 7)}):
        ack = client.push(client.gradient(nonfinite_tensors=["w"], **settings))
        assert ack.outcome == common_pb2.OUTCOME_REFUSED
    for step in range(2):
        assert client.push(client.gradient(step=step)).outcome == common_pb2.OUTCOME_STAGED
        assert client.pull(exact_step=step + 1)[2].version == step + 1
    client.push(client.gradient(step=2, nonfinite_tensors=["w"]))
    end = client.pull(exact_step=3)[2]
    assert (end.step, end.version) == (3, 2)


ASYNC: dict[str, tuple[dict[str, Any], str, int]] = {
    "number 0": ({"seq": 0}, "REFUSED", 2),
    "a duplicate": ({"seq": 1}, "DUPLICATE", 2),
    "one left out": ({"seq": 3}, "OUT_OF_SEQUENCE", 2),
    "a huge number": ({"seq": 2**64 - 1}, "OUT_OF_SEQUENCE", 2),
    "a given up one": ({"seq": 2, "commit": {"skip": True}}, "SKIPPED", 3),
}


@pytest.mark.parametrize("case", ASYNC)
def test_an_asynchronous_push_out_of_its_order_is_not_applied(client: PlainClient, case: str) -> None:
    settings, outcome, expected = ASYNC[case]
    client.start(consistency=plan_pb2.ConsistencySpec(mode="async"))
    client.push(client.gradient(seq=1))
    before = client.weights()
    ack = client.push(client.gradient(8.0, **settings))
    assert ack.outcome == common_pb2.Outcome.Value(f"OUTCOME_{outcome}")
    assert (ack.version, ack.next_seq) == (1, expected)
    assert client.weights() == before
    assert client.push(client.gradient(seq=expected)).outcome == common_pb2.OUTCOME_APPLIED
    assert client.weights() == tuple(value - RATE for value in before)


ASYNC_MALFORMED: dict[str, tuple[dict[str, Any], str, float]] = {
    "negative scale": ({"commit": {"scale": -1.0}}, "scale -1.0 of the gradient is not a positive finite", 1.0),
    "infinite scale": ({"commit": {"scale": INFINITY}}, "scale inf of the gradient is not a positive finite", 1.0),
    "scale that is no number": ({"commit": {"scale": NAN}}, "scale nan of the gradient is not a positive", 1.0),
    "base of the future": ({"base_max": 9}, "base version 9 is ahead of the shard.s version 0", 1.0),
    "nan": ({}, "gradient of 'w' .*has NaN or infinity; nothing was changed", NAN),
}


@pytest.mark.parametrize("case", ASYNC_MALFORMED)
def test_a_malformed_asynchronous_push_is_refused_and_its_number_stays_free(client: PlainClient, case: str) -> None:
    settings, sentence, value = ASYNC_MALFORMED[case]
    client.start(consistency=plan_pb2.ConsistencySpec(mode="async"))
    code = grpc.StatusCode.FAILED_PRECONDITION if case == "nan" else BAD
    refused(code, sentence, lambda: client.push(client.gradient(value, seq=1, **settings)))
    unchanged_async = client.pull()
    assert unchanged_async[0][W] == FIRST_W and unchanged_async[2].version == 0
    assert client.push(client.gradient(seq=1)).outcome == common_pb2.OUTCOME_APPLIED


def test_a_nan_from_any_client_is_skipped_where_the_job_skips(client: PlainClient) -> None:
    client.start(consistency=plan_pb2.ConsistencySpec(mode="async", nan_policy="skip"))
    assert client.push(client.gradient(NAN, seq=1)).outcome == common_pb2.OUTCOME_SKIPPED
    assert client.weights() == FIRST_W
    assert client.push(client.gradient(seq=2)).outcome == common_pb2.OUTCOME_APPLIED


HUGE = 5_000_000
TOO_LONG = "a message of .* bytes; the limit of Push is"
HUGE_HEADS: dict[str, tuple[Callable[[Frames], Frames], str]] = {
    "a task": (edit(HEADER, data__task="w" * HUGE), TOO_LONG),
    "a codec": (edit(HEADER, codec="w" * HUGE), TOO_LONG),
    "millions of empty buckets": (edit(HEADER, empty_buckets=[300] * (HUGE // 2)), TOO_LONG),
    "a bitmap": (edit(BUCKET, present=b"\1" * HUGE), TOO_LONG),
    "a name of a page": (edit(HEADER, data__task="w" * 2000), "head of a message has 2000 characters"),
    "a feature of a page": (
        edit(HEADER, data__required_features=["w" * 2000]),
        "head of a message has 2000 characters",
    ),
    "a long codec": (edit(HEADER, codec="w" * 100_000), "codec 'www.*"),
}


@pytest.mark.parametrize("case", HUGE_HEADS)
def test_a_head_of_absurd_size_is_refused_before_it_is_parsed(ready: PlainClient, case: str) -> None:
    change, says = HUGE_HEADS[case]
    code = grpc.StatusCode.RESOURCE_EXHAUSTED if says is TOO_LONG else BAD
    refused(code, says, lambda: ready.push(change(ready.gradient())))
    unchanged(ready)


def test_four_billion_replicas_cost_neither_memory_nor_time(ready: PlainClient) -> None:
    frames = ready.gradient(block=(0, 2**32 - 1))
    began_s, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ack = ready.push(frames)
    assert "outside the job's 1 replicas" in ack.reason
    # A bitmap of them would take 512 MB, and seconds in which the ps does nothing else.
    assert time.monotonic() - began_s < 5.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100_000


def test_an_oversized_message_is_refused_before_it_is_held(ready: PlainClient) -> None:
    frames = ready.gradient()
    frames[CHUNK].chunk.payload = bytes((64 << 20) + 1)
    refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max", lambda: ready.push(frames))
    unchanged(ready)
    ready.complete()


@pytest.mark.parametrize("sent", [1, 2, 3, 4, 5])
def test_a_stream_cut_half_way_applies_no_bucket_in_part_and_a_retry_completes_the_step(
    ready: PlainClient, ps: Ps, sent: int
) -> None:
    frames = ready.gradient()[:sent]
    handled = ps.store.shards[0].buckets[1]

    def requests() -> Iterator[parameter_server_pb2.PushRequest]:
        for frame in frames:
            yield parameter_server_pb2.PushRequest(frame=frame)
        # The header's empty buckets count as soon as it is read: then the stream is known to have arrived.
        wait_for(lambda: handled.step == 1, "the header to be read")
        raise ConnectionError("the worker has died")

    with pytest.raises(grpc.RpcError):
        ready.stub.Push(requests(), timeout=DEADLINE_S)
    unchanged(ready)
    ready.complete()

"""Payloads that are sent while others are still computed: order, retries, ends of every kind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from shardline.client.exchange.streaming_payloads import LivePayloads, SendQueue, Unready
from shardline.errors import UnreachableError
from shardline.waist import Payload

PATIENCE_S = 20.0


def payload(bucket: int) -> Payload:
    data = bytes([bucket]) * 4
    return Payload(bucket=bucket, dtype="uint8", elements=4, present=b"", data=data, raw_bytes=4, digest=1)


def live(
    count: int = 4,
    *,
    credit_bytes: int = 4,
    prepare: Callable[[int], Payload] = payload,
    interrupted: Callable[[], Exception | None] = lambda: None,
) -> LivePayloads:
    queue = SendQueue(range(count), [4] * count, credit_bytes)
    found = LivePayloads(queue, prepare, nbytes=4 * count, interrupted=interrupted)
    found.be_patient(PATIENCE_S)
    return found


def buckets(payloads: LivePayloads) -> list[int]:
    return [item.bucket for batch in payloads.batches() for item in batch]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=4) as found:
        yield found


def test_a_lane_waits_for_buckets_and_ends_when_they_have_all_come(pool: ThreadPoolExecutor) -> None:
    payloads = live()
    sending: Future[list[int]] = pool.submit(buckets, payloads)
    for bucket in (3, 2):
        payloads.offer(bucket)
    assert not sending.done()
    payloads.offer(0)
    payloads.close(empty=[1])
    assert sorted(sending.result(PATIENCE_S)) == [0, 2, 3]
    assert payloads.empty == (1,)
    assert (payloads.nbytes, payloads.raw_bytes, payloads.wire_bytes) == (16, 12, 12)


def test_ready_buckets_leave_by_priority_and_batch_by_batch() -> None:
    payloads = live(credit_bytes=8)
    for bucket in (3, 1, 2, 0):
        payloads.offer(bucket)
    payloads.close()
    assert [[item.bucket for item in batch] for batch in payloads.batches()] == [[0, 1], [2, 3]]
    assert payloads.order == [0, 1, 2, 3]


def test_a_retry_sends_the_same_bytes_in_the_same_order_first_and_encodes_nothing_twice() -> None:
    made: list[int] = []

    def prepare(bucket: int) -> Payload:
        made.append(bucket)
        return payload(bucket)

    payloads = live(prepare=prepare)
    payloads.offer(3)
    first = next(payloads.batches())
    payloads.offer(0)
    payloads.offer(1)
    payloads.close(empty=[2])
    again = [item for batch in payloads.batches() for item in batch]
    assert [item.bucket for item in again] == [3, 0, 1]
    assert again[0] is first[0]
    assert buckets(payloads) == made == [3, 0, 1]


def test_a_bucket_that_a_dead_call_is_still_encoding_is_not_encoded_a_second_time(pool: ThreadPoolExecutor) -> None:
    made: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def prepare(bucket: int) -> Payload:
        made.append(bucket)
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return payload(bucket)

    payloads = live(prepare=prepare)
    payloads.offer(0)
    dead = pool.submit(lambda: next(payloads.batches()))
    assert begun.wait(PATIENCE_S)
    payloads.close()
    retry = pool.submit(buckets, payloads)
    assert not retry.done()
    go_on.set()
    assert retry.result(PATIENCE_S) == [0]
    assert [item.bucket for item in dead.result(PATIENCE_S)] == [0]
    assert made == [0]


def test_an_interruption_ends_a_waiting_lane_and_a_later_one_goes_on(pool: ThreadPoolExecutor) -> None:
    asked: list[Exception] = []
    payloads = live(interrupted=lambda: asked[0] if asked else None)
    waiting = pool.submit(buckets, payloads)
    asked.append(KeyError("orders changed"))
    payloads.wake()
    with pytest.raises(KeyError, match="orders changed"):
        waiting.result(PATIENCE_S)
    asked.clear()
    payloads.offer(2)
    payloads.close(empty=[0, 1, 3])
    assert buckets(payloads) == [2]


def test_a_backward_pass_that_takes_long_ends_the_call_and_not_the_step() -> None:
    payloads = live()
    payloads.be_patient(0.02)
    with pytest.raises(Unready):
        buckets(payloads)
    assert not payloads.wait(0.01)
    payloads.offer(1)
    assert payloads.wait(PATIENCE_S)
    payloads.close()
    assert payloads.wait(PATIENCE_S)
    assert buckets(payloads) == [1]


def test_what_encoding_raises_ends_this_and_every_later_call(pool: ThreadPoolExecutor) -> None:
    def prepare(bucket: int) -> Payload:
        raise ArithmeticError(f"bucket {bucket} has NaN")

    payloads = live(prepare=prepare)
    other = pool.submit(payloads.wait, PATIENCE_S)
    payloads.offer(1)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="bucket 1 has NaN"):
            buckets(payloads)
    assert other.result(PATIENCE_S)


def test_nothing_is_kept_of_payloads_that_are_acknowledged() -> None:
    payloads = live()
    payloads.offer(0)
    payloads.close()
    held = [item for batch in payloads.batches() for item in batch]
    payloads.drop()
    assert payloads.order == []
    assert payloads.wire_bytes == 4
    with pytest.raises(RuntimeError, match="were released"):
        buckets(payloads)
    assert bytes(held[0].data) == b"\0" * 4


def test_payloads_are_gone_only_when_no_lane_is_at_a_bucket_any_more(pool: ThreadPoolExecutor) -> None:
    begun, go_on = threading.Event(), threading.Event()
    made: list[int] = []

    def prepare(bucket: int) -> Payload:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        # What it writes to is the next step's once drop() has returned.
        made.append(bucket)
        return payload(bucket)

    payloads = live(prepare=prepare, credit_bytes=8)
    for bucket in (0, 1):
        payloads.offer(bucket)
    given_up = pool.submit(buckets, payloads)
    assert begun.wait(PATIENCE_S)
    with pytest.raises(UnreachableError, match="still being prepared after 0 s"):
        payloads.drop(wait_s=0.01)

    def dropped() -> list[int]:
        payloads.drop()
        return list(made)

    found = pool.submit(dropped)
    threading.Timer(0.05, go_on.set).start()
    assert found.result(PATIENCE_S) == [0]
    with pytest.raises(RuntimeError, match="bucket 1 was already acknowledged"):
        given_up.result(PATIENCE_S)
    assert made == [0]
    assert payloads.order == []

"""Steps in one request: what is answered at once, what waits, and what is left to the stream."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest
import torch

from shardline.errors import NonFiniteError
from shardline.lanes.attachments import Attachments, Holder, Opening
from shardline.rpc.v1 import common_pb2, data_pb2
from shardline.server import incoming_push as quick
from shardline.server.at_once import SingleRequests
from shardline.server.calls import OpenCalls
from shardline.server.incoming_push import PushResult
from shardline_ps.store import ParameterStore
from tests.support.lanes import no_calls
from tests.support.pushes import (
    ELEMENTS,
    NBYTES,
    Segment,
    SegmentOffer,
    bucket_head,
    encoded,
    head,
    make_store,
    nothing_is_left,
    run,
)


class Published(Segment):
    def published(self, bucket: int, step: int) -> tuple[int, int]:  # type: ignore[override]
        return step & 1, bucket * NBYTES


class PublishedOffer(SegmentOffer):
    def open(self, holder: Holder, shard: Any, loop: Any, answer: Any) -> Opening:
        return Opening(attachment=Published(holder, self._memory))


class Steps:
    """Workers that push a step of one bucket in place and pull the next, each in one request."""

    def __init__(self, store: ParameterStore) -> None:
        self.store = store
        self.attachments = Attachments()
        self.attachments.offer(PublishedOffer(encoded(store, 0)))
        self.calls, self.results = OpenCalls(), list[PushResult]()
        self.single = SingleRequests(store, self.attachments, self.calls, self.results.append)
        self.written: list[data_pb2.PushPullReply] = []

    def request(self, worker: int, step: int = 0) -> data_pb2.PushPullRequest:
        holder = Holder(task=f"worker/{worker}", incarnation=1, shard=0)
        shard: Any = self.store.shards[0]
        number, _ = self.attachments.open("shm", holder, shard, asyncio.get_running_loop(), no_calls)
        frame = head(self.store, worker, data={"lane": common_pb2.LANE_SHM, "attachment": number}, step=step)
        frame.refs.add(bucket=bucket_head(self.store, 0))
        frame.commit.CopyFrom(data_pb2.Commit(buckets=1, bytes=NBYTES))
        pull = data_pb2.PullRequest(data=frame.header.data, exact_step=step + 1, wait_s=20.0)
        return data_pb2.PushPullRequest(push=frame, pull=pull)

    async def write(self, message: data_pb2.PushPullReply) -> None:
        self.written.append(message)

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        """There is none."""


def told(messages: list[data_pb2.PushPullReply]) -> tuple[list[int], list[int]]:
    """(outcomes of acks, steps of the buckets that were served) in these replies."""
    acks = [message.ack.outcome for message in messages if message.HasField("ack")]
    return acks, [state.step for message in messages for state in message.pull.buckets]


def test_a_small_step_is_answered_at_once_in_one_message() -> None:
    async def main() -> None:
        steps = Steps(make_store(replicas=1))
        answered = steps.single.answer(steps.request(0))
        assert answered is not None and answered.rest is None and len(answered.replies) == 1
        assert told(answered.replies) == ([common_pb2.OUTCOME_COUNTED], [1])
        assert [result.task for result in steps.results] == ["worker/0"]
        assert torch.equal(steps.store.shards[0].buckets[0].values, torch.full((ELEMENTS,), 0.5))
        await nothing_is_left(steps.store)
        steps.store.close()

    run(main)


def test_a_small_step_that_waits_for_others_is_acknowledged_at_once_and_served_when_they_came() -> None:
    async def main() -> None:
        steps = Steps(make_store(replicas=2))
        first = steps.single.answer(steps.request(0))
        assert first is not None and first.rest is not None
        assert told(first.replies) == ([common_pb2.OUTCOME_COUNTED], [])
        waiting = asyncio.create_task(first.rest(steps))
        await asyncio.sleep(0)
        assert [call.senders for call in steps.calls.open] == [{("worker/0", 1)}], "a fence can end it"
        last = steps.single.answer(steps.request(1))
        assert last is not None and last.rest is None
        assert told(last.replies) == ([common_pb2.OUTCOME_COUNTED], [1])
        await waiting
        assert told(steps.written) == ([], [1]) and not steps.calls.open
        await nothing_is_left(steps.store)
        steps.store.close()

    run(main)


def test_a_step_that_threads_count_waits_in_a_task_and_is_answered_in_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        steps = Steps(make_store(replicas=1))
        monkeypatch.setattr(quick, "QUICK_BYTES", NBYTES - 1)
        answered = steps.single.answer(steps.request(0))
        assert answered is not None and answered.replies == [] and answered.rest is not None
        await answered.rest(steps)
        assert len(steps.written) == 1 and told(steps.written) == ([common_pb2.OUTCOME_COUNTED], [1])
        await nothing_is_left(steps.store)
        steps.store.close()

    run(main)


@pytest.mark.parametrize("patience_s", [0.0, 0.05])
def test_a_step_in_one_request_that_finds_no_room_is_told_to_wait_and_pulls_nothing(patience_s: float) -> None:
    async def main() -> None:
        steps = Steps(make_store(replicas=4))
        staging = steps.store.staging
        staging.ledger.limit, steps.store.staging_wait_s = staging.ledger.reserved, patience_s
        answered = steps.single.answer(steps.request(3))
        assert answered is not None
        if answered.rest is not None:
            await answered.rest(steps)
        assert told([*answered.replies, *steps.written]) == ([common_pb2.OUTCOME_WAITING], [])
        assert [result.task for result in steps.results] == ["worker/3"] and not steps.calls.open
        await nothing_is_left(steps.store)
        steps.store.close()

    run(main)


def test_a_step_whose_wait_is_cancelled_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        steps = Steps(make_store(replicas=2, threads=1))
        monkeypatch.setattr(quick, "QUICK_BYTES", NBYTES - 1)
        gate = threading.Event()
        blocked = steps.store.pool.submit(gate.wait, 20.0)
        answered = steps.single.answer(steps.request(0))
        assert answered is not None and answered.rest is not None
        task = asyncio.create_task(answered.rest(steps))
        await asyncio.sleep(0.01)
        assert not steps.written
        task.cancel()
        await asyncio.sleep(0.01)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert blocked.result(20.0) and not steps.calls.open
        await nothing_is_left(steps.store)
        steps.store.close()

    run(main)


def test_a_step_with_nan_ends_its_attachment() -> None:
    async def main() -> None:
        steps = Steps(make_store(replicas=1))
        steps.attachments.offer(PublishedOffer(torch.full((ELEMENTS,), math.nan).numpy().tobytes()))
        with pytest.raises(NonFiniteError, match="t0"):
            steps.single.answer(steps.request(0))
        assert steps.attachments.count() == {"shm": 0}
        assert torch.equal(steps.store.shards[0].buckets[0].values, torch.ones(ELEMENTS))
        await nothing_is_left(steps.store)
        steps.store.close()

    run(main)


@pytest.mark.parametrize("change", ["several requests", "asynchronous", "first values"])
def test_what_is_no_step_in_one_request_is_left_alone(change: str) -> None:
    async def main() -> None:
        steps = Steps(make_store("async" if change == "asynchronous" else "sync", replicas=1))
        request = steps.request(0)
        if change == "several requests":
            request.push.ClearField("commit")
        elif change == "first values":
            request.push.header.kind = data_pb2.PUSH_KIND_INIT
        assert steps.single.answer(request) is None
        assert not steps.results and steps.attachments.count() == {"shm": 1}
        steps.store.close()

    run(main)

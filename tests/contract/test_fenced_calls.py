"""A fence ends the calls of the life it fences, at once, and nobody else's."""

from __future__ import annotations

import queue
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from shardline.rpc.v1 import common_pb2, data_pb2, parameter_server_pb2
from shardline.server import conversation as push_pull_servicer, data_plane
from shardline.server.pull_sender import New
from tests.support.cluster import Ps
from tests.support.plain_client import DEADLINE_S, FIRST_W, PlainClient
from tests.support.refusals import refused, says
from tests.support.waiting import wait_for

SENTENCE = "the call was ended: this incarnation of worker/1 is fenced"
HALF = 3
"""Frames of a push until the first chunk of its bucket."""


class Half:
    """A stream that stops in the middle of a bucket, and is never closed by its sender."""

    def __init__(self, client: PlainClient, method: str, replica: int, *, pull: bool = False) -> None:
        self._frames: queue.Queue[Any] = queue.Queue()
        request = parameter_server_pb2.PushRequest if method == "Push" else data_pb2.PushPullRequest
        if pull:
            self._frames.put(data_pb2.PushPullRequest(pull=client.pull_request(exact_step=1, wait_s=15.0)))
        frames = client.gradient(block=(replica, 1))
        self.rest = frames[HALF:]
        for frame in frames[:HALF]:
            self._put(request, frame)
        self._request = request
        call = getattr(client.stub, method)
        self.call = (call.future if method == "Push" else call)(iter(self._frames.get, None), timeout=DEADLINE_S)

    def _put(self, request: Any, frame: data_pb2.PushFrame) -> None:
        self._frames.put(request(**{"frame" if request is parameter_server_pb2.PushRequest else "push": frame}))

    def complete(self) -> None:
        for frame in self.rest:
            self._put(self._request, frame)
        self._frames.put(None)

    def replies(self) -> list[Any]:
        return [self.call.result(10.0)] if self._request is parameter_server_pb2.PushRequest else list(self.call)

    def close(self) -> None:
        self.call.cancel()
        self._frames.put(None)


def member(client: PlainClient, **incarnations: int) -> None:
    members = [
        parameter_server_pb2.Member(task=task.replace("_", "/"), incarnation=number)
        for task, number in incarnations.items()
    ]
    client.call("SetMembership", parameter_server_pb2.SetMembershipRequest(term=client.term, members=members))


@pytest.fixture
def two(ps: Ps, client: PlainClient) -> PlainClient:
    """A client whose shard trains two replicas and admits two workers."""
    client.start(replicas=2)
    member(client, worker_0=1, worker_1=1)
    return client


def ended(function: Callable[[], Any]) -> None:
    refused(grpc.StatusCode.UNAVAILABLE, SENTENCE, function)


@pytest.mark.parametrize(("method", "pull"), [("Push", False), ("PushPull", False), ("PushPull", True)])
def test_a_fence_ends_half_a_push_and_gives_its_room_back_while_others_go_on(
    two: PlainClient, ps: Ps, method: str, pull: bool
) -> None:
    staging = ps.store.staging
    other = Half(two, method, 0, pull=pull)
    wait_for(lambda: staging.leased > 0, "the first push to be half there")
    one = staging.leased
    two.task = "worker/1"
    zombie = Half(two, method, 1, pull=pull)
    wait_for(lambda: staging.leased == 2 * one, "the second push to be half there")
    member(two, worker_0=1, worker_1=2)
    ended(zombie.replies)
    wait_for(lambda: staging.leased == one, "the room to be given back")
    # Its next life completes the step.
    two.incarnation = 2
    assert two.push(two.gradient(block=(1, 1))).outcome == common_pb2.OUTCOME_COUNTED
    other.complete()
    acks = [reply.ack.outcome for reply in other.replies() if method == "Push" or reply.HasField("ack")]
    assert acks == [common_pb2.OUTCOME_COUNTED]
    assert two.weights() == tuple(value - 0.5 for value in FIRST_W)
    wait_for(lambda: staging.leased == 0 and not ps.servicer.calls.open, "all calls to be over")
    zombie.close()
    other.close()


def test_a_fence_ends_a_pull_that_waits(two: PlainClient, ps: Ps) -> None:
    other = two.stub.Pull(two.pull_request(exact_step=1, wait_s=15.0), timeout=DEADLINE_S)
    two.task = "worker/1"
    zombie = two.stub.Pull(two.pull_request(exact_step=1, wait_s=15.0), timeout=DEADLINE_S)
    wait_for(lambda: len(ps.servicer.calls.open) == 2, "both pulls to wait")
    member(two, worker_0=1, worker_1=2)
    ended(lambda: list(zombie))
    assert len(ps.servicer.calls.open) == 1
    other.cancel()
    wait_for(lambda: not ps.servicer.calls.open, "the other pull to be over")


@pytest.mark.parametrize("method", ["Pull", "PushPull"])
def test_a_fence_is_told_to_one_that_reads_too_slowly_to_be_sent_more(
    two: PlainClient, ps: Ps, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []

    async def endless(*_: object, new: New) -> AsyncIterator[Any]:
        while True:
            made.append(time.monotonic())
            reply, frame = new()
            frame.chunk.payload = bytes(1 << 20)
            yield reply

    monkeypatch.setattr(data_plane, "pull", endless)
    monkeypatch.setattr(push_pull_servicer, "pull", endless)
    two.task = "worker/1"
    zombie: Any
    if method == "Pull":
        zombie = two.stub.Pull(two.pull_request(exact_step=1), timeout=DEADLINE_S)
    else:
        pull = data_pb2.PushPullRequest(pull=two.pull_request(exact_step=1))
        zombie = two.stub.PushPull(iter([pull]), timeout=DEADLINE_S)
    wait_for(lambda: bool(made) and time.monotonic() - made[-1] > 0.5, "the reader to hold back what is sent")
    member(two, worker_0=1, worker_1=2)
    wait_for(lambda: not ps.servicer.calls.open, "the call to be over")
    ended(lambda: list(zombie))


def test_a_fenced_worker_that_comes_again_is_told_why_it_is_not_admitted(two: PlainClient, ps: Ps) -> None:
    two.task = "worker/1"
    zombie = Half(two, "PushPull", 1)
    wait_for(lambda: ps.store.staging.leased > 0, "the push to be half there")
    member(two, worker_0=1, worker_1=2)
    ended(zombie.replies)
    ack = two.push(two.gradient(block=(1, 1)))
    assert ack.outcome == common_pb2.OUTCOME_FENCED and says(
        ack.reason, "worker/1 incarnation 0x1 is not admitted, 0x2"
    )
    zombie.close()


def test_a_pull_that_waits_hears_at_once_that_the_ps_was_configured_anew(two: PlainClient, ps: Ps) -> None:
    waiting = two.stub.Pull(two.pull_request(exact_step=1, wait_s=15.0), timeout=DEADLINE_S)
    wait_for(lambda: any(signal.waiters for signal in ps.store.signals.values()), "the pull to wait")
    began_s = time.monotonic()
    two.call("Configure", two.configuration(replicas=2, timeline=two.timeline + 1))
    end = list(waiting)[-1].frame.end
    assert end.outcome == common_pb2.OUTCOME_WRONG_TIMELINE and end.timeline == two.timeline + 1
    assert time.monotonic() - began_s < 10.0

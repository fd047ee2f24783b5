"""Common to all lanes: the RPCs of one task to one shard, and how they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

from shardline.core.image import BucketImage
from shardline.core.outcome import Outcome
from shardline.errors import ProtocolError, UnreachableError
from shardline.lanes.base import Lane, LaneUnavailable
from shardline.lanes.call_frames import CallError
from shardline.lanes.call_socket import CallSocket, Item
from shardline.rpc.channel import Peer, end_call
from shardline.rpc.errors import code_and_details, from_code, from_status
from shardline.rpc.messages.convert import ImageAssembler
from shardline.rpc.messages.data import (
    PullReader,
    ack_from_proto,
    open_lane_request,
    outcome_from_proto,
    progress_request,
    ps_stub,
    standing_from_proto,
    state_frames,
    state_request,
)
from shardline.rpc.v1 import data_pb2, parameter_server_pb2
from shardline.waist import Ack, Arrival, End, Exchanged, Push, Sender, Sink, Standing, Want

LAST_WORD_S = 1.0
"""Seconds to wait for the shard's own answer after bytes on another connection broke off."""


class NotAdmittedError(Exception):
    """The shard currently accepts nothing from this sender; `outcome` is what a push or pull would get."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome

    def exchanged(self, contributions: Sequence[Push]) -> Exchanged:
        """The result of an exchange that could not begin."""
        if contributions:
            return Exchanged(acks=(Ack(outcome=self.outcome, reason=str(self)),), end=None)
        return Exchanged(acks=(), end=End(outcome=self.outcome, reason=str(self)))


class ShardCalls(Lane):
    """The calls of one lane to one shard. Used by one thread at a time; any thread may call cancel()."""

    name = ""

    def __init__(self, peer: Peer, shard: int, elements: Sequence[int]) -> None:
        self._peer = peer
        self._shard = shard
        self._elements = tuple(elements)
        self._stub = ps_stub(peer)
        self._lock = threading.Lock()
        self._call: Any = None
        """The gRPC call that runs."""
        self._sending: CallSocket | None = None
        """The socket with the call that runs."""
        self._cancelled = False

    def standing(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        self._arm()
        request = progress_request(sender, self._shard, replicas)
        return standing_from_proto(self._ask(self._stub.Progress, request, "Progress", timeout_s))

    def state(
        self, sender: Sender, step: int, buckets: Sequence[int], *, timeout_s: float
    ) -> Sequence[BucketImage] | None:
        self._arm()
        images: list[BucketImage] = []
        # Values and at most a handful of states, each as large as the largest bucket in float64.
        assembler = ImageAssembler(max_bytes=64 * max(self._elements, default=0) * 8 + (1 << 20))
        start_s = time.monotonic()
        try:
            for frame in self._started(
                self._stub.GetState(state_request(sender, self._shard, step, buckets), timeout=timeout_s)
            ):
                if (image := assembler.read(frame)) is not None:
                    images.append(image)
                if frame.HasField("end"):
                    outcome = outcome_from_proto(frame.outcome)
                    if outcome is Outcome.SERVED:
                        return images
                    if outcome is Outcome.OVERTAKEN:
                        return None
                    raise NotAdmittedError(outcome, frame.reason)
        except grpc.RpcError as error:
            waited_s = time.monotonic() - start_s
            raise from_status(error, peer=str(self._peer), what="GetState", waited_s=waited_s) from error
        finally:
            self._ended()
        raise ProtocolError(f"{self._peer}: GetState of step {step} ended early")

    def bring_state(self, sender: Sender, images: Sequence[BucketImage], *, timeout_s: float) -> Outcome:
        self._arm()
        frames = state_frames(sender, self._shard, images)
        return outcome_from_proto(self._ask(self._stub.PutState, frames, "PutState", timeout_s).outcome)

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._call is not None:
                self._call.cancel()
            if self._sending is not None:
                self._sending.cancel()

    def close(self) -> None:
        """End a running call. The channel belongs to Peers."""
        self.cancel()

    def _arm(self) -> None:
        with self._lock:
            self._cancelled = False

    def _started(self, call: Any) -> Any:
        with self._lock:
            self._call = call
            if self._cancelled:
                call.cancel()
        return call

    def _ended(self) -> None:
        with self._lock:
            call, self._call, self._sending = self._call, None, None
        if call is not None:
            end_call(call)

    def _ask(self, method: Any, request: Any, what: str, timeout_s: float) -> Any:
        """Make one unary call that cancel() ends. Raises the error of rpc.errors.from_status."""
        start_s = time.monotonic()
        try:
            return self._started(method.future(request, timeout=timeout_s)).result()
        except grpc.FutureCancelledError as error:
            raise UnreachableError(f"{self._peer}: {what} was abandoned") from error
        except grpc.RpcError as error:
            waited_s = time.monotonic() - start_s
            raise from_status(error, peer=str(self._peer), what=what, waited_s=waited_s) from error
        finally:
            self._ended()

    def open_attachment(self, sender: Sender, *, timeout_s: float) -> parameter_server_pb2.OpenLaneReply:
        """Ask the shard for an attachment of this lane.

        Raises LaneUnavailable if it offers none, NotAdmittedError if it currently accepts nothing from this sender.
        """
        request = open_lane_request(sender, self._shard, self.name)
        try:
            reply: parameter_server_pb2.OpenLaneReply = self._ask(self._stub.OpenLane, request, "OpenLane", timeout_s)
        except ProtocolError as error:
            cause = error.__cause__
            if isinstance(cause, grpc.Call) and cause.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise LaneUnavailable(f"{self._peer} runs a version that supports only lane grpc") from error
            raise
        outcome = outcome_from_proto(reply.outcome)
        if outcome is Outcome.REFUSED:
            raise LaneUnavailable(f"{self._peer}: {reply.reason}")
        if outcome is not Outcome.SERVED:
            raise NotAdmittedError(outcome, reply.reason)
        return reply

    def converse(
        self,
        requests: Iterable[data_pb2.PushPullRequest],
        contributions: Sequence[Push],
        want: Want | None,
        sink: Sink,
        *,
        timeout_s: float,
        single: bool = False,
        fill: Callable[[Arrival], None] = lambda arrival: None,
        calls: CallSocket | None = None,
    ) -> Exchanged:
        """Run one PushPull to its end; see Lane.exchange.

        single: there is one request; this thread makes and sends it.
        fill: takes a bucket whose bytes come by the lane's attachment. It and `requests` raise UnreachableError if the
        attachment breaks: then the caller gets the shard's own answer, if one comes soon.
        calls: the attachment's socket for calls; None = gRPC.
        """
        talk = _Conversation(sink, self._elements, fill, single=single)
        try:
            if calls is not None:
                # The replies to a call over the attachment's own socket.
                with self._lock:
                    self._sending = calls
                    if self._cancelled:
                        raise CallError(grpc.StatusCode.CANCELLED, "abandoned before it began")
                replies = calls.call(talk, requests, timeout_s, single=single)
            else:
                replies = _statuses(self.begin(talk, requests, timeout_s))
            for reply in replies:
                if not talk.heard(reply):
                    # The pull would wait for a step that can't close without this push.
                    return talk.result()
        except CallError as error:
            raise talk.cause(error, str(self._peer)) from error
        finally:
            talk.close()
            self._ended()
        if talk.broken:
            raise talk.broken[0]
        if len(talk.acks) != len(contributions) or (want is not None and talk.reader.end is None):
            raise ProtocolError(
                f"{self._peer}: the exchange with shard {self._shard} ended with {len(talk.acks)} of "
                f"{len(contributions)} acks" + ("" if talk.reader.end else " and without the end of the pull")
            )
        return talk.result()

    def begin(self, talk: _Conversation, requests: Iterable[data_pb2.PushPullRequest], timeout_s: float) -> Any:
        """The replies to requests that a gRPC thread sends."""
        call = self._started(self._stub.PushPull(talk.sending(self._until_cancelled(requests)), timeout=timeout_s))
        talk.began(call)
        call.add_done_callback(talk.over)
        return call

    def _until_cancelled(self, requests: Iterable[data_pb2.PushPullRequest]) -> Iterator[data_pb2.PushPullRequest]:
        """The requests; what becomes ready after cancel() never leaves, so it is not counted."""
        for request in requests:
            if self._cancelled:
                raise UnreachableError(f"{self._peer}: the exchange was abandoned")
            yield request


def _statuses(replies: Iterable[data_pb2.PushPullReply]) -> Iterator[data_pb2.PushPullReply]:
    """The replies of a gRPC call, whose error becomes a CallError."""
    try:
        yield from replies
    except grpc.RpcError as error:
        raise CallError(*code_and_details(error)) from error


class _Conversation:
    """One PushPull: its replies, and errors on our side."""

    def __init__(self, sink: Sink, elements: Sequence[int], fill: Callable[[Arrival], None], *, single: bool) -> None:
        self._fill = fill
        self._lock = threading.Lock()
        self._call: Any = None
        self._given_up = False
        self._start_s = time.monotonic()
        self._push_s = 0.0
        self._patience: threading.Timer | None = None
        self.reader = PullReader(sink, elements)
        self.acks: list[Ack] = []
        self.broken: list[Exception] = []
        """Errors on our side; the first one counts."""
        self._over = None if single else threading.Event()
        """Set when the call has ended, for the thread that sends its requests."""

    def began(self, call: Any) -> None:
        with self._lock:
            self._call = call
            if self._given_up:
                call.cancel()

    def over(self, call: Any) -> None:
        if self._over is not None:
            self._over.set()

    def _give_up(self) -> None:
        """End this call, but no later one of the same lane."""
        with self._lock:
            self._given_up = True
            if self._call is not None:
                self._call.cancel()

    def sending(self, requests: Iterable[Item]) -> Iterator[Item]:
        try:
            yield from requests
        except Exception as error:
            self.broken.append(error)
            if isinstance(error, UnreachableError) and self._over is not None:
                self._over.wait(LAST_WORD_S)
            self._give_up()

    def follow(self, requests: Iterator[Item]) -> None:
        try:
            next(requests, None)
        except UnreachableError as error:
            self._await_last_word(error)

    def _await_last_word(self, error: UnreachableError) -> None:
        """The attachment broke: wait a little for the shard's own answer."""
        self.broken.append(error)
        self._patience = threading.Timer(LAST_WORD_S, self._give_up)
        self._patience.daemon = True
        self._patience.start()

    def heard(self, reply: data_pb2.PushPullReply) -> bool:
        """Process one reply; False = a push was not accepted, so nothing else is worth waiting for."""
        if reply.HasField("ack"):
            self.acks.append(ack_from_proto(reply.ack))
            self._push_s = time.monotonic() - self._start_s
            if not self.acks[-1].accepted:
                return False
        if reply.HasField("pull"):
            for arrival in self.reader.feed(reply.pull):
                if self._patience is None:
                    try:
                        self._fill(arrival)
                    except UnreachableError as error:
                        self._await_last_word(error)
        return True

    def cause(self, error: CallError, peer: str) -> Exception:
        """The error for the caller of a failed call: the shard's own status, unless this side gave up."""
        first = self.broken[0] if self.broken else None
        if first is not None and (error.code is grpc.StatusCode.CANCELLED or not isinstance(first, UnreachableError)):
            return first
        waited_s = time.monotonic() - self._start_s
        return from_code(error.code, str(error), peer=peer, what="PushPull", waited_s=waited_s)

    def result(self) -> Exchanged:
        return Exchanged(acks=tuple(self.acks), end=self.reader.end, push_s=self._push_s)

    def close(self) -> None:
        """Release threads that wait for the last answer."""
        if self._over is not None:
            self._over.set()
        if self._patience is not None:
            self._patience.cancel()

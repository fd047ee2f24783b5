"""Joining: a task asks the chief for admission until it is admitted, refused for good, or out of time."""

from __future__ import annotations

import logging
import random
import threading
import uuid
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import grpc

from shardline.codecs import CODECS
from shardline.core.outcome import FEATURES, PROTOCOL_MINOR
from shardline.core.spec import JobSpec
from shardline.core.timeouts import Timeouts
from shardline.core.waiting import Waiting
from shardline.errors import MismatchError, UnreachableError
from shardline.host.awake import LONGEST_S, awake_s
from shardline.rpc.channel import is_retried
from shardline.rpc.client import ChiefClient
from shardline.rpc.messages.fields import to_message
from shardline.rpc.v1 import access_pb2, chief_pb2, common_pb2

log = logging.getLogger("shardline.link")


@dataclass(frozen=True, kw_only=True)
class Applicant:
    """A task's description of itself for its Join."""

    role: str
    index: int | None
    """None: the chief assigns one."""
    address: str = ""
    """Address it serves at, "host:port"; "" = none."""
    metrics_address: str = ""
    device: str = ""
    """Device that it computes on, such as "cuda:1"."""
    job: JobSpec | None = None
    """The job according to this task; the chief compares it with its own."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """Facts that affect the last bits of its gradients; see shardline.client.api.joining."""
    stable_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identifies this process when it asks again."""

    @property
    def task(self) -> str:
        """Name of the task; the role alone until the chief has assigned an index."""
        return self.role if self.index is None else f"{self.role}/{self.index}"


class _Away(Exception):
    """The chief went away during a request."""


@dataclass(eq=False)
class JoinAttempts:
    """One task's attempts to join. cancelled: the process was asked to end. closed: this side has given up."""

    client: ChiefClient
    timeouts: Timeouts
    applicant: Applicant
    _: KW_ONLY
    cancelled: threading.Event
    closed: threading.Event
    _wake: threading.Event = field(default_factory=threading.Event, init=False)

    def cancel(self) -> None:
        """End a running join() early; may be called from a signal's thread."""
        self.cancelled.set()
        self.client.peer.cancel()
        self._wake.set()

    def join(self) -> chief_pb2.JoinReply | None:
        """Ask until the chief admits this task, even before the chief is up, and log meanwhile what is awaited.

        None if the process was asked to end. Raises UnreachableError if the time for joining is over, MismatchError if
        the chief refuses for good, or FencedError.
        """
        task, timeout_s = self.applicant.task, self.timeouts.join_s
        start_s = awake_s()
        waiting = Waiting(start_s, start_s + timeout_s)
        request = self._request()
        if not self.client.peer.await_name(timeout_s):
            return None
        reason = ""
        while True:
            left_s = waiting.deadline_s - awake_s()
            if left_s <= 0 or self.closed.is_set():
                raise UnreachableError(
                    f"{task}: {self.client.peer} did not admit this task within {timeout_s:.0f} s: {reason}"
                )
            try:
                reply = self._ask(request, waiting)
            except _Away as away:
                reason = str(away)
            else:
                if reply is None or reply.accepted:
                    return reply
                reason = reply.reason
                if not reply.retry:
                    raise MismatchError(f"{task}: the chief refused this task: {reply.reason}")
            self._tell(waiting, reason)
            if self._wake.wait(min(0.2 + 0.3 * random.random(), max(0.0, left_s))) and self.cancelled.is_set():
                return None
            self._wake.clear()

    def _request(self) -> chief_pb2.JoinRequest:
        applicant = self.applicant
        hello = common_pb2.Hello(
            protocol_minor=PROTOCOL_MINOR,
            features=FEATURES,
            codecs=CODECS.names,
            lanes=[common_pb2.LANE_GRPC],
            machine=applicant.machine,
        )
        differing = {"hello": hello, "protocol_minor": PROTOCOL_MINOR}
        return to_message(chief_pb2.JoinRequest, applicant, without={"machine"}, **differing)

    def _tell(self, waiting: Waiting, why: str) -> None:
        if sentence := waiting.sentence(awake_s(), str(self.client.peer), why):
            log.info("%s", sentence)

    def _ask(self, request: chief_pb2.JoinRequest, waiting: Waiting) -> chief_pb2.JoinReply | None:
        """One Join, which waits for a chief that isn't up yet; None if the process was asked to end meanwhile."""
        start_s = awake_s()
        left_s = max(0.1, waiting.deadline_s - start_s)
        prover = self.client.peer.prover
        if not prover.ready:
            # Asked for beforehand: a call that waits for its challenge could not be cancelled.
            reply = self._await(self.client.access.Challenge, access_pb2.ChallengeRequest(), left_s, waiting)
            if reply is None:
                return None
            prover.answer(reply.challenge)
            left_s = max(0.1, left_s - (awake_s() - start_s))
        joined: chief_pb2.JoinReply | None = self._await(self.client.stub.Join, request, left_s, waiting)
        return joined

    def _await(self, method: Any, request: Any, left_s: float, waiting: Waiting) -> Any:
        """The reply to one call of join(), which waits for the chief; None if the process was asked to end."""
        start_s = awake_s()
        call = method.future(request, timeout=left_s, wait_for_ready=True)
        call.add_done_callback(lambda _: self._wake.set())
        while not call.done():
            # The call's own deadline limits this.
            self._wake.wait(waiting.pause_s(awake_s()) or 1.0)
            self._wake.clear()
            if self.cancelled.is_set() and not call.done():
                call.cancel()
                return None
            if not call.done() and waiting.pause_s(awake_s()) <= 0.0:
                self._tell(waiting, self.client.peer.obstacle())
        try:
            return call.result()
        except grpc.RpcError as error:
            waited_s = awake_s() - start_s
            failure = self.client.peer.failure(error, what="Join", waited_s=waited_s, connecting=True)
            if is_retried(error) and waited_s < left_s - LONGEST_S:
                # It was up, so it may come back, or this process was stopped until the call's deadline had passed; if
                # the chief had admitted this process, it will do so again.
                raise _Away(str(failure)) from error
            raise failure from error

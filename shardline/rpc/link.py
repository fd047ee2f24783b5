"""A task's connection to its chief: join, heartbeats, orders."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import grpc

from shardline.core.identity import Identity
from shardline.core.orders import BarrierPlace, Orders, Phase, StepReport
from shardline.core.status import TaskLinks, Traffic, Usage
from shardline.core.timeouts import Timeouts
from shardline.core.waiting import Waiting
from shardline.errors import FencedError, InternalError, ShardlineError, UnreachableError
from shardline.host.awake import awake_s
from shardline.host.printable import unicode
from shardline.rpc.channel import RETRIED
from shardline.rpc.client import ChiefClient
from shardline.rpc.joining import Applicant, JoinAttempts
from shardline.rpc.limits import MAX_SENTENCE
from shardline.rpc.messages.fields import from_message, to_message
from shardline.rpc.report_queue import PassQueue, ReportQueue
from shardline.rpc.v1 import chief_pb2, parameter_server_pb2
from shardline.security import PLAIN, Security


@dataclass(frozen=True, kw_only=True)
class BeatFacts:
    """Called on the heartbeat thread; None = this task has none of it."""

    ps: Callable[[], parameter_server_pb2.PsStatusReply] | None = None
    """The status of a parameter server."""
    traffic: Callable[[], Traffic] | None = None
    usage: Callable[[], Usage] | None = None
    links: Callable[[], TaskLinks] | None = None
    passes: PassQueue | None = None
    """Passes of a pipeline, on the clock of time.monotonic()."""

    figures: Callable[[], Mapping[str, float]] | None = None
    """Figures that change with every step."""

    def write(self, beat: chief_pb2.Beat) -> None:
        """Write them into a heartbeat."""
        if self.ps is not None:
            beat.ps.CopyFrom(self.ps())
        if self.traffic is not None:
            beat.traffic.CopyFrom(to_message(parameter_server_pb2.Traffic, self.traffic()))
        if self.usage is not None:
            beat.usage.CopyFrom(to_message(chief_pb2.Usage, self.usage()))
        if self.links is not None:
            beat.links.CopyFrom(to_message(chief_pb2.TaskLinks, self.links()))
        if self.figures is not None:
            beat.figures.update(self.figures())
        if self.passes is not None:
            beat.passes.extend(to_message(chief_pb2.PassReport, one) for one in self.passes.take())
            beat.clock_s = time.monotonic()

    @property
    def waiting(self) -> bool:
        """Whether there is something that another heartbeat should still take."""
        return bool(self.passes)


NOTHING = BeatFacts()


log = logging.getLogger("shardline.link")
T = TypeVar("T")

STREAM_S = 3600.0
"""Deadline of one heartbeat stream, in seconds; the next one follows at once."""
GOODBYE_S = 2.0
"""Seconds that an ending task waits for the chief to take its last heartbeat."""


class ChiefLink:
    """Joins the chief, sends heartbeats from a thread, and provides the chief's orders.

    on_orders is called on the heartbeat thread whenever orders change; it must not block.
    """

    def __init__(
        self,
        chief_address: str,
        timeouts: Timeouts,
        applicant: Applicant,
        *,
        on_orders: Callable[[Orders], None] | None = None,
        facts: BeatFacts = NOTHING,
        cancelled: threading.Event | None = None,
        security: Security = PLAIN,
    ) -> None:
        self.client = ChiefClient(chief_address, timeouts, security)
        self.timeouts = timeouts
        self.task = applicant.task
        self.incarnation = 0
        self.term = 0
        self.secret = b""
        self._on_orders = on_orders
        self._facts = facts
        self._lock = threading.Condition()
        self.orders = Orders()
        self._waiting: Waiting | None = None
        """The log of the current wait for other tasks."""
        self._reports = ReportQueue()
        self._step = 0
        self._leaving = False
        self._finished = False
        self._failure: tuple[str, int] | None = None
        self._failure_sent = threading.Event()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._dropped = False
        self._call: grpc.Call | None = None
        self._thread: threading.Thread | None = None
        self._joining = JoinAttempts(
            self.client, timeouts, applicant, cancelled=cancelled or threading.Event(), closed=self._closed
        )
        self._broken_s: float | None = None
        """Since when there has been no working stream; None while there is one."""
        self.lost: ShardlineError | None = None
        self.figures: dict[str, float] = {}
        self._barrier: BarrierPlace | None = None
        self._suspects: tuple[int, tuple[str, ...]] = (0, ())
        """Unreachable tasks, and the timeline in which they are."""

    # Joining

    def cancel_join(self) -> None:
        """End a running join() early; may be called from a signal's thread."""
        self._joining.cancel()

    def join(self) -> bool:
        """Join, and start the heartbeat; see JoinAttempts.join(). False if the process was asked to end."""
        reply = self._joining.join()
        if reply is None:
            return False
        self.task = reply.task
        self.incarnation = reply.incarnation
        self.secret = reply.secret
        self.term = reply.term
        self._thread = threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True)
        self._thread.start()
        return True

    @property
    def identity(self) -> Identity:
        """The identity of this task; valid once it has joined."""
        return Identity(self.task, self.incarnation, self.secret)

    # What the task reports

    def set_step(self, step: int) -> None:
        """Set the latest step, sent with the next heartbeat."""
        self._step = step

    def report(self, report: StepReport) -> None:
        self._reports.add(report)

    def beat_now(self) -> None:
        """Send a heartbeat without waiting for the interval."""
        self._wake.set()

    def leave(self) -> None:
        """Report to the chief that this task was asked to end."""
        self._leaving = True
        self.beat_now()

    def finish(self) -> None:
        self._finished = True
        self.beat_now()

    def reach(self, barrier: BarrierPlace) -> None:
        """Report to the chief that this worker is at a barrier."""
        self._barrier = barrier
        self.beat_now()

    def suspect(self, tasks: Iterable[str], timeline: int) -> None:
        """Report unreachable tasks to the chief, until the next call or the next timeline, in which the same names may
        belong to other processes.
        """
        self._suspects = timeline, tuple(sorted(tasks))
        self.beat_now()

    def resume(self) -> None:
        """Take finish() back: the job was rolled back to an earlier step."""
        self._finished = False

    def fail(self, sentence: str, code: int, *, timeout_s: float = 5.0) -> None:
        """Report to the chief why this task can't continue; waits until that is sent, for at most timeout_s seconds."""
        self._failure = (unicode(sentence)[:MAX_SENTENCE], code)
        if self._thread is None or not self._thread.is_alive() or self.lost is not None:
            return
        self.beat_now()
        if not self._failure_sent.wait(timeout_s):
            log.warning("%s: could not report to the chief within %.1f s: %s", self.task, timeout_s, sentence)

    # What the chief sends

    def wait(self, predicate: Callable[[Orders], bool], timeout_s: float | None = None) -> bool:
        """Wait until the orders satisfy the predicate; False on timeout. timeout_s: seconds, None = no limit.

        Raises UnreachableError if the chief stays away for longer than the cluster's timeout, FencedError if this
        incarnation was replaced.
        """
        deadline_s = None if timeout_s is None else awake_s() + timeout_s
        with self._lock:
            while not predicate(self.orders):
                self.check()
                left_s = self.timeouts.heartbeat_s if deadline_s is None else deadline_s - awake_s()
                if left_s <= 0:
                    return False
                self._lock.wait(min(left_s, self.timeouts.heartbeat_s))
            return True

    def ask(self, question: Callable[[], T]) -> T:
        """Ask the chief, repeatedly while it is away, for as long as this task waits for it.

        Raises what `question` and check() raise, but UnreachableError only after that time or the end of the job.
        """
        deadline_s: float | None = None
        while True:
            seen = self.orders
            try:
                return question()
            except UnreachableError as error:
                # From the first failure on: until then the chief was there, and a checkpoint may have taken long.
                now_s = awake_s()
                deadline_s = now_s + self.timeouts.total_s if deadline_s is None else deadline_s
                if self.orders.phase is Phase.ENDED or now_s >= deadline_s:
                    raise
                log.info("%s: asking again: %s", self.task, error)
                self.wait(lambda orders: orders != seen, timeout_s=self.timeouts.heartbeat_s)  # noqa: B023 - used at once

    def check(self) -> None:
        """Raise the error if the connection to the chief is lost for good."""
        if self.orders.fenced:
            raise FencedError(f"{self.task}: incarnation {self.incarnation:#x} was replaced; {self.orders.reason}")
        if self.lost is not None:
            raise self.lost

    # Thread

    def _beats(self, ended: threading.Event) -> Iterator[chief_pb2.Beat]:
        # The generator of a broken stream must not take reports that the next stream could still send.
        while not (self._closed.is_set() or ended.is_set()):
            yield self._beat(ended)
            if self._failure is not None:
                self._failure_sent.set()
            self._wake.wait(self.timeouts.heartbeat_s)
            self._wake.clear()
        if (self._reports or self._facts.waiting) and not ended.is_set():
            # Steps that finished after the previous heartbeat; without this one they would be missing from the logs.
            yield self._beat(ended)

    def _beat(self, ended: threading.Event) -> chief_pb2.Beat:
        # Log which tasks the job waits for, at useful intervals; only the chief knows the time left.
        if self.orders.awaited:
            now_s = awake_s()
            self._waiting = self._waiting or Waiting(now_s)
            if sentence := self._waiting.sentence(now_s, ", ".join(self.orders.awaited)):
                log.info("%s", sentence)
        timeline, suspects = self._suspects
        beat = chief_pb2.Beat(
            task=self.task,
            incarnation=self.incarnation,
            secret=self.secret,
            step=self._step,
            leaving=self._leaving,
            finished=self._finished,
            steps=[to_message(chief_pb2.StepReport, item) for item in self._reports.take(ended)],
            figures=self.figures,
            suspects=suspects if timeline == self.orders.timeline else (),
        )
        if self._barrier is not None:
            beat.barrier.CopyFrom(to_message(chief_pb2.BarrierPlace, self._barrier))
        if self._failure is not None:
            beat.failure, beat.failure_code = self._failure
        self._facts.write(beat)
        return beat

    def _beat_forever(self) -> None:
        while not self._closed.is_set():
            try:
                self._stream()
            except grpc.RpcError as error:
                if self._closed.is_set() or not self._may_go_on(error):
                    return
            except Exception as error:
                # A bug, ours or in on_orders: without heartbeats the task would merely look dead.
                log.exception("the heartbeat failed")
                self._lose(InternalError(f"{self.task}: the heartbeat failed: {type(error).__name__}: {error}"))
                return
            if self.orders.phase is Phase.ENDED or self.orders.fenced:
                # The chief has sent its last orders and closed the stream.
                return
            # Jitter, so that a whole cluster does not reconnect at the same instant.
            self._closed.wait(self.timeouts.heartbeat_s * (0.25 + 0.5 * random.random()))

    def _may_go_on(self, error: grpc.RpcError) -> bool:
        """Whether to try another stream after this one broke; if not, the task learns why."""
        code = error.code() if isinstance(error, grpc.Call) else None
        if code not in RETRIED and code not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN):
            self._lose(UnreachableError(f"{self.task}: {self.client.peer} refused heartbeats: {error}"))
            return False
        now_s = awake_s()
        if self._broken_s is None:
            # A stream that reached its own deadline also ends like this: that is no silence yet.
            self._broken_s = now_s
        silent_s = now_s - self._broken_s
        if silent_s <= self.timeouts.total_s:
            return True
        self._lose(
            UnreachableError(
                f"{self.task}: no answer from {self.client.peer} for {silent_s:.0f} s (limit "
                f"{self.timeouts.total_s:.0f} s); this task is ending. Is the chief still running?"
            )
        )
        return False

    def _stream(self) -> None:
        ended = threading.Event()
        call = self.client.stub.Heartbeat(self._beats(ended), timeout=STREAM_S)
        with self._lock:
            self._call = call
            if self._dropped:
                # close() was called meanwhile, and cancelled the previous call.
                call.cancel()
        try:
            for message in call:
                self._broken_s = None
                self._reports.answered()
                self.obey(_orders_from_proto(message))
        finally:
            ended.set()
            self._reports.take_back()
            self._wake.set()

    def obey(self, orders: Orders) -> None:
        """Take the chief's orders and tell who waits for them; older ones than the last are ignored."""
        with self._lock:
            if orders.version < self.orders.version and not orders.fenced:
                return
            changed = orders != self.orders
            self.orders = orders
            self._lock.notify_all()
        if changed and self._on_orders is not None:
            self._on_orders(orders)

    def _lose(self, error: ShardlineError) -> None:
        with self._lock:
            self.lost = error
            self._lock.notify_all()
        log.error("%s", error)
        if self._on_orders is not None:
            self._on_orders(self.orders)

    def __enter__(self) -> ChiefLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Send pending reports in a last heartbeat, and end; waits only briefly for the chief to take it."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=GOODBYE_S if self.lost is None else 0.0)
        with self._lock:
            self._dropped = True
            if self._call is not None:
                self._call.cancel()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self.client.close()


def _orders_from_proto(message: chief_pb2.Orders) -> Orders:
    return from_message(
        Orders,
        message,
        phase=Phase(message.phase) if message.phase else Phase.WAITING,
        scores=tuple((one.step, one.value if one.HasField("value") else None) for one in message.scores),
    )

"""A task's tie to its chief: join, heartbeats, orders."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import grpc

from shardline.core.identity import Identity
from shardline.core.orders import BarrierPlace, Orders, Phase, StepReport
from shardline.core.timeouts import Timeouts
from shardline.core.waiting import Waiting
from shardline.errors import FencedError, InternalError, ShardlineError, UnreachableError
from shardline.rpc.channel import RETRIED
from shardline.rpc.client import ChiefClient
from shardline.rpc.joining import Applicant, JoinAttempts
from shardline.rpc.messages.barrier import barrier_place_to_proto, barrier_state_from_proto
from shardline.rpc.messages.fields import to_message
from shardline.rpc.report_queue import ReportQueue
from shardline.rpc.v1 import chief_pb2, parameter_server_pb2
from shardline.security import PLAIN, Security

log = logging.getLogger("shardline.link")
T = TypeVar("T")

STREAM_S = 3600.0
"""Deadline of one heartbeat stream; the next one follows at once."""
GOODBYE_S = 2.0
"""How long a task that ends waits for the chief to take its last beat."""


class ChiefLink:
    """Joins the chief, sends heartbeats from a thread, and hands out its orders.

    on_orders is called on the heartbeat thread whenever orders change; it must not block.
    """

    def __init__(
        self,
        chief_address: str,
        timeouts: Timeouts,
        applicant: Applicant,
        *,
        on_orders: Callable[[Orders], None] | None = None,
        ps_status: Callable[[], parameter_server_pb2.PsStatusReply] | None = None,
        traffic: Callable[[], tuple[int, int, int, int]] | None = None,
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
        self._ps_status = ps_status
        self._traffic = traffic
        self._lock = threading.Condition()
        self._orders = Orders()
        self._waiting: Waiting | None = None
        """What was told of the wait for other tasks."""
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
        """Timeline in which these tasks were not heard."""

    # Joining

    def cancel_join(self) -> None:
        """End a running join() early; for the thread of a signal."""
        self._joining.cancel()

    def join(self) -> bool:
        """Join, and start the heartbeat; see JoinAttempts.join(). False where the process was asked to end."""
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
        """Who this task is, since it joined."""
        return Identity(self.task, self.incarnation, self.secret)

    # What the task tells

    def set_step(self, step: int) -> None:
        """Latest step, told with the next beat."""
        self._step = step

    def report(self, report: StepReport) -> None:
        """A finished step, told with the next beat."""
        self._reports.add(report)

    def beat_now(self) -> None:
        """Send a beat without waiting for the interval."""
        self._wake.set()

    def leave(self) -> None:
        """Tell the chief that this task was asked to end."""
        self._leaving = True
        self.beat_now()

    def finish(self) -> None:
        """Tell the chief that this task has done its part."""
        self._finished = True
        self.beat_now()

    def reach(self, barrier: BarrierPlace) -> None:
        """Tell the chief that this worker is at a barrier."""
        self._barrier = barrier
        self.beat_now()

    def suspect(self, tasks: Iterable[str], timeline: int) -> None:
        """Tell the chief that these tasks are not heard from here, until told otherwise or as long as it names this
        timeline: who has their names in the next one may be other processes.
        """
        self._suspects = timeline, tuple(sorted(tasks))
        self.beat_now()

    def resume(self) -> None:
        """There is more to do after all: the job went back to an earlier step."""
        self._finished = False

    def fail(self, sentence: str, code: int, *, timeout_s: float = 5.0) -> None:
        """Tell the chief why this task can't go on; waits until the beat is written or the timeout ends."""
        self._failure = (sentence, code)
        if self._thread is None or not self._thread.is_alive() or self.lost is not None:
            return
        self.beat_now()
        if not self._failure_sent.wait(timeout_s):
            log.warning("%s: could not tell the chief within %.1f s: %s", self.task, timeout_s, sentence)

    # What the chief says

    @property
    def orders(self) -> Orders:
        """Latest orders."""
        return self._orders

    def wait(self, predicate: Callable[[Orders], bool], timeout_s: float | None = None) -> bool:
        """Wait until the orders satisfy the predicate; False when the timeout ran out.

        Raises UnreachableError when the chief stays away for longer than the timeout of the cluster, FencedError
        when this incarnation was replaced.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            while not predicate(self._orders):
                self.check()
                left_s = self.timeouts.heartbeat_s if deadline_s is None else deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._lock.wait(min(left_s, self.timeouts.heartbeat_s))
            return True

    def ask(self, question: Callable[[], T]) -> T:
        """Ask the chief something, again while it is away, for as long as this task waits for it.

        Raises what the question raises, UnreachableError only after that time or the end of the job; and like check().
        """
        deadline_s = time.monotonic() + self.timeouts.total_s
        while True:
            seen = self._orders
            try:
                return question()
            except UnreachableError as error:
                if self._orders.phase is Phase.ENDED or time.monotonic() >= deadline_s:
                    raise
                log.info("%s: asking again: %s", self.task, error)
                self.wait(lambda orders: orders != seen, timeout_s=self.timeouts.heartbeat_s)  # noqa: B023 - used at once

    def check(self) -> None:
        """Raise if the tie is cut for good."""
        if self._orders.fenced:
            raise FencedError(f"{self.task}: incarnation {self.incarnation:#x} was replaced; {self._orders.reason}")
        if self.lost is not None:
            raise self.lost

    # Thread

    def _beats(self, ended: threading.Event) -> Iterator[chief_pb2.Beat]:
        # A generator of a broken stream must not take reports that the next stream could still send.
        while not (self._closed.is_set() or ended.is_set()):
            yield self._beat(ended)
            if self._failure is not None:
                self._failure_sent.set()
            self._wake.wait(self.timeouts.heartbeat_s)
            self._wake.clear()
        if self._reports and not ended.is_set():
            # Steps that ended after the beat before this one: without it their lines would lack in the logs.
            yield self._beat(ended)

    def _beat(self, ended: threading.Event) -> chief_pb2.Beat:
        self._tell_awaited()
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
            suspects=suspects if timeline == self._orders.timeline else (),
        )
        if self._barrier is not None:
            beat.barrier.CopyFrom(barrier_place_to_proto(self._barrier))
        if self._failure is not None:
            beat.failure, beat.failure_code = self._failure
        if self._ps_status is not None:
            beat.ps.CopyFrom(self._ps_status())
        if self._traffic is not None:
            push_raw, push_wire, pull_raw, pull_wire = self._traffic()
            beat.traffic.CopyFrom(
                parameter_server_pb2.Traffic(
                    push_raw_bytes=push_raw,
                    push_wire_bytes=push_wire,
                    pull_raw_bytes=pull_raw,
                    pull_wire_bytes=pull_wire,
                )
            )
        return beat

    def _tell_awaited(self) -> None:
        """Say for whom the job waits, as often as is of use; how long still the chief says."""
        if self._orders.awaited:
            now_s = time.monotonic()
            self._waiting = self._waiting or Waiting(now_s)
            if sentence := self._waiting.sentence(now_s, ", ".join(self._orders.awaited)):
                log.info("%s", sentence)

    def _beat_forever(self) -> None:
        while not self._closed.is_set():
            try:
                self._stream()
            except grpc.RpcError as error:
                if self._closed.is_set() or not self._may_go_on(error):
                    return
            except Exception as error:
                # A defect, ours or of on_orders: without heartbeats the task would only look dead.
                log.exception("the heartbeat failed")
                self._lose(InternalError(f"{self.task}: the heartbeat failed: {type(error).__name__}: {error}"))
                return
            if self._orders.phase is Phase.ENDED or self._orders.fenced:
                # The chief has said its last word and let go.
                return
            # Jitter, so that a whole cluster does not return in the same instant.
            self._closed.wait(self.timeouts.heartbeat_s * (0.25 + 0.5 * random.random()))

    def _may_go_on(self, error: grpc.RpcError) -> bool:
        """Whether to try another stream after this one broke; tells the task where not."""
        code = error.code() if isinstance(error, grpc.Call) else None
        if code not in RETRIED and code not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN):
            self._lose(UnreachableError(f"{self.task}: {self.client.peer} refused heartbeats: {error}"))
            return False
        now_s = time.monotonic()
        if self._broken_s is None:
            # Also how a stream ends that has reached its own deadline: no silence yet.
            self._broken_s = now_s
        silent_s = now_s - self._broken_s
        if silent_s <= self.timeouts.total_s:
            return True
        self._lose(
            UnreachableError(
                f"{self.task}: no word from {self.client.peer} for {silent_s:.0f} s (limit "
                f"{self.timeouts.total_s:.0f} s); this task ends. Is the chief still running?"
            )
        )
        return False

    def _stream(self) -> None:
        ended = threading.Event()
        call = self.client.stub.Heartbeat(self._beats(ended), timeout=STREAM_S)
        with self._lock:
            self._call = call
            if self._dropped:
                # close() has come in between and cancelled the call before this one.
                call.cancel()
        try:
            for message in call:
                self._broken_s = None
                self._reports.answered()
                self._obey(_orders_from_proto(message))
        finally:
            ended.set()
            self._reports.take_back()
            self._wake.set()

    def _obey(self, orders: Orders) -> None:
        with self._lock:
            if orders.version < self._orders.version and not orders.fenced:
                return
            changed = orders != self._orders
            self._orders = orders
            self._lock.notify_all()
        if changed and self._on_orders is not None:
            self._on_orders(orders)

    def _lose(self, error: ShardlineError) -> None:
        with self._lock:
            self.lost = error
            self._lock.notify_all()
        log.error("%s", error)
        if self._on_orders is not None:
            self._on_orders(self._orders)

    def __enter__(self) -> ChiefLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Send what was not told yet as a last beat, and end; a chief that does not take it is not waited for."""
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
    return Orders(
        version=message.version,
        phase=Phase(message.phase) if message.phase else Phase.WAITING,
        timeline=message.timeline,
        replicas=tuple(message.replicas),
        init=message.init,
        stop_step=message.stop_step,
        exit_code=message.exit_code,
        reason=message.reason,
        checkpoint_step=message.checkpoint_step,
        final_step=message.final_step,
        workers=message.workers,
        first_step=message.first_step,
        fenced=message.fenced,
        awaited=tuple(message.awaited),
        barrier=barrier_state_from_proto(message.barrier) if message.HasField("barrier") else None,
    )

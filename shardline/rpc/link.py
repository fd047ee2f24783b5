"""A task's tie to its chief: join, heartbeats, orders."""

from __future__ import annotations

import logging
import platform
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import grpc
import torch

from shardline.codecs import CODECS
from shardline.core.identity import Identity
from shardline.core.orders import BarrierPlace, Orders, Phase, StepReport
from shardline.core.protocol import FEATURES, PROTOCOL_MINOR
from shardline.core.spec import JobSpec
from shardline.core.timeouts import Timeouts
from shardline.core.waiting import Waiting
from shardline.errors import FencedError, InternalError, MismatchError, ShardlineError, UnreachableError
from shardline.rpc.channel import RETRIED
from shardline.rpc.client import ChiefClient
from shardline.rpc.messages.barrier import barrier_place_to_proto, barrier_state_from_proto
from shardline.rpc.messages.convert import job_to_proto
from shardline.rpc.v1 import access_pb2, chief_pb2, common_pb2, parameter_server_pb2
from shardline.security import PLAIN, Security

log = logging.getLogger("shardline.link")
T = TypeVar("T")

STREAM_S = 3600.0
"""Deadline of one heartbeat stream; the next one follows at once."""
MAX_REPORTS = 4096
"""Finished steps that wait for the chief, at most; of more the oldest are not told."""
GOODBYE_S = 2.0
"""How long a task that ends waits for the chief to take its last beat."""


def machine_fingerprint(threads: int, device: str) -> dict[str, str]:
    """What the last bits of a gradient depend on (PROTOCOL 1.10, E)."""
    facts = {
        "torch": torch.__version__,
        "cpu_vendor": cpu_vendor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(threads),
        "device": device.split(":")[0],
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name(torch.device(device))
    return facts


def cpu_vendor() -> str:
    """Vendor of the processor as Linux names it, else what Python knows."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith(("vendor_id", "CPU implementer")):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class _Away(Exception):
    """The chief went away while it was asked."""


class ChiefLink:
    """Joins the chief, sends heartbeats from a thread, and hands out its orders.

    on_orders is called on the heartbeat thread whenever orders change; it must not block.
    """

    def __init__(
        self,
        chief_address: str,
        timeouts: Timeouts,
        *,
        role: str,
        index: int | None,
        address: str = "",
        metrics_address: str = "",
        job: JobSpec | None = None,
        machine: Mapping[str, str] | None = None,
        on_orders: Callable[[Orders], None] | None = None,
        ps_status: Callable[[], parameter_server_pb2.PsStatusReply] | None = None,
        traffic: Callable[[], tuple[int, int, int, int]] | None = None,
        cancelled: threading.Event | None = None,
        security: Security = PLAIN,
    ) -> None:
        self.client = ChiefClient(chief_address, timeouts, security)
        self.timeouts = timeouts
        self.task = role if index is None else f"{role}/{index}"
        self.incarnation = 0
        self.term = 0
        self.secret = b""
        self._role = role
        self._index = index
        self._address = address
        self._metrics_address = metrics_address
        self._job = job
        self._machine = dict(machine or {})
        self._stable_id = uuid.uuid4().hex
        self._on_orders = on_orders
        self._ps_status = ps_status
        self._traffic = traffic
        self._lock = threading.Condition()
        self._orders = Orders()
        self._waiting: Waiting | None = None
        """What was told of the wait for other tasks."""
        self._reports: deque[StepReport] = deque(maxlen=MAX_REPORTS)
        self._unanswered: deque[list[StepReport]] = deque()
        """Reports of beats that the chief may not have got, oldest beat first."""
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
        self._cancelled = cancelled or threading.Event()
        self._join_wake = threading.Event()
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
        self._cancelled.set()
        self.client.peer.cancel()
        self._join_wake.set()

    def join(self) -> bool:
        """Join, asking again while the chief isn't there or says so, until the join deadline; tells who waits for whom.

        Returns False where the process was asked to end meanwhile (`cancelled`). Raises UnreachableError,
        MismatchError (refused for good) or FencedError.
        """
        start_s = time.monotonic()
        waiting = Waiting(start_s, start_s + self.timeouts.join_s)
        request = chief_pb2.JoinRequest(
            hello=common_pb2.Hello(
                protocol_minor=PROTOCOL_MINOR,
                features=FEATURES,
                codecs=CODECS.names,
                lanes=[common_pb2.LANE_GRPC],
                machine=self._machine,
            ),
            role=self._role,
            index=self._index,
            stable_id=self._stable_id,
            address=self._address,
            metrics_address=self._metrics_address,
            protocol_minor=PROTOCOL_MINOR,
        )
        if self._job is not None:
            request.job.CopyFrom(job_to_proto(self._job))
        if not self.client.peer.await_name(self.timeouts.join_s):
            return False
        reason = ""
        while True:
            left_s = waiting.deadline_s - time.monotonic()
            if left_s <= 0 or self._closed.is_set():
                raise UnreachableError(
                    f"{self.task}: {self.client.peer} did not admit this task within "
                    f"{self.timeouts.join_s:.0f} s: {reason}"
                )
            try:
                reply = self._ask_to_join(request, waiting)
            except _Away as away:
                reason = str(away)
            else:
                if reply is None:
                    return False
                if reply.accepted:
                    break
                reason = reply.reason
                if not reply.retry:
                    raise MismatchError(f"{self.task}: the chief refused this task: {reply.reason}")
            self._tell(waiting, reason)
            if self._join_wake.wait(min(0.2 + 0.3 * random.random(), max(0.0, left_s))) and self._cancelled.is_set():
                return False
            self._join_wake.clear()
        self.task = reply.task
        self.incarnation = reply.incarnation
        self.secret = reply.secret
        self.term = reply.term
        self._thread = threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True)
        self._thread.start()
        return True

    def _tell(self, waiting: Waiting, why: str) -> None:
        if sentence := waiting.sentence(time.monotonic(), str(self.client.peer), why):
            log.info("%s", sentence)

    def _ask_to_join(self, request: chief_pb2.JoinRequest, waiting: Waiting) -> chief_pb2.JoinReply | None:
        """One Join, waiting for a chief that isn't there yet; None where the process was asked to end meanwhile."""
        start_s = time.monotonic()
        left_s = max(0.1, waiting.deadline_s - start_s)
        prover = self.client.peer.prover
        if not prover.ready:
            # Before the call that needs it, which could not be given up while it waits for this.
            reply = self._await(self.client.access.Challenge, access_pb2.ChallengeRequest(), left_s, waiting)
            if reply is None:
                return None
            prover.answer(reply.challenge)
            left_s = max(0.1, left_s - (time.monotonic() - start_s))
        joined: chief_pb2.JoinReply | None = self._await(self.client.stub.Join, request, left_s, waiting)
        return joined

    def _await(self, method: Any, request: Any, left_s: float, waiting: Waiting) -> Any:
        """The reply to one call of join(), which waits for the chief; None where the process was asked to end."""
        start_s = time.monotonic()
        call = method.future(request, timeout=left_s, wait_for_ready=True)
        call.add_done_callback(lambda _: self._join_wake.set())
        while not call.done():
            # Bounded by the call's own deadline.
            self._join_wake.wait(waiting.pause_s(time.monotonic()) or 1.0)
            self._join_wake.clear()
            if self._cancelled.is_set() and not call.done():
                call.cancel()
                return None
            if not call.done() and waiting.pause_s(time.monotonic()) <= 0.0:
                self._tell(waiting, self.client.peer.obstacle())
        try:
            return call.result()
        except grpc.RpcError as error:
            waited_s = time.monotonic() - start_s
            failure = self.client.peer.failure(error, what="Join", waited_s=waited_s, connecting=True)
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE and waited_s < left_s:
                # It was there, so it may come back; if it had admitted this process, it does so again.
                raise _Away(str(failure)) from error
            raise failure from error

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
        self._reports.append(report)

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

    def _take_reports(self, ended: threading.Event) -> list[StepReport]:
        """Reports for the next beat; they are kept until it is answered."""
        with self._lock:
            if ended.is_set():
                return []
            taken = [self._reports.popleft() for _ in range(min(1024, len(self._reports)))]
            self._unanswered.append(taken)
            return taken

    def _answered(self) -> None:
        """The chief has said something: all beats but the newest, which may have crossed it, have arrived."""
        with self._lock:
            while len(self._unanswered) > 1:
                self._unanswered.popleft()

    def _take_back(self) -> None:
        """The stream is over: what may not have arrived is told again, some of it maybe for the second time."""
        with self._lock:
            again = [report for beat in self._unanswered for report in beat]
            self._unanswered.clear()
            self._reports.extendleft(reversed(again[: MAX_REPORTS - len(self._reports)]))

    def _beat(self, ended: threading.Event) -> chief_pb2.Beat:
        reports = [
            chief_pb2.StepReport(
                step=item.step,
                replica=item.replica,
                loss=item.loss,
                samples=item.samples,
                compute_s=item.compute_s,
                exchange_s=item.exchange_s,
                staleness=item.staleness,
            )
            for item in self._take_reports(ended)
        ]
        self._tell_awaited()
        timeline, suspects = self._suspects
        beat = chief_pb2.Beat(
            task=self.task,
            incarnation=self.incarnation,
            secret=self.secret,
            step=self._step,
            leaving=self._leaving,
            finished=self._finished,
            steps=reports,
            orders_seen=self._orders.version,
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
                self._answered()
                self._obey(_orders_from_proto(message))
        finally:
            ended.set()
            self._take_back()
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

"""One step's pushes and pulls: a connection per shard that repeats what fails, and all shards at once."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace

from shardline.client.exchange.streaming_payloads import LivePayloads, Unready
from shardline.core.fixed import fixed
from shardline.core.image import BucketImage
from shardline.core.outcome import Outcome
from shardline.core.tensor_bytes import copy_bytes
from shardline.core.timeouts import Timeouts
from shardline.errors import NonFiniteError, ProtocolError, ShardlineError, UnreachableError
from shardline.host.awake import awake_s
from shardline.lanes.base import Lane
from shardline.lanes.calls import NotAdmittedError
from shardline.rpc.messages import data
from shardline.waist import Ack, Arrival, End, Exchanged, Memory, Push, Sender, Sink, Standing, Want, octets

log = logging.getLogger("shardline.client")


class Restart(Exception):
    """The step has to start over from Progress (PROTOCOL 1.4.1): timeline, assignment or step changed."""


class Overtaken(Restart):
    """The job has gone on without this worker: its step is closed, and the parameters it wants are gone."""


class Rerouted(Restart):
    """What the exchange went through is away, and there is another way to the servers."""


class Stopped(Exception):
    """The job does not continue; the message names the step."""


class Interrupted(Exception):
    """The session has to check its orders."""


@fixed(kw_only=True)
class ShardTask:
    """One shard's pushes and pull in this step."""

    shard: int
    contributions: Sequence[Push]
    want: Want | None
    patience_s: float = 0.0
    """Seconds that one call may wait for gradients that are still being computed."""
    moves: int | None = None
    """Bytes that it moves at most, each way; None = those of the whole shard."""
    sink: PullSink | None = None
    """Where its pull goes; None = the shard's own sink."""


@fixed(kw_only=True)
class ShardOutcome:
    acks: tuple[Ack, ...]
    began_s: float
    """All times are of the monotonic clock, in seconds."""
    pushed_s: float
    """When the last push was acknowledged; began_s if nothing was pushed."""
    first_s: float
    """When the first pulled bucket began to arrive; 0 if none did."""
    ended_s: float
    wants_state: bool = False
    hyper: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def parts(self, computed_s: float) -> tuple[float, float, float]:
        """Seconds of push, barrier wait and pull, counted from computed_s, when the gradients were complete."""
        began = max(self.began_s, computed_s)
        pushed = max(self.pushed_s, began)
        first = max(self.first_s, pushed)
        return pushed - began, first - pushed, max(self.ended_s, first) - first


@fixed(kw_only=True)
class StepFigures:
    """One finished exchange, for metrics and reports."""

    seconds: float
    computed_s: float
    """When the last gradient was complete, by the monotonic clock."""
    outcomes: Mapping[int, ShardOutcome]
    skipped: bool
    """The step was skipped because a gradient was not finite."""
    gap: float | None = None
    """RMS distance between the parameters before and after it; None if it wasn't measured."""

    @property
    def staleness(self) -> int:
        """Staleness at the shard that was furthest ahead."""
        return max((ack.staleness for outcome in self.outcomes.values() for ack in outcome.acks), default=0)

    @property
    def blocked_s(self) -> float:
        """Seconds from the push to the pull at the shard where that took longest: others were waited for."""
        return max((outcome.parts(self.computed_s)[1] for outcome in self.outcomes.values()), default=0.0)


def rank(error: Exception) -> int:
    """Rank of an error, most informative first: a shard's answer beats the interruption of the other calls."""
    order = (Stopped, NonFiniteError, ProtocolError, ShardlineError, Restart, Interrupted)
    return next((number for number, cls in enumerate(order) if isinstance(error, cls)), 0)


def check_ack(ack: Ack, shard: int) -> None:
    """Return if the push needs no repetition. Raises Stopped, ProtocolError or Restart otherwise."""
    if ack.accepted:
        if ack.mismatch:
            log.error("shard %d: %s", shard, ack.reason)
        return
    raise refusal(ack.outcome, ack.reason, "push", shard)


def refusal(outcome: Outcome, reason: str, what: str, shard: int) -> Exception:
    """The error for a push or a pull that a shard did not serve: Stopped, ProtocolError or Restart."""
    if outcome is Outcome.STOPPED:
        return Stopped(reason)
    if outcome is Outcome.REFUSED:
        return ProtocolError(f"shard {shard} refused the {what}: {reason}")
    kind = Overtaken if outcome is Outcome.OVERTAKEN and what == "pull" else Restart
    return kind(f"shard {shard}: {outcome.name.lower()}: {reason}")


SLOWEST_BYTES_PER_S = 1e6
"""Slower links (8 Mbit/s) run into deadlines."""
TRIES = 4
"""A call may try several lanes to a task one after another, so it may take its own deadline several times."""
FIRST_PAUSE_S = 0.05


@dataclass(kw_only=True)
class Observer:
    """What exchanges tell and ask. Called by any thread."""

    still_ordered: Callable[[], bool] = lambda: True
    """Whether the result of the exchange is still wanted; called whenever a shard answers WAITING."""
    retried: Callable[[int], None] = lambda shard: None
    """A call to this shard is about to be repeated."""
    silent: Callable[[frozenset[int]], None] = lambda shards: None
    """Shards that have been silent long enough to count as dead; called whenever this set changes."""
    leaves: Callable[[int], bool] = lambda shard: False
    """A call to this shard has failed; returns whether it went through another task, which is left for another way."""
    not_finite: Callable[[str], None] = lambda name: None
    """The loss (name "loss") or the gradient of a tensor has NaN or infinity."""


class PullSink(Sink):
    """The memory that one shard's pulls go to, one after another: a base that copies what comes into buffer().

    shard_bytes: of all buckets before encoding.
    """

    def __init__(self, num_buckets: int, shard_bytes: int) -> None:
        self.num_buckets, self.shard_bytes = num_buckets, shard_bytes
        self.arrived: set[int] = set()
        """Complete buckets of the running pull."""
        self.raw_bytes = self.wire_bytes = 0
        """Bytes pulled so far: before encoding, and encoded."""
        self.first_s = 0.0
        """When the running pull's first bucket began to arrive, by the monotonic clock; 0 = none has."""

    def begin(self) -> None:
        self.arrived.clear()

    def whole(self, arrival: Arrival, payload: Memory) -> None:
        copy_bytes(self.buffer(arrival), memoryview(octets(payload)))
        self.done(arrival)

    def take(self, arrival: Arrival, memory: Memory) -> None:
        self.whole(arrival, memory)


@dataclass(eq=False)
class Retrying:
    """One shard's ShardService over a lane, whose calls it repeats.

    interrupted: makes a running exchange end with Interrupted. note: called with the shard and whether it is silent.
    promise: called with the shard and the seconds that its next call may take.
    """

    shard: int
    lane: Lane
    timeouts: Timeouts
    _: KW_ONLY
    interrupted: threading.Event
    observer: Observer
    note: Callable[[int, bool], None]
    promise: Callable[[int, float], None]
    _told: str = field(default="", init=False)

    def exchange(
        self, sender: Sender, pushes: Sequence[Push], want: Want | None, sink: PullSink, *, timeout_s: float
    ) -> Exchanged:
        """Push and pull until everything is done, or the shard refuses something. timeout_s: see _limit_s().

        Raises Interrupted; UnreachableError if the shard is silent for the whole timeout.
        """
        sink.begin()
        start_s, heard_s, pause_s, push_s = time.monotonic(), awake_s(), FIRST_PAUSE_S, 0.0
        pending, acks = list(pushes), list[Ack]()
        while pending or want is not None:
            if self.interrupted.is_set():
                raise Interrupted
            limit_s, call_s = self._limit_s(timeout_s, pending, sink), time.monotonic()
            self.promise(self.shard, TRIES * limit_s)
            try:
                done = self.lane.exchange(sender, pending, want, sink, timeout_s=limit_s)
            except Unready:
                # Not an error: the call is repeated when there is something to send.
                self._await_gradients(pending)
                heard_s, want = awake_s(), self._again(want, sink)
                continue
            except UnreachableError as error:
                self._failed(error, awake_s() - heard_s)
                self.interrupted.wait(pause_s)
                pause_s = min(pause_s * 2, self.timeouts.heartbeat_s + 1.0)
                want = self._again(want, sink)
                continue
            heard_s = awake_s()
            self.note(self.shard, False)
            if pending:
                push_s = call_s - start_s + done.push_s
            taken = [ack for ack in done.acks if ack.outcome is not Outcome.WAITING]
            acks += taken
            if len(taken) < len(done.acks):
                # The shard answered and is busy with other pushes: neither silence nor a fault of the lane.
                self._check_wanted()
                self._tell(f"shard {self.shard} has no room for this push yet: {done.acks[-1].reason}")
                pending = pending[len(taken) :]
                self.interrupted.wait(pause_s)
                want = self._again(want, sink)
                continue
            pending, end = [], done.end
            if want is None or end is None or end.outcome is not Outcome.WAITING:
                return Exchanged(acks=tuple(acks), end=end, push_s=push_s)
            self._check_wanted()
            self._tell_waiting(end, time.monotonic() - start_s, wants_latest=want.step is None)
            want = _rest(want, sink)
        return Exchanged(acks=tuple(acks), end=None, push_s=push_s)

    def _failed(self, error: UnreachableError, silent_s: float) -> None:
        """After a failed call. Raises Interrupted, Rerouted, or the error itself after the whole timeout."""
        if self.interrupted.is_set():
            raise Interrupted from error
        if self.observer.leaves(self.shard):
            raise Rerouted(f"shard {self.shard}: {error}") from error
        if silent_s > self.timeouts.total_s:
            raise error
        if silent_s >= self.timeouts.dead_s:
            self.note(self.shard, True)
        self.observer.retried(self.shard)
        log.warning("shard %d: %s; trying again", self.shard, error)

    def standing(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        """The shard's standing on some replicas; asked again for timeout_s while the shard does not answer.

        Raises UnreachableError; Interrupted, because the servers exit when the job ends.
        """
        start_s, pause_s = awake_s(), FIRST_PAUSE_S
        while True:
            if self.interrupted.is_set():
                raise Interrupted
            try:
                standing = self.lane.standing(sender, replicas, timeout_s=timeout_s)
                self.note(self.shard, False)
                return standing
            except UnreachableError as error:
                if self.interrupted.is_set():
                    raise Interrupted from error
                if self.observer.leaves(self.shard):
                    raise Rerouted(f"shard {self.shard}: {error}") from error
                waited_s = awake_s() - start_s
                if waited_s >= timeout_s:
                    self.note(self.shard, True)
                    raise UnreachableError(f"shard {self.shard}, after {waited_s:.1f} s: {error}") from error
                self.observer.retried(self.shard)
                self.interrupted.wait(pause_s)
                pause_s = min(pause_s * 2, 1.0)

    def _limit_s(self, timeout_s: float, pending: Sequence[Push], sink: PullSink) -> float:
        """Deadline of one call in seconds: timeout_s, plus time for its bytes on a very slow link.

        A dead link is noticed sooner, by keepalive; a server that waits answers WAITING sooner.
        """
        pushed = sum([push.payloads.nbytes for push in pending])
        return timeout_s + (pushed + sink.shard_bytes) / SLOWEST_BYTES_PER_S

    def _await_gradients(self, pending: Sequence[Push]) -> None:
        """Wait until the backward pass has computed more of a push. Raises Interrupted if the orders change."""
        for payloads in (push.payloads for push in pending):
            while isinstance(payloads, LivePayloads) and not payloads.wait(self.timeouts.rpc_s):
                if self.interrupted.is_set():
                    raise Interrupted
                self._check_wanted()

    def _check_wanted(self) -> None:
        if not self.observer.still_ordered():
            raise Interrupted

    def _again(self, want: Want | None, sink: PullSink) -> Want | None:
        """The buckets to ask for after a failed call.

        Buckets that have arrived are not requested again: those of an exact step can't have changed, and a later
        version must not overwrite what a forward pass may already be reading.
        """
        rest = _rest(want, sink) if want is not None else None
        # An empty list would mean all.
        return rest if rest is not None and rest.buckets else None

    def _tell_waiting(self, end: End, waited_s: float, *, wants_latest: bool) -> None:
        if waited_s < self.timeouts.suspect_s:
            return
        if wants_latest:
            self._tell(f"{end.reason}: this worker is too far ahead", f" since {waited_s:.0f} s")
            return
        sentence = f"shard {self.shard} is waiting for replicas {list(end.waiting_for)} in step {end.step}"
        rest = "the chief reassigns them when their worker is dead"
        if not end.waiting_for:
            sentence = f"shard {self.shard} has all gradients of step {end.step} but has not closed it"
            rest = "it is waiting for the verdict of all shards, or for its standby to have the step too"
        self._tell(sentence, f" since {waited_s:.0f} s; {rest}")

    def _tell(self, sentence: str, rest: str = "") -> None:
        """Log a warning, unless it is the same sentence as before."""
        if self._told != sentence:
            self._told = sentence
            log.warning("%s%s", sentence, rest)


def _rest(want: Want, sink: PullSink) -> Want:
    """The same request for the buckets that have not arrived yet."""
    everything = want.buckets or range(sink.num_buckets)
    return replace(want, buckets=[number for number in everything if number not in sink.arrived])


LOOK_S = 1.0
"""Seconds between two checks, during a wait, whether the exchange is overdue."""


class Running:
    """A running exchange with all shards.

    interrupt: ends it early; interrupted: whether this was requested. grace_s: seconds that a part may exceed its
    promise. on_end: called once, when the last shard's part has ended, on that part's thread.
    """

    def __init__(
        self,
        shards: Sequence[int],
        *,
        interrupt: Callable[[], None],
        interrupted: Callable[[], bool],
        grace_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self._interrupt = interrupt
        self._interrupted = interrupted
        self._grace_s = grace_s
        self._on_end = on_end
        self._lock = threading.Lock()
        # Held until the end. An Event, which is a lock within a condition, takes several microseconds to make.
        self._open = threading.Lock()
        self._open.acquire()
        self.ended = False
        """Whether every shard's part has ended."""
        self._left_s = dict.fromkeys(shards, grace_s)
        """Seconds left to wait for a part, by shard whose part has not ended."""
        self._results: dict[int, ShardOutcome] = {}
        self._errors: list[Exception] = []
        self.ended_s = 0.0
        """When the last part ended, by the monotonic clock."""
        if not self._left_s:
            self._end()

    def part_ended(self, shard: int, future: Future[ShardOutcome]) -> None:
        error: BaseException | None = Interrupted() if future.cancelled() else future.exception()
        self._note(shard, future.result() if error is None else error)

    def run_here(self, shard: int, part: Callable[[], ShardOutcome]) -> None:
        """Run a shard's part on this thread, to its end; wait() raises its error. Raises what is no Exception."""
        try:
            found: ShardOutcome | Exception = part()
        except Exception as error:
            found = error
        except BaseException as error:
            self._note(shard, error)
            raise
        self._note(shard, found)

    def _note(self, shard: int, found: ShardOutcome | BaseException) -> None:
        error = found if isinstance(found, BaseException) else None
        with self._lock:
            first = error is not None and not self._errors
            if isinstance(error, Exception):
                self._errors.append(error)
            elif not isinstance(found, BaseException):
                self._results[shard] = found
            del self._left_s[shard]
            last = not self._left_s
        if first:
            # The others may be waiting for a step that won't come because this part failed.
            self._interrupt()
        if last:
            self._end()

    def _end(self) -> None:
        self.ended_s = time.monotonic()
        # First: whoever waits for the end may start the next exchange, whose own waits this must not end.
        self._on_end()
        self.ended = True
        self._open.release()

    @property
    def busy(self) -> bool:
        """Whether some shard's part has not ended: false before on_end is called."""
        return bool(self._left_s)

    @property
    def failed(self) -> bool:
        return bool(self._errors)

    def promise(self, shard: int, seconds: float) -> None:
        """Promise that a shard's part ends its next action within this many seconds."""
        with self._lock:
            if shard in self._left_s:
                self._left_s[shard] = seconds + self._grace_s

    def look(self) -> None:
        """Check for overdue parts; called every LOOK_S during a wait.

        Raises UnreachableError if a part is long overdue.

        Counts calls instead of reading the clock: a suspended process has not waited.
        """
        if self._interrupted():
            # A call that was cancelled just before it began may have missed the cancellation.
            self._interrupt()
        with self._lock:
            for shard in self._left_s:
                self._left_s[shard] -= LOOK_S
            late = sorted(shard for shard, left_s in self._left_s.items() if left_s <= 0.0)
        if late:
            raise UnreachableError(
                f"the exchange with shard {', '.join(map(str, late))} is still running {self._grace_s:.0f} s after "
                "the deadlines of its calls; this process can't continue training: restart it"
            )

    def wait(self) -> dict[int, ShardOutcome]:
        """Wait for the outcomes, by shard. Raises the most informative error of all shards, and what look() raises."""
        while not self.ended and not self._open.acquire(timeout=LOOK_S):
            self.look()
        if self._errors:
            raise min(self._errors, key=rank)
        return self._results

    def join(self) -> bool:
        """Wait for the end, whatever the outcome; False if it does not end."""
        try:
            self.wait()
        except Exception as error:
            log.debug("an exchange ended: %s", error or type(error).__name__)
        return self.ended


class Exchange:
    """Exchanges with all shards in parallel. Any thread may call interrupt().

    index: the worker's, so that worker i starts at shard i mod S and W workers do not hit one server at once.
    """

    def __init__(
        self,
        lanes: Mapping[int, Lane],
        sinks: Mapping[int, PullSink],
        timeouts: Timeouts,
        *,
        index: int,
        observer: Observer | None = None,
    ) -> None:
        self.lanes = lanes
        self.timeouts = timeouts
        shards = sorted(lanes)
        offset = index % max(1, len(shards))
        self._order = shards[offset:] + shards[:offset]
        self._sinks = sinks
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(shards)), thread_name_prefix="shard")
        self._interrupted = threading.Event()
        self._live: list[LivePayloads] = []
        self._running: Running | None = None
        self.observer = observer or Observer()
        self._silent: set[int] = set()
        self._noting = threading.Lock()
        self._connections = {
            shard: Retrying(
                shard,
                lane,
                timeouts,
                interrupted=self._interrupted,
                observer=self.observer,
                note=self._note,
                promise=self._promise,
            )
            for shard, lane in lanes.items()
        }

    def _note(self, shard: int, silent: bool) -> None:
        """Tell the observer of a shard that does not answer, or answers again."""
        if silent == (shard in self._silent):
            return
        with self._noting:
            (self._silent.add if silent else self._silent.discard)(shard)
            found = frozenset(self._silent)
        self.observer.silent(found)

    def _promise(self, shard: int, seconds: float) -> None:
        if self._running is not None:
            self._running.promise(shard, seconds)

    def arm(self) -> None:
        """Forget earlier interruptions. Check the orders between this and start(), so that none is missed."""
        self._interrupted.clear()

    def interrupt(self) -> None:
        """Make the running exchange end soon, with Interrupted."""
        self._interrupted.set()
        for lane in self.lanes.values():
            lane.cancel()
        for payloads in list(self._live):
            payloads.wake()

    def give_up(self) -> None:
        """End the last exchange, whatever its outcome. Raises UnreachableError if it doesn't end."""
        self.interrupt()
        if self._running is not None and not self._running.join():
            raise UnreachableError("an abandoned exchange does not end; restart this process")

    def refusal(self) -> Exception | None:
        """The error that a wait within an exchange has to raise, if any."""
        return Interrupted() if self._interrupted.is_set() else None

    def start(
        self,
        sender: Sender,
        tasks: Mapping[int, ShardTask],
        on_end: Callable[[], None] = lambda: None,
        meanwhile: Callable[[], None] = lambda: None,
        *,
        here: bool = False,
    ) -> Running:
        """Start one task per shard.

        meanwhile: what this thread does while nothing has arrived yet. here: it will wait for the end, so a task that
        moves few bytes runs on it, to its end: to hand it over would take about as long as the rest. Its calls have
        deadlines like any other. An interruption that a call misses because it is about to begin still ends its push
        before anything is sent.
        """
        self._live = [
            push.payloads
            for task in tasks.values()
            for push in task.contributions
            if isinstance(push.payloads, LivePayloads)
        ]
        order = [shard for shard in self._order if shard in tasks]
        running = self._running = Running(
            order,
            interrupt=self.interrupt,
            interrupted=self._interrupted.is_set,
            grace_s=self.timeouts.total_s,
            on_end=on_end,
        )
        here = here and len(order) == 1 and self._moves(tasks[order[0]]) <= data.QUICK_BYTES
        if here:
            meanwhile()
        for shard in order:
            part = functools.partial(self._run, sender, tasks[shard])
            if here:
                running.run_here(shard, part)
            else:
                self._pool.submit(part).add_done_callback(functools.partial(running.part_ended, shard))
        if not here:
            meanwhile()
        return running

    def _moves(self, task: ShardTask) -> int:
        return self._sinks[task.shard].shard_bytes if task.moves is None else task.moves

    def _run(self, sender: Sender, task: ShardTask) -> ShardOutcome:
        """One shard's part. Raises Interrupted, Restart, Stopped, UnreachableError."""
        shard, sink, began_s = task.shard, task.sink or self._sinks[task.shard], time.monotonic()
        timeout_s = self.timeouts.rpc_s + task.patience_s
        done = self._connections[shard].exchange(sender, task.contributions, task.want, sink, timeout_s=timeout_s)
        for ack in done.acks:
            check_ack(ack, shard)
        if done.end is not None and done.end.outcome not in (Outcome.SERVED, Outcome.WAITING):
            raise refusal(done.end.outcome, done.end.reason, "pull", shard)
        return ShardOutcome(
            acks=done.acks,
            began_s=began_s,
            pushed_s=began_s + done.push_s,
            first_s=sink.first_s,
            ended_s=time.monotonic(),
            wants_state=done.end is not None and done.end.wants_state,
            hyper=done.end.hyper if done.end is not None else {},
        )

    def standing(self, sender: Sender, shard: int, replicas: Sequence[int]) -> Standing:
        """A shard's standing on some replicas; retried for a third of the timeout while the shard does not answer.

        Raises UnreachableError; Interrupted, because the servers exit when the job ends.
        """
        return self._connections[shard].standing(sender, replicas, timeout_s=self.timeouts.rpc_s)

    def state(self, sender: Sender, shard: int, step: int, buckets: Sequence[int]) -> Sequence[BucketImage] | None:
        """Parameters and optimizer state of a shard's buckets at a step, where workers run the optimizer; None if it
        has none. Raises UnreachableError, Restart.
        """
        timeout_s = self.timeouts.rpc_s + self._sinks[shard].shard_bytes / SLOWEST_BYTES_PER_S
        try:
            return self.lanes[shard].state(sender, step, buckets, timeout_s=timeout_s)
        except NotAdmittedError as error:
            raise Restart(f"shard {shard}: {error.outcome.name.lower()}: {error}") from error

    def bring_state(self, sender: Sender, shard: int, images: Sequence[BucketImage]) -> Outcome:
        """Bring a shard such a state for a cut. Raises UnreachableError, ProtocolError."""
        nbytes = self._sinks[shard].shard_bytes + sum(image.nbytes for image in images)
        timeout_s = self.timeouts.rpc_s + nbytes / SLOWEST_BYTES_PER_S
        return self.lanes[shard].bring_state(sender, images, timeout_s=timeout_s)

    def close(self) -> None:
        """End the threads and close the lanes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        try:
            self.give_up()
        except UnreachableError as error:
            log.warning("%s", error)
            return
        self._pool.shutdown(wait=True)
        # Another exchange may follow, so free memory and sockets now instead of at garbage collection.
        for lane in self.lanes.values():
            lane.close()

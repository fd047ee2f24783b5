"""One step's pushes and pulls with all shards at once, retried until done, interrupted, or refused."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from shardline.client.api.live import LivePayloads, Unready
from shardline.client.overlap.arrivals import LOOK_S
from shardline.client.step.layout import BucketSink
from shardline.config import Timeouts
from shardline.core.exchange import Ack, Contribution, End, Sender, Standing, Want
from shardline.core.outcome import Outcome
from shardline.errors import NonFiniteError, ProtocolError, ShardlineError, UnreachableError
from shardline.lanes.base import Lane

log = logging.getLogger("shardline.client")

SLOWEST_BYTES_PER_S = 1e6
"""Links slower than 8 Mbit/s run into deadlines."""
TRIES = 4
"""A call may try the lanes of a pair of tasks in turn, so it takes some times its own deadline at most."""


class Restart(Exception):
    """The step has to begin again from Progress (PROTOCOL 1.4.1): the timeline, the assignment or the step changed."""


class Stopped(Exception):
    """The job goes no further; `reason` names the step."""


class Interrupted(Exception):
    """The session was told to look at its orders."""


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """What one shard gets in this step."""

    shard: int
    contributions: Sequence[Contribution]
    want: Want | None
    patience_s: float = 0.0
    """How long one call may wait for gradients that are still being computed."""


@dataclass(frozen=True, kw_only=True)
class ShardOutcome:
    """What became of it."""

    acks: tuple[Ack, ...]
    began_s: float
    """This and the others: by the monotonic clock."""
    pushed_s: float
    """When the last push was acknowledged; began_s where nothing was pushed."""
    first_s: float
    """When the first pulled bucket began to come; 0 where none did."""
    ended_s: float

    def parts(self, computed_s: float) -> Parts:
        """How long push, barrier wait and pull took of what came after computed_s, when the gradients were whole."""
        began = max(self.began_s, computed_s)
        pushed = max(self.pushed_s, began)
        first = max(self.first_s, pushed)
        return Parts(push_s=pushed - began, wait_s=first - pushed, pull_s=max(self.ended_s, first) - first)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds of one exchange with one shard."""

    push_s: float
    wait_s: float
    pull_s: float


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """One finished exchange, for metrics and reports."""

    seconds: float
    computed_s: float
    """When the last gradient had been computed, by the monotonic clock."""
    outcomes: Mapping[int, ShardOutcome]
    skipped: bool
    """It changed nothing, since a gradient was not finite."""

    @property
    def staleness(self) -> int:
        """Of the shard that had gone furthest."""
        return max((ack.staleness for outcome in self.outcomes.values() for ack in outcome.acks), default=0)


class Running:
    """An exchange with all shards that is under way.

    interrupt: ends it early; interrupted: whether that was asked for. grace_s: how long a part may take longer than it
    promised. on_end: called once, when the last shard's part has ended, on that part's thread.
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
        self._ended = threading.Event()
        self._left_s = dict.fromkeys(shards, grace_s)
        """By shard whose part has not ended: seconds that somebody may still wait for it."""
        self._results: dict[int, ShardOutcome] = {}
        self._errors: list[Exception] = []
        self.ended_s = 0.0
        """When the last part ended, by the monotonic clock."""
        if not self._left_s:
            self._end()

    def part_ended(self, shard: int, future: Future[ShardOutcome]) -> None:
        """Called as each shard's part ends."""
        error: BaseException | None = Interrupted() if future.cancelled() else future.exception()
        with self._lock:
            first = error is not None and not self._errors
            if isinstance(error, Exception):
                self._errors.append(error)
            elif error is None:
                self._results[shard] = future.result()
            del self._left_s[shard]
            last = not self._left_s
        if first:
            # The others may wait for a step that won't come because this one has failed.
            self._interrupt()
        if last:
            self._end()

    def _end(self) -> None:
        self.ended_s = time.monotonic()
        self._ended.set()
        self._on_end()

    @property
    def ended(self) -> bool:
        """Whether every shard's part has ended."""
        return self._ended.is_set()

    @property
    def failed(self) -> bool:
        """Whether some shard's part has failed."""
        return bool(self._errors)

    def promise(self, shard: int, seconds: float) -> None:
        """A shard's part begins something that ends by itself within this time."""
        with self._lock:
            if shard in self._left_s:
                self._left_s[shard] = seconds + self._grace_s

    def look(self) -> None:
        """Called every LOOK_S by whoever waits. Raises UnreachableError where a part should have ended long ago.

        Looks are counted, not the clock: a process that stood still has not waited.
        """
        if self._interrupted():
            # A call that was about to begin when it was cancelled may have forgotten that.
            self._interrupt()
        with self._lock:
            for shard in self._left_s:
                self._left_s[shard] -= LOOK_S
            late = sorted(shard for shard, left_s in self._left_s.items() if left_s <= 0.0)
        if late:
            raise UnreachableError(
                f"the exchange with shard {', '.join(map(str, late))} has not ended {self._grace_s:.0f} s after the "
                f"deadlines of its own calls; this process can't train any further: start it again"
            )

    def wait(self) -> dict[int, ShardOutcome]:
        """Outcome by shard; raises the most telling error of all shards, and what look() raises."""
        while not self._ended.wait(LOOK_S):
            self.look()
        if self._errors:
            raise min(self._errors, key=_rank)
        return self._results

    def join(self) -> bool:
        """Wait for the end, whatever it is; False where it does not come."""
        try:
            self.wait()
        except Exception as error:
            log.debug("an exchange ended: %s", error or type(error).__name__)
        return self.ended


class Exchange:
    """Exchanges with all shards in parallel. interrupt() may come from any thread.

    index: the worker's, so that worker i starts at shard i mod S and W workers do not hit one server at once.
    """

    def __init__(
        self,
        lanes: Mapping[int, Lane],
        sinks: Mapping[int, BucketSink],
        timeouts: Timeouts,
        *,
        index: int,
        on_retry: Callable[[int], None] = lambda shard: None,
    ) -> None:
        self._lanes = lanes
        self._sinks = sinks
        self._timeouts = timeouts
        shards = sorted(lanes)
        offset = index % max(1, len(shards))
        self._order = shards[offset:] + shards[:offset]
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(shards)), thread_name_prefix="shard")
        self._interrupted = threading.Event()
        self._on_retry = on_retry
        self._lock = threading.Lock()
        self._told: dict[int, str] = {}
        self._live: list[LivePayloads] = []
        self._running: Running | None = None
        self._silent: set[int] = set()
        self.on_silence: Callable[[frozenset[int]], None] = lambda shards: None
        """(shards): those that have not been heard for as long as makes a task dead; called whenever that changes."""
        self.still_ordered: Callable[[], bool] = lambda: True
        """Asked whenever a shard says WAITING: whether what this exchange waits for is still wanted of it."""

    def arm(self) -> None:
        """Forget earlier interruptions. Look at the orders after this and before run(), so that none is missed."""
        self._interrupted.clear()

    def interrupt(self) -> None:
        """Make the running exchange end with Interrupted, soon."""
        self._interrupted.set()
        for lane in self._lanes.values():
            lane.cancel()
        for payloads in list(self._live):
            payloads.wake()

    def give_up(self) -> None:
        """End what was started last; what became of it doesn't matter. Raises UnreachableError where it doesn't end."""
        self.interrupt()
        if self._running is not None and not self._running.join():
            raise UnreachableError("an exchange that was given up does not end; start this process again")

    def refusal(self) -> Exception | None:
        """What a wait within an exchange has to raise, if anything."""
        return Interrupted() if self._interrupted.is_set() else None

    def start(
        self, sender: Sender, tasks: Mapping[int, ShardTask], on_end: Callable[[], None] = lambda: None
    ) -> Running:
        """Begin one task per shard."""
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
            grace_s=self._timeouts.total_s,
            on_end=on_end,
        )
        for shard in order:
            promise = functools.partial(running.promise, shard)
            future = self._pool.submit(self._one, sender, tasks[shard], promise)
            future.add_done_callback(functools.partial(running.part_ended, shard))
        return running

    def run(self, sender: Sender, tasks: Mapping[int, ShardTask]) -> dict[int, ShardOutcome]:
        """Run one task per shard; raises the most telling error of all shards after every one has ended."""
        return self.start(sender, tasks).wait()

    def progress(self, sender: Sender, shard: int, replicas: Sequence[int]) -> Standing:
        """What a shard has counted of some replicas; asked again for a third of the timeout while it isn't there.

        Raises Interrupted, since a job that has ended takes its servers with it; UnreachableError.
        """
        start_s, pause_s = time.monotonic(), 0.05
        while True:
            if self._interrupted.is_set():
                raise Interrupted
            try:
                standing = self._lanes[shard].progress(sender, replicas, timeout_s=self._timeouts.rpc_s)
                self._note(shard, silent=False)
                return standing
            except UnreachableError as error:
                if self._interrupted.is_set():
                    raise Interrupted from error
                waited_s = time.monotonic() - start_s
                if waited_s >= self._timeouts.rpc_s:
                    self._note(shard, silent=True)
                    raise UnreachableError(f"shard {shard}, asked for {waited_s:.1f} s: {error}") from error
                self._on_retry(shard)
                self._interrupted.wait(pause_s)
                pause_s = min(pause_s * 2, 1.0)

    def _one(self, sender: Sender, task: ShardTask, promise: Callable[[float], None]) -> ShardOutcome:
        lane, sink = self._lanes[task.shard], self._sinks[task.shard]
        sink.begin()
        start_s = heard_s = time.monotonic()
        pending = list(task.contributions)
        acks: list[Ack] = []
        want, pause_s, pushed_s = task.want, 0.05, start_s
        while pending or want is not None:
            if self._interrupted.is_set():
                raise Interrupted
            try:
                timeout_s = self._deadline_s(sink, pending) + task.patience_s
                call_s = time.monotonic()
                promise(TRIES * timeout_s)
                done = lane.exchange(sender, pending, want, sink, timeout_s=timeout_s)
            except Unready:
                # Nobody's fault: a call is made again when there is something to send.
                self._await_gradients(pending)
                heard_s = time.monotonic()
                want = self._again(want, sink)
                continue
            except UnreachableError as error:
                if self._interrupted.is_set():
                    raise Interrupted from error
                silent_s = time.monotonic() - heard_s
                if silent_s > self._timeouts.total_s:
                    raise
                if silent_s >= self._timeouts.dead_s:
                    self._note(task.shard, silent=True)
                self._on_retry(task.shard)
                log.warning("shard %d: %s; trying again", task.shard, error)
                self._interrupted.wait(pause_s)
                pause_s = min(pause_s * 2, self._timeouts.heartbeat_s + 1.0)
                want = self._again(want, sink)
                continue
            heard_s = time.monotonic()
            self._note(task.shard, silent=False)
            accepted = [ack for ack in done.acks if ack.outcome is not Outcome.WAITING]
            for ack in accepted:
                check_ack(ack, task.shard)
            if pending:
                pushed_s = call_s + done.push_s
            acks.extend(accepted)
            if len(accepted) < len(done.acks):
                # The shard was heard and is busy with others: neither silence nor a fault of the lane.
                if not self.still_ordered():
                    raise Interrupted
                self._tell_no_room(task.shard, done.acks[-1])
                pending = pending[len(accepted) :]
                self._interrupted.wait(pause_s)
                want = self._again(want, sink)
                continue
            pending = []
            if done.end is None or done.end.outcome is Outcome.SERVED:
                break
            check_end(done.end, task.shard)
            if not self.still_ordered():
                raise Interrupted
            self._tell_waiting(task.shard, done.end, time.monotonic() - start_s)
            assert want is not None
            want = self._rest(want, sink)
        return ShardOutcome(
            acks=tuple(acks), began_s=start_s, pushed_s=pushed_s, first_s=sink.first_s, ended_s=time.monotonic()
        )

    def _note(self, shard: int, *, silent: bool) -> None:
        """Tell who wants to know that a shard is not heard any more, or again. Called by the shards' own threads."""
        if silent == (shard in self._silent):
            return
        with self._lock:
            (self._silent.add if silent else self._silent.discard)(shard)
            found = frozenset(self._silent)
        self.on_silence(found)

    def _deadline_s(self, sink: BucketSink, pending: Sequence[Contribution]) -> float:
        """Deadline of one call: a third of the timeout, and time for its bytes on a very slow link.

        A dead link is noticed sooner, by the channel's keepalive; a server that waits answers WAITING sooner.
        """
        pushed = sum(push.payloads.nbytes for push in pending)
        return self._timeouts.rpc_s + (pushed + sink.shard_bytes) / SLOWEST_BYTES_PER_S

    def _await_gradients(self, pending: Sequence[Contribution]) -> None:
        """Wait until the backward pass has made more of a push; the session's orders end this too."""
        for payloads in (push.payloads for push in pending):
            while isinstance(payloads, LivePayloads) and not payloads.wait(self._timeouts.rpc_s):
                if self._interrupted.is_set() or not self.still_ordered():
                    raise Interrupted

    def _again(self, want: Want | None, sink: BucketSink) -> Want | None:
        """What to ask for after a broken call.

        What came over it is not asked for again: of an exact step it can't have changed, and a later version must not
        overwrite what a forward pass may be reading already.
        """
        rest = self._rest(want, sink) if want is not None else None
        # An empty list would mean all.
        return rest if rest is not None and rest.buckets else None

    def _rest(self, want: Want, sink: BucketSink) -> Want:
        """The buckets that have not come yet."""
        everything = want.buckets or range(sink.num_buckets)
        return replace(want, buckets=[number for number in everything if number not in sink.arrived])

    def _tell_waiting(self, shard: int, end: End, waited_s: float) -> None:
        if waited_s < self._timeouts.suspect_s:
            return
        sentence = f"shard {shard} waits for replicas {list(end.waiting_for)} in step {end.step}"
        rest = "the chief moves them when their worker is dead"
        if not end.waiting_for:
            sentence = f"shard {shard} has all gradients of step {end.step} and has not closed it"
            rest = "it waits for the verdict of all shards, or for its standby to hold the step too"
        if self._told.get(shard) != sentence:
            self._told[shard] = sentence
            log.warning("%s since %.0f s; %s", sentence, waited_s, rest)

    def _tell_no_room(self, shard: int, ack: Ack) -> None:
        if self._told.get(shard) != ack.reason:
            self._told[shard] = ack.reason
            log.warning("shard %d has no room for this push yet: %s", shard, ack.reason)

    def close(self) -> None:
        """End threads, and free what lanes hold."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        try:
            self.give_up()
        except UnreachableError as error:
            log.warning("%s", error)
            return
        self._pool.shutdown(wait=True)
        # Another exchange may follow: memory and sockets go now, not when the collector comes to it.
        for lane in self._lanes.values():
            lane.close()


def _rank(error: Exception) -> int:
    """Most telling first: what a shard said beats what our own interruption made of the other calls."""
    order = (Stopped, NonFiniteError, ProtocolError, ShardlineError, Restart, Interrupted)
    return next((number for number, cls in enumerate(order) if isinstance(error, cls)), 0)


def check_ack(ack: Ack, shard: int) -> None:
    """Return where the push counts or was counted before; raise what to do otherwise."""
    if ack.accepted:
        if ack.reason and ack.outcome is Outcome.DUPLICATE and "other bits" in ack.reason:
            log.error("shard %d: %s", shard, ack.reason)
        return
    if ack.outcome is Outcome.STOPPED:
        raise Stopped(ack.reason)
    if ack.outcome is Outcome.REFUSED:
        raise ProtocolError(f"shard {shard} refused the push: {ack.reason}")
    raise Restart(f"shard {shard}: {ack.outcome.name.lower()}: {ack.reason}")


def check_end(end: End, shard: int) -> None:
    """Return where a pull only has to wait; raise what to do otherwise."""
    if end.outcome is Outcome.WAITING:
        return
    if end.outcome is Outcome.STOPPED:
        raise Stopped(end.reason)
    if end.outcome is Outcome.REFUSED:
        raise ProtocolError(f"shard {shard} refused the pull: {end.reason}")
    raise Restart(f"shard {shard}: {end.outcome.name.lower()}: {end.reason}")

"""One step's pushes and pulls with all shards at once, on a thread each, and waiting for their end."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from shardline.client.exchange.arrivals import LOOK_S
from shardline.client.exchange.outcomes import Interrupted, ShardOutcome, ShardTask, check_ack, check_end, rank
from shardline.client.exchange.retrying import SLOWEST_BYTES_PER_S, Observer, PullSink, Retrying, SilentShards
from shardline.client.exchange.streaming_payloads import LivePayloads
from shardline.core.image import BucketImage
from shardline.core.outcome import Outcome
from shardline.core.timeouts import Timeouts
from shardline.errors import UnreachableError
from shardline.lanes.base import Lane
from shardline.rpc.messages import data
from shardline.waist import Sender, Standing

log = logging.getLogger("shardline.client")


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
        """Whether some shard's part has failed."""
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
        silence = SilentShards(self.observer)
        self._connections = {
            shard: Retrying(
                shard,
                lane,
                timeouts,
                interrupted=self._interrupted,
                observer=self.observer,
                silence=silence,
                promise=self._promise,
            )
            for shard, lane in lanes.items()
        }

    def _promise(self, shard: int, seconds: float) -> None:
        if self._running is not None:
            self._running.promise(shard, seconds)

    def arm(self) -> None:
        """Forget earlier interruptions. Check the orders between this and run(), so that no interruption is missed."""
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
        shard, sink, began_s = task.shard, self._sinks[task.shard], time.monotonic()
        timeout_s = self.timeouts.rpc_s + task.patience_s
        done = self._connections[shard].exchange(sender, task.contributions, task.want, sink, timeout_s=timeout_s)
        for ack in done.acks:
            check_ack(ack, shard)
        if done.end is not None and done.end.outcome is not Outcome.SERVED:
            check_end(done.end, shard)
        return ShardOutcome(
            acks=done.acks,
            began_s=began_s,
            pushed_s=began_s + done.push_s,
            first_s=sink.first_s,
            ended_s=time.monotonic(),
            wants_state=done.end is not None and done.end.wants_state,
            hyper=done.end.hyper if done.end is not None else {},
        )

    def run(self, sender: Sender, tasks: Mapping[int, ShardTask]) -> dict[int, ShardOutcome]:
        """Run one task per shard. Once all have ended, raises the most informative error of all shards."""
        return self.start(sender, tasks).wait()

    def standing(self, sender: Sender, shard: int, replicas: Sequence[int]) -> Standing:
        """A shard's standing on some replicas; retried for a third of the timeout while the shard does not answer.

        Raises UnreachableError; Interrupted, because the servers exit when the job ends.
        """
        return self._connections[shard].standing(sender, replicas, timeout_s=self.timeouts.rpc_s)

    def state(self, sender: Sender, shard: int, step: int, buckets: Sequence[int] = ()) -> Sequence[BucketImage] | None:
        """Parameters and optimizer state of a shard at a step, where workers run the optimizer; None if it has none.

        buckets: () = all of parameters.

        Raises UnreachableError, Restart.
        """
        return self._connections[shard].state(sender, step, buckets, timeout_s=self._state_s(shard))

    def bring_state(self, sender: Sender, shard: int, images: Sequence[BucketImage]) -> Outcome:
        """Bring a shard such a state for a cut. Raises UnreachableError, ProtocolError."""
        return self._connections[shard].bring_state(sender, images, timeout_s=self._state_s(shard))

    def _state_s(self, shard: int) -> float:
        return self.timeouts.rpc_s + self._sinks[shard].shard_bytes / SLOWEST_BYTES_PER_S

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

"""One step's pushes and pulls with all shards at once, retried until done, interrupted, or refused."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from shardline.client.exchange.live import LivePayloads, Unready
from shardline.client.exchange.observer import Observer
from shardline.client.exchange.outcomes import Interrupted, Restart, ShardOutcome, ShardTask, check_ack, check_end
from shardline.client.exchange.pull_sink import PullSink
from shardline.client.exchange.running import Running
from shardline.core.image import BucketImage
from shardline.core.outcome import Outcome
from shardline.core.timeouts import Timeouts
from shardline.errors import UnreachableError
from shardline.host.awake import awake_s
from shardline.lanes.base import Lane
from shardline.lanes.calls import NotAdmittedError
from shardline.rpc.messages import data
from shardline.waist import Ack, End, Exchanged, Push, Sender, Standing, Want

SLOWEST_BYTES_PER_S = 1e6
"""Slower links (8 Mbit/s) run into deadlines."""
TRIES = 4
"""A call may try several lanes to a task one after another, so it may take its own deadline several times."""
FIRST_PAUSE_S = 0.05


class SilentShards:
    """Shards that do not answer; reports every change to the observer. Any thread may call it."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self._silent: set[int] = set()

    def note(self, shard: int, *, silent: bool) -> None:
        """Note that a shard does not answer, or answers again."""
        if silent == (shard in self._silent):
            return
        with self._lock:
            (self._silent.add if silent else self._silent.discard)(shard)
            found = frozenset(self._silent)
        self._observer.silent(found)


@dataclass(kw_only=True, slots=True)
class _Talk:
    sender: Sender
    task: ShardTask
    promise: Callable[[float], None]
    pending: list[Push]
    want: Want | None
    start_s: float
    heard_s: float
    pushed_s: float
    pause_s: float = FIRST_PAUSE_S
    acks: list[Ack] = field(default_factory=list)
    end: End | None = None
    """Of a pull that was served."""

    @property
    def over(self) -> bool:
        return not self.pending and self.want is None


class Conversation:
    """All exchanges with one shard, one at a time, each on its own thread.

    interrupted: makes a running exchange end with Interrupted.
    """

    def __init__(
        self,
        shard: int,
        lane: Lane,
        sink: PullSink,
        timeouts: Timeouts,
        *,
        interrupted: threading.Event,
        observer: Observer,
        silence: SilentShards,
    ) -> None:
        self._shard = shard
        self._lane = lane
        self._sink = sink
        self._timeouts = timeouts
        self._interrupted = interrupted
        self._observer = observer
        self._silence = silence
        self._told = ""

    def hold(self, sender: Sender, task: ShardTask, promise: Callable[[float], None]) -> ShardOutcome:
        """Push and pull until everything is done. promise: called with the seconds that the next call may take.

        Raises Interrupted, Restart or Stopped; UnreachableError if the shard is silent for the whole timeout.
        """
        self._sink.begin()
        now_s = time.monotonic()
        talk = _Talk(
            sender=sender,
            task=task,
            promise=promise,
            pending=list(task.contributions),
            want=task.want,
            start_s=now_s,
            heard_s=awake_s(),
            pushed_s=now_s,
        )
        while not talk.over:
            if self._interrupted.is_set():
                raise Interrupted
            done = self._call(talk)
            if done is not None and self._take(talk, done):
                break
        return ShardOutcome(
            acks=tuple(talk.acks),
            began_s=talk.start_s,
            pushed_s=talk.pushed_s,
            first_s=self._sink.first_s,
            ended_s=time.monotonic(),
            wants_state=talk.end is not None and talk.end.wants_state,
            hyper=talk.end.hyper if talk.end is not None else {},
        )

    def _call(self, talk: _Talk) -> Exchanged | None:
        """Make one call; None if it failed and has to be repeated."""
        timeout_s = self._deadline_s(talk.pending) + talk.task.patience_s
        call_s = time.monotonic()
        talk.promise(TRIES * timeout_s)
        try:
            done = self._lane.exchange(talk.sender, talk.pending, talk.want, self._sink, timeout_s=timeout_s)
        except Unready:
            # Not an error: the call is repeated when there is something to send.
            self._await_gradients(talk.pending)
            talk.heard_s = awake_s()
            talk.want = self._again(talk.want)
            return None
        except UnreachableError as error:
            # After a failed call, wait a little. Raises Interrupted, or the error itself after the whole timeout.
            if self._interrupted.is_set():
                raise Interrupted from error
            silent_s = awake_s() - talk.heard_s
            if silent_s > self._timeouts.total_s:
                raise
            if silent_s >= self._timeouts.dead_s:
                self._silence.note(self._shard, silent=True)
            self._observer.retried(self._shard)
            log.warning("shard %d: %s; trying again", self._shard, error)
            self._interrupted.wait(talk.pause_s)
            talk.pause_s = min(talk.pause_s * 2, self._timeouts.heartbeat_s + 1.0)
            talk.want = self._again(talk.want)
            return None
        talk.heard_s = awake_s()
        self._silence.note(self._shard, silent=False)
        if talk.pending:
            talk.pushed_s = call_s + done.push_s
        return done

    def _take(self, talk: _Talk, done: Exchanged) -> bool:
        """Process the result of a call; returns whether everything is done."""
        accepted = [ack for ack in done.acks if ack.outcome is not Outcome.WAITING]
        for ack in accepted:
            check_ack(ack, self._shard)
        talk.acks.extend(accepted)
        if len(accepted) < len(done.acks):
            # The shard answered and is busy with other pushes: neither silence nor a fault of the lane.
            if not self._observer.still_ordered():
                raise Interrupted
            self._tell(f"shard {self._shard} has no room for this push yet: {done.acks[-1].reason}")
            talk.pending = talk.pending[len(accepted) :]
            self._interrupted.wait(talk.pause_s)
            talk.want = self._again(talk.want)
            return False
        talk.pending = []
        if done.end is None or done.end.outcome is Outcome.SERVED:
            talk.end = done.end
            return True
        check_end(done.end, self._shard)
        if not self._observer.still_ordered():
            raise Interrupted
        assert talk.want is not None
        self._tell_waiting(done.end, time.monotonic() - talk.start_s, wants_latest=talk.want.step is None)
        talk.want = self._rest(talk.want)
        return False

    def standing(self, sender: Sender, replicas: Sequence[int]) -> Standing:
        start_s, pause_s = awake_s(), FIRST_PAUSE_S
        while True:
            if self._interrupted.is_set():
                raise Interrupted
            try:
                standing = self._lane.standing(sender, replicas, timeout_s=self._timeouts.rpc_s)
                self._silence.note(self._shard, silent=False)
                return standing
            except UnreachableError as error:
                if self._interrupted.is_set():
                    raise Interrupted from error
                waited_s = awake_s() - start_s
                if waited_s >= self._timeouts.rpc_s:
                    self._silence.note(self._shard, silent=True)
                    raise UnreachableError(f"shard {self._shard}, after {waited_s:.1f} s: {error}") from error
                self._observer.retried(self._shard)
                self._interrupted.wait(pause_s)
                pause_s = min(pause_s * 2, 1.0)

    def state(self, sender: Sender, step: int, buckets: Sequence[int]) -> Sequence[BucketImage] | None:
        """See Lane.state. Raises UnreachableError, Restart."""
        try:
            return self._lane.state(sender, step, buckets, timeout_s=self._deadline_s(()))
        except NotAdmittedError as error:
            raise Restart(f"shard {self._shard}: {error.outcome.name.lower()}: {error}") from error

    def bring_state(self, sender: Sender, images: Sequence[BucketImage]) -> Outcome:
        timeout_s = self._deadline_s(()) + sum(image.nbytes for image in images) / SLOWEST_BYTES_PER_S
        return self._lane.bring_state(sender, images, timeout_s=timeout_s)

    def _deadline_s(self, pending: Sequence[Push]) -> float:
        """Deadline of one call in seconds: a third of the timeout, plus time for its bytes on a very slow link.

        A dead link is noticed sooner, by keepalive; a server that waits answers WAITING sooner.
        """
        pushed = sum([push.payloads.nbytes for push in pending])
        return self._timeouts.rpc_s + (pushed + self._sink.shard_bytes) / SLOWEST_BYTES_PER_S

    def _await_gradients(self, pending: Sequence[Push]) -> None:
        """Wait until the backward pass has computed more of a push. Raises Interrupted if the orders change."""
        for payloads in (push.payloads for push in pending):
            while isinstance(payloads, LivePayloads) and not payloads.wait(self._timeouts.rpc_s):
                if self._interrupted.is_set() or not self._observer.still_ordered():
                    raise Interrupted

    def _again(self, want: Want | None) -> Want | None:
        """The buckets to ask for after a failed call.

        Buckets that have arrived are not requested again: those of an exact step can't have changed, and a later
        version must not overwrite what a forward pass may already be reading.
        """
        rest = self._rest(want) if want is not None else None
        # An empty list would mean all.
        return rest if rest is not None and rest.buckets else None

    def _rest(self, want: Want) -> Want:
        """The same request for the buckets that have not arrived yet."""
        everything = want.buckets or range(self._sink.num_buckets)
        return replace(want, buckets=[number for number in everything if number not in self._sink.arrived])

    def _tell_waiting(self, end: End, waited_s: float, *, wants_latest: bool) -> None:
        if waited_s < self._timeouts.suspect_s:
            return
        if wants_latest:
            self._tell(f"{end.reason}: this worker is too far ahead", f" since {waited_s:.0f} s")
            return
        sentence = f"shard {self._shard} is waiting for replicas {list(end.waiting_for)} in step {end.step}"
        rest = "the chief reassigns them when their worker is dead"
        if not end.waiting_for:
            sentence = f"shard {self._shard} has all gradients of step {end.step} but has not closed it"
            rest = "it is waiting for the verdict of all shards, or for its standby to have the step too"
        self._tell(sentence, f" since {waited_s:.0f} s; {rest}")

    def _tell(self, sentence: str, rest: str = "") -> None:
        """Log a warning, unless it is the same sentence as before."""
        if self._told != sentence:
            self._told = sentence
            log.warning("%s%s", sentence, rest)


log = logging.getLogger("shardline.client")


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
        self._sizes = {shard: sink.shard_bytes for shard, sink in sinks.items()}
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(shards)), thread_name_prefix="shard")
        self._interrupted = threading.Event()
        self._live: list[LivePayloads] = []
        self._running: Running | None = None
        self.observer = observer or Observer()
        silence = SilentShards(self.observer)
        self._conversations = {
            shard: Conversation(
                shard,
                lane,
                sinks[shard],
                timeouts,
                interrupted=self._interrupted,
                observer=self.observer,
                silence=silence,
            )
            for shard, lane in lanes.items()
        }

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
            promise = functools.partial(running.promise, shard)
            hold = functools.partial(self._conversations[shard].hold, sender, tasks[shard], promise)
            if here:
                running.run_here(shard, hold)
            else:
                self._pool.submit(hold).add_done_callback(functools.partial(running.part_ended, shard))
        if not here:
            meanwhile()
        return running

    def _moves(self, task: ShardTask) -> int:
        return self._sizes[task.shard] if task.moves is None else task.moves

    def run(self, sender: Sender, tasks: Mapping[int, ShardTask]) -> dict[int, ShardOutcome]:
        """Run one task per shard. Once all have ended, raises the most informative error of all shards."""
        return self.start(sender, tasks).wait()

    def standing(self, sender: Sender, shard: int, replicas: Sequence[int]) -> Standing:
        """A shard's standing on some replicas; retried for a third of the timeout while the shard does not answer.

        Raises UnreachableError; Interrupted, because the servers exit when the job ends.
        """
        return self._conversations[shard].standing(sender, replicas)

    def state(self, sender: Sender, shard: int, step: int, buckets: Sequence[int] = ()) -> Sequence[BucketImage] | None:
        """Parameters and optimizer state of a shard at a step, where workers run the optimizer; None if it has none.

        buckets: () = all of parameters.

        Raises UnreachableError, Restart.
        """
        return self._conversations[shard].state(sender, step, buckets)

    def bring_state(self, sender: Sender, shard: int, images: Sequence[BucketImage]) -> Outcome:
        """Bring a shard such a state for a cut. Raises UnreachableError, ProtocolError."""
        return self._conversations[shard].bring_state(sender, images)

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

"""A connection to a shard that repeats what fails, until it is done, interrupted, or refused."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from shardline.client.exchange.outcomes import Interrupted, Restart
from shardline.client.exchange.streaming_payloads import LivePayloads, Unready
from shardline.core.image import BucketImage
from shardline.core.outcome import Outcome
from shardline.core.timeouts import Timeouts
from shardline.errors import UnreachableError
from shardline.host.awake import awake_s
from shardline.lanes.base import Lane
from shardline.lanes.calls import NotAdmittedError
from shardline.waist import Ack, End, Exchanged, Push, Sender, Sink, Standing, Want

log = logging.getLogger("shardline.client")

SLOWEST_BYTES_PER_S = 1e6
"""Slower links (8 Mbit/s) run into deadlines."""
TRIES = 4
"""A call may try several lanes to a task one after another, so it may take its own deadline several times."""
FIRST_PAUSE_S = 0.05


class Observer:
    """Ignores all events of exchanges; a session overrides what it needs. Called by any thread."""

    def still_ordered(self) -> bool:
        """Whether the result of the exchange is still wanted; called whenever a shard answers WAITING."""
        return True

    def retried(self, shard: int) -> None:
        """A call to this shard is about to be repeated."""

    def silent(self, shards: frozenset[int]) -> None:
        """Shards that have been silent long enough to count as dead; called whenever this set changes."""

    def not_finite(self, name: str) -> None:
        """The loss (name "loss") or the gradient of a tensor has NaN or infinity."""


class PullSink(Sink, Protocol):
    """The memory that one shard's pulls go to, one after another."""

    num_buckets: int
    shard_bytes: int
    """Bytes of all buckets before encoding."""
    arrived: set[int]
    """Complete buckets of the running pull."""
    raw_bytes: int
    """Bytes pulled so far, before encoding; wire_bytes: encoded."""
    wire_bytes: int
    first_s: float
    """When the running pull's first bucket began to arrive, by the monotonic clock; 0 = none has."""

    def begin(self) -> None: ...


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


class Retrying:
    """One shard's ShardService over a lane, whose calls it repeats.

    interrupted: makes a running exchange end with Interrupted. promise: called with the shard and the seconds that its
    next call may take.
    """

    def __init__(
        self,
        shard: int,
        lane: Lane,
        timeouts: Timeouts,
        *,
        interrupted: threading.Event,
        observer: Observer,
        silence: SilentShards,
        promise: Callable[[int, float], None],
    ) -> None:
        self._shard = shard
        self._lane = lane
        self._timeouts = timeouts
        self._interrupted = interrupted
        self._observer = observer
        self._silence = silence
        self._promise = promise
        self._told = ""

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
            if self._interrupted.is_set():
                raise Interrupted
            limit_s, call_s = self._limit_s(timeout_s, pending, sink), time.monotonic()
            self._promise(self._shard, TRIES * limit_s)
            try:
                done = self._lane.exchange(sender, pending, want, sink, timeout_s=limit_s)
            except Unready:
                # Not an error: the call is repeated when there is something to send.
                self._await_gradients(pending)
                heard_s, want = awake_s(), self._again(want, sink)
                continue
            except UnreachableError as error:
                self._failed(error, awake_s() - heard_s)
                self._interrupted.wait(pause_s)
                pause_s = min(pause_s * 2, self._timeouts.heartbeat_s + 1.0)
                want = self._again(want, sink)
                continue
            heard_s = awake_s()
            self._silence.note(self._shard, silent=False)
            if pending:
                push_s = call_s - start_s + done.push_s
            taken = [ack for ack in done.acks if ack.outcome is not Outcome.WAITING]
            acks += taken
            if len(taken) < len(done.acks):
                # The shard answered and is busy with other pushes: neither silence nor a fault of the lane.
                self._check_wanted()
                self._tell(f"shard {self._shard} has no room for this push yet: {done.acks[-1].reason}")
                pending = pending[len(taken) :]
                self._interrupted.wait(pause_s)
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
        """After a failed call. Raises Interrupted, or the error itself after the whole timeout."""
        if self._interrupted.is_set():
            raise Interrupted from error
        if silent_s > self._timeouts.total_s:
            raise error
        if silent_s >= self._timeouts.dead_s:
            self._silence.note(self._shard, silent=True)
        self._observer.retried(self._shard)
        log.warning("shard %d: %s; trying again", self._shard, error)

    def standing(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        """The shard's standing on some replicas; asked again for timeout_s while the shard does not answer.

        Raises UnreachableError; Interrupted, because the servers exit when the job ends.
        """
        start_s, pause_s = awake_s(), FIRST_PAUSE_S
        while True:
            if self._interrupted.is_set():
                raise Interrupted
            try:
                standing = self._lane.standing(sender, replicas, timeout_s=timeout_s)
                self._silence.note(self._shard, silent=False)
                return standing
            except UnreachableError as error:
                if self._interrupted.is_set():
                    raise Interrupted from error
                waited_s = awake_s() - start_s
                if waited_s >= timeout_s:
                    self._silence.note(self._shard, silent=True)
                    raise UnreachableError(f"shard {self._shard}, after {waited_s:.1f} s: {error}") from error
                self._observer.retried(self._shard)
                self._interrupted.wait(pause_s)
                pause_s = min(pause_s * 2, 1.0)

    def state(
        self, sender: Sender, step: int, buckets: Sequence[int], *, timeout_s: float
    ) -> Sequence[BucketImage] | None:
        """See Lane.state. Raises UnreachableError, Restart."""
        try:
            return self._lane.state(sender, step, buckets, timeout_s=timeout_s)
        except NotAdmittedError as error:
            raise Restart(f"shard {self._shard}: {error.outcome.name.lower()}: {error}") from error

    def bring_state(self, sender: Sender, images: Sequence[BucketImage], *, timeout_s: float) -> Outcome:
        """See Lane.bring_state."""
        moved_s = sum(image.nbytes for image in images) / SLOWEST_BYTES_PER_S
        return self._lane.bring_state(sender, images, timeout_s=timeout_s + moved_s)

    def _limit_s(self, timeout_s: float, pending: Sequence[Push], sink: PullSink) -> float:
        """Deadline of one call in seconds: timeout_s, plus time for its bytes on a very slow link.

        A dead link is noticed sooner, by keepalive; a server that waits answers WAITING sooner.
        """
        pushed = sum([push.payloads.nbytes for push in pending])
        return timeout_s + (pushed + sink.shard_bytes) / SLOWEST_BYTES_PER_S

    def _await_gradients(self, pending: Sequence[Push]) -> None:
        """Wait until the backward pass has computed more of a push. Raises Interrupted if the orders change."""
        for payloads in (push.payloads for push in pending):
            while isinstance(payloads, LivePayloads) and not payloads.wait(self._timeouts.rpc_s):
                if self._interrupted.is_set():
                    raise Interrupted
                self._check_wanted()

    def _check_wanted(self) -> None:
        if not self._observer.still_ordered():
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


def _rest(want: Want, sink: PullSink) -> Want:
    """The same request for the buckets that have not arrived yet."""
    everything = want.buckets or range(sink.num_buckets)
    return replace(want, buckets=[number for number in everything if number not in sink.arrived])

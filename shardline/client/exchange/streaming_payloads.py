"""Payloads of a push that is still being computed: offered bucket by bucket, sent by priority, kept for retries.

What the next forward pass needs first leaves first, one credit window at a time: gradients become ready from the last
layer to the first. Cutting tensors into slices and limiting the bytes in flight let an urgent bucket overtake waiting
ones. P3: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", 2019; credit: Peng et
al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (ByteScheduler), 2019.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from shardline.core.plan import Plan, ShardSpec
from shardline.errors import UnreachableError
from shardline.waist import Payload

CREDIT_FLOOR_BYTES = 4 << 20
"""Smaller windows cost more in messages than they gain by better order."""


def bucket_ranks(plan: Plan, uses: Sequence[int]) -> list[list[int]]:
    """Rank of each bucket by shard, 0 = most urgent; ranks are unique within a plan.

    uses: tensor numbers in the order of their first use in a forward pass. Buckets of tensors that were not seen come
    last; ties (slices of one tensor) keep the plan's order.
    """
    place = {tensor: position for position, tensor in reversed(list(enumerate(uses)))}
    unseen = len(uses)
    keys = sorted(
        (min((place.get(piece.tensor, unseen) for piece in bucket.slices), default=unseen), b, s)
        for s, shard in enumerate(plan.shards)
        for b, bucket in enumerate(shard.buckets)
    )
    ranks = [[0] * len(shard.buckets) for shard in plan.shards]
    for rank, (_, b, s) in enumerate(keys):
        ranks[s][b] = rank
    return ranks


def pull_order(ranks: Sequence[int], *, at_once: bool, sent: Sequence[int] = ()) -> list[int]:
    """A shard's buckets in the order in which to request them; it answers in that order.

    at_once: the shard applies a whole step at once, so the buckets that the next forward pass needs first come first.
    Otherwise it applies bucket by bucket and can first answer what is pushed first. sent: the order of sending in the
    previous step; () = unknown, then last layers first, as in a backward pass.
    """
    by_rank = sorted(range(len(ranks)), key=ranks.__getitem__)
    if at_once:
        return by_rank
    known = set(sent)
    return [*sent, *(bucket for bucket in reversed(by_rank) if bucket not in known)]


def default_credit(shard: ShardSpec) -> int:
    """Bytes that may be in flight to a shard: two of its largest buckets, one being sent and one behind it."""
    return max(CREDIT_FLOOR_BYTES, 2 * max((bucket.nbytes for bucket in shard.buckets), default=0))


class SendQueue:
    """The ready buckets of one push, most urgent first. Guarded by its owner's lock.

    ranks, sizes (bytes): by bucket. take() returns at most credit_bytes, but at least one bucket; the lane calls it
    again when those are on the wire, which returns their credit. Every added bucket is sent: nothing is added after the
    backward pass, so urgent buckets can't hold back the rest forever.
    """

    def __init__(self, ranks: Sequence[int], sizes: Sequence[int], credit_bytes: int) -> None:
        self._ranks = ranks
        self._sizes = sizes
        self._credit_bytes = credit_bytes
        self._ready: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, bucket: int) -> None:
        heapq.heappush(self._ready, (self._ranks[bucket], bucket))

    def take(self) -> list[int]:
        """The next buckets to send, in order; [] if none is ready."""
        taken: list[int] = []
        left = self._credit_bytes
        while self._ready and (not taken or self._sizes[self._ready[0][1]] <= left):
            _, bucket = heapq.heappop(self._ready)
            left -= self._sizes[bucket]
            taken.append(bucket)
        return taken


DROP_S = 120.0
"""Seconds that preparing one bucket may take; on a GPU it waits for everything enqueued before."""


class Unready(Exception):
    """The next bucket was not computed within the call's patience: the call ends and is repeated when there is more.

    Not an error of the shard or the link, however long a backward pass takes.
    """


class LivePayloads:
    """Buckets of one push to one shard. The computing side calls offer() and close(), a lane batches().

    queue: which bucket leaves next. prepare: fills, checks and encodes one bucket; called once per bucket, on the
    thread of the lane that sends it. The result is kept until drop(), so that a retry sends the same bytes (PROTOCOL
    trap 5). interrupted: called by every waiting reader when it is woken; returns an error to raise, or None.
    """

    at_once = False

    def __init__(
        self,
        queue: SendQueue,
        prepare: Callable[[int], Payload],
        *,
        nbytes: int,
        in_place: bool = False,
        interrupted: Callable[[], Exception | None] = lambda: None,
    ) -> None:
        self.in_place = in_place
        self._queue = queue
        self._prepare = prepare
        self.nbytes = nbytes
        self._interrupted = interrupted
        self._changed = threading.Condition()
        self._sent: list[Payload] = []
        """In the order of sending."""
        self.raw_bytes = self.wire_bytes = 0
        """Bytes prepared so far, before and after encoding."""
        self._preparing = False
        self._closed = False
        self.empty: Sequence[int] = ()
        self._error: Exception | None = None
        self._patience_s = 3600.0

    @property
    def order(self) -> list[int]:
        with self._changed:
            return [item.bucket for item in self._sent]

    def be_patient(self, seconds: float) -> None:
        """Set how long one call may wait for buckets in total, in seconds, from the next call on."""
        self._patience_s = seconds

    # The computing side

    def offer(self, bucket: int) -> None:
        """Offer a bucket, which can be prepared from now on."""
        with self._changed:
            self._queue.add(bucket)
            self._changed.notify_all()

    def close(self, empty: Sequence[int] = ()) -> None:
        """No further bucket will be offered. empty: buckets to which the push adds nothing."""
        with self._changed:
            self.empty = tuple(empty)
            self._closed = True
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """End every batches() with this error, now and in the future."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wake(self) -> None:
        """Let waiting readers check whether they are interrupted."""
        with self._changed:
            self._changed.notify_all()

    def drop(self, wait_s: float = DROP_S) -> None:
        """Free the prepared buckets: the push is acknowledged or given up.

        Returns when no bucket is being prepared any more: the thread of an abandoned call may still be preparing one,
        and the memory it writes to belongs to the next step from now on. Raises UnreachableError after wait_s.
        """
        with self._changed:
            self._error = self._error or RuntimeError("the payloads of this push were released")
            self._prepare = _gone
            self._changed.notify_all()
            ended = self._changed.wait_for(lambda: not self._preparing, wait_s)
            self._sent.clear()
        if not ended:
            raise UnreachableError(
                f"a bucket of an abandoned push is still being prepared after {wait_s:.0f} s; this process can't "
                "continue training: restart it"
            )

    # The sending side

    def wait(self, timeout_s: float) -> bool:
        """Wait until the backward pass is over or a bucket is ready to be sent; False after timeout_s."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or len(self._queue) > 0 or self._refusal() is not None, timeout_s
            )

    def batches(self) -> Iterator[Sequence[Payload]]:
        """Yield batches by priority; after a failed call first those sent before. See waist.Payloads.

        Raises Unready, an error of prepare() or fail(), or the error that `interrupted` returns.
        """
        end_s = time.monotonic() + self._patience_s
        done = 0
        while True:
            with self._changed:
                self._await_more(done, end_s)
                batch: Sequence[Payload] = self._sent[done:]
                numbers = [] if batch else self._queue.take()
                if not batch and not numbers:
                    return
                self._preparing = bool(numbers)
            if numbers:
                batch = self._make(numbers)
            done += len(batch)
            yield batch

    def _await_more(self, done: int, end_s: float) -> None:
        """Wait until there is more than `done` to send, or nothing will come. Call with the lock held."""
        while True:
            refusal = self._refusal()
            if refusal is not None:
                raise refusal
            if not self._preparing and (done < len(self._sent) or len(self._queue) or self._closed):
                return
            left_s = end_s - time.monotonic()
            if left_s <= 0.0 or not self._changed.wait(left_s):
                raise Unready

    def _refusal(self) -> Exception | None:
        return self._error or self._interrupted()

    def _make(self, numbers: Sequence[int]) -> list[Payload]:
        made: list[Payload] = []
        error: Exception | None = None
        try:
            for number in numbers:
                made.append(self._prepare(number))
        except Exception as raised:
            error = raised
            raise
        finally:
            with self._changed:
                # Kept even if this call is dead: a retry must not prepare a bucket a second time.
                self._sent.extend(made)
                self.raw_bytes += sum(item.raw_bytes for item in made)
                self.wire_bytes += sum(item.nbytes for item in made)
                self._preparing = False
                self._error = self._error or error
                self._changed.notify_all()
        return made


class ReadyPayloads:
    """Buckets of one push that are all prepared, and few. interrupted: see LivePayloads."""

    at_once = True

    def __init__(
        self,
        items: Sequence[Payload],
        *,
        empty: Sequence[int],
        in_place: bool,
        interrupted: Callable[[], Exception | None],
    ) -> None:
        self.empty = empty
        self.in_place = in_place
        self.raw_bytes = sum([item.raw_bytes for item in items])
        self.nbytes = self.wire_bytes = sum([item.nbytes for item in items])
        self._items = items
        self._interrupted = interrupted

    def batches(self) -> Iterator[Sequence[Payload]]:
        refusal = self._interrupted()
        if refusal is not None:
            raise refusal
        if self._items:
            yield self._items


def _gone(bucket: int) -> Payload:
    raise RuntimeError(f"bucket {bucket} was already acknowledged")

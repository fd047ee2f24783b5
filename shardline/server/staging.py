"""Who may bring the next bucket: a bound on receive slots and partial sums that can't stop a step. PROTOCOL 3.22.

A synchronous bucket closes when all replicas are counted in it. Until then it holds partial sums, one for each whole
node of the canonical tree; and each bucket on its way in holds a receive slot. Both are bounded by one limit.

**The rule.** A contribution is privileged where its sibling in the tree is held (it merges at once), where its block is
the lowest not yet counted in its bucket, or where it repeats what was counted. For every bucket the ledger sets aside
the most partial sums that the bucket can come to hold when from now on only privileged contributions are counted in it
(worst()); an empty bucket's is the tree's depth. A contribution that is covered by this, or whose bytes fit into what
is left of the limit, is granted. One that doesn't fit is granted all the same where it is privileged and its stream
holds nothing else; any other waits.

**Why nothing stops.** A stream brings the buckets of one block, in any order, one after another: it ends a bucket
before it asks for the next, and what it brought whole is counted without waiting for anybody. A worker of several
blocks brings them in ascending order or side by side. Let t be the lowest open step, m the lowest block that lacks in
some bucket of step t. The stream of m is at a bucket in which m lacks; every lower block is counted in it, so m is the
lowest there: it is privileged, and what its stream holds goes without waiting. So m is counted in one bucket after
another, then the next block is, and the step closes. Streams that are ahead, and what they hold, play no part in this.
A worker that died is replaced, and repeats what it had brought: repetitions wait for nothing but their own stream.

**Why the bound holds.** Privileged contributions don't raise a bucket's worst(): the lowest block is on the way that it
measures, and a sibling leaves fewer sums than it finds. Another raises it by one sum at most, and was granted only with
room for that; the slot of the lowest block counts as one of the sums until it is counted. Slots that were granted
without room are one per stream. So partial sums and slots stay within the limit and one bucket per stream, as long as
the limit is not below floor_bytes(): with less no order of arrival could be promised to end, so floor_bytes() is the
least limit there is.

Asynchronous pushes are held whole until their commit, and may come as slowly as a backward pass makes them. A bucket is
granted where, with it, all open pushes could still end one after another: the one that lacks least has room for what it
lacks, the next one has that room and what the first gives back, and so on. So no two wait for each other's half, and no
room is kept for what has not come. A push that alone is larger than the limit goes over it, one at a time. None begins
while one that has begun waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from shardline.core.plan import ShardSpec
from shardline.core.reduce import Block, sibling, split
from shardline.core.spec import TensorKind

SPARE_BYTES = 64 << 20
"""What the default limit leaves for contributions out of tree order."""


# How many partial sums a bucket holds


def replica_mask(block: Block) -> int:
    """A block as bits, replica r at bit r."""
    return ((1 << block.count) - 1) << block.first


@functools.lru_cache(maxsize=1 << 16)
def _node(count: int, mask: int) -> tuple[int, int]:
    """(whole nodes now, most at any time when the rest comes lowest first, without the moment all are there).

    Of a node over `count` replicas of which `mask` are counted. The second is 0 if all are.
    """
    if mask == (1 << count) - 1:
        return 1, 0
    if count == 1:
        return 0, 0
    left, right = split(Block(0, count))
    left_now, left_worst = _node(left.count, mask & replica_mask(left))
    right_now, right_worst = _node(right.count, mask >> left.count)
    worst = 0
    if mask & replica_mask(left) != replica_mask(left):
        worst = left_worst + right_now
    if mask >> left.count != (1 << right.count) - 1:
        # The left half has become one sum by then.
        worst = max(worst, 1 + right_worst)
    return left_now + right_now, worst


def partial_sums(mask: int, replicas: int) -> int:
    """Partial sums that a bucket holds when the replicas in `mask` are counted."""
    return _node(replicas, mask)[0]


def worst(mask: int, replicas: int, *, total_waits: bool) -> int:
    """The most it comes to hold if from now on only privileged contributions are counted.

    total_waits: the whole sum waits for a verdict; otherwise it is applied in the moment it is complete.
    """
    return max(_node(replicas, mask)[1], int(total_waits))


def floor_bytes(shards: Iterable[ShardSpec], replicas: int, *, total_waits: bool) -> int:
    """The least limit: what tree order itself may hold, so that one worker can be a whole model ahead of the next."""
    depth = worst(0, replicas, total_waits=total_waits)
    return depth * sum(b.nbytes for shard in shards for b in shard.buckets if b.kind is not TensorKind.FROZEN)


def limit_bytes(
    shards: Iterable[ShardSpec], replicas: int, *, in_tree: bool, total_waits: bool, asked: int | None = None
) -> int:
    """The limit in force: what was asked for, or the default, but never less than what can be promised to end.

    Default: room for tree order and 64 MB (or two of the largest bucket) for what comes out of order. Where
    nothing is summed: two whole pushes, or 64 MB.
    """
    hosted = list(shards)
    if not in_tree:
        largest = max((shard.nbytes for shard in hosted), default=0)
        return max(SPARE_BYTES, 2 * largest) if asked is None else asked
    floor = floor_bytes(hosted, replicas, total_waits=total_waits)
    if asked is not None:
        return max(floor, asked)
    largest = max((bucket.nbytes for shard in hosted for bucket in shard.buckets), default=0)
    return floor + max(SPARE_BYTES, 2 * largest)


# The rule


@dataclass(frozen=True, eq=False)
class AsyncPush:
    """An asynchronous push on its way in."""

    claim: int
    """Bytes that it holds in the end, at most."""


@dataclass(frozen=True)
class Ask:
    """A contribution that wants to come in. bucket None: a part of an asynchronous push, or all of it (push None)."""

    shard: int
    bucket: int | None
    block: Block
    nbytes: int
    """What it holds from its first byte until it is counted, at most."""
    step: int | None = None
    push: AsyncPush | None = None


def worker_index(task: str) -> int:
    """3 of "worker/3"; 0 of a name without a number."""
    digits = task.rpartition("/")[2]
    return int(digits) if digits.isdecimal() and len(digits) < 10 else 0


class Grant(enum.Enum):
    """What the ledger says of an ask."""

    ROOM = "room"
    PRIVILEGED = "privileged"
    """Over the limit, since everyone may wait for it."""
    WAIT = "wait"


View = Callable[[int, int], tuple[int, int] | None]
"""(open step, mask of counted replicas) of (shard, bucket); None if there is no such bucket."""


@dataclass(eq=False)
class Entry:
    """A granted ask."""

    ask: Ask
    grant: Grant
    charge: int
    covered: bool
    """Its bytes are those that its bucket's worst() counts on."""


@dataclass
class _Open:
    """What an asynchronous push holds."""

    lacks: int
    """Bytes that it may still ask for."""
    charged: int = 0
    """Bytes that count against the limit, and have not been given back."""
    entries: int = 0
    over: bool = False
    """It goes over the limit: whatever it asks for is granted."""


class Ledger:
    """The rule and its sums. Pure: no clock, no threads; view() is asked for the state of buckets."""

    def __init__(
        self, limit: int, sizes: Mapping[tuple[int, int], int], replicas: int, *, total_waits: bool, view: View
    ) -> None:
        """sizes: bytes of one partial sum by (shard, bucket); empty in asynchronous mode."""
        self.limit = limit
        self._sizes = dict(sizes)
        self._replicas = replicas
        self._total_waits = total_waits
        self._view = view
        self._depth = worst(0, replicas, total_waits=total_waits)
        self._states = dict.fromkeys(self._sizes, (0, False))
        """By bucket, the mask and whether a covered slot is on its way, for which _set_aside holds."""
        self._set_aside = {key: self._depth * size for key, size in self._sizes.items()}
        self._reserved = sum(self._set_aside.values())
        self._open: list[Entry] = []
        self._covered: set[tuple[int, int]] = set()
        """Buckets with such a slot."""
        self._pushes: dict[AsyncPush, _Open] = {}
        """Asynchronous ones that hold something."""

    @property
    def reserved(self) -> int:
        """Bytes that are set aside or charged."""
        return self._reserved

    def decide(self, ask: Ask) -> Entry:
        """What becomes of an ask; nothing is noted yet, see note()."""
        if not ask.nbytes:
            return Entry(ask, Grant.ROOM, 0, False)
        if ask.bucket is None:
            return self._decide_async(ask, ask.push or AsyncPush(ask.nbytes))
        covered, privileged = self._standing(ask, ask.bucket)
        size = self._sizes.get((ask.shard, ask.bucket), 0)
        charge = max(0, ask.nbytes - size) if covered else max(size, ask.nbytes)
        if self._reserved + charge <= self.limit:
            return Entry(ask, Grant.ROOM, charge, covered)
        if privileged and not self._streams_own(ask):
            return Entry(ask, Grant.PRIVILEGED, 0, covered)
        return Entry(ask, Grant.WAIT, 0, False)

    def begins(self, ask: Ask) -> bool:
        """Whether it is the first of an asynchronous push."""
        return ask.bucket is None and ask.push not in self._pushes

    def _decide_async(self, ask: Ask, push: AsyncPush) -> Entry:
        ask, held = replace(ask, push=push), self._pushes.get(push)
        over = held is not None and held.over
        if not over and self._all_end(push, ask.nbytes):
            return Entry(ask, Grant.ROOM, ask.nbytes, False)
        if over or not self._pushes.keys() - {push}:
            return Entry(ask, Grant.PRIVILEGED, 0, False)
        return Entry(ask, Grant.WAIT, 0, False)

    def _all_end(self, push: AsyncPush, nbytes: int) -> bool:
        """Whether all open pushes could end one after another when this one takes nbytes more."""
        free = self.limit - self._reserved - nbytes
        if free < 0:
            return False
        held = self._pushes.get(push) or _Open(push.claim)
        others = [other for key, other in self._pushes.items() if key is not push]
        # Those that go over the limit end whatever the rest does.
        free += sum(other.charged for other in others if other.over)
        lacking = [(held.lacks - nbytes, held.charged + nbytes)]
        lacking += [(other.lacks, other.charged) for other in others if not other.over]
        for lacks, given_back in sorted(lacking):
            if lacks > free:
                return False
            free += given_back
        return True

    def _streams_own(self, ask: Ask) -> bool:
        """Whether the ask's stream holds something already."""
        return any(e.ask.shard == ask.shard and e.ask.block == ask.block for e in self._open)

    def _standing(self, ask: Ask, bucket: int) -> tuple[bool, bool]:
        """(whether its bytes are set aside already, whether everyone may be waiting for it)."""
        seen = self._update((ask.shard, bucket))
        if seen is None:
            return False, True
        step, mask = seen
        mine = replica_mask(ask.block)
        if mask & mine or (ask.step is not None and ask.step != step):
            # It will be a duplicate or refused: it holds nothing for long, and is told so at once.
            return False, True
        lowest = not ~mask & ((1 << ask.block.first) - 1)
        family = sibling(ask.block, self._replicas)
        merges = family is not None and not ~mask & (replica_mask(family[0]) ^ mine)
        is_last = mask | mine == (1 << self._replicas) - 1 and not self._total_waits
        covered = lowest and not merges and not is_last
        # One slot is set aside, however many bring the same block.
        return covered and (ask.shard, bucket) not in self._covered, lowest or merges

    def note(self, entry: Entry) -> None:
        """Count a granted entry."""
        self._reserved += entry.charge
        self._open.append(entry)
        push = entry.ask.push
        if push is not None:
            held = self._pushes.setdefault(push, _Open(push.claim))
            held.entries += 1
            held.lacks = max(0, held.lacks - entry.ask.nbytes)
            held.charged += entry.charge
            held.over |= entry.grant is Grant.PRIVILEGED
        if entry.covered and entry.ask.bucket is not None:
            self._covered.add((entry.ask.shard, entry.ask.bucket))

    def free(self, entry: Entry) -> None:
        """The entry's contribution was counted, or came to nothing."""
        self._reserved -= entry.charge
        self._open.remove(entry)
        push = entry.ask.push
        if push is not None:
            held = self._pushes[push]
            held.entries -= 1
            held.charged -= entry.charge
            if not held.entries:
                del self._pushes[push]
        if entry.ask.bucket is not None:
            key = (entry.ask.shard, entry.ask.bucket)
            if entry.covered:
                self._covered.discard(key)
            self._update(key)

    def refresh(self) -> None:
        """Look at every bucket again: contributions are also counted, dropped and applied without an entry."""
        for key in self._sizes:
            self._update(key)

    def _update(self, key: tuple[int, int]) -> tuple[int, int] | None:
        """Look at a bucket; returns what there is to see."""
        size, seen = self._sizes.get(key), self._view(*key)
        if size is None or seen is None:
            return seen
        state = (seen[1], key in self._covered)
        if state != self._states[key]:
            mask, covered = state
            # A covered slot stays one where its sibling is counted before it.
            sums = partial_sums(mask, self._replicas) + covered
            needed = size * max(self._depth, worst(mask, self._replicas, total_waits=self._total_waits), sums)
            self._reserved += needed - self._set_aside[key]
            self._states[key], self._set_aside[key] = state, needed
        return seen


# The shell


class StagingLease:
    """The right to bring one contribution; release() it once it is counted, or came to nothing."""

    def __init__(self, staging: Staging, ledger: Ledger, entry: Entry) -> None:
        self._staging = staging
        self._ledger = ledger
        self._entry: Entry | None = entry
        self.nbytes = entry.ask.nbytes

    def release(self) -> None:
        """Give the bytes back; again is harmless. From any thread."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._staging.on_loop(lambda: self._staging.returned(self._ledger, entry))

    def __enter__(self) -> StagingLease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


@dataclass(eq=False)
class _Waiter:
    ask: Ask
    future: asyncio.Future[StagingLease]


class Staging:
    """Grants leases on the server's loop; changed() may come from any thread."""

    def __init__(self) -> None:
        self._ledger = Ledger(SPARE_BYTES, {}, 1, total_waits=False, view=lambda shard, bucket: None)
        self._held: Callable[[], int] = lambda: 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[_Waiter] = []
        self._leased = 0
        self.peak = 0
        """The highest in_use so far."""
        self.on_wait: Callable[[float], None] = lambda seconds: None
        """Seconds that a contribution had to wait, one that was granted in the end or not."""

    def configure(self, ledger: Ledger, held: Callable[[], int]) -> None:
        """Go by another ledger from now on; held: bytes of partial sums. Leases of before stay valid."""
        self._ledger, self._held = ledger, held
        self.changed()

    @property
    def in_use(self) -> int:
        """Bytes of receive slots and partial sums. A slot counts until its release, after its sum began to count."""
        return self._leased + self._held()

    @property
    def limit(self) -> int:
        """Bytes that in_use stays below, but for one bucket per stream."""
        return self._ledger.limit

    @property
    def waiting(self) -> int:
        """Contributions that wait now."""
        return len(self._waiting)

    async def reserve(
        self,
        shard: int,
        bucket: int | None,
        block: Block,
        nbytes: int,
        timeout_s: float,
        *,
        step: int | None = None,
        push: AsyncPush | None = None,
    ) -> StagingLease:
        """Wait until a contribution may come in.

        bucket None: a bucket of the asynchronous `push`, whose block is (worker index, 1). nbytes: all that it will
        hold at once: the receive slot and, where a codec decodes it to something else, that as well. A borrowed
        contribution holds its sum with another, so it asks for the bucket's bytes too, unless there is only one
        replica. step: the push's; another than the bucket's marks a repetition. Raises TimeoutError.
        """
        self._loop = asyncio.get_running_loop()
        # In line before the rule is asked, so that no change in between is missed.
        waiter = _Waiter(Ask(shard, bucket, block, nbytes, step, push), self._loop.create_future())
        self._waiting.append(waiter)
        self._grant()
        if not waiter.future.done():
            await self._wait(waiter, timeout_s)
        if not waiter.future.done():
            what = f"bucket {bucket}, replicas {block}"
            if bucket is None:
                what = "a push" + (f" of {push.claim:,} bytes in all" if push is not None else "")
            raise TimeoutError(
                f"shard {shard}, {what}: no room for {nbytes:,} bytes after {timeout_s:.1f} s; {self.in_use:,} of "
                f"{self.limit:,} bytes are in use by contributions that wait for others."
            )
        return waiter.future.result()

    async def _wait(self, waiter: _Waiter, timeout_s: float) -> None:
        started_s = time.monotonic()
        try:
            await asyncio.wait({waiter.future}, timeout=timeout_s)
        except asyncio.CancelledError:
            if waiter.future.done():
                waiter.future.result().release()
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            self.on_wait(time.monotonic() - started_s)

    def changed(self) -> None:
        """Contributions were counted, applied or dropped. From any thread."""
        if self._waiting:
            self.on_loop(self._look_again)

    def on_loop(self, function: Callable[[], None]) -> None:
        """Run on the server's loop: at once where this is its thread."""
        loop = self._loop
        try:
            here = asyncio.get_running_loop() is loop
        except RuntimeError:
            here = False
        if loop is None or here:
            function()
            return
        # At the end of a process the loop closes while threads still end their work.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(function)

    def returned(self, ledger: Ledger, entry: Entry) -> None:
        """A lease has ended. On the loop."""
        self._leased -= entry.ask.nbytes
        ledger.free(entry)
        self._look_again()

    def _look_again(self) -> None:
        if self._waiting:
            self._ledger.refresh()
            self._grant()

    def _grant(self) -> None:
        """Admit every request that fits, in order of arrival; streams under way come before new ones."""
        kept = False
        for waiter in sorted(self._waiting, key=lambda waiter: self._ledger.begins(waiter.ask)):
            if kept and self._ledger.begins(waiter.ask):
                continue
            entry = self._ledger.decide(waiter.ask)
            if entry.grant is Grant.WAIT and waiter is self._waiting[-1]:
                # The newest has not seen what happened without leases.
                self._ledger.refresh()
                entry = self._ledger.decide(waiter.ask)
            kept |= entry.grant is Grant.WAIT and waiter.ask.bucket is None and not self._ledger.begins(waiter.ask)
            if entry.grant is Grant.WAIT or waiter.future.done():
                continue
            self._ledger.note(entry)
            self._leased += waiter.ask.nbytes
            self._waiting.remove(waiter)
            waiter.future.set_result(StagingLease(self, self._ledger, entry))
        self.peak = max(self.peak, self.in_use)

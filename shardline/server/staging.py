"""Admission of buckets: a bound on receive slots and partial sums that can't block a step. PROTOCOL 3.22.

A synchronous bucket closes when all replicas are counted in it. Until then it has partial sums, one for each complete
node of the canonical tree; and each incoming bucket has a receive slot. One limit bounds both.

**The rule.** A contribution is privileged if its sibling in the tree is present (they merge at once), if its block is
the lowest not yet counted in its bucket, or if it repeats what was counted. For every bucket the ledger sets aside the
maximum of the partial sums that it can reach if from now on only privileged contributions are counted in it (sums());
for an empty bucket this is the tree's depth. A contribution that is covered by this, or that fits into the rest of the
limit, is granted. One that doesn't fit is still granted if it is privileged and its stream has nothing else in staging;
any other waits.

**Why nothing blocks.** A stream carries the buckets of one block, in any order, one after another: it completes a
bucket before it asks for the next, and complete buckets are counted without waiting for anybody. A worker with several
blocks sends them in ascending order or in parallel. Let t be the lowest open step, m the lowest block missing in some
bucket of step t. The stream of m is at a bucket in which m is missing; every lower block is counted in it, so m is the
lowest there: it is privileged, and its stream's slots are released without waiting. So m is counted in one bucket after
another, then the next block is, and the step closes. Streams that are ahead play no part in this. A worker that died is
replaced, and the new one repeats its contributions: repetitions wait only for their own stream.

**Why the bound holds.** Privileged contributions don't raise a bucket's sums(): the lowest block is part of what it
measures, and a merge leaves fewer sums than before. Any other contribution raises it by one sum at most, and was
granted only with room for that; the slot of the lowest block counts as one of the sums until it is counted. Each stream
has at most one slot that was granted without room. So partial sums and slots stay within the limit plus one bucket per
stream, if the limit is at least the floor of limit_bytes(): with less, no order of arrival is guaranteed to end.

Asynchronous pushes are kept whole until their commit, and may arrive as slowly as a backward pass computes them. A
bucket is granted if all open pushes could still end one after another with it: the one that needs the least has room
for the rest, the next one has that room and what the first gives back, and so on. So no two pushes block each other,
and no room is reserved for data that has not arrived. A push that is larger than the limit exceeds it, one at a time.
No new push begins while one that has begun waits.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from shardline.consistency.intake import INITIAL, Intake
from shardline.core.fixed import fixed
from shardline.core.plan import ShardSpec
from shardline.core.reduce import Block, replica_mask, sibling, sums_of
from shardline.core.spec import TensorKind
from shardline.host.loops import post

SPARE_BYTES = 64 << 20
"""Part of the default limit that is left for contributions out of tree order."""


def limit_bytes(shards: Iterable[ShardSpec], replicas: int, intake: Intake, asked: int | None = None) -> int:
    """The limit in bytes: the requested one, or the default, but never too low to guarantee progress.

    Lowest: enough for tree order with one worker a whole model ahead of the next. Default: 64 MB more, or twice what
    arrives together at most, for contributions out of order.
    """
    hosted = list(shards)
    summed = sum(b.nbytes for shard in hosted for b in shard.buckets if b.kind is not TensorKind.FROZEN)
    floor = intake.sums(0, replicas) * summed
    if asked is not None:
        return max(floor, asked)
    return floor + max(SPARE_BYTES, 2 * max(map(intake.together, hosted), default=0))


# The rule


@dataclass(frozen=True, eq=False)
class AsyncPush:
    claim: int
    """Upper bound for its bytes when complete."""


@fixed()
class Ask:
    """A request for room. bucket None: for a part of an asynchronous push, or for all of it (push None)."""

    shard: int
    bucket: int | None
    block: Block
    """In an asynchronous push (worker index, 1)."""
    nbytes: int
    """Maximum bytes that it occupies from its first byte until it is counted: the receive slot and, if a codec decodes
    it to something else, that as well. A borrowed contribution occupies its sum with another, so it also requests the
    bucket's bytes, unless there is only one replica."""
    step: int | None = None
    """The push's; another than the bucket's marks a repetition."""
    push: AsyncPush | None = None


class Grant(enum.Enum):
    """The ledger's answer to a request."""

    ROOM = "room"
    PRIVILEGED = "privileged"
    """Exceeds the limit, since everyone may be waiting for it."""
    WAIT = "wait"


View = Callable[[int, int], tuple[int, int] | None]
"""(open step, mask of counted replicas) of (shard, bucket); None if there is no such bucket."""


@dataclass(eq=False, slots=True)
class Entry:
    ask: Ask
    grant: Grant
    charge: int
    covered: bool
    """Whether its bytes are already part of its bucket's sums()."""


@dataclass
class _Open:
    """Account of an open asynchronous push."""

    lacks: int
    """Bytes that it may still request."""
    charged: int = 0
    """Bytes charged to the limit and not given back yet."""
    entries: int = 0
    over: bool = False
    """It exceeds the limit: all its requests are granted."""


class Ledger:
    """The rule and its accounting. Pure: no clock, no threads; view() returns the state of buckets."""

    def __init__(
        self, limit: int, sizes: Mapping[tuple[int, int], int], replicas: int, *, intake: Intake, view: View
    ) -> None:
        """sizes: bytes of one partial sum by (shard, bucket); empty in asynchronous mode."""
        self.limit = limit
        self._sizes = dict(sizes)
        self._replicas = replicas
        self._intake = intake
        self._view = view
        self._depth = intake.sums(0, replicas)
        self._states = dict.fromkeys(self._sizes, (0, False))
        """By bucket: the mask and whether a covered slot is open, for which _set_aside is valid."""
        self._set_aside = {key: self._depth * size for key, size in self._sizes.items()}
        self.reserved = sum(self._set_aside.values())
        self.entries: list[Entry] = []
        """What was granted and is not freed yet."""
        self._covered: set[tuple[int, int]] = set()
        """Buckets with a covered slot."""
        self._pushes: dict[AsyncPush, _Open] = {}
        """Open asynchronous pushes."""

    def decide(self, ask: Ask) -> Entry:
        """Decide on a request without recording it, see note()."""
        if not ask.nbytes:
            return Entry(ask, Grant.ROOM, 0, False)
        if ask.bucket is None:
            return self._decide_async(ask, ask.push or AsyncPush(ask.nbytes))
        covered, privileged = self._standing(ask, ask.bucket)
        size = self._sizes.get((ask.shard, ask.bucket), 0)
        charge = max(0, ask.nbytes - size) if covered else max(size, ask.nbytes)
        if self.reserved + charge <= self.limit:
            return Entry(ask, Grant.ROOM, charge, covered)
        # Whether the request's stream already has room.
        if privileged and not any(e.ask.shard == ask.shard and e.ask.block == ask.block for e in self.entries):
            return Entry(ask, Grant.PRIVILEGED, 0, covered)
        return Entry(ask, Grant.WAIT, 0, False)

    def begins(self, ask: Ask) -> bool:
        """Whether it is the first request of an asynchronous push."""
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
        """Whether all open pushes could end one after another if this one takes nbytes more."""
        free = self.limit - self.reserved - nbytes
        if free < 0:
            return False
        held = self._pushes.get(push) or _Open(push.claim)
        others = [other for key, other in self._pushes.items() if key is not push]
        # Those that exceed the limit end whatever the rest does.
        free += sum(other.charged for other in others if other.over)
        lacking = [(held.lacks - nbytes, held.charged + nbytes)]
        lacking += [(other.lacks, other.charged) for other in others if not other.over]
        for lacks, given_back in sorted(lacking):
            if lacks > free:
                return False
            free += given_back
        return True

    def _standing(self, ask: Ask, bucket: int) -> tuple[bool, bool]:
        """(whether its bytes are already set aside, whether everyone may be waiting for it)."""
        seen = self._update((ask.shard, bucket))
        if seen is None:
            return False, True
        step, mask = seen
        mine = replica_mask(ask.block)
        if mask & mine or (ask.step is not None and ask.step != step):
            # It will be a duplicate or refused: it occupies nothing for long and is answered at once.
            return False, True
        lowest = not ~mask & ((1 << ask.block.first) - 1)
        family = sibling(ask.block, self._replicas)
        merges = family is not None and not ~mask & (replica_mask(family[0]) ^ mine)
        # The last one makes the sum that is applied at once, unless this waits for a verdict.
        covered = lowest and not merges and self._intake.sums(mask | mine, self._replicas) > 0
        # One slot is set aside, however many streams carry the same block.
        return covered and (ask.shard, bucket) not in self._covered, lowest or merges

    def note(self, entry: Entry) -> None:
        self.reserved += entry.charge
        self.entries.append(entry)
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
        """Remove an entry whose contribution was counted or dropped."""
        self.reserved -= entry.charge
        self.entries.remove(entry)
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
        """Update every bucket: contributions are also counted, dropped and applied without an entry."""
        for key in self._sizes:
            self._update(key)

    def _update(self, key: tuple[int, int]) -> tuple[int, int] | None:
        """Update a bucket's account; returns its state."""
        size, seen = self._sizes.get(key), self._view(*key)
        if size is None or seen is None:
            return seen
        state = (seen[1], key in self._covered)
        if state != self._states[key]:
            mask, covered = state
            # A slot stays covered if its sibling is counted before it.
            sums = sums_of(self._replicas, mask)[0] + covered
            needed = size * max(self._depth, self._intake.sums(mask, self._replicas), sums)
            self.reserved += needed - self._set_aside[key]
            self._states[key], self._set_aside[key] = state, needed
        return seen


# The shell


class StagingLease:
    """The right to bring in one contribution; call release() when it is counted or dropped."""

    def __init__(self, staging: Staging, ledger: Ledger, entry: Entry) -> None:
        self._staging = staging
        self._ledger = ledger
        self._entry: Entry | None = entry
        self.nbytes = entry.ask.nbytes

    def release(self) -> None:
        """Give the bytes back; may be called twice. From any thread."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._staging.on_loop(self._staging.returned, self._ledger, entry)

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
        self.ledger = Ledger(SPARE_BYTES, {}, 1, intake=INITIAL, view=lambda shard, bucket: None)
        """The rule that decides now; configure() replaces it."""
        self._held: Callable[[], int] = lambda: 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[_Waiter] = []
        self.leased = 0
        """Bytes of the leases that have not been released."""
        self.peak = 0
        """The highest in_use so far."""
        self.on_wait: Callable[[float], None] = lambda seconds: None
        """Called with the seconds that a contribution waited, granted or not."""

    def configure(self, ledger: Ledger, held: Callable[[], int]) -> None:
        """Use another ledger from now on. held: bytes of partial sums. Earlier leases stay valid."""
        self.ledger, self._held = ledger, held
        self.changed()

    @property
    def in_use(self) -> int:
        """Bytes of receive slots and partial sums. A slot counts until its release, after its sum began to count."""
        return self.leased + self._held()

    @property
    def limit(self) -> int:
        """Upper bound of in_use in bytes, apart from one bucket per stream."""
        return self.ledger.limit

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def lend(self, ask: Ask) -> StagingLease | None:
        """A lease for a contribution that may come in now; None if it has to wait: see reserve()."""
        if self._waiting or (entry := self.ledger.decide(ask)).grant is Grant.WAIT:
            return None
        self._loop = asyncio.get_running_loop()
        return self._lent(entry)

    async def reserve(self, ask: Ask, timeout_s: float) -> StagingLease:
        """Wait until a contribution may come in. Raises TimeoutError."""
        self._loop = asyncio.get_running_loop()
        if (lease := self.lend(ask)) is not None:
            return lease
        # Enter the line before applying the rule again, so that no change in between is missed.
        waiter = _Waiter(ask, self._loop.create_future())
        self._waiting.append(waiter)
        self._grant()
        if not waiter.future.done():
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
        if not waiter.future.done():
            what = f"bucket {ask.bucket}, replicas {ask.block}"
            if ask.bucket is None:
                what = "a push" + (f" of {ask.push.claim:,} bytes in all" if ask.push is not None else "")
            raise TimeoutError(
                f"shard {ask.shard}, {what}: no room for {ask.nbytes:,} bytes after {timeout_s:.1f} s; {self.in_use:,} "
                f"of {self.limit:,} bytes are in use by contributions that wait for others."
            )
        return waiter.future.result()

    def changed(self) -> None:
        """Check the waiting requests again after contributions were counted, applied or dropped. From any thread."""
        if self._waiting:
            self.on_loop(self._look_again)

    def on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        """Run on the server's loop: at once if this is its thread."""
        loop = self._loop
        try:
            here = asyncio.get_running_loop() is loop
        except RuntimeError:
            here = False
        if loop is None or here:
            function(*arguments)
            return
        # At the end of a process the loop closes while threads are still finishing.
        post(loop, functools.partial(function, *arguments))

    def returned(self, ledger: Ledger, entry: Entry) -> None:
        """Take back an ended lease. On the loop."""
        self.leased -= entry.ask.nbytes
        ledger.free(entry)
        self._look_again()

    def _look_again(self) -> None:
        if self._waiting:
            self.ledger.refresh()
            self._grant()

    def _grant(self) -> None:
        """Grant every request that fits, in order of arrival; open streams come before new ones."""
        kept = False
        for waiter in sorted(self._waiting, key=lambda waiter: self.ledger.begins(waiter.ask)):
            if kept and self.ledger.begins(waiter.ask):
                continue
            entry = self.ledger.decide(waiter.ask)
            if entry.grant is Grant.WAIT and waiter is self._waiting[-1]:
                # The newest was not checked against changes without leases.
                self.ledger.refresh()
                entry = self.ledger.decide(waiter.ask)
            kept |= entry.grant is Grant.WAIT and waiter.ask.bucket is None and not self.ledger.begins(waiter.ask)
            if entry.grant is Grant.WAIT or waiter.future.done():
                continue
            self._waiting.remove(waiter)
            waiter.future.set_result(self._lent(entry))

    def _lent(self, entry: Entry) -> StagingLease:
        self.ledger.note(entry)
        self.leased += entry.ask.nbytes
        self.peak = max(self.peak, self.in_use)
        return StagingLease(self, self.ledger, entry)

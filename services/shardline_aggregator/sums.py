"""One shard as an aggregator has it: values from the servers, and sums on their way there.

A bucket at `step` t publishes theta_t, as pulled, and collects its members' contributions to step t. They leave as few
nodes of the canonical tree, once everybody has contributed who did so in the step before, or when the time for that is
over; what comes later leaves by itself. Each contribution is kept until theta_{t+1} arrives, so that a sum can be cut
again if the servers have counted a part of it. Since they count each replica once, an aggregator promises nothing: a
member's step is over only when theta_{t+1} arrives.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardline.client.exchange.shard_exchange import PullSink
from shardline.codecs.base import Turn
from shardline.codecs.coding import BucketCoding, JobCoding
from shardline.consistency.eager import Eager
from shardline.consistency.intake import BOTH_STEPS
from shardline.consistency.replica_steps import ReplicaSteps, admit_push
from shardline.consistency.server import ServerHalf, StepWanted, Terms
from shardline.core.contributions import Contributions, Partial, merge
from shardline.core.fixed import fixed
from shardline.core.outcome import Decision, Outcome
from shardline.core.plan import BucketSpec, Plan
from shardline.core.reduce import Block, cover, split
from shardline.core.tensor_bytes import tensor_bytes
from shardline.errors import ProtocolError
from shardline.host.awake import awake_s
from shardline.server.backend import HostedShard
from shardline.storage.bucket import Bucket
from shardline.storage.publication import Publication
from shardline.storage.shard import ByteCount, Hyper, Observers, Storage
from shardline.waist import Arrival

BEFORE = -1
"""Step of a bucket that has no values yet."""


@fixed()
class BlockSum:
    """A sum of one bucket that has to go to the servers."""

    step: int
    bucket: int
    block: Block
    total: Partial


def total_of(parts: Mapping[Block, Partial], node: Block, bucket: BucketSpec) -> Partial:
    """The canonical sum over a node of the tree that these parts cover; they are only read."""
    if node in parts:
        return replace(parts[node], borrowed=True)
    left, right = split(node)
    return merge(total_of(parts, left, bucket), total_of(parts, right, bucket), bucket)


class SumQueue:
    """Sums that have to leave, in order, and the last step that members ask for. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parts: deque[BlockSum] = deque()
        self._wanted = BEFORE
        self._closed = self._news = False

    def put(self, parts: Iterable[BlockSum]) -> None:
        with self._changed:
            self._parts.extend(parts)
            self._changed.notify_all()

    def ask(self, step: int) -> None:
        """A member waits for the values of this step."""
        if step > self._wanted:
            with self._changed:
                self._wanted = max(self._wanted, step)
                self._changed.notify_all()

    def take(self, timeout_s: float) -> list[BlockSum] | None:
        """All that has to leave now. If there is nothing, waits until there is, until look(), or for timeout_s.

        None once it is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._parts or self._closed or self._news, timeout_s)
            taken = list(self._parts)
            self._parts.clear()
            self._news = False
            return None if self._closed else taken

    def wanted(self, than: int, timeout_s: float) -> int | None:
        """The step that members ask for, once it is higher than this one or timeout_s are over; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._wanted > than, timeout_s)
            return None if self._closed else self._wanted

    def look(self) -> None:
        """Contributions wait: whoever takes has to see when their time is over."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class RelayedBucket(Bucket):
    """A bucket whose values come from the servers. All methods need the lock."""

    replicas: int
    """Of the job."""

    def begin(self) -> None:
        """Start without values."""
        self.step = self.oldest = self.changed_step = BEFORE
        self.overwritten = BEFORE - 1
        self.initialized = True
        self.left: set[int] = set()
        """Replicas of the open step whose contributions have left."""
        self.awaited: frozenset[int] = frozenset()
        """Replicas that contributed to the step before, and so are expected in the open one."""
        self.opened_s: float | None = None
        """When the first contribution came that has not left; None = all have."""

    def parts(self) -> list[BlockSum]:
        """What has not left yet, as few sums; it counts as left from now on."""
        counted, kept = self.contributions.counted, self.contributions.partials()
        leaving = cover(counted - self.left, self.replicas)
        self.left = set(counted)
        self.opened_s = None
        return [BlockSum(self.step, self.number, block, total_of(kept, block, self.spec)) for block in leaving]

    def again(self, block: Block) -> list[BlockSum]:
        """The contributions that a sum consists of, one by one."""
        kept = self.contributions.partials()
        inside = sorted(own for own in kept if block.first <= own.first and own.end <= block.end)
        return [BlockSum(self.step, self.number, own, replace(kept[own], borrowed=True)) for own in inside]

    def target(self, step: int) -> torch.Tensor:
        """Where the values of a step have to be written, before arrived()."""
        # The values of two steps before are gone from here on, although `step` does not say so yet.
        self.overwritten, self.oldest = max(self.overwritten, step - 2), max(self.oldest, step - 1)
        target = self.values_at(step)
        for which in (0, 1):
            if self.values_at(which) is target:
                self.writes.begin(which)
        return target

    def arrived(self, step: int, version: int, *, changed: bool) -> None:
        """Publish the values of a step, which are in target(). not changed: they are those of the step before."""
        follows = step == self.step + 1 and self.step != BEFORE
        if not changed and self.changed_step == self.step and self.values_at(step) is not self.values:
            self.target(step).copy_(self.values)
        if changed:
            self.changed_step = step
        self.awaited = frozenset(self.contributions.counted) if follows else frozenset()
        self.left, self.opened_s = set(), None
        if not follows:
            self.oldest = step
        self.version = version
        # Last of all that a pull reads.
        self.step = step
        self.contributions.clear()


class RelaySteps(ReplicaSteps):
    """What counts at an aggregator, and what its members get."""

    def __init__(self, storage: Storage, terms: Terms, outbox: SumQueue) -> None:
        super().__init__(storage, terms)
        self.outbox = outbox
        self.reach = 0
        """Highest step that the servers are known to have begun."""
        self.gone = BEFORE
        """Highest step that the servers have passed without this aggregator."""
        self._extras = threading.Lock()
        self._hyper: tuple[int, Hyper] = BEFORE, {}
        self._nonfinite: tuple[int, dict[str, None]] = BEFORE, {}

    def decide(self, bucket: Bucket, step: int, block: Block) -> Decision:
        if bucket.step < step and self._ask(step, bucket):
            why = f"step {step} is ahead of the aggregator, which is at step {max(0, bucket.step)}; find it again"
            return Decision(Outcome.NOT_CONFIGURED, why)
        stop = self.storage.stop_step
        if stop is not None and step >= stop:
            return Decision(Outcome.STOPPED, f"the job stops at step {stop}")
        counted = bucket.contributions.counted
        return admit_push(step, counted, block, bucket_step=bucket.step, replicas=self.terms.contributors)

    def ready(self, bucket: Bucket) -> bool:
        assert isinstance(bucket, RelayedBucket)
        if bucket.awaited <= bucket.contributions.counted:
            return True
        if bucket.opened_s is None:
            bucket.opened_s = awake_s()
            self.outbox.look()
        return False

    def counted(self, bucket: Bucket, block: Block, nonfinite: Collection[str], hyper: Hyper | None) -> None:
        if nonfinite or (hyper and block.first == 0):
            with self._extras:
                if hyper and block.first == 0:
                    self._hyper = bucket.step, hyper
                if nonfinite:
                    step, names = self._nonfinite
                    self._nonfinite = (
                        bucket.step,
                        {**(names if step == bucket.step else {}), **dict.fromkeys(nonfinite)},
                    )
        self._ask(bucket.step + 1, bucket)

    def complete(self, bucket: Bucket) -> None:
        assert isinstance(bucket, RelayedBucket)
        self.outbox.put(bucket.parts())

    def noted(self, bucket: Bucket, step: int, *, ready: bool) -> None: ...

    def serve(self, bucket: Bucket, want: StepWanted) -> Outcome:
        if want.step is None or bucket.step == BEFORE:
            outcome = Outcome.WAITING
        else:
            outcome = super().serve(bucket, want)
        if outcome is Outcome.WAITING and want.step is not None:
            if want.step <= self.gone:
                return Outcome.OVERTAKEN
            self._ask(want.step, bucket)
        return outcome

    def _ask(self, step: int, bucket: Bucket) -> bool:
        """Have the values of a step pulled; False, and nothing happens, if no member can need them yet."""
        if step > max(self.reach, bucket.step) + 1:
            return False
        self.outbox.ask(step)
        return True

    # For who exchanges with the servers

    def overdue(self, patience_s: float) -> float:
        """Have everything leave that has waited for others too long; returns the seconds until it is next due."""
        least = patience_s
        for bucket in self.storage.buckets:
            assert isinstance(bucket, RelayedBucket)
            if bucket.opened_s is None:
                continue
            with bucket.lock:
                if bucket.opened_s is None:
                    continue
                left_s = bucket.opened_s + patience_s - awake_s()
                if left_s <= 0.0:
                    self.complete(bucket)
                else:
                    least = min(least, left_s)
        return least

    def extras(self, step: int, block: Block) -> tuple[Hyper, tuple[str, ...]]:
        """What a push of a sum says besides: hyper-parameters, if it has replica 0, and tensors that are not finite."""
        with self._extras:
            (at, hyper), (found_at, names) = self._hyper, self._nonfinite
        return hyper if block.first == 0 and at == step else {}, tuple(names) if found_at == step else ()

    def cut_again(self, step: int, block: Block, buckets: Iterable[int]) -> bool:
        """The servers have counted a part of this sum: have its contributions leave one by one.

        False if it is a contribution itself.
        """
        for number in buckets:
            bucket = self.storage.buckets[number]
            assert isinstance(bucket, RelayedBucket)
            with bucket.lock:
                found = bucket.again(block) if bucket.step == step else []
            if any(part.block == block for part in found):
                return False
            self.outbox.put(found)
        return True

    def lacking(self, step: int) -> list[RelayedBucket]:
        return [b for b in self.storage.buckets if isinstance(b, RelayedBucket) and b.step < step]

    def passed(self, step: int) -> None:
        """The servers don't have the values of this step any more."""
        self.gone = max(self.gone, step)
        self.tell()

    def stopped(self, step: int) -> None:
        """The job has no such step."""
        known = self.storage.stop_step
        self.storage.stop_step = step if known is None else min(known, step)
        self.tell()

    def tell(self) -> None:
        for bucket in self.storage.buckets:
            self.storage.observers.on_publish(bucket.number)


@dataclass(frozen=True)
class Relaying(Eager):
    """Steps whose sums go to the servers."""

    outbox: SumQueue = field(default_factory=SumQueue)

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        return RelaySteps(storage, terms, self.outbox)


class RelayedShard(HostedShard):
    """A shard of the servers as the members of an aggregator see it."""

    @property
    def position(self) -> tuple[int, int]:
        step, version = super().position
        return max(0, step), version

    @property
    def steps(self) -> RelaySteps:
        assert isinstance(self.mode, RelaySteps)
        return self.mode

    def initialize(self, bucket: int, values: torch.Tensor | None) -> Decision:
        raise ProtocolError("an aggregator takes no first values; send them to the servers")


def relayed_shard(
    number: int,
    plan: Plan,
    replicas: int,
    nan_policy: str,
    publication: Publication,
    notify: Callable[[int, int], None],
) -> RelayedShard:
    """A shard without values. notify: called with (shard, bucket) when one has new ones."""
    waiting, buckets = ByteCount(), []
    for index, spec in enumerate(plan.shards[number].buckets):
        kept = Contributions(spec, replicas, on_held=waiting.add, in_tree=False)
        areas = BOTH_STEPS.areas(publication, index, spec)
        bucket = RelayedBucket(number, index, spec, plan.tensors, lambda device: None, contributions=kept, pub=areas)
        bucket.replicas = replicas
        bucket.begin()
        buckets.append(bucket)
    storage = Storage(number, buckets, Observers(on_publish=lambda bucket: notify(number, bucket)), waiting)
    terms = Terms(plan=plan, contributors=replicas, nan_policy=nan_policy)
    return RelayedShard(storage, Relaying(), terms, publication=publication)


class Arriving(PullSink):
    """Where one shard's pulled buckets go: decoded, to where members read them."""

    def __init__(self, shard: RelayedShard, coding: JobCoding) -> None:
        self._shard, self._coding = shard, coding
        self._encoded: dict[int, bytearray] = {}
        """Bytes that have to be decoded, by bucket."""
        super().__init__(len(shard.buckets), sum(bucket.spec.nbytes for bucket in shard.buckets))

    def buffer(self, arrival: Arrival) -> memoryview:
        bucket, written = self._bucket(arrival), self._written(arrival)
        if not written.codec.is_view:
            self._encoded[arrival.bucket] = bytearray(arrival.payload_bytes)
            return memoryview(self._encoded[arrival.bucket])
        with bucket.lock:
            target = bucket.target(arrival.step)
        return tensor_bytes(target)

    def done(self, arrival: Arrival) -> None:
        bucket, payload = self._bucket(arrival), self._encoded.pop(arrival.bucket, None)
        with bucket.lock:
            if arrival.step > bucket.step:
                if payload is not None and not arrival.unchanged:
                    self._decode(arrival, bucket, payload)
                bucket.arrived(arrival.step, arrival.version, changed=not arrival.unchanged)
        self.arrived.add(arrival.bucket)
        self.raw_bytes += bucket.spec.nbytes
        self.wire_bytes += arrival.payload_bytes
        self._shard.storage.observers.on_publish(arrival.bucket)

    def _decode(self, arrival: Arrival, bucket: RelayedBucket, payload: bytearray) -> None:
        """Write the values where members read them. The memory is the one that members' pulls are encoded with."""
        named = self._coding.of_pull(arrival.codec)
        memory = named.memory(self._shard.number, arrival.bucket, "")
        values = self._written(arrival).coder.decode(payload, Turn(arrival.step, relays=True, memory=memory))
        bucket.target(arrival.step).copy_(values)

    def _written(self, arrival: Arrival) -> BucketCoding:
        return self._coding.of_pull(arrival.codec).bucket(self._shard.number, arrival.bucket)

    def _bucket(self, arrival: Arrival) -> RelayedBucket:
        bucket = self._shard.buckets[arrival.bucket]
        assert isinstance(bucket, RelayedBucket)
        misfit = "" if arrival.unchanged else self._written(arrival).misfit(arrival.payload_bytes)
        if misfit:
            where = f"shard {self._shard.number}, bucket {arrival.bucket}"
            raise ProtocolError(f"{where}: {arrival.payload_bytes} bytes were pulled; {misfit}")
        return bucket


def grouped(parts: Sequence[BlockSum]) -> dict[tuple[int, Block], list[BlockSum]]:
    """Sums by the push that they are part of, in order; of several for one bucket, which are the same, the last."""
    found: dict[tuple[int, Block], dict[int, BlockSum]] = {}
    for part in parts:
        found.setdefault((part.step, part.block), {})[part.bucket] = part
    return {key: list(held.values()) for key, held in found.items()}

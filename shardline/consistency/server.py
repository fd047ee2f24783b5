"""The server half of a mode: one object per shard that decides what counts, when it is applied, and what is served.

A shard is three things: storage (buckets with their locks, publication, images), the server half, which goes over that
storage, and observers, which are told what happened. The server half knows no network and no event loop; any thread
may call it. It refers to the storage and never to the shard, so that a shard's memory goes with its last user.

Threads: a bucket's lock guards the bucket. `storage.order` is held while an update is made in several buckets as one,
and while a bucket is copied for a standby; it is taken before a bucket's lock, `storage.lock` (the tally) after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardline.core.contributions import Contributions, Partial
from shardline.core.gradients import Gradient
from shardline.core.image import WorkerSequence
from shardline.core.outcome import Decision, Outcome
from shardline.core.plan import BucketSpec, Plan
from shardline.core.push_context import TOGETHER, PushContext
from shardline.core.records import Applied, AppliedPush, Record
from shardline.core.reduce import Block
from shardline.errors import ProtocolError

Guard = Callable[[], Decision | None]
"""Why a message counts no more, or None where it does."""
Hyper = Mapping[int, Mapping[str, float]]
"""Hyper-parameters that came with a contribution, by parameter group."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a job says of every shard that a server half needs."""

    plan: Plan
    contributors: int
    """Replicas that make one update; see Consistency.contributors()."""
    nan_policy: str


@dataclass
class Tally:
    """Counts for status and metrics. Guarded by the storage's lock."""

    pushes: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    skipped_steps: int = 0
    duplicate_mismatches: int = 0

    def applied(self, staleness: int) -> None:
        """Count a push that was applied."""
        self.pushes += 1
        self.staleness_sum += staleness
        self.staleness_max = max(self.staleness_max, staleness)


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Who is told what happens in a shard; nobody at a standby. From any thread, and none of them may block.

    They are called without a bucket's lock, but for on_failure.
    """

    on_publish: Callable[[int], None] = lambda bucket: None
    """A bucket has new values, or others who wait for it have to look again."""
    on_counted: Callable[[], None] = lambda: None
    """Contributions were counted or dropped."""
    on_complete: Callable[[int], None] = lambda step: None
    """All contributions of a step that waits for a verdict are there."""
    on_barrier: Callable[[float], None] = lambda wait_s: None
    """Seconds from a step's first contribution to its last."""
    on_apply: Callable[[float], None] = lambda seconds: None
    """Seconds of the update rule on one bucket."""
    on_failure: Callable[[Exception], None] = lambda error: None
    """An update can't be applied: the job can't go on. Locks are held."""


class BucketView(Protocol):
    """What a server half sees of a bucket. Reading `step` needs no lock; everything else does."""

    lock: threading.Lock
    number: int
    spec: BucketSpec
    names: tuple[str, ...]
    device: torch.device
    group: int
    step: int
    version: int
    oldest: int
    initialized: bool
    contributions: Contributions
    hyper: Mapping[str, float] | None
    pending: object | None

    def apply(self, total: Partial, *, scale: float = 1.0, skip: bool = False, context: PushContext = TOGETHER) -> None:
        """Make the next values from a gradient and publish them."""


class ShardUpdate(Protocol):
    """One decision about all buckets of a shard."""

    @property
    def verdict(self) -> Applied:
        """What was decided."""

    def total_of(self, bucket: BucketView) -> Partial | None:
        """What a bucket gets; None where it does not wait for this update any more. Its lock held."""

    def applied(self, bucket: BucketView) -> None:
        """A bucket has published it. Its lock held."""

    def closed(self) -> None:
        """All buckets have. `order` held."""


class Storage(Protocol):
    """What a server half goes over."""

    number: int
    """Of the shard."""
    lock: threading.Lock
    order: threading.Lock
    tally: Tally
    observers: Observers
    stop_step: int | None
    """Nothing goes past it, where it is known."""

    @property
    def buckets(self) -> Sequence[BucketView]:
        """In the plan's order."""

    @property
    def version(self) -> int:
        """Updates that every bucket has seen."""

    def hold(self, difference: int) -> None:
        """Sums that wait take so many bytes more or less; their buckets' own contributions count by themselves."""

    def check_hyper(self, bucket: BucketView, hyper: Hyper | None) -> None:
        """Raise JobError or ProtocolError where the rule takes no such hyper-parameters."""

    def apply_bucket(self, bucket: BucketView, total: Partial) -> None:
        """Apply a step to one bucket, its lock held, and publish it: at once, or when the standby has it."""

    def apply_together(self, update: ShardUpdate) -> None:
        """The same for all buckets as one; takes `order` and their locks."""

    def record(self, parts: Sequence[tuple[BucketView, Partial]], *, scale: float, push: AppliedPush) -> int | None:
        """Tell the standby of a push; returns the record's number, None where nobody is told. `order` held."""

    def apply_now(
        self, bucket: BucketView, total: Partial, *, scale: float, context: PushContext, record: int | None
    ) -> None:
        """Apply to one bucket and publish at once; takes its lock. record: from record(). `order` held."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """A whole push of one worker."""

    task: str
    incarnation: int
    seq: int
    """Its number at this shard; the first one of an incarnation is 1."""
    base_version: int
    """Lowest version of the values that it was computed on."""
    scale: float = 1.0
    """What the worker's clipping multiplies the gradient by."""
    skip: bool = False
    """It only takes up its number."""


@dataclass(frozen=True, kw_only=True)
class StepWanted:
    """What a pull asks for."""

    step: int | None
    """None = whatever there is."""
    at_least: bool = False
    """A later step will do."""
    have: int | None = None
    """Step of which the puller has the values already."""
    task: str = ""
    """Who asks."""


@dataclass(frozen=True, kw_only=True)
class ShardVote:
    """What a shard says of its mean gradient at one step."""

    step: int
    sums: tuple[tuple[int, float], ...]
    """(quantum in the plan, sum of its squares in float64)."""
    nonfinite: tuple[str, ...]
    """Tensors with NaN or infinity."""


@dataclass(frozen=True)
class Staged:
    """Mean gradients of a step that waits for its verdict, one per bucket."""

    step: int
    epoch: int
    totals: list[Partial]


class ServerHalf:
    """What a mode does at one shard. Subclasses take contributions by bucket or by push, as `whole_pushes` says."""

    def __init__(self, storage: Storage, terms: Terms) -> None:
        self.storage = storage
        self.terms = terms

    # Contributions

    def contribute(
        self,
        bucket: int,
        step: int,
        block: Block,
        gradient: Gradient,
        *,
        hyper: Hyper | None = None,
        nonfinite: Collection[str] = (),
        guard: Guard = lambda: None,
    ) -> Decision:
        """Count one bucket of a contribution to a step.

        The gradient's tensor is the shard's from now on, unless it is borrowed. nonfinite: tensors that the worker
        found not finite. guard is asked under the bucket's lock, so that nothing of another history counts.
        Raises TensorError or NonFiniteError, the bucket unchanged.
        """
        raise ProtocolError("this job's consistency takes whole pushes, not single buckets of a step")

    def push(
        self,
        push: Push,
        gradients: Mapping[int, Gradient],
        *,
        hyper: Hyper | None = None,
        guard: Guard = lambda: None,
        then: Callable[[], None] = lambda: None,
    ) -> tuple[Decision, int]:
        """Count a whole push, once; returns the decision and its staleness.

        then() runs under `order` after the decision, for a reply that no other push comes between; guard is asked
        under it before. Raises TensorError or NonFiniteError, nothing changed.
        """
        raise ProtocolError("this job's consistency takes the buckets of a step, not whole numbered pushes")

    # What may be asked

    def serve(self, bucket: BucketView, want: StepWanted) -> Outcome:
        """Whether a pull may be answered now: SERVED, WAITING or OVERTAKEN. No lock is needed; where it is not held
        the caller looks again whether what it sends was overwritten.
        """
        raise NotImplementedError

    def progress(self, replica: int) -> int:
        """The step that a replica has to work on, as far as this shard knows."""
        raise NotImplementedError

    def last_push(self, task: str, incarnation: int = 0) -> int:
        """Number of the last push that counted of an incarnation; 0 where there is none, or none is numbered.

        incarnation 0: of whichever was heard last.
        """
        return 0

    def waiting_for(self) -> list[int]:
        """Replicas that the lowest open step lacks."""
        return []

    # Votes, where a step waits for a verdict

    last_verdict: Applied | None = None
    """The last one that is known; its step may not be published yet."""

    def vote(self, step: int) -> tuple[ShardVote, Staged] | None:
        """What the shard says of a complete step; None where there is nothing to vote on any more."""
        return None

    def waits_for(self, staged: Staged) -> bool:
        """Whether this vote is still open."""
        return False

    def decided(self, staged: Staged, verdict: Applied) -> None:
        """The verdict of an open vote is known, and a new lead has to be told of it from now on."""

    def apply_verdict(self, staged: Staged, *, scale: float, skip: bool) -> None:
        """Apply or skip a step in every bucket; nothing where the shard was restored since the vote."""

    # History

    def members_changed(self, tasks: Collection[str]) -> None:
        """These workers are admitted from now on, and no others. Returns at once."""

    def sequences(self) -> dict[str, WorkerSequence]:
        """What a cut has to remember besides the buckets: the last push of each worker that they hold. `order` held."""
        return {}

    def abandon(self) -> None:
        """The history ends here: nothing that is open will be applied. restored() follows."""

    def restored(self, sequences: Mapping[str, WorkerSequence]) -> None:
        """The buckets are those of a cut, which held these pushes."""

    # Standby

    def settle(self, bucket: BucketView) -> None:
        """A standby gets this bucket's values: nothing else of it may be open that a record will go on from.

        Contributions that workers send again after a failover are no concern. `order` and the bucket's lock held.
        """

    def remembered(self) -> tuple[Sequence[AppliedPush], Applied | None]:
        """What a standby has to know besides the buckets. `order` held."""
        return (), self.last_verdict

    def recall(self, pushes: Sequence[AppliedPush], verdict: Applied | None) -> None:
        """Be the standby of a shard that remembered this; its buckets are copied."""
        self.last_verdict = verdict

    def replay(self, record: Record, *, whole: bool) -> None:
        """Do what the primary did; only for buckets that are copied. whole: all of them are, and recall() came."""
        for part in record.parts:
            bucket = self.storage.buckets[part.bucket]
            total = self.total_of(part.tensor(), part.present, bucket)
            with bucket.lock:
                bucket.hyper = part.hyper
                bucket.apply(total, scale=record.scale, skip=record.skip)
        if record.verdict is not None:
            self.last_verdict = record.verdict

    @staticmethod
    def total_of(values: torch.Tensor | None, present: tuple[bool, ...], bucket: BucketView) -> Partial:
        """A recorded gradient on the bucket's device."""
        return Partial(values.to(bucket.device) if values is not None else None, present)

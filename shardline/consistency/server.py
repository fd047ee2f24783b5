"""The server half of a mode: one object per shard that decides what counts, when it is applied, and what is served.

A shard has three parts: storage (buckets with their locks, publication, images), the server half, which works on that
storage, and observers, which are notified of events. The server half knows no network and no event loop; any thread may
call it. It references the storage and never the shard, so that a shard's memory is freed with its last user.

Locks: a bucket's lock guards the bucket. `storage.order` is held while several buckets are updated as one, and while a
bucket is copied for a standby. Lock order: `storage.order`, bucket's lock, `storage.lock` (the tally).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardline.consistency.choosing import StepChoices
from shardline.core.choices import Choices
from shardline.core.contributions import Partial
from shardline.core.fixed import fixed
from shardline.core.gradients import Gradient
from shardline.core.image import WorkerSequence
from shardline.core.outcome import Decision, Outcome
from shardline.core.plan import Plan
from shardline.core.records import Applied, AppliedPush, Record
from shardline.core.reduce import Block
from shardline.errors import ProtocolError
from shardline.storage.bucket import Bucket
from shardline.storage.shard import Hyper, Storage

Guard = Callable[[], Decision | None]
"""Returns why a message does not count any more, or None if it does."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """A job's settings that every server half needs."""

    plan: Plan
    contributors: int
    """Replicas that make one update; see Consistency.contributors()."""
    nan_policy: str
    share: Callable[[int], float] = lambda staleness: 1.0
    """Factor for a push of this staleness in a sum of several; see UpdateRule.share()."""
    replayed: Choices = field(default_factory=Choices)
    """The choices of another run, which the lead repeats."""


@dataclass(frozen=True, kw_only=True)
class NumberedPush:
    task: str
    incarnation: int
    seq: int
    """Its number at this shard; the first of an incarnation is 1."""
    base_version: int
    """Lowest version of the values that it was computed from."""
    clock: int = 0
    """The worker's clock after it, in modes with `holds_back`."""
    scale: float = 1.0
    """Factor for the gradient from clipping at the worker."""
    skip: bool = False
    """It uses up its number and changes nothing."""


@fixed(kw_only=True)
class StepWanted:
    """The values that a pull asks for."""

    step: int | None
    """None = the latest."""
    at_least: bool = False
    """Also accept a later step."""
    have: int | None = None
    """Step whose values the puller already has."""
    task: str = ""
    """The pulling task."""


@dataclass(frozen=True, kw_only=True)
class ShardVote:
    """A shard's vote on its mean gradient at one step."""

    step: int
    sums: tuple[tuple[int, float], ...]
    """(quantum in the plan, sum of its squares in float64)."""
    nonfinite: tuple[str, ...]
    """Tensors with NaN or infinity."""


@dataclass(frozen=True)
class Staged:
    """Mean gradients of a step that waits for its verdict, by bucket."""

    step: int
    epoch: int
    totals: list[Partial]


class ServerHalf:
    """A mode's half at one shard. Subclasses take contributions by bucket or by push, according to `whole_pushes`."""

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

        The shard takes over the gradient's tensor, unless it is borrowed. nonfinite: tensors that the worker found not
        finite. guard is called under the bucket's lock, so that nothing of another timeline counts. Raises TensorError
        or NonFiniteError and leaves the bucket unchanged.
        """
        raise ProtocolError("the consistency mode of this job takes whole pushes, not single buckets of a step")

    def push(
        self,
        push: NumberedPush,
        gradients: Mapping[int, Gradient],
        *,
        hyper: Hyper | None = None,
        guard: Guard = lambda: None,
        then: Callable[[], None] = lambda: None,
    ) -> tuple[Decision, int]:
        """Count a whole push, once; returns the decision and its staleness.

        Under `order`, guard() is called before the decision and then() after it, for a reply that no other push can
        precede. Raises TensorError or NonFiniteError and changes nothing.
        """
        raise ProtocolError("the consistency mode of this job takes the buckets of a step, not whole numbered pushes")

    # Queries

    def serve(self, bucket: Bucket, want: StepWanted) -> Outcome:
        """Whether a pull may be answered now: SERVED, WAITING or OVERTAKEN.

        No lock is needed; without it the caller checks afterwards whether the values it sends were overwritten.
        """
        raise NotImplementedError

    def progress(self, replica: int) -> int:
        """The step that a replica has to work on according to this shard."""
        raise NotImplementedError

    def last_push(self, task: str, incarnation: int = 0) -> int:
        """Number of an incarnation's last counted push; 0 if there is none, or pushes are not numbered.

        incarnation 0: the latest one of the task.
        """
        return 0

    def waiting_for(self) -> list[int]:
        """Replicas missing in the lowest open step."""
        return []

    def slowest(self) -> list[str]:
        """Workers whose pushes the pulls of others wait for; empty if none waits."""
        return []

    def asked(self, task: str, incarnation: int, *, begins: bool) -> None:
        """A worker has asked for its position. begins: it computes from now on; False: it pushes nothing until then."""

    # Votes, if a step waits for a verdict

    last_verdict: Applied | None = None
    """The last known verdict; its step may not be published yet."""

    def vote(self, step: int) -> tuple[ShardVote, Staged] | None:
        """The shard's vote on a complete step; None if there is nothing to vote on any more."""
        return None

    def waits_for(self, staged: Staged) -> bool:
        """Whether this vote is still open."""
        return False

    def decided(self, staged: Staged, verdict: Applied) -> None:
        """Store the verdict of an open vote, so that a new lead can learn it."""

    def apply_verdict(self, staged: Staged, *, scale: float, skip: bool) -> None:
        """Apply or skip a step in every bucket; does nothing if the shard was restored since the vote."""

    choices: StepChoices | None = None
    """Whose gradients make each step, if a step closes before all replicas have contributed."""

    # Timelines

    def members_changed(self, tasks: Collection[str]) -> None:
        """Set the admitted workers. Returns at once."""

    def origins(self, workers: Collection[str]) -> Collection[str]:
        """Whose updates may come from now on, by PushContext.task: what the rule keeps for others is dropped."""
        return workers

    def sequences(self) -> dict[str, WorkerSequence]:
        """What a cut stores besides the buckets: the last push of each worker that they contain. `order` held."""
        return {}

    def abandon(self) -> None:
        """The history ends here: nothing that is open will be applied. restored() follows."""

    def restored(self, sequences: Mapping[str, WorkerSequence]) -> None:
        """The buckets are those of a cut, which held these pushes."""

    # Standby

    def settle(self) -> None:
        """Apply everything that is counted but not applied, before a bucket is copied for a cut or a standby.

        Contributions to steps need not be applied: workers resend them. Call with `order` held, and no bucket's lock.
        """

    def remembered(self) -> tuple[Sequence[AppliedPush], Applied | None]:
        """What a standby has to know besides the buckets. Call with `order` held."""
        return (), self.last_verdict

    def recall(self, pushes: Sequence[AppliedPush], verdict: Applied | None) -> None:
        """Become the standby of a shard with this result of remembered(); its buckets are copied."""
        self.last_verdict = verdict

    def replay(self, record: Record, *, whole: bool) -> None:
        """Repeat the primary's update, only for copied buckets. whole: all are copied, and recall() was called."""
        for part in record.parts:
            bucket = self.storage.buckets[part.bucket]
            total = self.total_of(part.tensor(), part.present, bucket)
            with bucket.lock:
                bucket.hyper = part.hyper
                bucket.apply(total, scale=record.scale, skip=record.skip)
        if record.verdict is not None:
            self.last_verdict = record.verdict

    @staticmethod
    def total_of(values: torch.Tensor | None, present: tuple[bool, ...], bucket: Bucket) -> Partial:
        """A recorded gradient on the bucket's device."""
        return Partial(values.to(bucket.device) if values is not None else None, present)

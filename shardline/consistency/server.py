"""The server half of a mode: one object per shard that decides what counts, when it is applied, and what is served.

A shard has three parts: storage (buckets with their locks, publication, images), the server half, which works on that
storage, and observers, which are notified of events. The server half knows no network and no event loop; any thread may
call it. It references the storage and never the shard, so that a shard's memory is freed with its last user. Its locks
and their order are those of shardline.storage.shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardline.core.choices import Choices
from shardline.core.contributions import Partial, dim_of
from shardline.core.fixed import fixed
from shardline.core.gradients import Gradient
from shardline.core.image import WorkerSequence
from shardline.core.outcome import Decision, Outcome
from shardline.core.plan import Plan
from shardline.core.records import Applied, AppliedPush, Record
from shardline.core.reduce import Block
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
    weights: Callable[[int], float] | None = None
    """Factor for a push of this staleness in a sum of several; see shardline.update.weights()."""
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
    """The worker's clock after it, in modes in which pulls wait for workers that are behind."""
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


@fixed(kw_only=True)
class Offer:
    """Gradients that a mode may admit: those of one bucket of a step, or of a whole numbered push."""

    gradients: Mapping[int, Gradient]
    """By bucket. The shard takes over their tensors, unless they are borrowed."""
    step: int = 0
    block: Block = Block(0, 1)
    push: NumberedPush | None = None
    """The push that they are, if it has a number; `step` and `block` say nothing then."""
    hyper: Hyper | None = None
    nonfinite: Collection[str] = ()
    """Tensors that the worker found not finite."""
    guard: Guard = lambda: None
    """Called under the lock before anything counts, so that nothing of another timeline does."""
    then: Callable[[], None] = lambda: None
    """Called under `order` after a numbered push, for an answer that no other push can precede."""


class ServerHalf:
    """A mode's half at one shard: what counts (admit), what a pull gets (serve), and who is not waited for any more."""

    def __init__(self, storage: Storage, terms: Terms) -> None:
        self.storage = storage
        self.terms = terms

    def admit(self, offer: Offer) -> tuple[Decision, int]:
        """Count gradients, once; returns the decision and the staleness of a numbered push.

        What closes a step, or a push, applies it. Raises TensorError or NonFiniteError and changes nothing.
        """
        raise NotImplementedError

    def serve(self, bucket: Bucket, want: StepWanted) -> Outcome:
        """Whether a pull may be answered now: SERVED, WAITING or OVERTAKEN.

        No lock is needed; without it the caller checks afterwards whether the values it sends were overwritten.
        """
        raise NotImplementedError

    def standing(self, task: str, incarnation: int, replicas: Sequence[int]) -> dict[int, int]:
        """The step of each replica, for a worker that asks for its position; see waist.ShardService.standing()."""
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

    def late(self) -> str:
        """Whom waiting pulls wait for, for a sentence."""
        return "pushes of other workers"

    # Timelines

    def members_changed(self, tasks: Collection[str], *, forget: bool = False) -> None:
        """Set the admitted workers. forget: rules drop what they keep for others. Returns at once."""
        if forget:
            for bucket in self.storage.buckets:
                bucket.members_changed(tasks)

    def abandon(self) -> None:
        """The history ends here: nothing that is open will be applied. restored() follows."""

    def restored(self, sequences: Mapping[str, WorkerSequence]) -> None:
        """The buckets are those of a cut, which held these pushes."""

    # Copies

    def settle(self) -> dict[str, WorkerSequence]:
        """Apply everything that is counted but not applied, before buckets are copied for a cut or a standby.

        Contributions to steps need not be applied: workers resend them. Returns what a cut stores besides the buckets:
        the last push of each worker that they contain. Call with `order` held, and no bucket's lock.
        """
        return {}

    def remembered(self) -> tuple[Sequence[AppliedPush], Applied | None]:
        """What a standby has to know besides the buckets. Call with `order` held."""
        return (), None

    def recall(self, pushes: Sequence[AppliedPush], verdict: Applied | None) -> None:
        """Become the standby of a shard with this result of remembered(); its buckets are copied."""

    def replay(self, record: Record, *, whole: bool) -> None:
        """Repeat the primary's update, only for copied buckets. whole: all are copied, and recall() was called."""
        for part in record.parts:
            bucket = self.storage.buckets[part.bucket]
            total = self.total_of(part.tensor(), part.present, bucket)
            with bucket.lock:
                bucket.hyper = part.hyper
                bucket.apply(total, scale=record.scale, skip=record.skip)

    @staticmethod
    def total_of(values: torch.Tensor | None, present: tuple[bool, ...], bucket: Bucket) -> Partial:
        """A recorded gradient on the bucket's device."""
        return Partial(values.to(bucket.device) if values is not None else None, present, dim=dim_of(bucket.spec))


def numbers(values: Sequence[int], limit: int = 8) -> str:
    """The numbers as text, shortened for a message."""
    shown = ", ".join(str(value) for value in values[:limit])
    return shown + (f" and {len(values) - limit} more" if len(values) > limit else "")

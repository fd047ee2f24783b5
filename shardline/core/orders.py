from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardline.core.fixed import fixed
from shardline.core.placement import Placement, Post
from shardline.core.plan import Plan
from shardline.core.scores import Scores
from shardline.core.spec import JobSpec

LOST, REPEATED = "lost_updates", "repeated_batches"
"""Figures that a worker reports in asynchronous mode: acknowledged updates lost with a restored shard, and batches that
were sent and computed again."""
ACKNOWLEDGED, SINCE = "acknowledged.", "acknowledged_since"
"""Figures of the same worker: the number of its last acknowledged push at a shard, whose number follows the name; and
the timeline in which it last compared these numbers with the shards."""


MOST_BROADCAST = 1 << 16
"""Most characters of a value that worker/0 hands to all workers at a barrier."""


@dataclass(frozen=True, order=True)
class BarrierPlace:
    """One barrier. Places are ordered: a worker at a later one has been at all earlier ones."""

    step: int
    """The worker's step; 0 in asynchronous mode."""
    begun: bool
    """Whether it has begun a step since its process started."""
    number: int
    """Number of barriers passed before in this step; in asynchronous mode since its process started."""
    value: str = field(default="", compare=False)
    """JSON that worker/0 hands to all workers there: the worker's own in its report, worker/0's in the answer."""


@dataclass(frozen=True, kw_only=True)
class BarrierState:
    """State of the barrier that a worker reported last."""

    place: BarrierPlace
    passed: bool
    """All workers have been there, so it may continue."""
    hopeless: bool = False
    """A worker that it waits for has ended and will never come."""
    waits_for: tuple[str, ...] = ()
    """Workers that have not been there; if hopeless, those that have ended."""


class Phase(enum.Enum):
    """The phase of the job; names of proto Phase."""

    WAITING = 1
    INIT = 2
    RUNNING = 3
    STOPPING = 4
    ENDED = 5


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The chief's current orders to this task."""

    version: int = 0
    phase: Phase = Phase.WAITING
    timeline: int = 0
    replicas: tuple[int, ...] = ()
    init: bool = False
    stop_step: int = 0
    """Last step of the job; 0 = not decided."""
    exit_code: int = 0
    reason: str = ""
    checkpoint_step: int = -1
    final_step: int = -1
    workers: int = 0
    first_step: int = 0
    fenced: bool = False
    awaited: tuple[str, ...] = ()
    """Before training begins: tasks that the job waits for."""
    barrier: BarrierState | None = None
    """State of the barrier that this task reported last."""
    posts: tuple[Post, ...] = ()
    """In a pipeline: who computes each unit, by unit; see shardline_pipeline."""
    posting: int = 0
    """Higher with every change of posts, so that two orders with the same posts are told apart: the chief's term << 32,
    and the number of changes, of which the first is that the job begins."""
    job_secret: bytes = field(default=b"", repr=False)
    """With posts: random bytes of the chief's process, known to this job's tasks alone, by which workers of a host find
    and recognize each other. A new chief, which has a new term and so other posts' numbers, has other ones."""
    scores: Scores = ()
    """Where the job's learning rate follows scores: those of this history; see shardline.core.scores."""

    peers: tuple[Post, ...] = ()
    """Where not all workers exchange with the servers themselves: a worker's aggregators, an aggregator's workers."""

    @property
    def work(self) -> tuple[tuple[int, ...], tuple[Post, ...], int]:
        """What this task computes, and with whom."""
        return self.replicas, self.posts, self.posting

    @property
    def moved(self) -> bool:
        """In a pipeline: whether any unit has moved from one worker to another under the present chief."""
        return self.posting & 0xFFFFFFFF > 1

    def units(self, task: str) -> Sequence[int]:
        """What this task computes: its replicas, or in a pipeline its units."""
        return [unit for unit, post in enumerate(self.posts) if post.task == task] if self.posts else self.replicas


@dataclass(frozen=True, kw_only=True)
class StepReport:
    step: int
    replica: int
    loss: float
    samples: int
    compute_s: float = 0.0
    exchange_s: float = 0.0
    """Seconds of push, waiting and pull."""
    staleness: int = 0
    blocked_s: float = 0.0
    """The part of exchange_s in which the servers waited for other workers."""
    drift: float = 0.0
    """L2 norm of how far the replica moved, in a cadence that trains locally."""
    gap: float = 0.0
    """RMS distance between the parameters before and after the push, where workers push for themselves; 0 = not
    measured."""
    data_s: float = 0.0
    """Seconds of waiting for batches, which compute_s doesn't contain; in a script not known, and part of that."""
    logged: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Figures for curves, by name: the learning rate, sometimes the gradient's norm, and those that a script logs."""


@fixed(kw_only=True)
class PassReport:
    """A pass of a pipeline that was computed: one microbatch through one stage, forward or backward."""

    step: int
    replica: int
    stage: int
    microbatch: int
    back: bool
    start_s: float
    """On a clock of the process that computed it."""
    end_s: float
    version: int
    """Updates that the parameters had had that it was computed with."""
    held: int
    """Microbatches whose activations the stage held for this replica meanwhile, its own included."""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """The chief's description of the job for a task."""

    job: JobSpec
    plan: Plan
    placement: tuple[Placement, ...]
    timeline: int

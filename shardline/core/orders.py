"""What the chief wants of a task, and what a task reports of its steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shardline.core.placement import Placement
from shardline.core.plan import Plan
from shardline.core.spec import JobSpec

LOST, REPEATED = "lost_updates", "repeated_batches"
"""Figures of a worker's life in asynchronous mode: acknowledged updates that a restored shard has no more, and batches
that were sent and computed again."""


@dataclass(frozen=True, order=True)
class BarrierPlace:
    """One barrier. Places are ordered: who is at a later one has been at all before it."""

    step: int
    """Step that the worker is in; 0 in asynchronous mode."""
    begun: bool
    """It has begun a step since its process was started."""
    number: int
    """How many it has met before in this step; in asynchronous mode since its process was started."""


@dataclass(frozen=True, kw_only=True)
class BarrierState:
    """How it stands with the barrier that a worker told last."""

    place: BarrierPlace
    passed: bool
    """All workers have been there: it may go on."""
    hopeless: bool = False
    """Somebody it waits for has ended and will never come."""
    waits_for: tuple[str, ...] = ()
    """Workers that have not been there; of a hopeless one those that have ended."""


class Phase(enum.Enum):
    """Where the job is; names of proto Phase."""

    WAITING = 1
    INIT = 2
    RUNNING = 3
    STOPPING = 4
    ENDED = 5


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What the chief wants of this task now."""

    version: int = 0
    phase: Phase = Phase.WAITING
    timeline: int = 0
    replicas: tuple[int, ...] = ()
    init: bool = False
    stop_step: int = 0
    """Nothing goes past this step; 0 = not decided."""
    exit_code: int = 0
    reason: str = ""
    checkpoint_step: int = -1
    final_step: int = -1
    workers: int = 0
    first_step: int = 0
    fenced: bool = False
    awaited: tuple[str, ...] = ()
    """Before training begins: tasks that it waits for."""
    barrier: BarrierState | None = None
    """How it stands with the barrier that this task told last."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One finished step of one replica."""

    step: int
    replica: int
    loss: float
    samples: int
    compute_s: float = 0.0
    exchange_s: float = 0.0
    staleness: int = 0


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What the chief tells a task about the job."""

    job: JobSpec
    plan: Plan
    placement: tuple[Placement, ...]
    timeline: int

"""What tasks ask and tell the chief, as plain values; servicer.py turns them into protobuf and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardline.core.identity import Identity
from shardline.core.orders import BarrierPlace, StepReport
from shardline.core.spec import JobSpec
from shardline.core.status import PsStatus, Traffic

TRAINERS = ("chief", "worker")
"""Roles that run replicas: workers, and a chief that trains."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """A task asks to take part."""

    role: str
    index: int | None
    stable_id: str
    address: str
    metrics_address: str = ""
    job: JobSpec | None = None
    protocol_minor: int = 0
    required_features: tuple[str, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)
    secret: bytes = field(default=b"", repr=False)
    """Drawn by the servicer for the life that this Join may begin."""

    @property
    def name(self) -> str:
        """How to call the task before it has an index."""
        return self.role if self.index is None else f"{self.role}/{self.index}"


@dataclass(frozen=True, kw_only=True)
class JoinAnswer:
    """Whether it may, and as whom; `retry`: asking again may help."""

    accepted: bool
    reason: str = ""
    retry: bool = False
    task: str = ""
    incarnation: int = 0
    secret: bytes = field(default=b"", repr=False)
    """Goes with all that this life says; the chief and the servers keep a digest of it."""


@dataclass(frozen=True, kw_only=True)
class PlaceAnswer:
    """The index of a task that asked for one, such as "worker/1"; empty: `reason` and `retry` as for a JoinAnswer."""

    task: str = ""
    reason: str = ""
    retry: bool = False


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a task tells with each heartbeat."""

    task: str
    incarnation: int
    step: int = 0
    leaving: bool = False
    finished: bool = False
    failure: str = ""
    failure_code: int = 0
    steps: tuple[StepReport, ...] = ()
    ps: PsStatus | None = None
    traffic: Traffic = field(default_factory=Traffic)
    suspects: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    barrier: BarrierPlace | None = None
    """The last one that this worker came to."""
    secret: bytes = field(default=b"", repr=False)

    @property
    def sender(self) -> Identity:
        """Who it says that it is from."""
        return Identity(self.task, self.incarnation, self.secret)


@dataclass(frozen=True, kw_only=True)
class LeaseAnswer:
    """Batches to train on next: [first, first + count). `outcome` is a name of proto Outcome without its prefix."""

    outcome: str
    reason: str = ""
    lease: int = 0
    first: int = 0
    count: int = 0
    retry_after_s: float = 0.0

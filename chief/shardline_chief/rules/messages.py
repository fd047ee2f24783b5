"""What tasks ask of the chief and report to it, as plain values; servicer.py converts them from and to protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardline.core.identity import Identity
from shardline.core.orders import BarrierPlace, PassReport, StepReport
from shardline.core.spec import JobSpec
from shardline.core.status import PsStatus, TaskLinks, Traffic, Usage


@dataclass(frozen=True, kw_only=True)
class Join:
    """A task asks to take part. index: None to have the chief assign one."""

    role: str
    index: int | None
    stable_id: str
    address: str
    metrics_address: str = ""
    device: str = ""
    job: JobSpec | None = None
    protocol_minor: int = 0
    required_features: tuple[str, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)
    secret: bytes = field(default=b"", repr=False)
    """Drawn by the servicer for the life that this Join may begin."""

    @property
    def name(self) -> str:
        """Name of the task for messages: "worker/1", or "worker" without an index."""
        return self.role if self.index is None else f"{self.role}/{self.index}"


@dataclass(frozen=True, kw_only=True)
class JoinAnswer:
    """Whether the task may join, and as which incarnation. `retry`: asking again may help."""

    accepted: bool
    reason: str = ""
    retry: bool = False
    task: str = ""
    incarnation: int = 0
    secret: bytes = field(default=b"", repr=False)
    """Sent with every message of this life; the chief and the servers keep only a digest."""


@dataclass(frozen=True, kw_only=True)
class PlaceAnswer:
    """The assigned task, such as "worker/1"; if empty, `reason` and `retry` are as in JoinAnswer."""

    task: str = ""
    reason: str = ""
    retry: bool = False


@dataclass(frozen=True, kw_only=True)
class Beat:
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
    usage: Usage = field(default_factory=Usage)
    links: TaskLinks = field(default_factory=TaskLinks)
    suspects: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    barrier: BarrierPlace | None = None
    """The last barrier that this worker reached; None if it reached none."""
    passes: tuple[PassReport, ...] = ()
    """Passes of a pipeline since the last heartbeat."""
    clock_s: float = 0.0
    """When it was sent, on the clock of its passes."""
    secret: bytes = field(default=b"", repr=False)

    @property
    def sender(self) -> Identity:
        return Identity(self.task, self.incarnation, self.secret)


@dataclass(frozen=True, kw_only=True)
class MoveAnswer:
    """A request to move shards to other servers."""

    number: int
    """Of this request; the chief knows the newest only."""
    moves: Mapping[int, str] = field(default_factory=dict)
    """The new server, such as "ps/0", of each shard that has not moved yet."""
    failure: str = ""
    """Why it was given up; empty if it was not."""
    done: bool = False
    """All have moved, and a server that is drained holds no standby either."""


@dataclass(frozen=True, kw_only=True)
class LeaseAnswer:
    """Batches to train on next: [first, first + count). `outcome` is a name of the proto enum Outcome, no prefix."""

    outcome: str
    reason: str = ""
    lease: int = 0
    first: int = 0
    count: int = 0
    retry_after_s: float = 0.0

"""What the chief and the parameter servers say about themselves, as values (protobuf's stay in this package)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardline.errors import ProtocolError
from shardline.rpc.v1 import chief_pb2, parameter_server_pb2

PHASES: Mapping[str, chief_pb2.Phase.ValueType] = {
    "waiting": chief_pb2.PHASE_WAITING,
    "init": chief_pb2.PHASE_INIT,
    "running": chief_pb2.PHASE_RUNNING,
    "stopping": chief_pb2.PHASE_STOPPING,
    "ended": chief_pb2.PHASE_ENDED,
}
"""Phases of a job by name: tasks are missing; parameters are being set; training; ending; ended."""


def phase_from_proto(value: int) -> str:
    """Name of a phase; raises ProtocolError where this version doesn't know it."""
    for name, number in PHASES.items():
        if number == value:
            return name
    raise ProtocolError(f"the chief is in phase {value}, which this version doesn't know; is it a newer Shardline?")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of tensors since a task started; raw: as held in memory, wire: as sent."""

    push_raw_bytes: int = 0
    push_wire_bytes: int = 0
    pull_raw_bytes: int = 0
    pull_wire_bytes: int = 0

    @classmethod
    def from_proto(cls, message: parameter_server_pb2.Traffic) -> Traffic:
        """Value of a message."""
        return cls(
            push_raw_bytes=message.push_raw_bytes,
            push_wire_bytes=message.push_wire_bytes,
            pull_raw_bytes=message.pull_raw_bytes,
            pull_wire_bytes=message.pull_wire_bytes,
        )

    def to_proto(self) -> parameter_server_pb2.Traffic:
        """Message of this value."""
        return parameter_server_pb2.Traffic(
            push_raw_bytes=self.push_raw_bytes,
            push_wire_bytes=self.push_wire_bytes,
            pull_raw_bytes=self.pull_raw_bytes,
            pull_wire_bytes=self.pull_wire_bytes,
        )

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            push_raw_bytes=self.push_raw_bytes + other.push_raw_bytes,
            push_wire_bytes=self.push_wire_bytes + other.push_wire_bytes,
            pull_raw_bytes=self.pull_raw_bytes + other.pull_raw_bytes,
            pull_wire_bytes=self.pull_wire_bytes + other.pull_wire_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class HeldCut:
    """A cut that a shard holds for the chief."""

    step: int
    complete: bool = False
    skipped: bool = False

    @classmethod
    def from_proto(cls, message: parameter_server_pb2.HeldCut) -> HeldCut:
        """Value of a message."""
        return cls(step=message.step, complete=message.complete, skipped=message.skipped)

    def to_proto(self) -> parameter_server_pb2.HeldCut:
        """Message of this value."""
        return parameter_server_pb2.HeldCut(step=self.step, complete=self.complete, skipped=self.skipped)


STANDBY_STATES: Mapping[str, parameter_server_pb2.StandbyState.ValueType] = {
    "": parameter_server_pb2.STANDBY_STATE_UNSPECIFIED,
    "unprotected": parameter_server_pb2.STANDBY_STATE_UNPROTECTED,
    "copying": parameter_server_pb2.STANDBY_STATE_COPYING,
    "synced": parameter_server_pb2.STANDBY_STATE_SYNCED,
    "silent": parameter_server_pb2.STANDBY_STATE_SILENT,
}
"""A standby as its primary sees it: there shall be none; it is not reached; it is being copied; it may take the
primary's place; it was whole and does not answer, so that the primary stands still."""


def standby_state(value: int) -> str:
    """Name of a standby's state; one that this version doesn't know is none that could be relied on."""
    return next((name for name, number in STANDBY_STATES.items() if number == value), "unprotected")


@dataclass(frozen=True, kw_only=True)
class StandbyStatus:
    """A standby that a ps holds."""

    shard: int
    synced: bool = False
    """It may be promoted."""
    record: int = 0
    """The last record of its copy that it holds."""
    copy: int = 0
    bytes: int = 0
    appointment: int = 0
    """The one that it was copied for."""

    @classmethod
    def from_proto(cls, message: parameter_server_pb2.StandbyStatus) -> StandbyStatus:
        """Value of a message."""
        return cls(
            shard=message.shard,
            synced=message.synced,
            record=message.record,
            copy=message.copy,
            bytes=message.bytes,
            appointment=message.appointment,
        )

    def to_proto(self) -> parameter_server_pb2.StandbyStatus:
        """Message of this value."""
        return parameter_server_pb2.StandbyStatus(
            shard=self.shard,
            synced=self.synced,
            record=self.record,
            copy=self.copy,
            bytes=self.bytes,
            appointment=self.appointment,
        )


@dataclass(frozen=True, kw_only=True)
class ShardStatus:
    """One shard on one ps."""

    shard: int
    step_min: int = 0
    """Lowest step of its buckets; the highest is at most one more in synchronous mode."""
    step_max: int = 0
    version: int = 0
    initialized: bool = False
    cuts: tuple[HeldCut, ...] = ()
    pushes: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    skipped_steps: int = 0
    waiting_for: tuple[int, ...] = ()
    """Replicas missing in the lowest open step."""
    bytes: int = 0
    duplicate_mismatches: int = 0
    standby: str = ""
    """One of STANDBY_STATES."""
    standby_task: str = ""
    standby_record: int = 0
    """The last record that it has acknowledged."""
    standby_silent_s: float = 0.0
    standby_problem: str = ""

    @classmethod
    def from_proto(cls, message: parameter_server_pb2.ShardStatus) -> ShardStatus:
        """Value of a message."""
        return cls(
            shard=message.shard,
            step_min=message.step_min,
            step_max=message.step_max,
            version=message.version,
            initialized=message.initialized,
            cuts=tuple(HeldCut.from_proto(cut) for cut in message.cuts),
            pushes=message.pushes,
            staleness_sum=message.staleness_sum,
            staleness_max=message.staleness_max,
            skipped_steps=message.skipped_steps,
            waiting_for=tuple(message.waiting_for),
            bytes=message.bytes,
            duplicate_mismatches=message.duplicate_mismatches,
            standby=standby_state(message.standby),
            standby_task=message.standby_task,
            standby_record=message.standby_record,
            standby_silent_s=message.standby_silent_s,
            standby_problem=message.standby_problem,
        )

    def to_proto(self) -> parameter_server_pb2.ShardStatus:
        """Message of this value."""
        return parameter_server_pb2.ShardStatus(
            shard=self.shard,
            step_min=self.step_min,
            step_max=self.step_max,
            version=self.version,
            initialized=self.initialized,
            cuts=[cut.to_proto() for cut in self.cuts],
            pushes=self.pushes,
            staleness_sum=self.staleness_sum,
            staleness_max=self.staleness_max,
            skipped_steps=self.skipped_steps,
            waiting_for=self.waiting_for,
            bytes=self.bytes,
            duplicate_mismatches=self.duplicate_mismatches,
            standby=STANDBY_STATES[self.standby],
            standby_task=self.standby_task,
            standby_record=self.standby_record,
            standby_silent_s=self.standby_silent_s,
            standby_problem=self.standby_problem,
        )


@dataclass(frozen=True, kw_only=True)
class PsStatus:
    """One parameter server."""

    task: str
    term: int = 0
    chief_uuid: str = ""
    timeline: int = 0
    active: bool = False
    shards: tuple[ShardStatus, ...] = ()
    traffic: Traffic = field(default_factory=Traffic)
    failure: str = ""
    """Sentence for the person where it can't go on."""
    standbys: tuple[StandbyStatus, ...] = ()

    @classmethod
    def from_proto(cls, message: parameter_server_pb2.PsStatusReply) -> PsStatus:
        """Value of a message."""
        return cls(
            task=message.task,
            term=message.term.number,
            chief_uuid=message.term.chief_uuid,
            timeline=message.timeline,
            active=message.active,
            shards=tuple(ShardStatus.from_proto(shard) for shard in message.shards),
            traffic=Traffic.from_proto(message.traffic),
            failure=message.failure,
            standbys=tuple(StandbyStatus.from_proto(item) for item in message.standbys),
        )

    def to_proto(self) -> parameter_server_pb2.PsStatusReply:
        """Message of this value."""
        return parameter_server_pb2.PsStatusReply(
            task=self.task,
            term=parameter_server_pb2.Term(number=self.term, chief_uuid=self.chief_uuid),
            timeline=self.timeline,
            active=self.active,
            shards=[shard.to_proto() for shard in self.shards],
            traffic=self.traffic.to_proto(),
            failure=self.failure,
            standbys=[item.to_proto() for item in self.standbys],
        )


@dataclass(frozen=True, kw_only=True)
class TaskStatus:
    """One task as the chief sees it."""

    task: str
    state: str
    incarnation: int = 0
    address: str = ""
    metrics_address: str = ""
    last_heard_s: float = 0.0
    """Seconds since its last heartbeat."""
    step: int = 0
    replicas: tuple[int, ...] = ()
    traffic: Traffic = field(default_factory=Traffic)
    push_bytes_per_s: float = 0.0
    pull_bytes_per_s: float = 0.0
    shards: tuple[ShardStatus, ...] = ()
    steps_per_s: float = 0.0
    staleness: float = 0.0
    """Mean of its last steps, in versions."""
    compute_s: float = 0.0
    """Seconds of computing in one of its last steps, on average."""
    exchange_s: float = 0.0
    """The same of push, barrier wait and pull."""

    @classmethod
    def from_proto(cls, message: chief_pb2.TaskStatus) -> TaskStatus:
        """Value of a message."""
        return cls(
            task=message.task,
            state=message.state,
            incarnation=message.incarnation,
            address=message.address,
            metrics_address=message.metrics_address,
            last_heard_s=message.last_heard_s,
            step=message.step,
            replicas=tuple(message.replicas),
            traffic=Traffic.from_proto(message.traffic),
            push_bytes_per_s=message.push_bytes_per_s,
            pull_bytes_per_s=message.pull_bytes_per_s,
            shards=tuple(ShardStatus.from_proto(shard) for shard in message.shards),
            steps_per_s=message.steps_per_s,
            staleness=message.staleness,
            compute_s=message.compute_s,
            exchange_s=message.exchange_s,
        )

    def to_proto(self) -> chief_pb2.TaskStatus:
        """Message of this value."""
        return chief_pb2.TaskStatus(
            task=self.task,
            state=self.state,
            incarnation=self.incarnation,
            address=self.address,
            metrics_address=self.metrics_address,
            last_heard_s=self.last_heard_s,
            step=self.step,
            replicas=self.replicas,
            traffic=self.traffic.to_proto(),
            push_bytes_per_s=self.push_bytes_per_s,
            pull_bytes_per_s=self.pull_bytes_per_s,
            shards=[shard.to_proto() for shard in self.shards],
            steps_per_s=self.steps_per_s,
            staleness=self.staleness,
            compute_s=self.compute_s,
            exchange_s=self.exchange_s,
        )


@dataclass(frozen=True, kw_only=True)
class EventStatus:
    """One sentence of the chief's."""

    time: float
    """Unix time."""
    level: str
    """"info", "warning" or "error"."""
    sentence: str


@dataclass(frozen=True, kw_only=True)
class CheckpointStatus:
    """A committed checkpoint that is still on disk."""

    step: int
    path: str
    bytes: int
    age_s: float
    """Seconds since it was committed."""


@dataclass(frozen=True, kw_only=True)
class ChiefStatus:
    """The job as the chief sees it."""

    job: str = ""
    phase: str = "waiting"
    """One of PHASES."""
    step: int = 0
    steps: int = 0
    """Steps to train; 0 where a script ends the job by itself."""
    first_step: int = 0
    """Step this run started from."""
    loss: float = float("nan")
    steps_per_s: float = 0.0
    bytes_per_s: float = 0.0
    """Wire bytes pushed and pulled by all workers."""
    seconds: float = 0.0
    tasks: tuple[TaskStatus, ...] = ()
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoint_step: int = -1
    """-1 = none yet."""
    checkpoint_path: str = ""
    events: tuple[str, ...] = ()
    exit_code: int = 0
    reason: str = ""
    out_dir: str = ""
    consistency: str = "sync"
    time: float = 0.0
    """Unix time of the chief when it answered."""
    missing: tuple[str, ...] = ()
    """Tasks of the cluster spec that have never joined."""
    said: tuple[EventStatus, ...] = ()
    """`events` with their time and level."""
    checkpoints: tuple[CheckpointStatus, ...] = ()
    last_metrics_step: int = -1
    best_step: int = -1
    best_metrics: Mapping[str, float] = field(default_factory=dict)
    staleness: float = 0.0
    """Mean of the last steps, in versions."""
    staleness_max: int = 0
    """Highest of the run."""
    push_bytes_per_s: float = 0.0
    """Through all parameter servers."""
    pull_bytes_per_s: float = 0.0
    replicas: int = 0
    rule: str = ""
    """Name of the update rule."""
    dead_s: float = 0.0
    """Silence after which a task is dead."""
    page: str = ""
    """Address of the chief's own page; empty where it serves none."""
    shard_bytes: tuple[int, ...] = ()
    """Bytes of the values in each shard, by its number."""
    faults: tuple[str, ...] = ()
    """What fails at present while the job goes on (checkpoints, logs, the journal), a sentence each."""

    @classmethod
    def from_proto(cls, message: chief_pb2.ChiefStatusReply) -> ChiefStatus:
        """Value of a message; raises ProtocolError at a phase this version doesn't know."""
        return cls(
            job=message.job,
            phase=phase_from_proto(message.phase),
            step=message.step,
            steps=message.steps,
            first_step=message.first_step,
            loss=message.loss,
            steps_per_s=message.steps_per_s,
            bytes_per_s=message.bytes_per_s,
            seconds=message.seconds,
            tasks=tuple(TaskStatus.from_proto(task) for task in message.tasks),
            last_metrics=dict(message.last_metrics),
            checkpoint_step=message.checkpoint_step,
            checkpoint_path=message.checkpoint_path,
            events=tuple(message.events),
            exit_code=message.exit_code,
            reason=message.reason,
            out_dir=message.out_dir,
            consistency=message.consistency,
            time=message.time,
            missing=tuple(message.missing),
            said=tuple(EventStatus(time=e.time, level=e.level, sentence=e.sentence) for e in message.said),
            checkpoints=tuple(
                CheckpointStatus(step=c.step, path=c.path, bytes=c.bytes, age_s=c.age_s) for c in message.checkpoints
            ),
            last_metrics_step=message.last_metrics_step,
            best_step=message.best_step,
            best_metrics=dict(message.best_metrics),
            staleness=message.staleness,
            staleness_max=message.staleness_max,
            push_bytes_per_s=message.push_bytes_per_s,
            pull_bytes_per_s=message.pull_bytes_per_s,
            replicas=message.replicas,
            rule=message.rule,
            dead_s=message.dead_s,
            page=message.page,
            shard_bytes=tuple(message.shard_bytes),
            faults=tuple(message.faults),
        )

    def to_proto(self) -> chief_pb2.ChiefStatusReply:
        """Message of this value."""
        return chief_pb2.ChiefStatusReply(
            job=self.job,
            phase=PHASES[self.phase],
            step=self.step,
            steps=self.steps,
            first_step=self.first_step,
            loss=self.loss,
            steps_per_s=self.steps_per_s,
            bytes_per_s=self.bytes_per_s,
            seconds=self.seconds,
            tasks=[task.to_proto() for task in self.tasks],
            last_metrics=self.last_metrics,
            checkpoint_step=self.checkpoint_step,
            checkpoint_path=self.checkpoint_path,
            events=self.events,
            exit_code=self.exit_code,
            reason=self.reason,
            out_dir=self.out_dir,
            consistency=self.consistency,
            time=self.time,
            missing=self.missing,
            said=[chief_pb2.EventStatus(time=e.time, level=e.level, sentence=e.sentence) for e in self.said],
            checkpoints=[
                chief_pb2.CheckpointStatus(step=c.step, path=c.path, bytes=c.bytes, age_s=c.age_s)
                for c in self.checkpoints
            ],
            last_metrics_step=self.last_metrics_step,
            best_step=self.best_step,
            best_metrics=self.best_metrics,
            staleness=self.staleness,
            staleness_max=self.staleness_max,
            push_bytes_per_s=self.push_bytes_per_s,
            pull_bytes_per_s=self.pull_bytes_per_s,
            replicas=self.replicas,
            rule=self.rule,
            dead_s=self.dead_s,
            page=self.page,
            shard_bytes=self.shard_bytes,
            faults=self.faults,
        )

"""Status of the chief and the parameter servers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from shardline.core.choices import Choices


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of tensors since a task started, and what codecs make of them. raw: as in memory, wire: as sent."""

    push_raw_bytes: int = 0
    push_wire_bytes: int = 0
    pull_raw_bytes: int = 0
    pull_wire_bytes: int = 0
    codec_error: float = 0.0
    """L2 norm of what was not sent, over that of what was to be, as last measured: of pushes at a worker, of pulls at a
    ps. 0 = nothing was measured, or the codec is exact."""
    codec_owed: float = 0.0
    """L2 norm of a worker's error memory, as last measured."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            push_raw_bytes=self.push_raw_bytes + other.push_raw_bytes,
            push_wire_bytes=self.push_wire_bytes + other.push_wire_bytes,
            pull_raw_bytes=self.pull_raw_bytes + other.pull_raw_bytes,
            pull_wire_bytes=self.pull_wire_bytes + other.pull_wire_bytes,
            codec_error=max(self.codec_error, other.codec_error),
            codec_owed=math.hypot(self.codec_owed, other.codec_owed),
        )


@dataclass(frozen=True, kw_only=True)
class HeldCut:
    """A cut that a shard keeps for the chief."""

    step: int
    complete: bool = False
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class StandbyStatus:
    shard: int
    synced: bool = False
    """Whether it may be promoted."""
    record: int = 0
    """The last record of its copy that it has."""
    copy: int = 0
    bytes: int = 0
    appointment: int = 0
    """The appointment that it was copied for."""


@dataclass(frozen=True, kw_only=True)
class TableStatus:
    """Rows of a table in a shard, and what its server has counted since it has the shard."""

    table: str
    rows: int = 0
    below_admission: int = 0
    """Gradients dropped of ids that were not admitted."""
    cap: int = 0
    """Gradients dropped of ids for which there was no room."""
    evicted: int = 0
    """Rows removed."""
    memory_hits: int = 0
    """With memory_rows: rows that updates and reads found in memory."""
    memory_misses: int = 0
    """Rows that they had to bring from disk."""
    disk_rows: int = 0
    """Rows that are on disk."""
    disk_bytes: int = 0
    """Bytes of the disk that are taken for them."""


@dataclass(frozen=True, kw_only=True)
class ShardFacts:
    """Facts about a shard that its server tells and people see."""

    shard: int
    step_min: int = 0
    """Lowest step of its buckets; the highest is at most one more in synchronous mode."""
    step_max: int = 0
    version: int = 0
    pushes: int = 0
    staleness_max: int = 0
    waiting_for: tuple[int, ...] = ()
    """Replicas missing in the lowest open step."""
    standby_problem: str = ""
    """Why its standby is not in step, if known."""
    tables: tuple[TableStatus, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShardStatus(ShardFacts):
    initialized: bool = False
    cuts: tuple[HeldCut, ...] = ()
    staleness_sum: int = 0
    skipped_steps: int = 0
    bytes: int = 0
    duplicate_mismatches: int = 0
    standby: str = ""
    """One of STANDBY_STATES."""
    standby_task: str = ""
    standby_record: int = 0
    """The last record that it has acknowledged."""
    standby_silent_s: float = 0.0
    choices: Choices = field(default_factory=Choices)
    """Of the closed steps that the chief may not have noted yet; only the lead reports them."""


@dataclass(frozen=True, kw_only=True)
class PsStatus:
    task: str
    term: int = 0
    chief_uuid: str = ""
    timeline: int = 0
    active: bool = False
    shards: tuple[ShardStatus, ...] = ()
    traffic: Traffic = field(default_factory=Traffic)
    failure: str = ""
    """Message for the user if it can't continue."""
    standbys: tuple[StandbyStatus, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepMeans:
    """Means over a task's last steps of the figures that it reports for each. None = not known, or of no meaning.

    A field here, in core.orders.StepReport and in the messages is one more figure of the status, the page and the
    summary.
    """

    staleness: float | None = 0.0
    """In versions."""
    compute_s: float | None = 0.0
    """Seconds of computing."""
    data_s: float | None = 0.0
    """Seconds of waiting for batches."""
    exchange_s: float | None = 0.0
    """Seconds of push, barrier wait and pull."""
    blocked_s: float | None = 0.0
    """The part of it in which the servers waited for other workers."""
    drift: float | None = 0.0
    """L2 norm of how far its replicas moved in a step, in a cadence that trains locally."""
    gap: float | None = 0.0
    """RMS distance between the parameters before and after a push, where workers push for themselves; of the steps
    that measured it."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Processor, memory and GPU that a task's process uses; 0 = not known."""

    cores: float = 0.0
    """Cores that it computes on, on average since it was measured last; 1.5 = one and a half."""
    resident_bytes: int = 0
    gpu_bytes: int = 0
    """Memory of its GPU in use, by all processes."""
    gpu_share: float = 0.0
    """Share of the last moments in which its GPU computed, for any process, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class PeerBytes:
    """Bytes of tensors to another task and from it, as sent, or as they moved through memory.

    Since the task started in a heartbeat, per second in a TaskStatus.
    """

    task: str
    out_bytes: float = 0.0
    in_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TaskLinks:
    """Whom a task exchanges with, and over what."""

    line_bytes_per_s: float = 0.0
    """What the link of its machine carries each way; 0 = not known."""
    peers: tuple[PeerBytes, ...] = ()
    """Only of tasks that push and pull: the other side of an exchange does not tell of it."""


STEP_MEANS = tuple(item.name for item in fields(StepMeans))
MEASURED_RARELY = ("drift", "gap")
"""Those that are 0 where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class TaskFacts(StepMeans):
    """Facts about a task that the chief tells and people see."""

    state: str
    """alive, suspect, dead, left or missing."""
    address: str = ""
    metrics_address: str = ""
    device: str = ""
    """Device that it computes on, such as "cuda:1"; empty if it did not say."""
    replicas: tuple[int, ...] = ()
    push_bytes_per_s: float = 0.0
    """Bytes per second towards the parameters: sent by a worker, received by a ps."""
    pull_bytes_per_s: float = 0.0
    steps_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TaskStatus(TaskFacts):
    task: str
    incarnation: int = 0
    last_heard_s: float = 0.0
    """Seconds since its last heartbeat; NaN = unknown."""
    step: int = 0
    """-1 = unknown."""
    traffic: Traffic = field(default_factory=Traffic)
    usage: Usage = field(default_factory=Usage)
    links: TaskLinks = field(default_factory=TaskLinks)
    shards: tuple[ShardStatus, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """One stage of a pipeline, over its recent steps and all its replicas."""

    stage: int
    tasks: tuple[str, ...] = ()
    """Who computes it."""
    bubble: float = 0.0
    """Share of the time from the first pass of a step to its last, in any stage, in which this stage computed nothing,
    0 to 1. What lies between two steps does not count."""
    forward_s: float = 0.0
    """Mean seconds of a forward pass of one microbatch."""
    backward_s: float = 0.0
    held: int = 0
    """Most microbatches of a replica whose activations it held."""
    behind: int = 0
    """Updates that its parameters had missed at most; 0 with a flush."""
    versions: int = 1
    """Most versions of its parameters that its passes needed at a time."""


@dataclass(frozen=True, kw_only=True)
class EventStatus:
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
class Awaited:
    """A task that a job which stands still waits for."""

    task: str
    why: str
    """Facts about it, such as "replica 1, last heard 11 s ago"."""


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """No step has ended for much longer than usual."""

    seconds: float
    """Time since the job last moved."""
    awaited: tuple[Awaited, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Counting:
    """Unit of a job's step numbers."""

    unit: str = "step"
    """Its progress, checkpoints and curves: "step", "round" (a step of several passes) or "update"."""
    asked: str = "step"
    """Its `steps`: the same, or "batch" or "round" where workers push for themselves."""
    passes: int = 1
    """Passes of a replica in each of those; 0 = not in each as many."""
    all_passes: int = 0
    """Passes of a replica in all of those."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """Facts about a job that the chief tells and people see."""

    job: str = ""
    phase: str = "waiting"
    """One of PHASES."""
    reason: str = ""
    """Why the job ended."""
    exit_code: int = 0
    step: int = 0
    done: int = 0
    """How many of its steps are done, in the unit Counting.asked."""
    counting: Counting = Counting()
    first_step: int = 0
    """First step of this run."""
    seconds: float = 0.0
    """Of training so far."""
    steps_per_s: float = 0.0
    push_bytes_per_s: float = 0.0
    """Bytes/s through all parameter servers."""
    pull_bytes_per_s: float = 0.0
    replicas: int = 0
    rule: str = ""
    """Name of the update rule, such as SGD."""
    staleness_max: int = 0
    """Highest staleness of the run, in versions."""
    faults: tuple[str, ...] = ()
    """Current faults that do not stop the job (checkpoints, logs, the journal), a sentence each."""
    stages: tuple[StageStatus, ...] = ()
    """Of a pipeline whose first step is done."""
    out_dir: str = ""
    time: float = 0.0
    """Unix time of the chief when it answered."""
    dead_s: float = 0.0
    """Seconds of silence after which a task is dead."""


@dataclass(frozen=True, kw_only=True)
class ChiefStatus(JobFacts):
    steps: int = 0
    """Steps to train; 0 if a script ends the job by itself."""
    loss: float = float("nan")
    bytes_per_s: float = 0.0
    """Wire bytes pushed and pulled by all workers."""
    tasks: tuple[TaskStatus, ...] = ()
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoint_step: int = -1
    """-1 = none yet."""
    checkpoint_path: str = ""
    consistency: str = ""
    """Empty until the job is known."""
    missing: tuple[str, ...] = ()
    """Tasks of the cluster spec that have never joined."""
    said: tuple[EventStatus, ...] = ()
    """The last events, newest last."""
    checkpoints: tuple[CheckpointStatus, ...] = ()
    last_metrics_step: int = -1
    best_step: int = -1
    best_metrics: Mapping[str, float] = field(default_factory=dict)
    staleness: float = 0.0
    """Mean staleness of the last steps, in versions."""
    codec_up: str = ""
    """Codec of gradients; empty until the job is known."""
    codec_down: str = ""
    """Codec of parameters."""
    codec_parcels: str = ""
    """Codec of activations and their gradients; empty without a pipeline."""
    page: str = ""
    """Address of the chief's own page; empty if it serves none."""
    shard_bytes: tuple[int, ...] = ()
    """Bytes of the values in each shard, by its number."""
    standstill: Standstill | None = None
    """None while the job moves, and before it trains."""

"""The cluster at a glance: what the chief's page and `shardline status` show, computed from the chief's status.

view = cluster_view(ChiefWatch(address, timeouts).status())
json.dumps(as_json(view))

Pure: no clock, no socket. Unknown values are None (null in JSON), never a zero that could be mistaken for a value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shardline.cluster import parse_task
from shardline.core.status import (
    MEASURED_RARELY,
    STEP_MEANS,
    CheckpointStatus,
    ChiefStatus,
    EventStatus,
    JobFacts,
    ShardFacts,
    TaskFacts,
    TaskStatus,
    Traffic,
    Usage,
)
from shardline.observability.topology_view import TopologyView, topology_view
from shardline.roles import ROLES

V = TypeVar("V")
MISSING = "missing"
"""State of a task that is in the cluster spec and has never joined; the other states are the chief's: alive, suspect,
dead, left."""
GONE = ("dead", "left")
MOST_NAMED = 4
"""Most awaited tasks that are named."""
PLAIN = "raw"
"""The codec that sends bytes as they are."""
PHASE_WORDS: Mapping[str, str] = {
    "waiting": "waiting for tasks",
    "init": "preparing parameters",
    "running": "training",
    "stopping": "stopping",
    "ended": "ended",
}


STANDBY_WORDS: Mapping[str, str] = {
    "": "none",
    "unprotected": "unreachable",
    "copying": "copying",
    "synced": "in step",
    "silent": "silent",
}
"""A standby as its primary sees it, see rpc.messages.status. Only one in step can be promoted."""


@dataclass(frozen=True, kw_only=True)
class ShardView(ShardFacts):
    ps: str
    state: str
    """State of the primary's task."""
    bytes: int
    """Bytes of its values."""
    held_bytes: int | None
    """Bytes of memory on the primary: values, optimizer state, partial sums and cuts."""
    share: float
    """Its bytes relative to the largest shard's, 0 to 1."""
    staleness: float | None
    """Mean over all its pushes, in versions."""
    standby: str
    """The ps with its standby, or that is to get it; empty if there is to be none."""
    standby_state: str
    """One of STANDBY_WORDS."""


@dataclass(frozen=True, kw_only=True)
class TaskView(TaskFacts):
    """Its means are None for tasks that don't train."""

    name: str
    role: str
    index: int
    incarnation: str
    """For people: "2.5" is the fifth life since the second start of the chief; empty if the task never joined."""
    heard_s: float | None
    """Seconds since its last heartbeat."""
    step: int | None
    """For a ps: the lowest step that its shards have reached; if pushes are applied one by one, their version."""
    shards: tuple[int, ...]
    cores: float | None
    """Cores that it computes on, such as 1.5."""
    resident_bytes: int | None
    gpu_bytes: int | None
    """Memory in use on its GPU, by all processes."""
    gpu_share: float | None
    """Share of the last moments in which its GPU computed, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class CodecView:
    """What a codec makes of one direction."""

    way: str
    """up (gradients), down (parameters), or "between stages"."""
    codec: str
    ratio: float | None
    """Bytes in memory per byte sent; None if nothing was sent through a network."""
    error: float | None
    """L2 norm of what was not sent, over that of what was to be: the largest of the tasks that encode."""
    owed: float | None
    """L2 norm of the error memory of all workers; None for parameters."""


@dataclass(frozen=True, kw_only=True)
class ScoreView:
    """Evaluation metrics of one step."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class CheckpointView(CheckpointStatus):
    best: bool
    """Whether it has the best evaluation so far."""


@dataclass(frozen=True, kw_only=True)
class StandstillView:
    """No step has ended for much longer than usual."""

    since: float
    """Unix time of the last movement."""
    seconds: float
    whom: str
    """The tasks that are waited for, such as "worker/1"; empty if none is known."""
    facts: str
    """Name tasks with their replicas and silence: "worker/1 (replica 1, last heard 11 s ago)"."""


@dataclass(frozen=True, kw_only=True)
class ClusterView(JobFacts):
    """Without steps per second while the job stands still."""

    mode: str
    """sync or async; empty until the job is known."""
    codecs: tuple[CodecView, ...]
    """Of the directions that are encoded."""
    doing: str
    """The phase in words, with the awaited tasks: "waiting for ps/1"."""
    steps: int | None
    """Steps to train; None if a script decides when to end."""
    progress: float | None
    """Share of the steps done, 0 to 1."""
    left_s: float | None
    """Seconds to the last step at the present speed; None if unknown, and while the job stands still."""
    loss: float | None
    staleness: float | None
    """Mean of the recent steps, in versions."""
    evaluation: ScoreView | None
    """The newest score."""
    best: ScoreView | None
    tasks: tuple[TaskView, ...]
    """In the order chief, ps, worker, evaluator, as in cluster specs, then by index."""
    shards: tuple[ShardView, ...]
    checkpoints: tuple[CheckpointView, ...]
    """Newest first."""
    events: tuple[EventStatus, ...]
    """Newest last."""
    topology: TopologyView | None
    """None before the first exchange, and after the end."""
    standstill: StandstillView | None
    """None while the job moves."""
    written: float | None
    """Unix time at which a run's files last changed, where the view is made of them; None if a chief tells."""


def cluster_view(status: ChiefStatus, written: float | None = None) -> ClusterView:
    started = status.step > status.first_step
    ended = status.phase == "ended"
    rows = [*status.tasks, *(TaskStatus(task=name, state=MISSING) for name in status.missing)]
    found = [_task(task, status.phase) for task in rows]
    order = tuple(ROLES)
    tasks = tuple(sorted(found, key=lambda task: (order.index(task.role), task.index)))
    return _made(
        ClusterView,
        status,
        mode=status.consistency,
        codecs=_codecs(status),
        doing=doing(status),
        steps=status.steps or None,
        done=done(status),
        progress=min(1.0, done(status) / status.steps) if status.steps else None,
        left_s=left_s(status),
        # After the end nothing moves any more; the average speed of the run is more informative.
        steps_per_s=_whole_rate(status) if ended else status.steps_per_s,
        push_bytes_per_s=0.0 if ended else status.push_bytes_per_s,
        pull_bytes_per_s=0.0 if ended else status.pull_bytes_per_s,
        loss=_finite(status.loss),
        staleness=_finite(status.staleness) if started else None,
        evaluation=_score(status.last_metrics_step, status.last_metrics),
        best=_score(status.best_step, status.best_metrics),
        tasks=tasks,
        shards=_shards(status),
        checkpoints=tuple(
            CheckpointView(**vars(c), best=c.step == status.best_step)
            for c in sorted(status.checkpoints, key=lambda c: -c.step)
        ),
        events=status.said,
        topology=None if ended else topology_view([task for task in status.tasks if task.state not in GONE]),
        standstill=_standstill(status),
        written=written,
    )


def doing(status: ChiefStatus) -> str:
    """What the job is doing, such as "training" or "waiting for ps/1, worker/0"."""
    still = _standstill(status)
    if still is not None:
        return f"standing still for {still.seconds:.0f} s{', waiting for ' if still.whom else ''}{still.whom}"
    if status.phase == "waiting":
        lost = [task.task for task in status.tasks if task.state not in ("alive", "left")]
        awaited = [*status.missing, *lost]
        if awaited:
            return f"waiting for {_few(awaited)}"
    return PHASE_WORDS.get(status.phase, status.phase)


def _few(names: Sequence[str]) -> str:
    """The first few names: "ps/0, ps/1, ps/2, ps/3 and 2 more"."""
    rest = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + rest


def _standstill(status: ChiefStatus) -> StandstillView | None:
    found = status.standstill
    if found is None:
        return None
    return StandstillView(
        since=status.time - found.seconds,
        seconds=found.seconds,
        whom=_few([one.task for one in found.awaited]),
        facts=_few([f"{one.task} ({one.why})" for one in found.awaited]),
    )


def left_s(status: ChiefStatus) -> float | None:
    """Seconds to the last step, from the current speed, smoothed with that of the whole run; None if unknown."""
    made = done(status)
    # Where workers push for themselves, an update may have several batches.
    left = (status.steps - made) * (status.step / made if made else 1.0)
    if not status.steps or status.phase not in ("running", "stopping") or status.steps_per_s <= 0:
        return None
    if left <= 0:
        return 0.0
    whole = _whole_rate(status) or status.steps_per_s
    return left / ((status.steps_per_s + whole) / 2)


def done(status: ChiefStatus) -> int:
    """How many of the job's steps are done, also according to a chief of an earlier version."""
    return status.step if status.counting.asked == status.counting.unit else status.done


def _whole_rate(status: ChiefStatus) -> float:
    """Steps per second over the whole run; 0 before the first step."""
    return max(0, status.step - status.first_step) / status.seconds if status.seconds > 0 else 0.0


def as_json(view: ClusterView) -> dict[str, Any]:
    """The view as JSON values; a number that is not finite becomes null."""
    found: dict[str, Any] = _plain(dataclasses.asdict(view))
    return found


def _codecs(status: ChiefStatus) -> tuple[CodecView, ...]:
    servers = [task.traffic for task in status.tasks if task.task.startswith("ps/")]
    workers = [task.traffic for task in status.tasks if not task.task.startswith("ps/")]
    total = sum(servers, Traffic())
    found = []
    for way, codec, raw, wire, encoding in (
        ("up", status.codec_up, total.push_raw_bytes, total.push_wire_bytes, workers),
        ("down", status.codec_down, total.pull_raw_bytes, total.pull_wire_bytes, servers),
    ):
        if codec in ("", PLAIN):
            continue
        sides = sum(encoding, Traffic())
        found.append(
            CodecView(
                way=way,
                codec=codec,
                ratio=raw / wire if wire else None,
                error=_finite(sides.codec_error) or None,
                owed=_finite(sides.codec_owed) or None,
            )
        )
    if status.codec_parcels not in ("", PLAIN):
        found.append(CodecView(way="between stages", codec=status.codec_parcels, ratio=None, error=None, owed=None))
    return tuple(found)


def codec_text(codec: CodecView) -> str:
    """Such as "topk up, 66x smaller, error 88 %, owed 1.2"."""
    parts = [f"{codec.codec} {codec.way}"]
    if codec.ratio is not None:
        parts.append(f"{codec.ratio:.3g}x smaller")
    if codec.error is not None:
        parts.append(f"error {100 * codec.error:.3g} %")
    if codec.owed is not None:
        parts.append(f"owed {codec.owed:.3g}")
    return ", ".join(parts)


def _step(task: TaskStatus) -> int | None:
    """Step of a trainer, or the step that all shards of a ps have reached."""
    if task.state == MISSING:
        return None
    if not ROLES[parse_task(task.task)[0]].holds:
        return task.step if task.step >= 0 else None
    return min((shard.step_min for shard in task.shards), default=None)


def _task(task: TaskStatus, phase: str) -> TaskView:
    role, index = parse_task(task.task)
    moving = task.state not in (MISSING, *GONE) and phase != "ended"
    trains = ROLES[role].trains and task.state != MISSING
    stepped = trains and bool(task.compute_s)
    # So are its cores, and what it had in memory is free.
    usage = task.usage if moving else Usage()
    return _made(
        TaskView,
        task,
        name=task.task,
        role=role,
        index=index,
        incarnation=f"{task.incarnation >> 32}.{task.incarnation & 0xFFFFFFFF}" if task.incarnation else "",
        heard_s=None if task.state == MISSING else _finite(task.last_heard_s),
        step=_step(task),
        shards=tuple(shard.shard for shard in task.shards),
        # The last seconds of a dead task are not its current rate.
        push_bytes_per_s=task.push_bytes_per_s if moving else 0.0,
        pull_bytes_per_s=task.pull_bytes_per_s if moving else 0.0,
        steps_per_s=task.steps_per_s if moving else 0.0,
        cores=usage.cores if usage.resident_bytes else None,
        resident_bytes=usage.resident_bytes or None,
        gpu_bytes=usage.gpu_bytes or None,
        gpu_share=usage.gpu_share if usage.gpu_bytes else None,
        **{name: _mean(name, getattr(task, name), stepped=stepped) for name in STEP_MEANS},
    )


def _mean(name: str, value: float | None, *, stepped: bool) -> float | None:
    there = bool(value) if name in MEASURED_RARELY else stepped
    return _finite(value) if there and value is not None else None


def _shards(status: ChiefStatus) -> tuple[ShardView, ...]:
    sizes = dict(enumerate(status.shard_bytes))
    largest = max(sizes.values(), default=0)
    found = [
        _made(
            ShardView,
            shard,
            ps=task.task,
            state=task.state,
            bytes=sizes.get(shard.shard, 0),
            held_bytes=shard.bytes or None,
            share=sizes.get(shard.shard, 0) / largest if largest else 0.0,
            staleness=shard.staleness_sum / shard.pushes if shard.pushes else None,
            waiting_for=shard.waiting_for if status.phase in ("running", "stopping") else (),
            standby=shard.standby_task if shard.standby else "",
            standby_state=STANDBY_WORDS[shard.standby],
            standby_problem=shard.standby_problem if shard.standby else "",
        )
        for task in status.tasks
        for shard in task.shards
    ]
    return tuple(sorted(found, key=lambda shard: shard.shard))


def _made(kind: type[V], value: object, **differing: Any) -> V:
    """A view with the fields of the same names of a status."""
    names = (item.name for item in dataclasses.fields(kind) if item.name not in differing)  # type: ignore[arg-type]
    return kind(**{name: getattr(value, name) for name in names}, **differing)


def _score(step: int, metrics: Mapping[str, float]) -> ScoreView | None:
    return ScoreView(step=step, metrics=dict(metrics)) if step >= 0 and metrics else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value

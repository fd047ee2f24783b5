"""Plays a schedule with real processes, and checks what must hold after it.

Synchronous: the job ends well, at its last step, with the bits of one undisturbed process (of an undisturbed run where
workers share layers). Asynchronous: it ends well; each update of a shard is in its parameters exactly once, and as many
as its version says, with SoftSync each the mean of at most one push per worker; every batch of every epoch was trained
on, less what was counted as lost, and no more often than was counted as repeated. Asynchronous pipelines: each stage
ends with as many updates as the job has steps; the job went back to its newest checkpoint whatever stage was lost, with
what that cost counted; in each checkpoint no replica of bounded staleness is further ahead than it may be, and the last
one has learned. Always: no contribution came twice with other bits, no two chiefs acted at once, no task ended by a
defect, and no process is left.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardline import consistency
from shardline.checkpoint import Checkpoint, CheckpointStore
from shardline.core.choices import members
from shardline.core.plan import ShardSpec
from shardline.core.rows import part_of
from shardline.core.spec import ConsistencySpec
from shardline.core.tensor_bytes import params_sha256
from shardline.core.timeouts import Timeouts
from shardline.job import load_job
from shardline.testing import reference
from shardline_chief.io.journal import run_to_replay
from tests.chaos.field import Field
from tests.chaos.job import BATCH, COUNTERS, RATE, SAMPLES, SHARED, VISITS, write_job
from tests.chaos.nursery import Starter
from tests.chaos.schedules import EPOCH, NO_STASH, SUMMED, TIMEOUT_S, Event, Schedule
from tests.e2e.support import RUN_ID, end_processes, events, processes, summary_of
from tests.support.cluster import Cluster

LIMIT_S = 120.0
"""What a schedule may take in all, on a machine with two busy cores."""
POLL_S = 0.01
LEARNED = 0.4
"""Accuracy that a few dozen updates reach, among four classes."""
DEFECT = 1
"""Exit code of an error that nobody foresaw."""
USAGE = 2


class Broken(AssertionError):
    """Something that must hold does not."""


def check(holds: object, what: str) -> None:
    """Raise Broken where it does not hold."""
    if not holds:
        raise Broken(what)


@dataclass(frozen=True)
class Happened:
    """An event, and when it began by the wall clock."""

    event: Event
    time: float


@dataclass(frozen=True)
class Played:
    """A schedule that was played to its end."""

    schedule: Schedule
    happened: tuple[Happened, ...]
    summary: Mapping[str, Any]
    seconds: float
    out: Path
    marks: tuple[float, ...]
    """Unix time of every batch that was computed."""
    codes: Mapping[str, tuple[int, ...]]
    """Exit codes of each task's processes."""
    timeouts: Timeouts


def job_of(schedule: Schedule, folder: Path) -> Path:
    """Write the job file."""
    sync: dict[str, Any] = {}
    if schedule.synchronous:
        sync = {"replicas": schedule.replicas, "clip_norm": schedule.clip_norm, "apply": schedule.apply}
        sync |= {"topology": schedule.topology}
    if schedule.apart:
        sync = {"replicas": schedule.replicas}
    if schedule.pipeline != "whole-model":
        sync |= {"pipeline": schedule.pipeline, "accumulate": schedule.accumulate}
    if schedule.team:
        # Other parameters for each of two neighbours.
        sync |= {"tensor_parallel": SHARED, "seed": int(schedule.seed < 0)}
    if schedule.codec_parcels:
        sync |= {"codec_parcels": schedule.codec_parcels}
    if schedule.tables:
        sync |= {"tables": True}
    if schedule.codec != "raw":
        sync |= {"codec_up": schedule.codec, "codec_down": schedule.codec_down or "raw", "error_memory": "exact"}
    return write_job(
        folder / "job.py", mode=schedule.mode, steps=schedule.steps, checkpoint_every=schedule.every, **sync
    )


@functools.cache
def _undisturbed(replicas: int, steps: int, clip_norm: float, tables: bool) -> str:
    with tempfile.TemporaryDirectory() as name:
        fields = {"replicas": replicas, "clip_norm": clip_norm, "tables": tables}
        path = write_job(Path(name) / "job.py", mode="sync", steps=steps, **fields)
        return reference(load_job(path)).sha256


def _encoded(played: Played) -> str:
    """Where one undisturbed worker with one server ends, with the same codecs."""
    job = load_job(job_of(played.schedule, played.out))
    # As in the tasks: the last bits of gradients depend on it.
    torch.set_num_threads(job.threads)
    with Cluster(job, ps=1) as cluster:
        cluster.train([range(job.replicas)])
        found, trained = cluster.state().params, dict(job.model().named_parameters())
        return params_sha256({name: values for name, values in found.items() if name in trained})


def _chosen(played: Played) -> str:
    """Where one undisturbed process ends with the replicas that the journal has for each step."""
    choices = run_to_replay(played.out).choices
    steps = played.schedule.steps
    check((choices.first, choices.end) == (0, steps), f"the journal has choices {choices.first} to {choices.end}")
    return reference(
        load_job(job_of(played.schedule, played.out)), choices=[members(made) for made in choices.made]
    ).sha256


def play(schedule: Schedule, folder: Path, starter: Starter, *, timeout_s: float = TIMEOUT_S) -> Played:
    """Play it in an empty folder; raises Broken where something does not hold, with the logs left there."""
    players = [_Player(schedule, folder, starter, timeout_s)]
    if schedule.beside is not None:
        players.append(_Player(schedule.beside, _made(folder / "beside"), starter, timeout_s))
    with ThreadPoolExecutor(len(players)) as pool:
        found = [playing.result() for playing in [pool.submit(player.play) for player in players]]
    for played in found:
        verify(played)
        if played.schedule.team and played.schedule.events:
            _bits_of_a_quiet_run(played, starter)
    return found[0]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


_quiet: dict[Schedule, str] = {}
"""Digests of the parameters of undisturbed runs of jobs whose workers share layers: one process rounds otherwise."""


def _bits_of_a_quiet_run(played: Played, starter: Starter) -> None:
    quiet = replace(played.schedule, events=(), beside=None, seed=-1 if played.schedule.seed < 0 else 0)
    if quiet not in _quiet:
        _quiet[quiet] = play(quiet, _made(played.out.parent / "quiet"), starter).summary["sha256"]
    check(played.summary["sha256"] == _quiet[quiet], "other bits than an undisturbed run")


class _Player:
    def __init__(self, schedule: Schedule, folder: Path, starter: Starter, timeout_s: float) -> None:
        self.schedule = schedule
        self.folder = folder
        self.timeout_s = timeout_s
        self.limit_s = LIMIT_S + sum(timeout_s + event.seconds for event in schedule.events)
        self.happened: list[Happened] = []
        self.broken: list[str] = []
        self._acts: list[threading.Thread] = []
        self.run_id = uuid.uuid4().hex
        flags = ["--no-page", "--standbys", str(schedule.standbys)]
        if schedule.own and not schedule.standbys:
            flags += ["--min-workers", str(schedule.workers)]
        between = {"aggregator": schedule.aggregators} if schedule.aggregators else {}
        self.field = Field(
            starter,
            folder,
            job_of(schedule, folder),
            counts={"chief": 1, "ps": schedule.ps, "worker": schedule.workers, "evaluator": 1, **between},
            timeout_s=timeout_s,
            flags=flags,
            own=schedule.own,
            networks=schedule.networks,
            restarts=12 + len(schedule.events),
            settings={RUN_ID: self.run_id, "SHARDLINE_LANE": schedule.lane},
        )

    def play(self) -> Played:
        """From the first start to the last end."""
        began_s = time.monotonic()
        marked = os.environ.get(RUN_ID)
        with self._nothing_left(), self.field:
            for event in self.schedule.events:
                if not self._await(event):
                    break
                self._begin(event)
            code = self.field.wait("chief/0", self.limit_s)
            for act in self._acts:
                act.join(self.limit_s)
            check(code == 0, f"the chief ended with {code}: {events(self.field.out)[-1:]}")
            touched = {name for at in self.happened for name in (at.event.task, at.event.peer)}
            for name in self.field.tasks:
                # Who was away while the job ended finds nobody, and fails as often as it is started again.
                if name not in touched:
                    self.field.wait(name, self.timeout_s * 2)
        assert os.environ.get(RUN_ID) == marked
        check(not self.broken, "; ".join(self.broken))
        return Played(
            self.schedule,
            tuple(self.happened),
            summary_of(self.field.out),
            time.monotonic() - began_s,
            self.field.out,
            tuple(self.field.marks()),
            {name: tuple(task.codes) for name, task in self.field.tasks.items()},
            Timeouts(total_s=self.timeout_s),
        )

    @contextlib.contextmanager
    def _nothing_left(self) -> Iterator[None]:
        try:
            yield
        finally:
            left = _living(self.run_id, self.field)
            end_processes(list(left))
        check(not left, f"still running: {left}")

    def _await(self, event: Event) -> bool:
        """Until the event is due; False where the job has ended before."""
        deadline_s = time.monotonic() + self.limit_s
        batches = self.schedule.batches
        path = self.folder / "marks"
        while event.at and not self.field.finished():
            if path.exists() and path.stat().st_size >= 8 * event.at * batches:
                break
            if time.monotonic() > deadline_s:
                raise Broken(f"{event.at:.0%} were not reached in {self.limit_s:.0f} s: {events(self.field.out)[-4:]}")
            self.field.sleep(POLL_S)
        self.field.sleep(event.after)
        return not self.field.finished()

    def _begin(self, event: Event) -> None:
        self.happened.append(Happened(event, time.time()))
        if event.kind == "kill":
            self.field.kill(event.task)
            return
        self._acts.append(threading.Thread(target=self._act, args=(event,), daemon=True))
        self._acts[-1].start()

    def _act(self, event: Event) -> None:
        try:
            self._do(event)
        except Exception as error:
            self.broken.append(f"{event}: {type(error).__name__}: {error}")

    def _do(self, event: Event) -> None:
        field = self.field
        everybody = [name for name in field.tasks if name != event.task]
        match event.kind:
            case "away":
                field.keep_away(event.task, event.seconds)
            case "pause":
                field.pause(event.task, event.seconds)
            case "freeze":
                field.freeze(event.seconds)
            case "together":
                field.kill(event.task)
                field.kill(event.peer)
            case "writing":
                if field.writing(self.limit_s):
                    field.kill(event.task)
            case "second":
                log = field.out / "logs" / "second.log"
                code = field.run(event.task, log, self.timeout_s * 2)
                check(code == USAGE, f"a second {event.task} ended with {code}; see {log}")
            case "slow":
                assert field.networks is not None
                with field.networks.slow(event.task):
                    field.sleep(event.seconds)
            case "reset":
                assert field.networks is not None
                with field.networks.resetting(event.task, [event.peer]):
                    field.sleep(event.seconds)
            case "island":
                with field.cut(event.task, everybody, there=True, back=True):
                    field.sleep(event.seconds)
            case "cut" | "deaf" | "mute":
                with field.cut(event.task, [event.peer], there=event.kind != "deaf", back=event.kind != "mute"):
                    field.sleep(event.seconds)
            case _:
                raise ValueError(f"no event is called {event.kind!r}")


def _living(run_id: str, field: Field) -> dict[int, str]:
    """Processes of this field that are there; one that was forked is known by its pid only."""
    found = processes(run_id)
    for task in field.tasks.values():
        if task.pid and Path(f"/proc/{task.pid}").exists():
            found[task.pid] = task.name
    return found


# What must hold


def verify(played: Played) -> None:
    """Raise Broken where something does not hold."""
    schedule, found = played.schedule, played.summary
    check(found["exit_code"] == 0, f"the job ended with {found['exit_code']}: {found['reason']}")
    check(found["duplicate_mismatches"] == 0, "a contribution came twice with different bits")
    _no_defects(played)
    _one_chief_at_a_time(played.out / "chief")
    if schedule.synchronous:
        check(found["steps"] == schedule.steps, f"{found['steps']} steps of {schedule.steps}")
        check(set(found["versions"]) == {schedule.steps}, f"versions {found['versions']}")
        if schedule.team:
            # play() compares the digest with that of a quiet run.
            _near_one_process(played)
            return
        if schedule.codec != "raw":
            wanted = _encoded(played)
        elif schedule.pipeline != "whole-model":
            wanted = _staged(played)
        elif schedule.mode == "sync":
            wanted = _undisturbed(schedule.replicas, schedule.steps, schedule.clip_norm, schedule.tables)
        else:
            wanted = _chosen(played)
        check(found["sha256"] == wanted, "other bits than one undisturbed process")
    elif schedule.apart:
        _every_update_counts(played)
    else:
        _every_batch_counts(played)


def _near_one_process(played: Played) -> None:
    """Raise Broken where parameters differ from those of one process by more than how their sums are rounded."""
    expected = reference(load_job(played.out.parent / "job.py", [("tensor_ranks", "1")])).params
    found = CheckpointStore(played.out / "checkpoints", 3).newest_valid()
    for name, values in expected.items():
        check(torch.allclose(found.tensor(name).view_as(values), values, rtol=1e-3, atol=1e-4), f"other {name}")


def _staged(played: Played) -> str:
    """The parameters of one process, which goes back to no checkpoint: only without a flush does that change bits."""
    job = load_job(job_of(played.schedule, played.out))
    begun: list[int] = []
    for step in _went_back(played) if played.schedule.unbroken else []:
        begun = [*(before for before in begun if before < step), step]
    result = None
    for step in begun:
        result = reference(job, step, start=result)
    return reference(job, start=result).sha256


def _went_back(played: Played) -> list[int]:
    """The checkpoints that a pipeline without a flush went back to: each time the newest, with what it cost counted."""
    newest, begun = 0, []
    lines = (played.out / "logs" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    for event in map(json.loads, lines):
        if event["kind"] == "checkpoint":
            newest = event["step"]
        elif event["kind"] == "restore":
            begun.append(int(re.findall(r"restoring step (\d+) from", event["message"])[0]))
            # A chief that was killed just then has told nobody of its last checkpoint.
            check(begun[-1] >= newest, f"went back to step {begun[-1]}, but there was a checkpoint of step {newest}")
            newest = begun[-1]
    recoveries = played.summary["recoveries"]
    if played.schedule.standbys:
        # Where one has taken over, nothing went back.
        recoveries = [one for one in recoveries if one["lost"]]
    check({one["from_step"] for one in recoveries} <= set(begun), f"{recoveries}, but restored were {begun}")
    lives = [codes for name, codes in played.codes.items() if not name.startswith("evaluator")]
    check(
        played.summary["recoveries"] or not any(-9 in codes for codes in lives),
        f"a stage was lost, but no recovery is counted: {lives}",
    )
    for one in recoveries:
        check(one["lost"] == one["at_step"] - one["from_step"] >= 0, f"{one} counts other steps than were repeated")
    schedule, repeated = played.schedule, sum(one["lost"] for one in recoveries)
    least = schedule.batches // schedule.steps * (schedule.steps + repeated)
    check(len(played.marks) >= least, f"{len(played.marks)} microbatches, but {repeated} steps are counted as repeated")
    return begun


def _every_update_counts(played: Played) -> None:
    """Replicas of stages that don't wait for each other: no bits to compare with, but all updates, and what they do."""
    schedule, found = played.schedule, played.summary
    check(found["steps"] == schedule.steps, f"{found['steps']} updates of {schedule.steps}")
    check(set(found["versions"]) == {schedule.steps}, f"versions {found['versions']}")
    _went_back(played)
    mode = consistency.of(ConsistencySpec(mode=schedule.mode))
    store = CheckpointStore(played.out / "checkpoints", 3)
    for step in store.list():
        kept = store.open(step)
        for shard in range(len(kept.plan.shards)):
            counts = [one.last_seq for one in kept.sequences(kept.plan, shard).values()]
            ahead = max(counts) - min(counts)
            allowed = mode.slack + 1 if isinstance(mode, consistency.SSP) else schedule.steps
            check(ahead <= allowed, f"checkpoint {step}, shard {shard}: replicas have made {counts} steps")
    newest = store.newest_valid()
    check(newest.step == schedule.steps, f"the last checkpoint that is whole has {newest.step} updates")
    job = load_job(job_of(schedule, played.out))
    model = job.build_model()
    model.load_state_dict({name: newest.tensor(name) for name in model.state_dict()})
    check(all(values.isfinite().all() for values in model.state_dict().values()), "NaN or infinity in the parameters")
    assert job.evaluate is not None
    accuracy = job.evaluate(model.eval())["accuracy"]
    bar = 0.0 if schedule.pipeline == NO_STASH else LEARNED
    check(accuracy >= bar, f"accuracy {accuracy:.2f}, less than {bar}")


def _rows_count_the_same(found: Checkpoint, held: ShardSpec, visits: torch.Tensor) -> None:
    """A push counts in a shard's tables if it counts in its counters."""
    ids, tables = torch.arange(SAMPLES), [piece for bucket in held.buckets for piece in bucket.slices]
    piece = next(one for one in tables if found.job.tensors[one.tensor].name == VISITS)
    part = part_of(ids) - piece.first_row
    own = ids[(part >= 0) & (part < piece.rows)]
    rows = found.rows(VISITS, own).view(-1) / RATE
    check(
        torch.equal(rows, visits[own]), f"rows of {VISITS} count {rows.tolist()}, the counters {visits[own].tolist()}"
    )


def _no_defects(played: Played) -> None:
    for name, codes in played.codes.items():
        odd = [code for code in codes if code == DEFECT or (code < 0 and code != -9)]
        check(not odd, f"a process of {name} ended with {odd[:1]}")
    for log in sorted((played.out / "logs").glob("*.log")):
        text = log.read_text(encoding="utf-8", errors="replace")
        check("Traceback" not in text, f"a traceback in {log}")


def _one_chief_at_a_time(folder: Path) -> None:
    """Nothing is noted by a chief after a newer one has begun."""
    before = 0.0
    for path in sorted(folder.glob("journal-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2])):
        times = [json.loads(line)["time"] for line in path.read_text(encoding="utf-8").splitlines()]
        # To the millisecond, and rounded.
        check(not times or min(times) >= before - 0.002, f"{path} begins before the chief before it had ended")
        before = max([before, *times])


def _unheard(played: Played) -> int:
    """Batches that a worker may not have told of: it died within a heartbeat, and with it a server that had them."""
    within_s = played.timeouts.heartbeat_s + 0.1
    deaths = [one.time for one in played.happened if one.event.kind == "together"]
    return sum(any(0 <= death - mark < within_s for death in deaths) for mark in played.marks)


def _every_batch_counts(played: Played) -> None:
    """Asynchronous: what the parameters say was done to them, against what the summary says."""
    schedule, found = played.schedule, played.summary
    newest = CheckpointStore(played.out / "checkpoints", 3).newest_valid()
    plan = newest.plan
    names = [tensor.name for tensor in plan.tensors]
    lost, repeated = found["lost_updates"], found["repeated_batches"]
    epochs = schedule.steps // EPOCH
    # SoftSync: an update is the mean of as many at most, so a batch counts for that share of a visit at least.
    most = schedule.workers if schedule.mode == SUMMED else 1
    check(len(played.marks) >= schedule.steps, f"{len(played.marks)} batches were computed of {schedule.steps}")
    # Each batch was acknowledged by every shard at least once.
    missing, unheard = sum(max(0, schedule.steps - most * version) for version in found["versions"]), _unheard(played)
    check(
        missing <= lost + unheard,
        f"versions {found['versions']} lack {missing} updates of {schedule.steps}, {lost} are counted; "
        f"at most {unheard} were acknowledged too late for a heartbeat",
    )
    for name in COUNTERS:
        (shard,) = {
            number
            for number, held in enumerate(plan.shards)
            for bucket in held.buckets
            for part in bucket.slices
            if names[part.tensor] == name
        }
        visits = newest.tensor(name) / RATE
        if schedule.tables and not schedule.own:
            _rows_count_the_same(newest, plan.shards[shard], visits)
        version, total = found["versions"][shard], float(visits.sum())
        if schedule.own:
            # The table, which has a server for itself, counts the same in all.
            table, rows = found["versions"][-1], float(newest.rows(VISITS, torch.arange(SAMPLES)).sum()) / RATE
            check(
                abs(rows - BATCH * table) <= (0 if most == 1 else 0.1), f"rows count {rows} visits in {table} updates"
            )
        check(
            abs(total - BATCH * version) <= (0 if most == 1 else 0.1),
            f"shard {shard} has version {version}, its parameters have the gradients of {total / BATCH:g} batches",
        )
        check(version <= schedule.steps + repeated, f"{version} updates of {schedule.steps} batches, {repeated} twice")
        check(
            most * version >= schedule.steps - lost - unheard,
            f"{version} updates of {schedule.steps} batches, {lost} lost",
        )
        fewest, highest = (float(value) for value in visits.aminmax())
        check(lost or most * fewest > epochs - 0.1, f"a sample has {fewest:g} visits in {epochs} epochs")
        check(lost or repeated or highest < epochs + 0.1, f"a sample has {highest:g} visits in {epochs} epochs")
    assert SAMPLES == BATCH * EPOCH

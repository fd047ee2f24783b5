"""Plays a schedule with real processes and checks what must hold after it.

    make chaos                        # seeds 0 to 49
    make chaos ARGS="--seed 17"       # one of them again
    make chaos-figures                # 20 kills of each role: how long, how much is made again

Synchronous: the job ends well, at its last step, with the bits of one undisturbed process. Asynchronous: it ends well,
every batch was trained on, and no shard has applied more than the batches and their counted repetitions, nor less than
what was not counted as lost. Always: no contribution came twice with different bits, and nothing is left running.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shardline.job import load_job
from shardline.testing import reference
from tests.chaos.field import Field, why_no_networks
from tests.chaos.schedules import TIMEOUT_S, Event, Schedule, draw
from tests.e2e.support import RUN_ID, end_processes, events, json_lines, processes, summary_of, write_job

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
"""What a schedule may take in all, on two cores: each start of a process costs seconds."""
STEP_S = 0.02
"""A replica's step takes at least this long, so that there is a middle to be killed in."""


class Broken(AssertionError):
    """Something that must hold does not."""


def check(holds: object, what: str) -> None:
    """Raise Broken where it does not hold."""
    if not holds:
        raise Broken(what)


def job_of(schedule: Schedule, folder: Path) -> Path:
    """Write the job file."""
    fields: dict[str, Any] = {
        "name": "chaos",
        "consistency": schedule.mode,
        "steps": schedule.steps,
        "checkpoint_every": schedule.every,
    }
    if schedule.mode == "sync":
        fields.update(replicas=schedule.replicas, clip_norm=schedule.clip_norm)
    return write_job(folder / "job.py", imports="import time", after_loss=f"time.sleep({STEP_S})", **fields)


@functools.cache
def _reference(replicas: int, steps: int, clip_norm: float) -> str:
    with tempfile.TemporaryDirectory() as name:
        plain = Schedule(
            seed=-1,
            mode="sync",
            ps=1,
            workers=1,
            replicas=replicas,
            steps=steps,
            every=0,
            clip_norm=clip_norm,
            standbys=0,
            networks=False,
            events=(),
        )
        text = job_of(plain, Path(name)).read_text(encoding="utf-8").replace(f"time.sleep({STEP_S})", "pass")
        path = Path(name) / "plain.py"
        path.write_text(text, encoding="utf-8")
        return reference(load_job(path)).sha256


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
    summary: dict[str, Any]
    seconds: float
    out: Path


def play(schedule: Schedule, folder: Path) -> Played:
    """Play it; raises Broken where something does not hold, with the logs left in the folder."""
    began_s = time.monotonic()
    happened: list[Happened] = []
    # As under a supervisor: one that is killed after its last word finds that all is done.
    flags = ["--resume", *(["--standbys", str(schedule.standbys)] if schedule.standbys else [])]
    counts = {"chief": 1, "ps": schedule.ps, "worker": schedule.workers, "evaluator": 1}
    job = job_of(schedule, folder)
    networks = schedule.networks and not why_no_networks()
    run_id = uuid.uuid4().hex
    os.environ[RUN_ID] = run_id
    try:
        with Field(folder, job, counts=counts, timeout_s=TIMEOUT_S, flags=flags, networks=networks) as field:
            acts = []
            for event in schedule.events:
                _await_share(field, event.at, schedule.steps)
                if field.tasks["chief/0"].codes[-1:] == [0]:
                    break
                happened.append(Happened(event, time.time()))
                acts.append(threading.Thread(target=_happen, args=(field, event)))
                acts[-1].start()
            code = field.wait("chief/0", LIMIT_S)
            check(code == 0, f"the chief ended with {code}: {events(field.out)[-1:]}")
            for act in acts:
                act.join(LIMIT_S)
            for name in field.tasks:
                # Who was away while the job ended finds nobody, and fails as often as it is started again.
                if not any(name in (h.event.task, h.event.peer) for h in happened):
                    field.wait(name, TIMEOUT_S * 3)
            out = field.out
    finally:
        del os.environ[RUN_ID]
        left = processes(run_id)
        end_processes(list(left))
    check(not left, f"still running: {left}")
    found = Played(schedule, tuple(happened), summary_of(out), time.monotonic() - began_s, out)
    verify(found)
    return found


def _happen(field: Field, event: Event) -> None:
    match event.kind:
        case "kill":
            field.kill(event.task)
        case "away":
            field.keep_away(event.task, event.seconds)
        case "pause":
            field.pause(event.task, event.seconds)
        case "cut" | "deaf" if field.networks is not None:
            field.cut(event.task, event.peer, event.seconds, both=event.kind == "cut")
        case "slow" if field.networks is not None:
            field.slow(event.task, event.seconds)


def _await_share(field: Field, share: float, steps: int) -> None:
    """Until so much of the job is logged, or it has ended."""
    deadline_s = time.monotonic() + LIMIT_S
    pause = threading.Event()
    path = field.out / "logs" / "steps.jsonl"
    while time.monotonic() < deadline_s and field.tasks["chief/0"].codes[-1:] != [0]:
        lines = json_lines(path)
        done = len({line["step"] for line in lines})
        if done >= share * steps and (share > 0 or lines):
            return
        pause.wait(0.05)
    if field.tasks["chief/0"].codes[-1:] != [0]:
        raise Broken(f"the job did not come to {share:.0%} within {LIMIT_S:.0f} s: {events(field.out)[-4:]}")


def verify(played: Played) -> None:
    """What must hold after any schedule."""
    schedule, found = played.schedule, played.summary
    check(found["exit_code"] == 0, f"the job ended with {found['exit_code']}: {found['reason']}")
    check(found["duplicate_mismatches"] == 0, "a contribution came twice with different bits")
    if schedule.mode == "sync":
        check(found["steps"] == schedule.steps, f"{found['steps']} steps of {schedule.steps}")
        check(set(found["versions"]) == {schedule.steps}, f"versions {found['versions']}")
        wanted = _reference(schedule.replicas, schedule.steps, schedule.clip_norm)
        check(found["sha256"] == wanted, "other bits than one undisturbed process")
    else:
        most = schedule.steps + found["repeated_batches"]
        check(max(found["versions"]) <= most, f"versions {found['versions']}, {most} batches with repetitions")
        least = schedule.steps - found["lost_updates"]
        check(min(found["versions"]) >= least, f"versions {found['versions']}, {least} not counted as lost")


# Figures


def figures_of(played: Played) -> dict[str, Any]:
    """Of a schedule with one kill: when it was noticed, when a step was closed again, what was made again."""
    (happened,) = played.happened
    at = happened.time
    task = happened.event.task
    told = json_lines(played.out / "logs" / "events.jsonl")
    since = [(entry, _wall(entry["time"]) - at) for entry in told]
    name = "takeover" if task == "chief/0" else task
    noticed = [s for entry, s in since if s > 0 and (name in entry["message"] or entry["kind"] == name)]
    steps = sorted(line["time"] for line in json_lines(played.out / "logs" / "steps.jsonl"))
    # Steps that were under way when it happened are still told a moment later.
    later = [step - at for step in steps if step - at > (noticed[0] if noticed else 0.0)]
    again = sum(recovery["lost"] for recovery in played.summary["recoveries"])
    return {
        "task": task,
        "mode": played.schedule.mode,
        "detected_s": round(noticed[0], 3) if noticed else None,
        "resumed_s": round(later[0], 3) if later else None,
        "steps_again": again,
        "lost_updates": played.summary["lost_updates"],
        "repeated_batches": played.summary["repeated_batches"],
        "bit_identical": played.schedule.mode == "sync",
    }


def _wall(stamp: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(stamp).timestamp()


def kill_of(role: str, number: int, standbys: int = 0) -> Schedule:
    """One kill of a task of this role, at another moment for each number."""
    at = 0.15 + 0.6 * (number % 20) / 20
    event = Event(at=at, kind="kill", task=f"{role}/{number % 2 if role in ('ps', 'worker') else 0}")
    return Schedule(
        seed=number,
        mode="sync",
        ps=2,
        workers=2,
        replicas=2,
        steps=80,
        every=10,
        clip_norm=0.0,
        standbys=standbys,
        networks=False,
        events=(event,),
    )


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and worst of one role's kills."""

    def spread(name: str) -> dict[str, float] | None:
        values = [row[name] for row in rows if row[name] is not None]
        return {"median": round(statistics.median(values), 2), "worst": round(max(values), 2)} if values else None

    return {
        "kills": len(rows),
        "detected_s": spread("detected_s"),
        "resumed_s": spread("resumed_s"),
        "steps_again": spread("steps_again"),
        "bit_identical": sum(row["bit_identical"] for row in rows),
    }


# Command


@click.group()
def main() -> None:
    """Chaos."""


@main.command()
@click.option("--seed", "seeds", type=int, multiple=True, help="This schedule; may be repeated. Default: 0 to 49.")
@click.option("--count", type=click.IntRange(1), default=50, show_default=True, help="So many seeds from 0.")
@click.option("--networks/--no-networks", default=True, help="Cut links too, where the machine can do that.")
@click.option("--standbys/--no-standbys", default=True, help="Give some of the jobs standbys.")
@click.option("--keep", type=click.Path(path_type=Path), help="Folder for the logs of what failed.")
def schedules(seeds: tuple[int, ...], count: int, networks: bool, standbys: bool, keep: Path | None) -> None:
    """Play schedules; exit code 1 where one is broken."""
    reason = why_no_networks() if networks else ""
    if reason:
        click.echo(f"no links are cut: {reason}")
    broken = []
    for seed in seeds or range(count):
        schedule = draw(seed, networks=networks and not reason, standbys=standbys)
        click.echo(str(schedule))
        folder = Path(tempfile.mkdtemp(prefix=f"shardline-chaos-{seed}-"))
        try:
            played = play(schedule, folder)
        except AssertionError as error:
            broken.append(seed)
            kept = folder
            if keep is not None:
                kept = Path(shutil.move(str(folder), keep / f"seed-{seed}"))
            click.echo(f"  BROKEN: {error}\n  logs: {kept}\n  again: make chaos ARGS='--seed {seed}'")
            continue
        found = played.summary
        rolled = sum(recovery["lost"] for recovery in found["recoveries"])
        click.echo(
            f"  held, {played.seconds:.0f} s: {len(found['recoveries'])} recoveries, {rolled} steps or updates again, "
            f"{found['repeated_batches']} batches repeated, {found['lost_updates']} updates lost"
        )
        shutil.rmtree(folder)
    total = len(seeds or range(count))
    click.echo(f"{total - len(broken)} of {total} schedules held" + (f"; broken: {broken}" if broken else ""))
    sys.exit(1 if broken else 0)


@main.command()
@click.option("--kills", type=click.IntRange(1), default=20, show_default=True, help="Of each role.")
@click.option("--role", "roles", multiple=True, default=("worker", "ps", "chief", "evaluator"), show_default=True)
@click.option("--standbys", type=click.IntRange(0, 1), default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "benchmarks" / "results" / "recovery.json")
def figures(kills: int, roles: tuple[str, ...], standbys: int, out: Path) -> None:
    """Kill each role again and again; write medians."""
    from benchmarks.machine import describe

    held: dict[str, Any] = {}
    if out.exists():
        held = json.loads(out.read_text(encoding="utf-8")).get("roles", {})
    for role in roles:
        rows = []
        for number in range(kills):
            folder = Path(tempfile.mkdtemp(prefix="shardline-chaos-"))
            row = figures_of(play(kill_of(role, number, standbys), folder))
            click.echo(json.dumps(row))
            rows.append(row)
            shutil.rmtree(folder)
        name = f"{role} with standby" if standbys else role
        held[name] = {**summarise(rows), "samples": rows}
        value = {"machine": describe(), "timeout_s": TIMEOUT_S, "roles": held}
        out.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        click.echo(f"{name}: {json.dumps(summarise(rows))}")


if __name__ == "__main__":
    main()

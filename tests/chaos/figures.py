"""What a death costs: each role is killed again and again, in jobs that train meanwhile.

    make chaos-figures                              # 20 kills of each role, benchmarks/results/recovery.json
    make chaos-figures ARGS="--role ps --mode sync --kills 3 --out /tmp/x.json"

Two servers and two workers; a few kills (--each) in one job, under a supervisor that starts whoever was killed 0.3 s
later. New processes are forked from one that has imported everything, so that the cluster is measured and not the disk;
--cold starts each from nothing (`python -m shardline`), which adds the time of importing torch to each figure after
the first. Of each kill:

    noticed   until the chief says that something is wrong with the task (until the next chief begins, of a chief)
    stall     the longest time around the kill in which no batch was computed
    resumed   until all is as before: training goes on after that longest time; the next chief has taken over; of those
              without whom training goes on (evaluator, asynchronous worker), until the next one is there
    again     steps computed again; asynchronous: acknowledged updates that were lost

and of each job whether it held: it ended in the bits of one undisturbed process, or, asynchronous, with each update in
the parameters once and each batch trained on (play.py).
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import describe
from tests.chaos.nursery import ROOT, Cold, Nursery, Starter
from tests.chaos.play import Happened, Played, play
from tests.chaos.schedules import EPOCH, Event, Schedule
from tests.e2e.support import json_lines

TIMEOUT_S = 18.0
"""A silent task is dead after a third of it."""
BETWEEN = 48
"""Batches of each worker from one kill to the next: time to come back, and to copy a standby."""
STILL = 20
"""The same where training waits until the killed task is back."""
EVERY = 10
"""Steps between two checkpoints."""
NOTICED = {"life", "ps_lost", "standby_lost", "replaced", "joined"}
FIELDS = ("noticed_s", "stall_s", "resumed_s", "again")


@dataclass(frozen=True)
class Case:
    """Who is killed in which kind of job."""

    role: str
    mode: str
    standbys: int = 0

    @property
    def between(self) -> int:
        """Batches of each worker from one kill to the next."""
        waits = not self.standbys and (self.role == "ps" or (self.role == "worker" and self.mode == "sync"))
        return STILL if waits else BETWEEN

    def __str__(self) -> str:
        return f"{self.role}{' with a standby' if self.standbys else ''}, {self.mode}"


CASES = (
    Case("worker", "sync"),
    Case("worker", "async"),
    Case("ps", "sync"),
    Case("ps", "async"),
    Case("ps", "sync", 1),
    Case("ps", "async", 1),
    Case("chief", "sync"),
    Case("chief", "async"),
    Case("evaluator", "sync"),
)


def kills_of(case: Case, kills: int, first: int = 0) -> Schedule:
    """So many kills of tasks of a role, each a while of training after the one before; first: number of the first."""
    sync = case.mode == "sync"
    per_worker = case.between * (kills + 2)
    # Whole epochs where each batch is counted.
    steps = per_worker if sync else -(-2 * per_worker // EPOCH) * EPOCH
    events = tuple(
        Event(
            at=round((number + 1) / (kills + 2), 4),
            # Spread over a step, which takes about 40 ms.
            after=0.04 * ((first + number) % 5) / 5,
            kind="kill",
            task=f"{case.role}/{(first + number) % 2 if case.role in ('ps', 'worker') else 0}",
        )
        for number in range(kills)
    )
    return Schedule(
        seed=-1,
        mode=case.mode,
        ps=2,
        workers=2,
        replicas=2 if sync else 1,
        steps=steps,
        every=EVERY if sync else 2 * EVERY,
        standbys=case.standbys,
        events=events,
    )


def measure(played: Played) -> list[dict[str, Any]]:
    """A row of figures per kill."""
    told = [
        (datetime.fromisoformat(event["time"]).timestamp(), event)
        for event in json_lines(played.out / "logs" / "events.jsonl")
    ]
    ends = [after.time for after in played.happened[1:]] + [float("inf")]
    return [_row(played, at, end, told) for at, end in zip(played.happened, ends, strict=True)]


def _row(
    played: Played, happened: Happened, end: float, told: Sequence[tuple[float, Mapping[str, Any]]]
) -> dict[str, Any]:
    task, at = happened.event.task, happened.time
    role = task.split("/")[0]
    mine = [(time - at, event) for time, event in told if at < time < end]
    stall, back = _gap(played.marks, at, end)
    if role == "chief":
        back = _first(mine, {"adopted"}, "")
    elif role == "evaluator" or (role == "worker" and played.schedule.mode == "async"):
        back = _first(mine, {"joined"}, task)
    return {
        "task": task,
        "noticed_s": _rounded(_first(mine, {"takeover"}, "") if role == "chief" else _first(mine, NOTICED, task)),
        "stall_s": _rounded(stall),
        "resumed_s": _rounded(back),
        "again": sum(event.get("lost", 0) for _, event in mine if event["kind"] == "recovered"),
    }


def _first(told: Iterable[tuple[float, Mapping[str, Any]]], kinds: set[str], task: str) -> float | None:
    return min((s for s, event in told if event["kind"] in kinds and task in event["message"]), default=None)


def _gap(marks: Sequence[float], at: float, end: float) -> tuple[float | None, float | None]:
    """The longest time without a batch, from the last one before `at`, and its end in seconds after `at`."""
    times = [max((mark for mark in marks if mark <= at), default=at), *(mark for mark in marks if at < mark < end)]
    gaps = [(later - earlier, later - at) for earlier, later in itertools.pairwise(times)]
    return max(gaps) if gaps else (None, None)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def spread(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float] | None:
    """Median and worst of a figure; None where no kill has it."""
    values = [row[name] for row in rows if row[name] is not None]
    if not values:
        return None
    return {"median": round(statistics.median(values), 2), "worst": round(max(values), 2), "of": len(values)}


def run(case: Case, kills: int, each: int, starter: Starter, folder: Path) -> dict[str, Any]:
    """A role's figures. Jobs that did not hold leave their logs in the folder, and no figures but their number."""
    samples: list[dict[str, Any]] = []
    broken: list[str] = []
    jobs = -(-kills // each)
    seconds = 0.0
    for number in range(jobs):
        place = folder / f"{str(case).replace(', ', '-').replace(' ', '-')}-{number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        schedule = kills_of(case, min(each, kills - number * each), number * each)
        try:
            played = play(schedule, place, starter, timeout_s=TIMEOUT_S)
        except AssertionError as error:
            broken.append(f"{error}; logs: {place}".replace(f"{ROOT}/", ""))
            continue
        samples += measure(played)
        seconds += played.seconds
        shutil.rmtree(place)
    return {
        "case": str(case),
        "role": case.role,
        "mode": case.mode,
        "standbys": case.standbys,
        "kills": len(samples),
        "jobs": jobs,
        "checkpoint_every": kills_of(case, each).every,
        "held": jobs - len(broken),
        **{name: spread(samples, name) for name in FIELDS},
        "broken": broken,
        "seconds": round(seconds, 1),
    }


@click.command()
@click.option("--kills", type=click.IntRange(1, 200), default=20, show_default=True, help="Of each role.")
@click.option("--each", type=click.IntRange(1, 50), default=10, show_default=True, help="Kills in one job.")
@click.option("--role", "roles", multiple=True, help="Cases that begin so, such as 'ps' or 'ps, sync'. Default: all.")
@click.option("--mode", type=click.Choice(["sync", "async"]), help="Only this one. Default: both.")
@click.option("--cold", is_flag=True, help="Start each process from nothing, as people do.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=ROOT / "benchmarks" / "results" / "recovery.json",
    help="Cases that it holds already stay in it.",
)
def main(kills: int, each: int, roles: tuple[str, ...], mode: str | None, cold: bool, out: Path) -> None:
    """Kill each role again and again; prints a table and writes JSON. Exit code 1 where a job did not hold."""
    before = json.loads(out.read_text(encoding="utf-8"))["cases"] if out.exists() else []
    found = {one["case"]: one for one in before}
    chosen = [case for case in CASES if str(case).startswith(roles or "") and mode in (None, case.mode)]
    if not chosen:
        raise click.UsageError(f"no case begins with {' or '.join(map(repr, roles))}; there are {_names()}")
    for case in chosen:
        machine = describe()
        with Cold() if cold else Nursery() as starter:
            found[str(case)] = run(case, kills, each, starter, ROOT / "runs" / "chaos")
        found[str(case)] |= {"machine": machine, "cold": cold, "timeout_s": TIMEOUT_S}
        ordered = [found[str(one)] for one in CASES if str(one) in found]
        out.write_text(json.dumps({"cases": ordered}, indent=2) + "\n", encoding="utf-8")
        click.echo(table([found[str(case)]]))
    click.echo(table(list(found.values())))
    sys.exit(any(found[str(case)]["broken"] for case in chosen))


def _names() -> str:
    return "; ".join(map(str, CASES))


def table(cases: Iterable[Mapping[str, Any]]) -> str:
    """Medians, with the worst in brackets."""
    lines = [f"{'killed':26} kills  " + "".join(f"{name:>16}" for name in FIELDS) + "  held"]
    for one in cases:
        cells = [f"{part['median']:g} ({part['worst']:g})" if (part := one[name]) else "-" for name in FIELDS]
        columns = "".join(f"{cell:>16}" for cell in cells)
        lines.append(f"{one['case']:26} {one['kills']:5}  {columns}  {one['held']} of {one['jobs']}")
        lines += [f"  BROKEN: {sentence}" for sentence in one["broken"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

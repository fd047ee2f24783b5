"""How long a death is noticed late, and what it costs: each role is killed again and again, while one job trains.

    make chaos-figures                              # 20 kills of each role, benchmarks/results/recovery.json
    make chaos-figures ARGS="--role ps --kills 3 --out /tmp/x.json"

Synchronous, two servers and two workers, every process started as people do (`python -m shardline`), by a supervisor
that waits 0.3 s. Of each kill:

    noticed   until the chief says that something is wrong with the task (its own takeover, where the chief is killed)
    decided   until the chief acts: the task is dead, replaced or lost; for a chief: it has taken over
    stall     the longest time around the kill in which no batch was computed
    resumed   until the first batch is computed after that longest time
    again     steps computed again

and of each role whether the job ended in the bits of one undisturbed process.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import describe
from tests.chaos.nursery import ROOT, Cold
from tests.chaos.play import Happened, Played, play
from tests.chaos.schedules import Event, Schedule
from tests.e2e.support import json_lines

TIMEOUT_S = 18.0
"""A silent task is dead after a third of it."""
BETWEEN = 18
"""Steps from one kill to the next, and a few more so that they fall anywhere between two checkpoints."""
EVERY = 10
ROLES = ("worker", "ps", "ps with standby", "chief", "evaluator")
NOTICED = {"life", "ps_lost", "standby_lost", "replaced", "joined"}
FIELDS = ("noticed_s", "decided_s", "stall_s", "resumed_s", "again")


def kills_of(role: str, kills: int) -> Schedule:
    """So many kills of tasks of a role, each a while of training after the one before."""
    name, standbys = role.split()[0], int("standby" in role)
    steps = BETWEEN * (kills + 2)
    events = tuple(
        Event(
            at=round(BETWEEN * (number + 1) / steps, 4),
            # Spread over a step, which takes about 40 ms.
            after=0.04 * (number % 5) / 5,
            kind="kill",
            task=f"{name}/{number % 2 if name in ('ps', 'worker') else 0}",
        )
        for number in range(kills)
    )
    return Schedule(
        seed=-1,
        mode="sync",
        ps=2,
        workers=2,
        replicas=2,
        steps=steps,
        every=EVERY,
        standbys=standbys,
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
    mine = [(time - at, event) for time, event in told if at < time < end]
    noticed = [s for s, event in mine if event["kind"] == "takeover" or _notices(event, task)]
    decided = [s for s, event in mine if _decides(event, task)]
    # The batch before the kill, and those until the next one.
    times = [max([mark for mark in played.marks if mark <= at], default=at)]
    times += [mark for mark in played.marks if at < mark < end]
    gaps = [(later - earlier, later) for earlier, later in itertools.pairwise(times)]
    stall, back = max(gaps) if gaps else (None, None)
    return {
        "task": task,
        "noticed_s": _rounded(min(noticed, default=None)),
        "decided_s": _rounded(min(decided, default=None)),
        "stall_s": _rounded(stall),
        "resumed_s": _rounded(None if back is None else back - at),
        "again": sum(event.get("lost", 0) for _, event in mine if event["kind"] == "recovered"),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _notices(event: Mapping[str, Any], task: str) -> bool:
    return event["kind"] in NOTICED and task in event["message"]


def _decides(event: Mapping[str, Any], task: str) -> bool:
    if task == "chief/0":
        return bool(event["kind"] == "adopted")
    mine = task in event["message"]
    return mine and (event["kind"] in ("ps_lost", "replaced") or f"{task} is dead" in event["message"])


def spread(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float] | None:
    """Median and worst of a figure; None where no kill has it."""
    values = [row[name] for row in rows if row[name] is not None]
    if not values:
        return None
    return {"median": round(statistics.median(values), 2), "worst": round(max(values), 2), "of": len(values)}


def summarise(played: Played) -> dict[str, Any]:
    """A role's figures. That the bits are those of an undisturbed process has been checked when it was played."""
    rows = measure(played)
    batches = played.schedule.steps * played.schedule.replicas
    return {
        "kills": len(rows),
        **{name: spread(rows, name) for name in FIELDS},
        "steps_again": sum(recovery["lost"] for recovery in played.summary["recoveries"]),
        "batches_again": len(played.marks) - batches,
        "bit_identical": True,
        "seconds": round(played.seconds, 1),
        "samples": rows,
    }


@click.command()
@click.option("--kills", type=click.IntRange(1, 200), default=20, show_default=True, help="Of each role.")
@click.option("--role", "roles", type=click.Choice(ROLES), multiple=True, default=ROLES, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=ROOT / "benchmarks" / "results" / "recovery.json",
    help="Roles that it holds already stay in it.",
)
def main(kills: int, roles: tuple[str, ...], out: Path) -> None:
    """Kill each role again and again; prints a table and writes JSON."""
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["roles"] if out.exists() else {}
    for role in roles:
        folder = ROOT / "runs" / "chaos" / f"figures-{role.replace(' ', '-')}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with Cold() as starter:
            found[role] = summarise(play(kills_of(role, kills), folder, starter, timeout_s=TIMEOUT_S))
        shutil.rmtree(folder)
        ordered = {name: found[name] for name in ROLES if name in found}
        value = {"machine": describe(), "timeout_s": TIMEOUT_S, "checkpoint_every": EVERY, "roles": ordered}
        out.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        click.echo(table({role: found[role]}))
    click.echo(table(found))


def table(roles: Mapping[str, Mapping[str, Any]]) -> str:
    """Medians, with the worst in brackets."""
    lines = [f"{'role':16} kills  " + "".join(f"{name:>16}" for name in FIELDS) + "  bit-identical"]
    for role, row in roles.items():
        cells = [f"{one['median']:g} ({one['worst']:g})" if (one := row[name]) else "-" for name in FIELDS]
        lines.append(
            f"{role:16} {row['kills']:5}  " + "".join(f"{cell:>16}" for cell in cells) + f"  {row['bit_identical']}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

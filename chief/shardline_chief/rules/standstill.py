"""A job that stands still: since when, what is usual, and which tasks it waits for. The time is an argument."""

from __future__ import annotations

import statistics
from collections import deque

from shardline.core.status import Awaited, Standstill
from shardline_chief.rules.events import PREPARATION, RECOVERY, TAKEOVER, Stage
from shardline_chief.rules.state.membership import Life, Member
from shardline_chief.rules.state.state import State

STILL_S = 5.0
"""Seconds without a movement after which a job may stand still."""
FIRST_S = 30.0
"""Limit before the first movement: compiling a model, or reading the first batches, takes a while."""
TIMES = 3.0
"""A job stands still after this many times its usual time between two movements, or after STILL_S if that is longer."""
GAPS = 20
"""Last movements that the usual time is taken from."""


def patience_s(usual_s: float | None) -> float:
    """Seconds without a movement after which something stands still. usual_s: between two movements; None = unknown."""
    return FIRST_S if usual_s is None else max(STILL_S, TIMES * usual_s)


class Motion:
    """Movements of one job, such as steps closed or updates applied."""

    def __init__(self, told_s: float = 0.0) -> None:
        """told_s: seconds between two reports of the tasks, between which no movement is seen."""
        self._told_s = told_s
        self.moved_s: float | None = None
        """When it last moved, or began to train; None before."""
        self._mark: object = None
        self._gaps: deque[float] = deque(maxlen=GAPS)

    def note(self, mark: object, now_s: float) -> None:
        """Look at the job. mark: differs from the last one if the job has moved."""
        if self.moved_s is not None and mark != self._mark:
            self._gaps.append(now_s - self.moved_s)
        if self.moved_s is None or mark != self._mark:
            self._mark, self.moved_s = mark, now_s

    def still_s(self, now_s: float) -> float | None:
        """Seconds since the last movement, if that is longer than usual; None while the job moves."""
        if self.moved_s is None:
            return None
        # The median: one long gap, such as an evaluation or an earlier standstill, makes nobody more patient.
        usual_s = statistics.median(self._gaps) if self._gaps else None
        seconds = now_s - self.moved_s
        return seconds if seconds >= max(patience_s(usual_s), TIMES * self._told_s) else None


STEPPING = frozenset({Stage.TRAINING, Stage.CHOOSING, Stage.REACHING})
"""Stages in which steps are made."""


def note_motion(state: State, motion: Motion, now_s: float) -> None:
    """Look whether the job has moved; call it with each tick."""
    if state.stage in STEPPING:
        shards = state.progress.shards.values()
        # Local training moves between two rounds, in which servers see nothing.
        told = max(state.tasks.steps.values(), default=0)
        moves = sum(shard.step_min + shard.step_max + shard.version for shard in shards)
        motion.note((state.layout.timeline, moves, told), now_s)


def standstill(state: State, motion: Motion, now_s: float) -> Standstill | None:
    """The job's standstill, or None while it moves, before it trains, and once its steps are done."""
    seconds = motion.still_s(now_s)
    if seconds is None or state.stage not in STEPPING | PREPARATION | RECOVERY | TAKEOVER:
        return None
    return Standstill(seconds=seconds, awaited=tuple(_awaited(state, now_s)))


def _awaited(state: State, now_s: float) -> list[Awaited]:
    # Servers with shards that are silent, or that a task can't reach.
    found = []
    for task in _holders(state):
        member = state.tasks.members.get(task)
        cut_off = [other for other, servers in state.tasks.suspects.items() if task in servers]
        if member is None or member.state is not Life.ALIVE:
            found.append(Awaited(task=task, why=_life(member, now_s)))
        elif cut_off:
            found.append(Awaited(task=task, why=f"it does not answer {', '.join(sorted(cut_off))}"))
    if found:
        return found
    if state.stage in PREPARATION - {Stage.READY} or state.stage is Stage.PLACING:
        return [Awaited(task=task, why="its shards are being prepared") for task in _holders(state)]
    if state.stage is Stage.FINDING:
        return [Awaited(task="chief/0", why="it reads the checkpoint to go back to")]
    if state.tasks.too_few() or state.lacks_team or not state.tasks.trainers():
        absent = state.tasks.missing_trainers()
        return [Awaited(task=task, why=_life(state.tasks.members.get(task), now_s)) for task in absent]
    return _trainers(state, now_s)


def _holders(state: State) -> list[str]:
    """Servers that have shards, or had them before they were lost."""
    home = state.losses.now.home if state.losses.now is not None else ()
    return sorted({place.task for place in (*home, *state.layout.placement)})


def _trainers(state: State, now_s: float) -> list[Awaited]:
    """Trainers whose work the lowest open step lacks; the silent ones alone if there are some."""
    lowest = min((shard.step_min for shard in state.progress.shards.values()), default=0)
    lacking = {r for s in state.progress.shards.values() if s.step_min == lowest for r in s.waiting_for}
    replicas = state.job.replicas if state.job is not None else 1
    owners: dict[str, set[int]] = {}
    for unit, task in {**state.work.homes, **state.work.assignment}.items():
        if unit % replicas in lacking:
            owners.setdefault(task, set()).add(unit % replicas)
    if not owners:
        # Each worker pushes for itself, or no push of the step has come yet.
        owners = {member.task: set() for member in state.tasks.working()}
    members = {task: state.tasks.members.get(task) for task in sorted(owners)}
    silent = {task: member for task, member in members.items() if member is None or member.state is not Life.ALIVE}
    found = []
    for task, member in (silent or members).items():
        numbers = ", ".join(map(str, sorted(owners[task])))
        has = f"replica {numbers}, " if numbers else ""
        at = f"last at step {state.tasks.steps[task]}, " if task in state.tasks.steps else ""
        found.append(Awaited(task=task, why=f"{has}{at}{_life(member, now_s)}"))
    return found


def _life(member: Member | None, now_s: float) -> str:
    if member is None:
        return "has not joined"
    ago = f"last heard {max(0.0, now_s - member.last_heard_s):.0f} s ago"
    return {Life.ALIVE: "alive", Life.SUSPECT: ago, Life.DEAD: f"dead, {ago}", Life.LEFT: "has left"}[member.state]

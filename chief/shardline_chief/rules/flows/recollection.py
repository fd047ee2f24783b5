"""What a restarted chief restores from the journal, and what is missing from the servers."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.core.plan import make_plan
from shardline.core.spec import JobSpec, differences
from shardline.core.status import PsStatus
from shardline_chief.rules.actions import Finish
from shardline_chief.rules.replay import Remembered
from shardline_chief.rules.stages import Stage
from shardline_chief.rules.state.losses import Recovered
from shardline_chief.rules.state.settings import ChiefSettings, as_chosen, as_in_cluster
from shardline_chief.rules.state.state import State


def obstacle(remembered: Remembered, job: JobSpec | None, settings: ChiefSettings) -> str:
    """Why the unfinished job in the folder is not the one being started; empty if it is, or may be."""
    known = remembered.job
    if known is None:
        return ""
    if job is not None:
        phrases = differences(as_chosen(as_in_cluster(job, settings), known), known)
        if phrases:
            return "; ".join(phrases)
    if remembered.plan_id:
        plan = make_plan(known.tensors, len(settings.ps))
        if plan.plan_id != remembered.plan_id:
            servers = f"a number of parameter servers other than {len(settings.ps)}"
            return f"its parameters were partitioned for {servers}, or by another version of Shardline"
    return ""


def recall(state: State, known: Remembered, now_s: float, trained_s: float) -> None:
    """Restore what can't be asked for. trained_s: seconds since training began, by the wall clock."""
    if known.job is not None:
        state.adopt(known.job)
    state.tasks.machine = known.machine
    state.tasks.finished = set(known.finished)
    for step, metrics in known.metrics.items():
        state.figures.score(step, metrics)
    state.figures.best = known.best
    state.work.leases = known.leases
    state.choices.recall(known.choices)
    state.progress.first_step, state.progress.base_step = known.first_step, known.base_step
    state.saves.committed(known.checkpoint_step, known.checkpoint_path)
    state.losses.recoveries = [Recovered(**recovered) for recovered in known.recoveries]
    state.losses.back = list(known.back)
    state.figures.lives |= known.lives
    state.losses.failovers = known.failovers + 1
    state.figures.dropped_memories = known.dropped_memories
    if known.began_s is not None:
        state.figures.running_s = now_s - trained_s
    for member in known.members.values():
        state.tasks.members.recall(member, now_s)


def say_goodbye(state: State, exit_code: int, reason: str) -> None:
    """The end had been decided, but not every task may have heard: announce it again."""
    saves, progress = state.saves, state.progress
    state.stage = Stage.ENDED
    state.exit_code, state.reason = exit_code, reason
    saves.final_step = saves.checkpoint_step
    progress.base_step = max(progress.base_step, saves.checkpoint_step)
    state.say(
        "takeover", f"the job had already ended when the last chief died: {reason}; informing the remaining tasks"
    )
    state.outbox.actions.append(Finish(exit_code=exit_code, reason=reason))


def missing(known: Remembered, gone: Mapping[str, str]) -> dict[str, str]:
    """Servers that held shards and whose process has changed or gone: reason by name.

    gone: reason for each known server that is gone.
    """
    held = {place.task for place in known.placement}
    lost = {task: why for task, why in gone.items() if task in held}
    return lost | {task: f"{task} was gone when the chief returned" for task in held - known.members.keys()}


def empty(known: Remembered, servers: Mapping[str, PsStatus]) -> dict[str, str]:
    """Running servers that lack what they should hold: reason by name."""
    lost = {}
    for place in known.placement:
        status = servers.get(place.task)
        there = {shard.shard for shard in status.shards if shard.initialized} if status is not None else set()
        if place.shard not in there:
            lost[place.task] = f"{place.task} has no values for shard {place.shard}"
    return lost

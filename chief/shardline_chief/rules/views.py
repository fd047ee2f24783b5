"""What others see of the job: orders for tasks, the job view for clients, status rows for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardline import cadence as cadences, consistency, division, topology
from shardline.consistency import Clock
from shardline.consistency.assignment import by_worker
from shardline.core.orders import JobView, Orders, Phase
from shardline.core.placement import Post
from shardline.core.spec import JobSpec
from shardline.core.status import Counting, TaskLinks, TaskStatus, Traffic, Usage
from shardline.errors import UsageError
from shardline_chief.rules.events import Stage
from shardline_chief.rules.flows.barriers import Barriers
from shardline_chief.rules.state.membership import Life
from shardline_chief.rules.state.state import State


def job_view(state: State) -> JobView:
    """Job, plan and placement. Raises UsageError while they are not known yet."""
    layout = state.layout
    if state.job is None or not (layout.timeline or state.ended):
        raise UsageError("the job is not known yet; ask again once the orders name a timeline")
    # A job that ended before it began still has a plan to show.
    plan = layout.plan or state.settings.plan(state.job)
    return JobView(job=state.job, plan=plan, placement=layout.placement, timeline=layout.timeline)


class AllOrders:
    """The current orders for all tasks; what they have in common is made once."""

    def __init__(self, state: State, barriers: Barriers, held: tuple[Post, ...]) -> None:
        """held: see posts()."""
        self._state = state
        self._barriers = barriers.states()
        met = [m for m in state.tasks.members if m.living and m.talks and meets(state)]
        self._trainers = tuple(member.post for member in met if member.trains)
        speak = state.job is not None and topology.of(state.job).speaks
        self._between = self._trainers if speak else tuple(member.post for member in met if member.row.sends)
        self._units = {} if _goes_back_first(state) else by_worker(state.work.assignment)
        self._common = Orders(
            phase=state.phase,
            timeline=state.layout.timeline,
            stop_step=state.progress.stop_step,
            exit_code=state.exit_code,
            reason=state.reason,
            checkpoint_step=state.saves.checkpoint_step,
            final_step=state.saves.final_step,
            workers=len(state.tasks.trainers()),
            first_step=state.progress.base_step,
            awaited=tuple(state.tasks.awaited()) if _waits_at_start(state) else (),
            posts=held,
            posting=(state.settings.term << 32) + state.work.postings if held else 0,
            job_secret=state.settings.job_secret if held else b"",
            scores=tuple(state.figures.followed.items()),
        )

    def of(self, task: str, incarnation: int) -> Orders:
        state = self._state
        member = state.tasks.members.get(task)
        if member is None or member.incarnation != incarnation or not member.living:
            left = member is not None and member.incarnation == incarnation and member.state is Life.LEFT
            return Orders(
                phase=Phase.ENDED if left or state.ended else state.phase,
                exit_code=0,
                reason="left as asked" if left else f"incarnation {incarnation:#x} is fenced",
                fenced=not left,
            )
        return dataclasses.replace(
            self._common,
            replicas=_replicas(state, self._units.get(task, ())) if member.trains else (),
            init=state.phase is Phase.INIT and state.work.initializer == task,
            barrier=self._barriers.get(task),
            peers=() if member.row.holds else self._trainers if member.row.sends else self._between,
        )


def posts(state: State) -> tuple[Post, ...]:
    """Who computes each unit; empty where a worker computes the whole model, and while a unit has nobody."""
    if state.job is None or not division.of(state.job).partial or _goes_back_first(state):
        return ()
    units = range(division.of(state.job).units)
    members = [state.tasks.members.get(state.work.assignment.get(unit, "")) for unit in units]
    found = [member.post for member in members if member]
    return tuple(found) if len(found) == len(members) else ()


def meets(state: State) -> bool:
    """Whether workers may exchange with other tasks than the servers."""
    return state.job is not None and topology.of(state.job).meets


def _goes_back_first(state: State) -> bool:
    """Whether the job has yet to go back because stages have moved.

    Who takes one over begins with an empty pipeline, in the middle of what the others have computed. Where each
    gradient is an update, nobody would see that it belongs to nothing. So in one timeline nobody takes anything over.
    """
    return bool(state.work.moved) and state.mode.clock is Clock.VERSION


def _waits_at_start(state: State) -> bool:
    """Whether training has never begun; later waits are for lost tasks, which the event log reports."""
    waits = state.phase in (Phase.WAITING, Phase.INIT) and state.stage is not Stage.NOTHING_LEFT
    return waits and state.figures.running_s is None


def rows(state: State, now_s: float) -> tuple[TaskStatus, ...]:
    found = []
    told, units = state.progress.shards, by_worker(state.work.assignment)
    shards: dict[str, list[int]] = {}
    for place in state.layout.placement:
        shards.setdefault(place.task, []).append(place.shard)
    for member in state.tasks.members:
        found.append(
            TaskStatus(
                task=member.task,
                state=member.state.value,
                incarnation=member.incarnation,
                address=member.address,
                metrics_address=member.metrics_address,
                device=member.device,
                last_heard_s=now_s - member.last_heard_s,
                step=state.tasks.steps.get(member.task, 0),
                replicas=_replicas(state, units.get(member.task, ())) if member.trains else (),
                traffic=state.figures.traffic.get(member.task, Traffic()),
                usage=state.figures.usage.get(member.task, Usage()),
                links=state.figures.links.get(member.task, TaskLinks()),
                shards=tuple(told[shard] for shard in sorted(shards.get(member.task, ())) if shard in told),
            )
        )
    return tuple(found)


def _replicas(state: State, units: Sequence[int]) -> tuple[int, ...]:
    """The replicas of which a task with these units computes something."""
    return tuple(division.of(state.job).replicas(units) if state.job is not None else units)


def counting(job: JobSpec) -> Counting:
    mode, cadence = consistency.of(job.consistency), cadences.of(job)
    whole = "round" if cadence.rounds.ticks > 1 else "step"
    unit = "update" if mode.clock is Clock.VERSION else whole
    leased = {"step": "batch"}.get(whole, whole) if mode.batches.leased(job) else unit
    return Counting(
        unit=unit,
        asked=leased,
        passes=cadence.rounds.ticks if cadence.rounds.uniform else 0,
        all_passes=cadence.rounds.ticks_before(job.steps),
    )


def done(state: State) -> int:
    """How many of the job's steps are done: batches whose lease is done, else steps or updates."""
    return state.work.leases.done if state.work.leases is not None else state.progress.step

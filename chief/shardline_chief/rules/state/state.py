"""All mutable state of the chief's rules, one part per subject. Only the control thread uses it."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from shardline import codecs, consistency, division
from shardline.consistency import Consistency
from shardline.core.orders import SINCE, Phase
from shardline.core.settings import EXACT
from shardline.core.spec import ConsistencySpec, JobSpec
from shardline.errors import FencedError
from shardline_chief.rules.actions import Finish, JournalLine, Order, Resume, Say
from shardline_chief.rules.events import Event
from shardline_chief.rules.stages import PHASES, TAKEOVER, Stage
from shardline_chief.rules.state.checkpoints import Checkpoints
from shardline_chief.rules.state.figures import JobFigures
from shardline_chief.rules.state.layout import JobLayout
from shardline_chief.rules.state.losses import Loss, Losses
from shardline_chief.rules.state.membership import Tasks
from shardline_chief.rules.state.outbox import Outbox
from shardline_chief.rules.state.progress import ChoiceLog, Progress
from shardline_chief.rules.state.settings import ChiefSettings
from shardline_chief.rules.state.work import Work


class State:
    """The job as the chief knows it."""

    def __init__(self, settings: ChiefSettings, now_s: float, *, resume: Resume | None) -> None:
        self.timeouts = settings.timeouts
        self.job: JobSpec | None = None
        self.stage = Stage.GATHERING
        self.told_phase = Phase.WAITING
        """During a takeover: the phase that the last chief sent to tasks."""
        self.tasks = Tasks(settings)
        self.layout = JobLayout(settings.term)
        self.progress = Progress(self.layout, consistency.of(ConsistencySpec()))
        self.work = Work()
        self.choices = ChoiceLog()
        self.saves = Checkpoints(resume)
        self.losses = Losses()
        self.figures = JobFigures(now_s)
        self.outbox = Outbox(self.layout)
        self.events: deque[Event] = deque()
        """Events emitted by rules; the machine handles them once the rule has returned."""
        self.after_table: list[Event] = []
        """Events that follow once every server has the new table of members."""
        self.exit_code = 0
        self.reason = ""

    # Questions

    @property
    def settings(self) -> ChiefSettings:
        return self.tasks.settings

    @property
    def phase(self) -> Phase:
        return PHASES.get(self.stage, self.told_phase)

    @property
    def returning(self) -> bool:
        """Whether a restarted chief has not taken command yet: tasks keep their last orders."""
        return self.stage in TAKEOVER

    @property
    def ended(self) -> bool:
        """Whether the job has ended: nothing more is decided."""
        return self.stage is Stage.ENDED

    @property
    def begun(self) -> bool:
        """Whether there is a plan that the servers have, or are about to get."""
        return self.layout.plan is not None and self.stage is not Stage.NOTHING_LEFT

    @property
    def mode(self) -> Consistency:
        """The job's mode; only valid once the job is known."""
        return self.progress.mode

    @property
    def script(self) -> bool:
        """Whether the user's own script drives the steps."""
        return self.job is not None and self.job.script

    @property
    def chooses_batches(self) -> bool:
        """Whether workers choose their own batches: in an asynchronous script they get neither replicas nor leases."""
        return self.script and not self.mode.assigns_replicas

    @property
    def last_step(self) -> int:
        """The step at which servers stop by themselves, where it is known from the start; else 0."""
        return self.mode.cuts.last_step(self.job.steps) if self.job is not None and not self.script else 0

    @property
    def remembers(self) -> bool:
        """Whether workers keep the error memory of a codec."""
        return self.job is not None and codecs.of(self.job).remembers

    @property
    def exact_memory(self) -> bool:
        """Whether the job goes back to a checkpoint, at which no replica has any, when error memory is lost."""
        return self.job is not None and self.job.error_memory == EXACT and self.remembers

    # Acts

    def begin_to_serve(self, address: str, now_s: float) -> None:
        """Tasks can reach the chief at this address: their time to join begins."""
        self.tasks.settings = dataclasses.replace(self.settings, chief_address=address)
        self.figures.started_s = now_s

    def adopt(self, job: JobSpec) -> None:
        """The job becomes known. It pauses with fewer workers than share a layer."""
        self.job = job
        least = max(self.settings.min_workers, division.of(job).team)
        self.tasks.settings = dataclasses.replace(self.settings, min_workers=least)
        self.progress.mode = consistency.of(job.consistency)
        for step, metrics in self.settings.scores.items():
            self.figures.follow(step, metrics, job)

    def emit(self, event: Event) -> None:
        """Queue an event for the machine, to be handled once the calling rule has returned."""
        self.events.append(event)

    def say(self, kind: str, sentence: str, level: str = "info", **fields: Any) -> None:
        self.outbox.actions.append(Say(kind=kind, sentence=sentence, level=level, fields=fields))

    def record(self, kind: str, **fields: Any) -> None:
        """Record a decision in the journal, before the actions that follow."""
        self.outbox.actions.append(JournalLine(kind=kind, fields=fields))

    def command(self, order: Order) -> int:
        """Send an order to every ps; returns its number, which the event OrderAnswered has once all have answered."""
        return self.outbox.command(order)

    def note_cursor(self) -> None:
        """Record which batches are done, when no lease entry implies it."""
        leases = self.work.leases
        assert leases is not None
        self.record("cursor", steps=leases.steps, cursor=leases.cursor())

    def reassign(self, gone: int | None = None) -> list[str]:
        """Give the work to living tasks; returns phrases that say what moved.

        gone: incarnation whose leases are handed out again; every server must have fenced it.
        """
        moved = []
        leases = self.work.leases.fence(gone) if gone is not None and self.work.leases is not None else ()
        if leases:
            moved.append(f"{sum(lease.count for lease in leases)} batches are assigned again")
        if self.phase not in (Phase.RUNNING, Phase.STOPPING):
            return moved
        trainers = self.tasks.trainers()
        lives = {member.task: member.incarnation for member in trainers}
        machines = {member.task: member.address.rpartition(":")[0] for member in trainers}
        self.work.most_trainers = max(self.work.most_trainers, len(lives))
        if self.job is None or not self.mode.assigns_replicas or self.tasks.too_few():
            return moved
        # A script's worker computes its own replica only.
        return moved + self.work.reassign(lives, self.job, machines=machines, own=self.script)

    @property
    def lacks_team(self) -> bool:
        """Whether workers are to share layers, and no host has as many of them as that takes."""
        return self.job is not None and division.of(self.job).team > 1 and not self.work.assignment

    def note_loss(self, task: str, heard_s: float) -> Loss:
        """Note that this task's loss has stopped the job; returns the current loss, which may have begun earlier."""
        if self.losses.now is None:
            shards = self.progress.shards.items()
            if any(SINCE in told for told in self.figures.lives.values()):
                # A worker may be lost with the server, and this chief with both. Of those that are gone it is recorded.
                living = {(member.task, member.incarnation) for member in self.tasks.members if member.living}
                self.record("figures", lives=self.figures.told(living))
            self.losses.now = Loss(
                first=task,
                began_s=heard_s,
                at={number: (shard.step_min, shard.version) for number, shard in shards},
                at_step=max(self.progress.told_step, self.mode.cuts.passed(self.saves.checkpoint_step)),
                home=self.layout.placement,
            )
        return self.losses.now

    def end(self, exit_code: int, reason: str, now_s: float) -> None:
        """End the job; only the first call counts."""
        if self.ended:
            return
        if self.figures.running_s is not None:
            self.figures.end_training(now_s)
        self.stage = Stage.ENDED
        self.exit_code = exit_code
        self.reason = reason
        self.record("ended", exit_code=exit_code, reason=reason)
        self.say("ended", reason, "info" if exit_code == 0 else "error", exit_code=exit_code)
        self.outbox.actions.append(Finish(exit_code=exit_code, reason=reason))

    def resign(self, reason: str) -> None:
        """Another chief leads the servers: this one decides nothing more."""
        self.stage = Stage.ENDED
        self.exit_code, self.reason = FencedError.exit_code, reason
        self.say("resigned", reason, "error", exit_code=self.exit_code)
        self.outbox.actions.append(Finish(exit_code=self.exit_code, reason=reason, resigned=True))

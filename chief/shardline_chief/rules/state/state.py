"""Everything mutable of the chief's rules, in parts of one concern each. All of it belongs to the control thread."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from shardline import consistency
from shardline.consistency import Consistency
from shardline.core.orders import Phase
from shardline.core.spec import ConsistencySpec, JobSpec
from shardline.errors import FencedError
from shardline_chief.rules.actions import Finish, Order, Resume
from shardline_chief.rules.continuations import After
from shardline_chief.rules.events import Event
from shardline_chief.rules.stages import PHASES, TAKEOVER, Stage
from shardline_chief.rules.state.checkpoints import Checkpoints
from shardline_chief.rules.state.figures import JobFigures
from shardline_chief.rules.state.layout import JobLayout
from shardline_chief.rules.state.losses import Loss, Losses
from shardline_chief.rules.state.outbox import Outbox
from shardline_chief.rules.state.progress import Progress
from shardline_chief.rules.state.settings import ChiefSettings
from shardline_chief.rules.state.tasks import Tasks
from shardline_chief.rules.state.work import Work


class State:
    """The job as the chief knows it."""

    def __init__(self, settings: ChiefSettings, now_s: float, *, resume: Resume | None) -> None:
        self.timeouts = settings.timeouts
        self.job: JobSpec | None = None
        self.stage = Stage.GATHERING
        self.told_phase = Phase.WAITING
        """During a takeover: the phase that tasks were told by the last chief."""
        self.tasks = Tasks(settings)
        self.layout = JobLayout(settings.term)
        self.progress = Progress(self.layout, consistency.of(ConsistencySpec()))
        self.work = Work()
        self.saves = Checkpoints(resume)
        self.losses = Losses()
        self.figures = JobFigures(now_s)
        self.outbox = Outbox(self.layout)
        self.events: deque[Event] = deque()
        """What rules have made to happen; the machine takes them up when the rule has returned."""
        self.exit_code = 0
        self.reason = ""

    # Questions

    @property
    def settings(self) -> ChiefSettings:
        """What the chief was started with."""
        return self.tasks.settings

    @property
    def phase(self) -> Phase:
        """What tasks are told."""
        return PHASES.get(self.stage, self.told_phase)

    @property
    def returning(self) -> bool:
        """Whether a chief that has come back has not taken command yet: tasks keep the orders that they have."""
        return self.stage in TAKEOVER

    @property
    def ended(self) -> bool:
        """Nothing more will be decided."""
        return self.stage is Stage.ENDED

    @property
    def begun(self) -> bool:
        """Whether there is a plan that servers were told of, or are about to be."""
        return self.layout.plan is not None and self.stage is not Stage.NOTHING_LEFT

    @property
    def mode(self) -> Consistency:
        """The job's mode of consistency; only of use once the job is known."""
        return self.progress.mode

    @property
    def script(self) -> bool:
        """Whether a person's own script drives the steps."""
        return self.job is not None and self.job.script

    @property
    def chooses_batches(self) -> bool:
        """Whether workers train on what they choose: an asynchronous script's are given neither replicas nor leases."""
        return self.script and not self.mode.assigns_replicas

    @property
    def stops_by_itself(self) -> bool:
        """Whether the last step is known from the start, so that servers stop there by themselves."""
        return self.mode.consistent_cuts and not self.script

    # Acts

    def begin_to_serve(self, address: str, now_s: float) -> None:
        """Tasks can reach the chief there: their time to join begins."""
        self.tasks.settings = dataclasses.replace(self.settings, chief_address=address)
        self.figures.started_s = now_s

    def adopt(self, job: JobSpec) -> None:
        """The job becomes known."""
        self.job = job
        self.progress.mode = consistency.of(job.consistency)

    def emit(self, event: Event) -> None:
        """Have the machine deal with this once the rule that calls this has returned."""
        self.events.append(event)

    def say(self, kind: str, sentence: str, level: str = "info", **fields: Any) -> None:
        """Tell the person."""
        self.outbox.say(kind, sentence, level, fields)

    def record(self, kind: str, **fields: Any) -> None:
        """Note a decision in the journal before the acts that follow."""
        self.outbox.record(kind, fields)

    def command(self, order: Order, then: After | None = None) -> None:
        """Order every ps; `then` follows once all have answered."""
        self.outbox.command(order, then)

    def note_cursor(self) -> None:
        """Note which batches are done, where that follows from no lease."""
        leases = self.work.leases
        assert leases is not None
        self.record("cursor", steps=leases.steps, cursor=leases.cursor())

    def publish_members(self, then: After) -> None:
        """Send the table of living incarnations to every ps; `then`: when all have taken it, or could not."""
        self.layout.table_sent = True
        self.command(self.tasks.table(self.layout.timeline), then)

    def reassign(self, gone: int | None = None) -> list[str]:
        """Give the work to the living; returns a phrase for what moved.

        gone: a life whose leases are handed out again, after every server has fenced it.
        """
        moved = []
        leases = self.work.leases.fence(gone) if gone is not None and self.work.leases is not None else ()
        if leases:
            moved.append(f"{sum(lease.count for lease in leases)} batches are handed out again")
        if self.phase not in (Phase.RUNNING, Phase.STOPPING):
            return moved
        lives = {member.task: member.incarnation for member in self.tasks.trainers()}
        self.work.most_trainers = max(self.work.most_trainers, len(lives))
        if self.job is None or not self.mode.assigns_replicas or self.tasks.too_few():
            return moved
        # A script computes its own replica and nobody else's.
        return moved + self.work.reassign(lives, self.job.replicas, own=self.script)

    def note_loss(self, task: str, heard_s: float) -> Loss:
        """The job stands still because of this task, or did so already; returns what is known of the loss."""
        if self.losses.now is None:
            shards = self.progress.shards.items()
            self.losses.now = Loss(
                first=task,
                began_s=heard_s,
                at={number: (shard.step_min, shard.version) for number, shard in shards},
                at_step=self.progress.step,
                home=self.layout.placement,
            )
        return self.losses.now

    def end(self, exit_code: int, reason: str, now_s: float) -> None:
        """End the job; the first reason stands."""
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
        """Another chief leads the servers: this one decides nothing any more."""
        self.stage = Stage.ENDED
        self.exit_code, self.reason = FencedError.exit_code, reason
        self.say("resigned", reason, "error", exit_code=self.exit_code)
        self.outbox.actions.append(Finish(exit_code=self.exit_code, reason=reason, resigned=True))

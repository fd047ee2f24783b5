"""All mutable state of the chief's rules, one part per subject. Only the control thread uses it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Any

from shardline import codecs, consistency, division
from shardline.consistency import Clock, Consistency
from shardline.core.choices import Choices
from shardline.core.orders import SINCE, Phase, StepReport
from shardline.core.scores import counts
from shardline.core.settings import EXACT
from shardline.core.spec import ConsistencySpec, JobSpec
from shardline.core.status import ShardStatus, TaskLinks, Traffic, Usage
from shardline.errors import FencedError
from shardline.job import lowest_is_best
from shardline_chief.rules.actions import Finish, JournalLine, Order, Say
from shardline_chief.rules.events import PHASES, TAKEOVER, Event, Stage
from shardline_chief.rules.state.checkpoints import Checkpoints, Resume
from shardline_chief.rules.state.layout import JobLayout
from shardline_chief.rules.state.leases import Leases
from shardline_chief.rules.state.losses import Loss, Losses
from shardline_chief.rules.state.membership import Tasks
from shardline_chief.rules.state.outbox import Outbox
from shardline_chief.rules.state.settings import ChiefSettings

KEPT_SCORES = 100
"""Scores that are kept: a long run has any number of checkpoints."""


class JobFigures:
    """Times, traffic, scores and faults."""

    def __init__(self, now_s: float) -> None:
        self.started_s = now_s
        self.running_s: float | None = None
        """When training first began; None before."""
        self.training_end_s: float | None = None
        self.traffic: dict[str, Traffic] = {}
        self.usage: dict[str, Usage] = {}
        self.links: dict[str, TaskLinks] = {}
        self.lives: dict[tuple[str, int], Mapping[str, float]] = {}
        """Counters that each life of a task reports, by (task, incarnation); see shardline.core.orders."""
        self.dropped_memories = 0
        """How many times a replica's, or a worker's, error memory was dropped."""
        self.faults: dict[str, str] = {}
        """Current faults that do not stop the job, by subject: "checkpoint", "journal"."""
        self.metrics: dict[int, Mapping[str, float]] = {}
        """The evaluator's newest scores, by step."""
        self.followed: dict[int, float | None] = {}
        """Scores that the learning rate follows, if it does, by rising steps; see shardline.core.scores."""
        self.best: tuple[int, Mapping[str, float]] | None = None
        self.names: set[str] = set()
        """Names of all metrics of this run."""
        self.unscored: dict[int, str] = {}
        """Why a checkpoint has no score, by step."""
        self.lost_scores = ""
        """Why there is no evaluator any more; empty if none was lost."""

    def told(self, lives: Collection[tuple[str, int]]) -> list[list[object]]:
        """The counters of these lives, for the journal."""
        return [[*life, dict(figures)] for life, figures in sorted(self.lives.items()) if life in lives]

    def total(self, name: str) -> int:
        """Sum of a figure over all lives of all tasks."""
        return int(sum(figures.get(name, 0.0) for figures in self.lives.values()))

    def seconds(self, now_s: float) -> float:
        if self.running_s is None:
            return 0.0
        return (now_s if self.training_end_s is None else self.training_end_s) - self.running_s

    def end_training(self, now_s: float) -> None:
        """Note when training ended; only the first call counts."""
        if self.training_end_s is None:
            self.training_end_s = now_s

    def score(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note a checkpoint's score, {} if it has none."""
        self.metrics.pop(step, None)
        self.metrics[step] = dict(metrics)
        self.names |= metrics.keys()
        if len(self.metrics) > KEPT_SCORES:
            oldest = next(iter(self.metrics))
            del self.metrics[oldest]
            self.unscored.pop(oldest, None)

    def follow(self, step: int, metrics: Mapping[str, float], job: JobSpec | None) -> None:
        """Have the learning rate follow a score, {} if there is none, where it does; the first one of a step counts."""
        last = next(reversed(self.followed), 0)
        if job is None or not job.follows_scores or step <= last or not counts(step, job.checkpoint_every):
            return
        name = job.best_metric or next(iter(metrics), "")
        self.followed[step] = metrics.get(name)

    def better(self, metrics: Mapping[str, float], job: JobSpec | None) -> bool:
        """Whether these metrics beat the best so far; the first ones do, unless they are not finite.

        The job's best_metric decides; without one, the first metric that evaluate returns, and lower is better if its
        name implies it.
        """
        if not metrics or job is None:
            return False
        name = job.best_metric or next(iter(metrics))
        lowest = job.best_is_lowest if job.best_metric else lowest_is_best(name)
        value = metrics.get(name)
        if value is None or not math.isfinite(value):
            return False
        best = self.best[1].get(name) if self.best is not None else None
        if best is None or not math.isfinite(best):
            return True
        return value < best if lowest else value > best


class Progress:
    def __init__(self, layout: JobLayout, mode: Consistency) -> None:
        self._layout = layout
        self.mode = mode
        """The job's mode; only valid once the job is known."""
        self.shards: dict[int, ShardStatus] = {}
        """Last reports of this timeline, by shard."""
        self.first_step = 0
        """Step at which this run began."""
        self.base_step = 0
        """Step at which the current timeline began: first_step, or the step of the last rollback."""
        self.stop_step = 0
        """No shard goes past this step; 0 = not decided."""

    @property
    def all_told(self) -> bool:
        """Whether every shard that is not empty has reported in this timeline."""
        return self._layout.plan is not None and len(self.shards) >= self._layout.filled

    def of(self, shard: ShardStatus) -> int:
        """How far one shard is: steps closed, or updates applied, depending on the mode's clock."""
        return shard.step_min if self.mode.clock is Clock.STEP else shard.version

    @property
    def step(self) -> int:
        """Steps that every shard has closed, or updates that every shard has applied."""
        return min(map(self.of, self.shards.values())) if self.all_told else self.base_step

    @property
    def told_step(self) -> int:
        """The same, of the shards that have reported: after a takeover some are lost before they do."""
        return min(map(self.of, self.shards.values()), default=self.base_step)

    @property
    def step_max(self) -> int:
        """Highest step that any bucket has reached."""
        return max((shard.step_max for shard in self.shards.values()), default=self.base_step)

    def common_step(self) -> int | None:
        """The step that every bucket of every shard is at; None if they differ or are not known."""
        if not self.all_told:
            return None
        steps = {step for shard in self.shards.values() for step in (shard.step_min, shard.step_max)}
        return steps.pop() if len(steps) == 1 else None


class ChoiceLog:
    """Which steps of the surviving history have noted choices, which the journal has, and counts for people."""

    def __init__(self) -> None:
        self._first = 0
        self.end = 0
        """The first step that is not noted yet."""
        self.used: Counter[str] = Counter()
        """Gradients that made a step, by task that had the replica when the chief noted the step."""
        self.dropped: Counter[str] = Counter()
        """The same for those that came too late."""

    def news(self, told: Choices) -> Choices:
        """What the lead has told and the log lacks."""
        return told.since(self.end)

    def add(self, news: Choices, assignment: Mapping[int, str]) -> None:
        """Note the next steps. After a gap the log begins anew."""
        if news.first > self.end:
            self._first = news.first
        self.end = news.end
        for choice in news.made:
            for replica, task in assignment.items():
                (self.used if choice >> replica & 1 else self.dropped)[task] += 1

    def back_to(self, step: int) -> None:
        """The job goes back to a step, or begins at it."""
        self.end = min(self.end, max(self._first, step))
        if self.end == self._first:
            self._first = self.end = step

    def recall(self, known: Choices) -> None:
        """Continue where an earlier chief was."""
        self._first, self.end = known.first, known.end


class Work:
    """Work assigned to the tasks that train."""

    def __init__(self) -> None:
        self.assignment: dict[int, str] = {}
        """Unit -> task: replicas, or parts of them that workers share; see shardline.division."""
        self.homes: dict[int, str] = {}
        """The first task of each unit that this chief has known."""
        self.given: dict[int, set[int]] = {}
        """Units that each living incarnation has or had."""
        self.leases: Leases | None = None
        """None unless the chief hands out batches."""
        self.postings = 0
        """Changes of who has which unit."""
        self.holders: dict[int, int] = {}
        """Incarnation that has each unit, or had it last."""
        self.moved: set[int] = set()
        """Units that another life has taken over since the state of all of them was last restored."""
        self.unready: set[int] = set()
        """Those of them whose new life had none of the same stage, so it has not followed the training."""
        self.initializer = ""
        """Task that sets the first values; empty if none is chosen."""
        self.most_trainers = 0
        """Highest number of tasks that trained at the same time."""

    def has_given(self, incarnation: int) -> bool:
        """Whether this incarnation has, or had, replicas or leases."""
        return bool(self.given.get(incarnation)) or (self.leases is not None and self.leases.has_given(incarnation))

    def covers(self, incarnation: int, report: StepReport, replicas: int) -> bool:
        """Whether a reported step belongs to the work that this incarnation was given. replicas: of the job."""
        if self.leases is not None:
            return self.leases.has_given_batch(incarnation, report.step)
        return any(unit % replicas == report.replica for unit in self.given.get(incarnation, ()))

    def reassign(self, lives: Mapping[str, int], job: JobSpec, *, machines: Mapping[str, str], own: bool) -> list[str]:
        """Assign the job's units to these tasks; returns a phrase for each task that gained some.

        lives: incarnation by task. machines: host by task. own: each worker keeps the replica of its own index.
        """
        before, had = self.assignment, dict(self.holders)
        if own:
            self.assignment = {int(task.rpartition("/")[2]): task for task in lives}
        else:
            self.assignment = division.of(job).assign(before, machines, self.homes)
        self.homes = {**self.assignment, **self.homes}
        self.given = {life: self.given.get(life, set()) for life in lives.values()}
        # Who has the optimizer's state, where workers have it: those that have, or had last, a replica of the stage.
        ready = {(unit // max(1, job.replicas), life) for unit, life in self.holders.items()}
        gained: dict[str, list[int]] = {}
        for replica, task in sorted(self.assignment.items()):
            self.given[lives[task]].add(replica)
            if self.holders.setdefault(replica, lives[task]) != lives[task]:
                self.holders[replica] = lives[task]
                self.moved.add(replica)
                if (replica // max(1, job.replicas), lives[task]) not in ready:
                    self.unready.add(replica)
            if before.get(replica) != task:
                gained.setdefault(task, []).append(replica)
        self.postings += self.holders != had
        named = division.of(job).named
        return [f"{named(numbers)} to {task}" for task, numbers in gained.items()]


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

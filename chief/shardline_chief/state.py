"""The job as the chief knows it, and the few ways in which its rules act: say, record, command, answer.

All of it belongs to the control thread. setup.py, running.py and ending.py hold the rules over it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline.config import Timeouts
from shardline.errors import FencedError, ProtocolError, ShardlineError, UnreachableError
from shardline.job import lowest_is_best
from shardline.rpc.configuration import Placement
from shardline.rpc.link import Phase
from shardline.rpc.status import ShardStatus, Traffic
from shardline.sharding import Plan
from shardline.spec import JobSpec
from shardline.waiting import Waiting
from shardline_chief.actions import (
    Action,
    Answer,
    AskStatus,
    Command,
    CommandResult,
    Cut,
    Finish,
    Lead,
    Members,
    Order,
    Record,
    Release,
    Resume,
    Say,
    Tell,
)
from shardline_chief.cuts import CutLedger
from shardline_chief.leases import Leases
from shardline_chief.membership import Member, Membership
from shardline_chief.messages import TRAINERS

log = logging.getLogger("shardline_chief.state")

Then = Callable[[CommandResult, float], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the chief was started with."""

    term: int
    chief_uuid: str
    chief_address: str
    ps: tuple[str, ...]
    """Addresses in the cluster spec, by index."""
    workers: int
    evaluators: int = 0
    chief_trains: bool = False
    min_workers: int = 1
    """With fewer tasks that train than this the job stands still, and ends where it does so for too long."""
    max_workers: int = 64
    inexact: bool = False
    standbys: int = 0
    """Standbys of each shard: 0 or 1."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    out: str = ""

    @property
    def trainers(self) -> int:
        """Tasks that are expected to run replicas."""
        return self.workers + self.chief_trains


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """The job went on after a parameter server was lost."""

    task: str
    """The first one that was lost."""
    at_step: int
    """Step (sync) or updates (async) that all shards had reached, as last told."""
    from_step: int
    """Step of the checkpoint that was gone back to; 0 where there was none."""
    seconds: float
    """From its last sign of life until training went on."""
    lost: int
    """Steps to be computed again; in asynchronous mode updates of the lost shards, as far as they had been told of: the
    workers know how many it really were (lost_updates in the summary)."""


class State:
    """Everything mutable of the chief's rules."""

    def __init__(self, settings: Settings, now_s: float, *, resume: Resume | None) -> None:
        self.settings = settings
        self.timeouts = settings.timeouts
        self.resume = resume
        self.job: JobSpec | None = None
        self.plan: Plan | None = None
        self.placement: tuple[Placement, ...] = ()
        self.members = Membership(settings.term, suspect_s=settings.timeouts.suspect_s, dead_s=settings.timeouts.dead_s)
        self.machine: Mapping[str, str] = {}
        """Fingerprint of the first task that trains; the others' must be equal in synchronous mode."""
        self.phase = Phase.WAITING
        self.timeline = 0
        self._timelines = self._appointments = 0
        self.table_sent = False
        """The ps hold a table of members, so that who joins must be put in before the reply (F4)."""
        self.assignment: dict[int, str] = {}
        self.given: dict[int, set[int]] = {}
        """Replicas that a living task has or had, by its incarnation."""
        self.leases: Leases | None = None
        self.initializer = ""
        self.shards: dict[int, ShardStatus] = {}
        self.steps: dict[str, int] = {}
        self.traffic: dict[str, Traffic] = {}
        self.figures: dict[tuple[str, int], Mapping[str, float]] = {}
        """What each life of a task counts of itself; see shardline.rpc.link."""
        self.suspects: dict[str, tuple[str, ...]] = {}
        """By task, those that it does not hear."""
        self.finished: set[str] = set()
        self.most_trainers = 0
        """Most tasks that trained at a time."""
        self.ledger = CutLedger(0)
        self.saving: int | None = None
        self.started_s = now_s
        self.running_s: float | None = None
        self.training_end_s: float | None = None
        self.alone_since_s: float | None = None
        self.first_step = 0
        """Where this run began."""
        self.base_step = 0
        """Where the timeline in force began: first_step, or the step that the job went back to."""
        self.stop_step = 0
        self.checkpoint_step = -1
        self.checkpoint_path = ""
        self.faults: dict[str, str] = {}
        """What fails at present while the job goes on, by what it is: "checkpoint", "journal"."""
        self.failed_saves = 0
        """Checkpoints that could not be written since the last good one."""
        self.least_interval = 0
        """Steps that must lie between checkpoints at least, see pacing.py; 0 while that isn't known."""
        self.final_step = -1
        self.metrics: dict[int, Mapping[str, float]] = {}
        self.best: tuple[int, Mapping[str, float]] | None = None
        self.unscored: dict[int, str] = {}
        """Why the evaluator gave a checkpoint no score, by step."""
        self.lost_scores = ""
        """Why there is no evaluator any more."""
        self.exit_code = 0
        self.reason = ""
        self.actions: list[Action] = []
        self.on_ps_lost: Callable[[str, str, float], None] = lambda task, why, now_s: None
        """(task, why, now): a server is gone with what it held; see recovery.py."""
        self.on_refused: Callable[[Order, Mapping[str, ShardlineError], float], bool] = lambda order, errors, now_s: (
            False
        )
        """(order, errors, now): servers did not do it; returns whether that has been dealt with."""
        self.recoveries: list[Recovered] = []
        self.returning = False
        """A chief that has come back has not taken command yet: tasks keep the orders they have; see takeover.py."""
        self.failovers = 0
        """Chiefs of this job that took over from another."""
        self._orders: dict[int, tuple[Order, Then | None, int]] = {}
        self._commands = 0
        self._asking = False
        self._waiting: Waiting | None = None
        """What was told of the wait for tasks; the next one of a job begins where it stopped."""

    # Questions

    @property
    def sync(self) -> bool:
        """Whether steps are synchronous; only once the job is known."""
        return self.job is None or self.job.consistency.mode == "sync"

    @property
    def script(self) -> bool:
        """Whether a person's own script drives the steps."""
        return self.job is not None and self.job.script

    @property
    def ended(self) -> bool:
        """Nothing more will be decided."""
        return self.phase is Phase.ENDED

    def trainers(self) -> list[Member]:
        """Living tasks that run replicas."""
        return self.members.living(*TRAINERS)

    def working(self) -> list[Member]:
        """Those of them that have not finished their part."""
        return [member for member in self.trainers() if member.task not in self.finished]

    def too_few(self) -> bool:
        """Whether fewer tasks train than the job wants at least; it then stands still."""
        return len(self.trainers()) < self.settings.min_workers

    def missing_ps(self) -> list[int]:
        """Indices of parameter servers that are not there."""
        there = {member.index for member in self.members.living("ps")}
        return [index for index in range(len(self.settings.ps)) if index not in there]

    @property
    def all_told(self) -> bool:
        """Whether every shard that holds anything has told how it is, in this timeline."""
        return self.plan is not None and len(self.shards) >= filled_shards(self.plan)

    @property
    def step(self) -> int:
        """Steps that every shard has closed (sync), updates that every shard has applied (async)."""
        if not self.all_told:
            return self.base_step
        return min(shard.step_min if self.sync else shard.version for shard in self.shards.values())

    @property
    def step_max(self) -> int:
        """Highest step any bucket is at."""
        return max((shard.step_max for shard in self.shards.values()), default=self.base_step)

    def common_step(self) -> int | None:
        """The step that every bucket of every shard is at; None where they differ or are not known."""
        if not self.all_told:
            return None
        steps = {step for shard in self.shards.values() for step in (shard.step_min, shard.step_max)}
        return steps.pop() if len(steps) == 1 else None

    def figure(self, name: str) -> int:
        """Sum of a figure over all lives of all tasks."""
        return int(sum(figures.get(name, 0.0) for figures in self.figures.values()))

    def seconds(self, now_s: float) -> float:
        """Seconds of training so far."""
        if self.running_s is None:
            return 0.0
        return (now_s if self.training_end_s is None else self.training_end_s) - self.running_s

    def awaited(self) -> list[str]:
        """Tasks of the cluster spec that are not there, evaluators aside: nothing waits for those."""
        settings = self.settings
        found = [ps_at(index, settings.ps[index]) for index in self.missing_ps()]
        trainers = {member.task for member in self.trainers()}
        names = [*(["chief/0"] if settings.chief_trains else []), *(f"worker/{n}" for n in range(settings.workers))]
        # A worker beyond the cluster spec may have come in the place of one that is in it.
        lacking = max(0, settings.trainers - len(trainers))
        return found + [name for name in names if name not in trainers][:lacking]

    # Acts

    def tell_wait(self, now_s: float, deadline_s: float, whom: str) -> None:
        """Say in the chief's log for whom it waits and how long still, as often as is of use."""
        if self._waiting is None:
            self._waiting = Waiting(now_s, deadline_s)
        self._waiting.deadline_s = deadline_s
        if sentence := self._waiting.sentence(now_s, whom):
            self.actions.append(Tell(sentence=sentence))

    def say(self, kind: str, sentence: str, level: str = "info", **fields: Any) -> None:
        """Tell the person."""
        self.actions.append(Say(kind=kind, sentence=sentence, level=level, fields=fields))

    def record(self, kind: str, **fields: Any) -> None:
        """Note a decision in the journal before the acts that follow."""
        self.actions.append(Record(kind=kind, fields=fields))

    def note_cursor(self) -> None:
        """Asynchronous mode: note which batches are done, where that follows from no lease."""
        assert self.leases is not None
        self.record("cursor", steps=self.leases.steps, cursor=self.leases.cursor())

    def answer(self, ticket: Any, value: Any) -> None:
        """Reply to a waiting call."""
        self.actions.append(Answer(ticket=ticket, value=value))

    def command(self, order: Order, then: Then | None = None) -> None:
        """Order every ps; `then` gets the result once all have answered, errors included (see `history`)."""
        self._commands += 1
        self._orders[self._commands] = (order, then, self.timeline)
        self.actions.append(Command(number=self._commands, order=order))

    def history(self, then: Then) -> Then:
        """`then`, but only where all ps did it and neither the timeline nor the job ended meanwhile."""
        timeline = self.timeline

        def guarded(result: CommandResult, now_s: float) -> None:
            if not result.errors and not self.ended and self.timeline == timeline:
                then(result, now_s)

        return guarded

    def ask_status(self) -> None:
        """Ask every ps for its status, unless such a question is on its way; answers come as if they were beats."""
        if not self._asking:
            self._asking = True
            self.command(AskStatus())

    def continued(self, number: int, result: CommandResult, now_s: float) -> None:
        """A command came back from every ps. What must be done and was not ends the job; then what follows it."""
        order, then, timeline = self._orders.pop(number)
        result = self._of_holders(order, result)
        if isinstance(order, AskStatus):
            self._asking = False
        elif timeline != self.timeline or self.ended:
            # A server that was lost since: whoever is there now has nothing to do with this.
            log.debug("%s of timeline %#x: %s", type(order).__name__, timeline, result.errors)
        elif result.errors and not isinstance(order, Release):
            self._command_failed(order, result.errors, now_s)
        if then is not None:
            then(result, now_s)

    def _of_holders(self, order: Order, result: CommandResult) -> CommandResult:
        """A cut is no matter of servers that hold no shard, such as one that came back and is not configured yet."""
        if not isinstance(order, Cut):
            return result
        holders = {place.task for place in self.placement}
        errors = {
            task: error
            for task, error in result.errors.items()
            if task in holders or not isinstance(error, ProtocolError)
        }
        return CommandResult(values=result.values, errors=errors)

    def new_timeline(self) -> int:
        """Begin another history."""
        self._timelines += 1
        self.timeline = self.settings.term << 32 | self._timelines
        return self.timeline

    def new_appointment(self) -> int:
        """A number for a standby that a shard is given, which none before it has had, of no chief."""
        self._appointments += 1
        return self.settings.term << 32 | self._appointments

    def publish_members(self, then: Then) -> None:
        """Send the table of living incarnations to every ps; `then`: when all have taken it, or could not."""
        self.table_sent = True
        table = {member.task: member.incarnation for member in self.trainers()}
        keys = {member.task: member.key for member in self.trainers()}
        self.command(Members(timeline=self.timeline, members=table, keys=keys), then)

    def end(self, exit_code: int, reason: str, now_s: float) -> None:
        """End the job; the first reason stands."""
        if self.ended:
            return
        if self.running_s is not None and self.training_end_s is None:
            self.training_end_s = now_s
        self.phase = Phase.ENDED
        self.exit_code = exit_code
        self.reason = reason
        self.record("ended", exit_code=exit_code, reason=reason)
        self.say("ended", reason, "info" if exit_code == 0 else "error", exit_code=exit_code)
        self.actions.append(Finish(exit_code=exit_code, reason=reason))

    def resign(self, reason: str) -> None:
        """Another chief leads the servers: this one decides nothing any more."""
        self.phase = Phase.ENDED
        self.exit_code, self.reason = FencedError.exit_code, reason
        self.say("resigned", reason, "error", exit_code=self.exit_code)
        self.actions.append(Finish(exit_code=self.exit_code, reason=reason, resigned=True))

    def newest(self) -> tuple[int, str]:
        """Step and folder of the newest checkpoint; (-1, "") where there is none yet."""
        if self.checkpoint_step < 0 and self.resume is not None:
            return self.resume.step, self.resume.path
        return self.checkpoint_step, self.checkpoint_path

    def last_good(self) -> str:
        """The newest checkpoint, as a phrase."""
        step, path = self.newest()
        return f"the last good checkpoint is of step {step}: {path}" if step >= 0 else "there is no checkpoint yet"

    def what_remains(self) -> str:
        """Where to go on from after a loss."""
        step, path = self.newest()
        if step <= 0:
            return "No checkpoint holds a step yet; start the job again."
        return f"Go on with --resume from step {step}: {path}"

    def _command_failed(self, order: Order, errors: Mapping[str, ShardlineError], now_s: float) -> None:
        """Some ps did not do what it was told. One that doesn't answer is lost; else nothing is certain any more."""
        fenced = [str(error) for _, error in sorted(errors.items()) if isinstance(error, FencedError)]
        if fenced and isinstance(order, Lead):
            self.resign(f"{fenced[0]}. Another chief leads this job, so this one ends")
            return
        # A process that nobody has led yet took the place of the one that was asked.
        silent = {task: error for task, error in errors.items() if isinstance(error, (UnreachableError, FencedError))}
        if silent:
            for task, why in sorted(silent.items()):
                what = "is another process now" if isinstance(why, FencedError) else "does not answer"
                self.on_ps_lost(task, f"{task} {what}: {why}", now_s)
        elif not self.on_refused(order, errors, now_s):
            _, error = sorted(errors.items())[0]
            self.end(error.exit_code, str(error), now_s)

    def better(self, metrics: Mapping[str, float]) -> bool:
        """Whether these metrics beat the best so far; the first ones always do. A NaN never does.

        The job's best_metric decides; without one the first that evaluate gives, and less is better where its name
        says so.
        """
        if not metrics or self.job is None:
            return False
        name = self.job.best_metric or next(iter(metrics))
        lowest = self.job.best_is_lowest if self.job.best_metric else lowest_is_best(name)
        value = metrics.get(name)
        if value is None or value != value:
            return False
        held = self.best[1].get(name) if self.best is not None else None
        if held is None or held != held:
            return True
        return value < held if lowest else value > held


def ps_at(index: int, address: str) -> str:
    """A ps that never joined, for sentences. Port 0: it would have told its address at its Join."""
    return f"ps/{index} (address not known yet)" if address.endswith(":0") else f"ps/{index} at {address}"


def filled_shards(plan: Plan) -> int:
    """Shards that hold anything: a small model on many ps leaves some empty."""
    return sum(bool(shard.buckets) for shard in plan.shards)


def as_in_cluster(job: JobSpec, settings: Settings) -> JobSpec:
    """The job with what only the cluster knows: a script has one replica per worker."""
    if job.script and job.consistency.mode == "sync":
        return dataclasses.replace(job, replicas=settings.trainers)
    return job

"""The chief's mind: what happened goes in, what to do comes out. No threads, no sockets, no clock of its own.

program = Program(settings, now_s, job=spec, resume=None)
program.beat(beat, now_s)
for action in program.take(): ...        # control.py does it and tells the outcome: done(), saved()
orders = program.orders("worker/0")      # what that task shall do now

Every method is called by one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.errors import FencedError, InternalError, UsageError
from shardline.rpc.client import JobView
from shardline.rpc.link import Orders, Phase
from shardline.rpc.status import PsStatus, TaskStatus, Traffic
from shardline.security import key_of
from shardline.sharding import make_plan
from shardline.spec import JobSpec
from shardline_chief import admission
from shardline_chief.actions import Action, CommandResult, Found, MarkBest, Resume, Saved
from shardline_chief.assignment import replicas_of
from shardline_chief.barriers import Barriers
from shardline_chief.ending import Ending
from shardline_chief.membership import Member, Refused
from shardline_chief.membership import State as Life
from shardline_chief.messages import Beat, Join, JoinAnswer, LeaseAnswer, PlaceAnswer
from shardline_chief.notes import Notes
from shardline_chief.recovery import Recovery
from shardline_chief.replay import Remembered
from shardline_chief.running import Running
from shardline_chief.setup import Setup
from shardline_chief.state import Settings, State
from shardline_chief.takeover import Takeover
from shardline_chief.workers import Workers


class Program:
    """One job, from the first Join to the last goodbye."""

    def __init__(
        self,
        settings: Settings,
        now_s: float,
        *,
        job: JobSpec | None = None,
        resume: Resume | None = None,
        remembered: Remembered | None = None,
        trained_s: float = 0.0,
    ) -> None:
        """remembered: what another chief left, to go on with; trained_s: seconds since its training began."""
        self.state = State(settings, now_s, resume=resume)
        self.setup = Setup(self.state)
        self.running = Running(self.state)
        self.ending = Ending(self.state, self.running)
        self.recovery = Recovery(self.state, self.setup, self.running, self.ending)
        self._told_failures: set[tuple[str, int]] = set()
        self._told_leaving: set[tuple[str, int]] = set()
        self._refusals = admission.Refusals()
        self.workers = Workers(self.state, self.setup, self.running, self.ending, self.recovery)
        self.barriers = Barriers(self.state)
        self.notes = Notes(self.state)
        self.takeover = Takeover(self.state, self.setup, self.running, self.ending, self.recovery)
        if remembered is not None:
            self.takeover.begin(remembered, now_s, trained_s)
            self.notes.remember(remembered)
        if job is not None and self.state.job is None:
            self.setup.adopt(job, "the job file")

    def take(self) -> list[Action]:
        """What to do now, in order; each is given out once."""
        return self.notes.take()

    def note(self) -> None:
        """After each event: note who came, who went and who is done, before what the event made to be done."""
        self.notes.note()

    # Joining

    def join(self, ticket: Any, join: Join, now_s: float) -> None:
        """A task asks to take part; the answer may come later, when every ps has it in its table (F4)."""
        state = self.state
        refused = admission.refusal(state, join)
        if refused is None and join.role == "ps":
            self._ps_again(join, now_s)
        if refused is None:
            key = key_of(join.secret) if join.secret else b""
            decision = state.members.join(now_s, join, limit=admission.limit(state, join.role), key=key)
            refused = decision if isinstance(decision, Refused) else None
        if refused is not None:
            if self._refusals.fresh(join.name, refused, now_s):
                state.say("refused", f"{join.name} at {join.address} is not admitted: {refused.reason}", "warning")
            state.answer(ticket, JoinAnswer(accepted=False, reason=refused.reason, retry=refused.retry))
            return
        assert not isinstance(decision, Refused)
        member = decision.member
        if decision.replaced is not None:
            state.say("replaced", f"{member.task}: a new process takes the place of a silent one, which is fenced")
        self._admitted(ticket, join, member, decision.replaced, now_s)

    def place(self, role: str, address: str, now_s: float) -> PlaceAnswer:
        """An index for a task that is about to join from this address, kept for it for --timeout."""
        state = self.state
        refused = admission.place_refusal(role)
        if refused is None and state.ended and state.exit_code:
            refused = Refused(reason=f"the job has ended: {state.reason}", retry=True)
        if refused is None:
            found = state.members.place(
                now_s, role, address, limit=admission.limit(state, role), keep_s=state.timeouts.lost_s
            )
            if not isinstance(found, Refused):
                return PlaceAnswer(task=f"{role}/{found}")
            refused = found
        return PlaceAnswer(reason=refused.reason, retry=refused.retry)

    def _ps_again(self, join: Join, now_s: float) -> None:
        """A new process where a ps was: what that one held is gone. One that still beats is left alone (see join)."""
        old = next((m for m in self.state.members if m.role == "ps" and m.index == join.index), None)
        if old is None or old.state is not Life.SUSPECT:
            return
        if old.stable_id == join.stable_id:
            self.takeover.heard(old.task)
        elif self.takeover.hearing:
            self.takeover.gone(old.task, f"{old.task} was started again and is empty")
        elif self.setup.begun:
            self.recovery.lost(old.task, f"{old.task} was started again and is empty", now_s, back=True)

    def _admitted(self, ticket: Any, join: Join, member: Member, old: Member | None, now_s: float) -> None:
        state = self.state
        if member.trains:
            if state.job is None and join.job is not None:
                self.setup.adopt(join.job, member.task)
            if join.machine and not state.machine:
                state.machine = dict(join.machine)
                state.record("machine", facts=state.machine)
            state.alone_since_s = None
        if member.role == "evaluator":
            state.lost_scores = ""
        state.finished.discard(member.task)
        state.say(
            "joined",
            f"{member.task} joined from {member.address or 'an unnamed address'} "
            f"({len(state.members.living(member.role))} {member.role} of {self._expected(member.role)})",
            incarnation=member.incarnation,
        )
        answer = JoinAnswer(accepted=True, task=member.task, incarnation=member.incarnation, secret=join.secret)
        # Who comes after the end is told so by its orders, and goes.
        if state.ended or not (member.trains and state.table_sent):
            if old is not None:
                # As in _lives(): no server knows of it in this timeline.
                self.workers.take_back(old.incarnation)
            state.answer(ticket, answer)
            self.setup.advance(now_s)
            return
        if old is not None and self.setup.trainer_lost(old):
            # The ps get a table with the new life in it before anything else.
            state.answer(ticket, answer)
            return

        def admitted(result: CommandResult, at_s: float) -> None:
            state.answer(ticket, answer)
            if state.ended:
                return
            self.workers.take_back(old.incarnation if old is not None else None)
            self.setup.advance(at_s)

        state.publish_members(admitted)

    def _expected(self, role: str) -> int:
        settings = self.state.settings
        return {
            "ps": len(settings.ps),
            "worker": settings.workers,
            "chief": int(settings.chief_trains),
            "evaluator": settings.evaluators,
        }.get(role, 0)

    # Heartbeats

    def beat(self, beat: Beat, now_s: float) -> bool:
        """A heartbeat. False: that incarnation is fenced or unknown, its stream gets fenced orders and ends."""
        state = self.state
        if not state.members.heard(beat.task, beat.incarnation, now_s):
            return False
        state.steps[beat.task] = beat.step
        state.traffic[beat.task] = beat.traffic
        self.takeover.heard(beat.task)
        # Who only trains says nothing of shards, and a server nothing of who is silent.
        member = state.members.get(beat.task)
        assert member is not None
        if member.trains:
            state.suspects[beat.task] = beat.suspects
            if beat.barrier is not None:
                self.barriers.told(beat.task, beat.barrier)
        if beat.figures and member.trains and self.workers.trained(beat.incarnation):
            state.figures[beat.task, beat.incarnation] = beat.figures
        life = (beat.task, beat.incarnation)
        if beat.failure and life not in self._told_failures:
            self._told_failures.add(life)
            self._failed(beat, now_s)
        if beat.ps is not None and member.role == "ps":
            self.ps_status(beat.task, beat.ps, now_s)
        if beat.finished and member.trains and beat.task not in state.finished:
            state.finished.add(beat.task)
            state.ask_status()
        elif not beat.finished:
            # The job went back, so there is more for it to do.
            state.finished.discard(beat.task)
        if beat.leaving and life not in self._told_leaving:
            self._told_leaving.add(life)
            self._leaving(beat.task, now_s)
        self._progress(now_s)
        return True

    def ps_status(self, task: str, status: PsStatus, now_s: float, *, asked: bool = False) -> None:
        """A ps described itself, in a heartbeat or when asked.

        An answer comes in the order of the commands; a heartbeat may be older than the command that changed all.
        """
        state = self.state
        plan = state.plan
        if plan is None or state.ended:
            return
        state.traffic[task] = status.traffic
        if status.timeline == state.timeline:
            shards = [s for s in status.shards if s.shard < len(plan.shards) and plan.shards[s.shard].buckets]
            for shard in shards:
                state.shards[shard.shard] = shard
            state.ledger.observe(shards)
            self.recovery.told(task, shards, now_s)
            self.setup.shards_told(now_s)
            self.running.shards_told(now_s)
        elif self.takeover.hearing:
            # Judged when all are heard.
            return
        elif state.phase in (Phase.RUNNING, Phase.STOPPING) and any(p.task == task for p in state.placement):
            if asked:
                at = f"timeline {status.timeline:#x}" if status.timeline else "nothing"
                self.recovery.lost(task, f"{task} holds {at} instead of timeline {state.timeline:#x}", now_s)
            else:
                state.ask_status()
        if status.failure and (task, 0) not in self._told_failures:
            self._told_failures.add((task, 0))
            self.ending.begin(status.failure, now_s, exit_code=InternalError.exit_code)

    def stream_broken(self, task: str, incarnation: int, now_s: float) -> None:
        """A heartbeat stream ended."""
        state = self.state
        if not state.members.current(task, incarnation):
            return
        if state.ended or (task in state.finished and state.phase is not Phase.RUNNING):
            state.members.leave(task)
            return
        state.members.stream_broken(task, incarnation)
        if state.script and task in state.finished:
            state.members.leave(task)
        self._lives(now_s)

    def _failed(self, beat: Beat, now_s: float) -> None:
        state = self.state
        if beat.task.startswith("evaluator/"):
            state.say("evaluator", f"{beat.task}: {beat.failure}; training goes on without it", "warning")
            # It ends with that, and nothing waits for its word any more.
            state.lost_scores = beat.failure
            state.members.leave(beat.task)
            return
        code = beat.failure_code or InternalError.exit_code
        self.ending.begin(f"{beat.task}: {beat.failure}", now_s, exit_code=code)

    def _leaving(self, task: str, now_s: float) -> None:
        """A task was asked to end, and wants to go."""
        state = self.state
        member = state.members.get(task)
        if member is None or state.phase is Phase.ENDED:
            return
        if state.phase is Phase.STOPPING and member.role != "evaluator":
            # The common last step needs everybody else; they are let go with the end.
            return
        others = [other for other in state.trainers() if other.task != task]
        if member.role == "ps" or (member.trains and (not others or state.script)):
            if member.role == "ps" and not self.setup.begun:
                state.members.leave(task)
                state.say("left", f"{task} was asked to end before the job began; waiting for another", "warning")
                return
            if member.role == "ps" and not any(task in (place.task, place.standby_task) for place in state.placement):
                state.members.leave(task)
                state.say("left", f"{task} leaves as it was asked to; it held nothing")
                return
            why = "nobody else can take its place" if member.trains else "its shards have no other holder"
            self.ending.begin(f"stopped: {task} was asked to end, and {why}", now_s)
            return
        state.members.leave(task)
        if member.trains and state.table_sent:
            self.workers.lost(member, f"{task} leaves as it was asked to", now_s, level="info")
        else:
            state.say("left", f"{task} leaves as it was asked to")

    # Life and death

    def tick(self, now_s: float) -> None:
        """Time passes: call about ten times a second."""
        state = self.state
        self._lives(now_s)
        self.workers.links(now_s)
        self.takeover.tick(now_s)
        self.recovery.tick(now_s)
        self.setup.tick(now_s)
        self.workers.tick(now_s)
        self.ending.poll()
        if state.phase is Phase.RUNNING and state.sync and 0 < state.stop_step <= state.step_max + 1:
            # The last step is being closed: don't wait for the next heartbeat to learn it.
            state.ask_status()
        self._progress(now_s)

    def _lives(self, now_s: float) -> None:
        state = self.state
        if state.ended:
            return
        for change in state.members.tick(now_s):
            member = change.member
            if member.living and member.trains and (member.task, member.incarnation) in self._told_failures:
                # Why it goes has been said.
                continue
            if member.living:
                level = "info" if member.state is Life.ALIVE else "warning"
                state.say("life", change.sentence, level, task=member.task, state=member.state.value)
            elif member.role == "ps" and self.takeover.hearing:
                self.takeover.gone(member.task, change.sentence)
            elif member.role == "ps" and self.setup.begun:
                self.recovery.lost(member.task, change.sentence, now_s)
                if state.ended:
                    return
            elif member.trains and state.table_sent:
                self.workers.lost(member, change.sentence, now_s)
            else:
                # No server knows of it yet in this timeline, so it is fenced as it is.
                self.workers.take_back(member.incarnation)
                rest = "the job goes on without it" if member.role == "evaluator" else "waiting for another"
                state.say("life", f"{change.sentence}; {rest}", "warning", task=member.task, state=member.state.value)

    def _progress(self, now_s: float) -> None:
        if self.running.complete():
            self.ending.begin("done", now_s, done=True)
        self.ending.tick(now_s)

    # Outcomes of actions

    def done(self, number: int, result: CommandResult, now_s: float) -> None:
        """A command came back from every ps."""
        for task, value in result.values.items():
            if isinstance(value, PsStatus):
                self.ps_status(task, value, now_s, asked=True)
        self.state.continued(number, result, now_s)
        self._progress(now_s)

    def saved(self, saved: Saved, now_s: float) -> None:
        """A checkpoint was committed, or could not be."""
        self.running.saved(saved)
        self.setup.saved(saved)
        self.ending.saved(saved, now_s)
        self._progress(now_s)

    def found(self, found: Found, now_s: float) -> bool:
        """The checkpoint to go back to after a loss; False where it is not asked for any more."""
        return self.recovery.found(found, now_s)

    def fatal(self, exit_code: int, reason: str, now_s: float) -> None:
        """Something without which the chief can't be trusted went wrong."""
        self.state.end(exit_code, reason, now_s)

    # Questions

    def stop(self, reason: str, now_s: float) -> int:
        """End the job with a checkpoint; returns the step it stops at, 0 where that has still to be found out."""
        self.ending.begin(f"stopped: {reason}", now_s)
        return self.ending.stop_step

    def lease(self, task: str, incarnation: int, done: tuple[int, ...], now_s: float) -> LeaseAnswer:
        """Asynchronous mode: batches to train on next."""
        answer = self.running.lease(task, incarnation, done)
        self._progress(now_s)
        return answer

    def report(
        self, task: str, incarnation: int, step: int, metrics: Mapping[str, float], failure: str, now_s: float
    ) -> bool:
        """The evaluator's word on a checkpoint; returns whether it is the best so far. Raises FencedError."""
        state = self.state
        if not state.members.current(task, incarnation, ("evaluator",)):
            raise FencedError(
                f"{task} incarnation {incarnation:#x} is not admitted; what it reports of step {step} changes nothing"
            )
        best = False
        if not metrics:
            state.unscored[step] = failure or "the job has no `evaluate`"
        if failure:
            state.say(
                "evaluation_failed", f"{task} could not score step {step}: {failure}; training goes on", "warning"
            )
        else:
            best = state.better(metrics)
            shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            state.say(
                "evaluation",
                f"step {step}: {shown}{' (best so far)' if best else ''}",
                step=step,
                metrics=dict(metrics),
            )
            if best:
                state.best = (step, dict(metrics))
                state.actions.append(MarkBest(step=step, metrics=dict(metrics)))
        state.metrics[step] = dict(metrics)
        # A list of pairs: the first metric may be the one that decides.
        state.record("evaluation", step=step, metrics=list(metrics.items()), best=best)
        self._progress(now_s)
        return best

    def job_view(self) -> JobView:
        """Job, plan and placement. Raises UsageError while they are not known yet."""
        state = self.state
        if state.job is None or not (state.timeline or state.ended):
            raise UsageError("the job is not known yet; ask again once the orders name a timeline")
        # A job that ended before it began still has its plan, for those who only want to know what it was.
        plan = state.plan or make_plan(state.job.tensors, len(state.settings.ps))
        return JobView(job=state.job, plan=plan, placement=state.placement, timeline=state.timeline)

    def orders(self, task: str, incarnation: int) -> Orders:
        """What one life of a task shall do now."""
        state = self.state
        member = state.members.get(task)
        if member is None or member.incarnation != incarnation or not member.living:
            left = member is not None and member.incarnation == incarnation and member.state is Life.LEFT
            return Orders(
                phase=Phase.ENDED if left or state.ended else state.phase,
                exit_code=0,
                reason="left as asked" if left else f"incarnation {incarnation:#x} is fenced",
                fenced=not left,
            )
        return Orders(
            phase=state.phase,
            timeline=state.timeline,
            replicas=replicas_of(state.assignment, task) if member.trains else (),
            init=state.phase is Phase.INIT and state.initializer == task,
            stop_step=state.stop_step,
            exit_code=state.exit_code,
            reason=state.reason,
            checkpoint_step=state.checkpoint_step,
            final_step=state.final_step,
            workers=len(state.trainers()),
            first_step=state.base_step,
            awaited=tuple(state.awaited()) if state.phase in (Phase.WAITING, Phase.INIT) and self._at_start else (),
            barrier=self.barriers.state_of(task),
        )

    @property
    def _at_start(self) -> bool:
        """Whether training has never begun: later it waits for those that were lost, which events tell."""
        return self.state.running_s is None and not self.setup.done_before

    def rows(self, now_s: float) -> tuple[TaskStatus, ...]:
        """The tasks, for `shardline status`."""
        state = self.state
        rows = []
        for member in state.members:
            shards = {place.shard for place in state.placement if place.task == member.task}
            rows.append(
                TaskStatus(
                    task=member.task,
                    state=member.state.value,
                    incarnation=member.incarnation,
                    address=member.address,
                    metrics_address=member.metrics_address,
                    last_heard_s=now_s - member.last_heard_s,
                    step=state.steps.get(member.task, 0),
                    replicas=replicas_of(state.assignment, member.task) if member.trains else (),
                    traffic=state.traffic.get(member.task, Traffic()),
                    shards=tuple(state.shards[number] for number in sorted(shards & state.shards.keys())),
                )
            )
        return tuple(rows)

"""Tasks that train: which are lost, whose link is broken, who is left to continue (PROTOCOL 1.6)."""

from __future__ import annotations

from shardline import division
from shardline.core.orders import Phase
from shardline.errors import JobError, TaskLostError
from shardline_chief.rules.events import EndAsked, Fenced, ServerLost, Stage, StrangerLost, Tick, TrainerLost
from shardline_chief.rules.state.membership import Member
from shardline_chief.rules.state.state import State


class Workers:
    """Rules for the tasks that train, from their first step to the last."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._uneven_since_s: float | None = None
        self._suspected_s: float | None = None
        """Since when some task can't reach a server."""

    # Losses

    def lost(self, event: TrainerLost, now_s: float) -> None:
        """A task that trains is lost: fence it on every server, then give its work to living tasks."""
        self.state.after_table.append(Fenced(event))

    def fenced(self, event: Fenced, now_s: float) -> None:
        """Every server has fenced the lost task: give its work to living tasks."""
        state, lost, member = self.state, event.lost, event.lost.member
        if state.ended:
            return
        moved = "; ".join(state.reassign(member.incarnation))
        few = not state.tasks.trainers() or state.tasks.too_few()
        rest = self._waits() if few else moved or "none of its work is lost"
        worst = "warning" if few else lost.level
        state.say("life", f"{lost.sentence}; {rest}", worst, task=member.task, state=member.state.value)

    def stranger_lost(self, event: StrangerLost, now_s: float) -> None:
        """No server knows the task in this timeline, so there is nothing to fence."""
        member = event.member
        self.state.reassign(member.incarnation)
        rest = "the job continues without it" if not member.row.needed else "waiting for another"
        fields = {"task": member.task, "state": member.state.value}
        self.state.say("life", f"{event.sentence}; {rest}", "warning", **fields)

    def server_lost(self, event: ServerLost, now_s: float) -> None:
        """A server is lost before it was given anything."""
        member = self.state.tasks.members.get(event.task)
        if member is not None and not event.back:
            self.stranger_lost(StrangerLost(member, event.why), now_s)

    def _waits(self) -> str:
        wait = f"waiting {self.state.timeouts.lost_s:g} s for a task to join"
        there = len(self.state.tasks.trainers())
        if not there:
            return f"no task is left to train: {wait}"
        return f"{there} of at least {self.state.settings.min_workers} tasks that train are left: {wait}"

    # Links

    def links(self, event: Tick, now_s: float) -> None:
        """Trainers can't reach a server that the chief can reach: decide which side is at fault (PROTOCOL 1.6)."""
        state, tasks = self.state, self.state.tasks
        trainers = self._witnesses()
        suspected = any(tasks.suspects.get(member.task) for member in trainers)
        # A restarted chief hears all servers first, so that losses are decided together.
        if state.stage is not Stage.TRAINING or not suspected:
            self._suspected_s = None
            return
        if self._suspected_s is None:
            self._suspected_s = now_s
        if now_s - self._suspected_s < state.timeouts.suspect_s:
            # Others may be about to report the same, which makes it the server's fault.
            return
        for place in state.layout.placement:
            named = [member for member in trainers if place.task in tasks.suspects.get(member.task, ())]
            host = tasks.members.get(place.task)
            if named and host is not None and host.living:
                who = ", ".join(member.task for member in named)
                sentence = f"{who} got no answer from {place.task} at {place.address} for {state.timeouts.dead_s:g} s"
                self._judge_link(ServerLost(place.task, sentence), named, len(trainers), now_s)
                return

    def _witnesses(self) -> list[Member]:
        """Tasks whose reports on servers count: not spares, which exchange nothing with servers and may be many."""
        state, work = self.state, self.state.work
        trainers = state.tasks.trainers()
        if state.chooses_batches:
            return trainers
        tasks, lives = set(work.assignment.values()), work.leases.holders if work.leases is not None else set()
        return [member for member in trainers if member.task in tasks or member.incarnation in lives]

    def _judge_link(self, lost: ServerLost, named: list[Member], trainers: int, now_s: float) -> None:
        """lost: event to emit if the server is at fault. named: tasks that can't reach it. trainers: their number."""
        tasks, sentence = self.state.tasks, lost.why
        if 2 * len(named) > trainers:
            why = "most of the tasks that train" if trainers > 1 else "no other task trains"
            self.state.emit(ServerLost(lost.task, f"{sentence} ({why})"))
            return
        for member in named:
            tasks.suspects.pop(member.task)
            tasks.members.declare_dead(member.task)
            self.lost(TrainerLost(member, f"{sentence}, but the others did"), now_s)

    # Too few, or uneven

    def alone(self, event: Tick, now_s: float) -> None:
        """Too few tasks train, or a script lacks one of its workers: wait, then end the job."""
        state, tasks = self.state, self.state.tasks
        if state.phase is not Phase.RUNNING:
            return
        lacking = not tasks.working() or tasks.too_few() or state.lacks_team
        if state.script:
            lacking = bool(self._gone_from_script())
        if not lacking or len(tasks.finished) >= state.settings.trainers:
            tasks.alone_since_s = None
            return
        if tasks.alone_since_s is None:
            tasks.alone_since_s = now_s
        if now_s - tasks.alone_since_s >= state.timeouts.lost_s:
            who = "every task that trains"
            if state.script:
                who = f"{', '.join(self._gone_from_script())}, without which a script can't continue,"
            elif state.lacks_team and not tasks.too_few():
                assert state.job is not None
                who = f"a team of {division.of(state.job).team} workers of one host, which share layers,"
            elif tasks.trainers():
                who = f"{self._gone()} ({len(tasks.trainers())} of at least {state.settings.min_workers} train)"
            missed = f"no replacement joined within {state.timeouts.lost_s:g} s"
            reason = f"{who} is gone and {missed}. {state.saves.how_to_go_on()}"
            state.emit(EndAsked(reason, TaskLostError.exit_code))

    def _gone_from_script(self) -> list[str]:
        """Workers of a script that are gone and have not finished."""
        tasks = self.state.tasks
        there = {*(member.task for member in tasks.trainers()), *tasks.finished}
        names = [f"worker/{index}" for index in range(self.state.settings.workers)]
        return [task for task in names if task not in there]

    def _gone(self) -> str:
        """Tasks that trained and no longer do, as a phrase."""
        members = self.state.tasks.members
        return ", ".join(m.task for m in members if m.trains and not m.living) or "a task that trains"

    def uneven(self, event: Tick, now_s: float) -> None:
        """Workers of a synchronous script make different numbers of steps: fail once the first has finished."""
        state, tasks = self.state, self.state.tasks
        ahead = self._ahead() if state.phase is Phase.RUNNING else []
        if not ahead:
            self._uneven_since_s = None
            return
        if self._uneven_since_s is None:
            self._uneven_since_s = now_s
        # A worker that is neither done nor waiting may be saving its results: give it time for that.
        undecided = len(tasks.working()) > len(ahead)
        if undecided and now_s - self._uneven_since_s < state.timeouts.lost_s:
            return
        made = {task: tasks.steps.get(task, 0) for task in sorted(tasks.finished)}
        done = ", ".join(f"{task} ended after {steps} steps" for task, steps in made.items())
        reason = (
            f"{done}, but {', '.join(ahead)} {'was' if len(ahead) == 1 else 'were'} to make {max(made.values()) + 1} "
            "or more: each step of a synchronous script needs all workers, so the job ends here. Let all make the "
            "same number of steps, and call optimizer.step() in each of them"
        )
        state.emit(EndAsked(reason, JobError.exit_code))

    def _ahead(self) -> list[str]:
        """Workers of a script that have pushed a step that an already finished worker will never push."""
        state, tasks = self.state, self.state.tasks
        if not (state.script and state.mode.assigns_replicas and tasks.finished):
            return []
        gone = {int(task.rpartition("/")[2]) for task in tasks.finished}
        # A report from before the other worker finished lacks its replica too.
        last = max(tasks.steps.get(task, 0) for task in tasks.finished)
        shards = state.progress.shards.values()
        open_ = [set(s.waiting_for) for s in shards if s.step_min >= last and gone & set(s.waiting_for)]
        return [m.task for m in tasks.working() if any(m.index not in missing for missing in open_)]

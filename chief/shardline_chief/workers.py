"""Those that train: who is gone, whose link is broken, who is left to go on (PROTOCOL 1.6). Pure, like program.py."""

from __future__ import annotations

from shardline.errors import JobError, TaskLostError
from shardline.rpc.link import Phase, StepReport
from shardline_chief.actions import CommandResult
from shardline_chief.ending import Ending
from shardline_chief.membership import Member
from shardline_chief.messages import TRAINERS, Beat
from shardline_chief.recovery import Recovery
from shardline_chief.running import Running
from shardline_chief.setup import Setup, reassign
from shardline_chief.state import State


class Workers:
    """Rules over the tasks that train, from their first step to the last."""

    def __init__(self, state: State, setup: Setup, running: Running, ending: Ending, recovery: Recovery) -> None:
        self.state = state
        self.setup = setup
        self.running = running
        self.ending = ending
        self.recovery = recovery
        self._uneven_since_s: float | None = None
        self._suspected_s: float | None = None
        """Since when a task does not hear a server."""

    def tick(self, now_s: float) -> None:
        """Deadlines of those that are left; after those of the servers."""
        self._alone(now_s)
        self._uneven(now_s)

    def links(self, now_s: float) -> None:
        """Tasks that train can't reach a server that the chief hears: the server's fault, or theirs (PROTOCOL 1.6)."""
        state = self.state
        trainers = self._witnesses()
        suspected = any(state.suspects.get(member.task) for member in trainers)
        # A chief that comes back first hears all servers: what is lost is decided once, with what the others hold.
        if state.phase is not Phase.RUNNING or state.returning or not suspected:
            self._suspected_s = None
            return
        if self._suspected_s is None:
            self._suspected_s = now_s
        if now_s - self._suspected_s < state.timeouts.suspect_s:
            # Others may be about to say the same, which makes it the server's fault.
            return
        for place in state.placement:
            named = [member for member in trainers if place.task in state.suspects.get(member.task, ())]
            host = state.members.get(place.task)
            if not named or host is None or not host.living:
                continue
            who = ", ".join(member.task for member in named)
            sentence = f"{who} did not hear {place.task} at {place.address} for {state.timeouts.dead_s:g} s"
            if 2 * len(named) > len(trainers):
                why = "most of those that train" if len(trainers) > 1 else "nobody else trains"
                self.recovery.lost(place.task, f"{sentence} ({why})", now_s)
                return
            for member in named:
                state.suspects.pop(member.task)
                state.members.declare_dead(member.task)
                self.lost(member, f"{sentence}, and the others do", now_s)
            return

    def _witnesses(self) -> list[Member]:
        """Whose word on the servers counts. Spares exchange nothing with them, and a stranger could be many spares."""
        state = self.state
        trainers = state.trainers()
        if state.sync:
            holders = set(state.assignment.values())
            return [member for member in trainers if member.task in holders]
        if state.leases is None:
            return trainers
        holding = state.leases.holders
        return [member for member in trainers if member.incarnation in holding]

    def trained(self, incarnation: int) -> bool:
        """Whether this life of a task that trains has been given anything to train on."""
        state = self.state
        if state.sync:
            return bool(state.given.get(incarnation))
        return state.leases is None or state.leases.was_given(incarnation)

    def reported(self, beat: Beat) -> tuple[StepReport, ...]:
        """The steps that a beat tells of, but for replicas and batches that its sender was never given."""
        state = self.state
        if not state.members.current(beat.task, beat.incarnation, TRAINERS):
            return ()
        leases = state.leases
        if state.returning or (not state.sync and leases is None):
            # Who trains what is known again soon; a script chooses its batches.
            return beat.steps
        if leases is not None:
            return tuple(report for report in beat.steps if leases.was_given(beat.incarnation, report.step))
        given = state.given.get(beat.incarnation, ())
        return tuple(report for report in beat.steps if report.replica in given)

    def lost(self, member: Member, sentence: str, now_s: float, *, level: str = "warning") -> None:
        """A task that trains is gone: fence it on every ps, then give its work to the living."""
        state = self.state
        if self.setup.trainer_lost(member):
            state.say("life", sentence, level, task=member.task, state=member.state.value)
            return

        def fenced(result: CommandResult, at_s: float) -> None:
            if state.ended:
                return
            moved = self.take_back(member.incarnation)
            few = not state.trainers() or state.too_few()
            rest = self._waits() if few else moved or "nothing of its work is lost"
            worst = "warning" if few else level
            state.say("life", f"{sentence}; {rest}", worst, task=member.task, state=member.state.value)

        state.publish_members(fenced)

    def take_back(self, incarnation: int | None) -> str:
        """After every ps has fenced a life: its work goes to the living. Returns what moved, for the sentence."""
        state = self.state
        phrases = []
        if incarnation is not None and state.leases is not None:
            leases = state.leases.fence(incarnation)
            if leases:
                phrases.append(f"{sum(lease.count for lease in leases)} batches are handed out again")
        if state.phase in (Phase.RUNNING, Phase.STOPPING):
            phrases += reassign(state)
        return "; ".join(phrases)

    def _waits(self) -> str:
        wait = f"waiting {self.state.timeouts.lost_s:g} s for a task to join"
        there = len(self.state.trainers())
        if not there:
            return f"nobody is left to train: {wait}"
        return f"{there} of at least {self.state.settings.min_workers} tasks that train are left: {wait}"

    def _alone(self, now_s: float) -> None:
        """Nobody trains, fewer than the job wants, or a script lacks one of its workers: wait, then end."""
        state = self.state
        if state.phase is not Phase.RUNNING:
            return
        lacking = not state.working() or state.too_few()
        if state.script:
            lacking = bool(self._gone_from_script())
        if not lacking or len(state.finished) >= state.settings.trainers:
            state.alone_since_s = None
            return
        if state.alone_since_s is None:
            state.alone_since_s = now_s
        if now_s - state.alone_since_s >= state.timeouts.lost_s:
            who = "every task that trains"
            if state.script:
                who = f"{', '.join(self._gone_from_script())}, without which a script can't go on,"
            elif state.trainers():
                who = f"{self._gone()} ({len(state.trainers())} of at least {state.settings.min_workers} train)"
            self.ending.begin(
                f"{who} is gone and none came within {state.timeouts.lost_s:g} s. {state.what_remains()}",
                now_s,
                exit_code=TaskLostError.exit_code,
            )

    def _gone_from_script(self) -> list[str]:
        """Workers of a script that are not there and have not done their part."""
        there = {*(member.task for member in self.state.trainers()), *self.state.finished}
        names = [f"worker/{index}" for index in range(self.state.settings.workers)]
        return [task for task in names if task not in there]

    def _gone(self) -> str:
        """Tasks that trained and do no more."""
        return ", ".join(m.task for m in self.state.members if m.trains and not m.living) or "a task that trains"

    def _uneven(self, now_s: float) -> None:
        """Workers of a synchronous script make different numbers of steps: fail where the first one has finished."""
        state = self.state
        ahead = self.running.ahead() if state.phase is Phase.RUNNING else []
        if not ahead:
            self._uneven_since_s = None
            return
        if self._uneven_since_s is None:
            self._uneven_since_s = now_s
        # Who is neither done nor waiting may be saving its results: it has time for that.
        undecided = len(state.working()) > len(ahead)
        if undecided and now_s - self._uneven_since_s < state.timeouts.lost_s:
            return
        made = {task: state.steps.get(task, 0) for task in sorted(state.finished)}
        done = ", ".join(f"{task} made {steps} steps and ended" for task, steps in made.items())
        self.ending.begin(
            f"{done}, {', '.join(ahead)} {'was' if len(ahead) == 1 else 'were'} to make {max(made.values()) + 1} or "
            "more: each step of a synchronous script needs all workers, so the job ends here. Have all make the same "
            "number of steps, and call optimizer.step() in each of them",
            now_s,
            exit_code=JobError.exit_code,
        )

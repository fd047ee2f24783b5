"""A chief that comes back goes on with the job that the last one left, as if nothing had been (PROTOCOL 1.6).

First every server that the journal names is heard, or is seen to be gone: workers go on meanwhile by the orders they
have. Then this chief takes command (Lead, with its higher term), compares what the servers hold with the journal, and
sends them the table of the living. Where a server lacks what it should hold, recovery.py goes back to a checkpoint.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from shardline.core.orders import Phase
from shardline.core.plan import make_plan
from shardline.core.spec import JobSpec, differences
from shardline.core.status import PsStatus
from shardline.errors import TaskLostError
from shardline_chief.rules.actions import Activate, AskStatus, CommandResult, Cut, Finish, Lead, Release
from shardline_chief.rules.cuts import CutLedger
from shardline_chief.rules.ending import Ending
from shardline_chief.rules.membership import State as Life
from shardline_chief.rules.recovery import Recovery
from shardline_chief.rules.replay import Remembered
from shardline_chief.rules.running import Running
from shardline_chief.rules.standbys import as_found
from shardline_chief.rules.start import Setup, addresses, reassign
from shardline_chief.rules.state import Recovered, Settings, State, as_in_cluster, filled_shards


def obstacle(remembered: Remembered, job: JobSpec | None, settings: Settings) -> str:
    """Why the unfinished job in the folder is not the one that is started now; empty where it is, or may be."""
    known = remembered.job
    if known is None:
        return ""
    if job is not None:
        phrases = differences(as_in_cluster(job, settings), known)
        if phrases:
            return "; ".join(phrases)
    if remembered.plan_id:
        plan = make_plan(known.tensors, len(settings.ps))
        if plan.plan_id != remembered.plan_id:
            return f"its parameters were cut for another number of parameter servers than {len(settings.ps)}"
    return ""


class Stage(enum.Enum):
    """Where the return is."""

    NONE = 0
    """There is none, or it is over."""
    HEARING = 1
    """Waiting until each known server is heard or known to be gone."""
    ASKING = 2
    """Standbys may have to take over: asking the servers that are there what they hold."""
    LEADING = 3
    """Taking command and comparing."""


class Takeover:
    """Rules from the start of a chief that comes back until training has a chief again."""

    def __init__(self, state: State, setup: Setup, running: Running, ending: Ending, recovery: Recovery) -> None:
        self.state = state
        self.setup = setup
        self.running = running
        self.ending = ending
        self.recovery = recovery
        self.stage = Stage.NONE
        self._known = Remembered()
        self._unheard: set[str] = set()
        self._gone: dict[str, str] = {}
        """Why, of each known server that is not there any more."""
        self._began_s = 0.0
        self._said_few = False
        state.on_ps_lost = self._lost

    @property
    def hearing(self) -> bool:
        """Whether nothing may be decided yet, since it is not known who is there, or with what."""
        return self.stage in (Stage.HEARING, Stage.ASKING)

    # The start

    def begin(self, known: Remembered, now_s: float, trained_s: float) -> None:
        """Take up what was. trained_s: seconds since training began, by the wall clock."""
        state = self.state
        self._known, self._began_s = known, now_s
        self.ending.early = known.stopping
        state.job = known.job
        state.machine = known.machine
        state.finished = set(known.finished)
        state.metrics, state.best = dict(known.metrics), known.best
        state.leases = known.leases
        state.first_step, state.base_step = known.first_step, known.base_step
        state.checkpoint_step, state.checkpoint_path = known.checkpoint_step, known.checkpoint_path
        state.recoveries = [Recovered(**recovered) for recovered in known.recoveries]
        state.failovers = known.failovers + 1
        if known.began_s is not None:
            state.running_s = now_s - trained_s
        for member in known.members.values():
            state.members.recall(member, now_s)
        if known.ended is not None:
            self._say_goodbye(*known.ended)
            return
        self._unheard = {task for task, member in known.members.items() if member.role == "ps"}
        self.stage = Stage.HEARING
        state.returning = True
        if known.job is not None and known.timeline:
            self._take_up_history(known.job)
        what = f"job {known.job.name!r}" if known.job is not None else "the job"
        state.say(
            "takeover",
            f"{what} of the chief of term {known.term} has not ended: this chief, of term {state.settings.term}, goes "
            f"on with it, {len(known.members)} tasks are known",
            term=state.settings.term,
            after=known.term,
        )

    def _take_up_history(self, job: JobSpec) -> None:
        state, known = self.state, self._known
        state.plan = make_plan(job.tensors, len(state.settings.ps))
        state.ledger = CutLedger(filled_shards(state.plan))
        state.placement = known.placement
        state.timeline = known.timeline
        lives = {member.task: member.incarnation for member in known.members.values()}
        whole = [p for p in known.placement if known.active or p.shard in known.kept]
        self.recovery.remember({p.shard: lives[p.task] for p in whole if p.task in lives})
        self.setup.begun = True
        state.phase = Phase.INIT
        if known.active and known.began_s is not None:
            state.phase = Phase.RUNNING
            self.setup.table_there = self.setup.values_there = self.setup.active = True
            self.running.remember(known.checkpoint_step)
            state.stop_step = known.stop_step or self._bound()
            reassign(state)

    def _bound(self) -> int:
        """The step that the job file ends at; 0 where there is none."""
        state = self.state
        return state.job.steps if state.job is not None and state.sync and not state.script else 0

    def _say_goodbye(self, exit_code: int, reason: str) -> None:
        """The end was decided, and not everybody was told."""
        state = self.state
        state.phase = Phase.ENDED
        state.exit_code, state.reason = exit_code, reason
        state.final_step = state.checkpoint_step
        state.base_step = max(state.base_step, state.checkpoint_step)
        state.say(
            "takeover", f"the job had ended before the last chief did: {reason}; telling the tasks that are there"
        )
        state.actions.append(Finish(exit_code=exit_code, reason=reason))

    # Who is there

    def heard(self, task: str) -> None:
        """A known task is alive."""
        self._unheard.discard(task)

    def gone(self, task: str, why: str) -> None:
        """A known server is gone, or its next process is here."""
        self._unheard.discard(task)
        if task not in self._gone:
            self._gone[task] = why
            self.state.say("life", f"{why}; it may have held shards", "warning", task=task)

    def _lost(self, task: str, why: str, now_s: float) -> None:
        """A server did not do what it was told."""
        if self.hearing:
            self.state.members.declare_dead(task)
            self.gone(task, why)
        else:
            self.recovery.lost(task, why, now_s)

    def tick(self, now_s: float) -> None:
        """Go on as far as possible."""
        if self.stage is Stage.HEARING and not self._unheard:
            if self._most_are_here(now_s):
                self._decide(now_s)
        elif self.stage is Stage.LEADING and not self.state.returning:
            # A server was lost meanwhile: recovery has taken over.
            self._over()

    def _most_are_here(self, now_s: float) -> bool:
        """Whether more than half of the servers can be led: with fewer, another chief might lead the others."""
        state = self.state
        held = sorted({place.task for place in self._known.placement})
        here = {member.task for member in state.members.living("ps")}
        missing = [task for task in held if task not in here]
        if 2 * len(missing) < len(held) or not held:
            return True
        waited_s = now_s - self._began_s
        few = f"{len(held) - len(missing)} of {len(held)} parameter servers are there"
        if waited_s >= state.timeouts.join_s:
            state.end(
                TaskLostError.exit_code,
                f"{', '.join(missing)} did not come within {state.timeouts.join_s:g} s, and with half of them or fewer "
                f"this chief can't know that no other leads them. {state.what_remains()}",
                now_s,
            )
            self._over()
            return False
        if not self._said_few:
            self._said_few = True
            state.say(
                "takeover",
                f"{few}: waiting {state.timeouts.join_s - waited_s:.0f} s for {', '.join(missing)}",
                "warning",
            )
        state.tell_wait(now_s, self._began_s + state.timeouts.join_s, ", ".join(missing))
        return False

    def _decide(self, now_s: float) -> None:
        state, known = self.state, self._known
        self.stage = Stage.LEADING
        if not known.timeline or known.job is None:
            # Nothing was begun: what is there is a cluster that waits for its chief.
            state.returning = False
            self._over()
            self.setup.advance(now_s)
            return
        if state.settings.standbys and known.began_s is not None and (known.active or known.stays):
            self._ask()
            return
        lost = self._missing()
        if state.phase is Phase.INIT or lost:
            self._go_back(lost, now_s)
            return
        named = addresses(known.placement)
        state.command(Lead(addresses=named), state.history(lambda result, at_s: self._led()))

    def _missing(self) -> dict[str, str]:
        """Servers that held shards and are not the processes that they were: why, by name."""
        held = {place.task for place in self._known.placement}
        lost = {task: why for task, why in self._gone.items() if task in held}
        return lost | {task: f"{task} was gone when the chief came back" for task in held - self._known.members.keys()}

    # Standbys

    def _ask(self) -> None:
        """Take command of those that are there, to hear what they hold."""
        state, known = self.state, self._known
        self.stage = Stage.ASKING
        named = addresses(known.placement)
        there = {m.task: m.address for m in state.members.living("ps") if m.task in known.members.keys() - self._gone}
        heirs = {heir.task for heir in known.promoted.values()}
        servers = {task: at for task, at in there.items() if task in named or task in heirs}
        state.command(Lead(addresses=servers), self._asked)

    def _asked(self, result: CommandResult, now_s: float) -> None:
        if self._again(result):
            return
        self.state.command(AskStatus(), self._heard_of_all)

    def _again(self, result: CommandResult) -> bool:
        """Whether another server turned out to be gone: then it is decided anew, with those that are left."""
        if self.stage is not Stage.ASKING or self.state.ended:
            return True
        for task, error in result.errors.items():
            self.gone(task, f"{task} does not answer: {error}")
        if result.errors:
            self.stage = Stage.HEARING
        return bool(result.errors)

    def _heard_of_all(self, result: CommandResult, now_s: float) -> None:
        """Go on as it is, or with standbys in the place of those that are gone, or go back."""
        if self._again(result):
            return
        state, known = self.state, self._known
        servers = {task: value for task, value in result.values.items() if task not in self._gone}
        living = {member.task: member.address for member in state.members.living("ps")}
        found = as_found(known.placement, known.promoted, servers, since=known.since, living=living)
        self.stage = Stage.LEADING
        if found is None:
            self._go_back(self._missing() or self._empty(servers), now_s)
            return
        state.placement = found.placement
        behind = [task for task, status in servers.items() if status.timeline != known.timeline]
        if not found.promoted and not behind and known.active:
            self._compared(result, now_s)
            return
        self._release_copies(servers)
        state.placement = known.placement
        told = [shard for status in servers.values() for shard in status.shards if shard.initialized]
        steps = [shard.step_min if state.sync else shard.version for shard in told]
        why = "; ".join(self._missing().values()) or "the last chief died while standbys took over"
        state.returning = False
        self._over()
        step = min(steps, default=state.base_step)
        self.recovery.stand_in(found, why, now_s, since_s=self._began_s, step=step)

    def _empty(self, servers: Mapping[str, PsStatus]) -> dict[str, str]:
        """Servers that are there without what they should hold: why, by name."""
        lost = {}
        for place in self._known.placement:
            status = servers.get(place.task)
            held = {shard.shard for shard in status.shards if shard.initialized} if status is not None else set()
            if place.shard not in held:
                lost[place.task] = f"{place.task} has no values for shard {place.shard}"
        return lost

    def _release_copies(self, servers: Mapping[str, PsStatus]) -> None:
        """Asynchronous: which leases were done when these were copied died with the last chief; they are of no use."""
        state = self.state
        held = [cut.step for status in servers.values() for shard in status.shards for cut in shard.cuts]
        if held and not state.sync:
            state.command(Release(timeline=state.timeline, step=max(held)))

    def _go_back(self, lost: dict[str, str], now_s: float) -> None:
        """Something of what the shards held is not there, or was never there."""
        state = self.state
        state.returning = False
        self._over()
        everything = lost.keys() >= {place.task for place in self._known.placement}
        if everything and self.ending.early == self._known.stopping:
            # Not only the chief was started again but the job: whoever did that wants it to go on.
            self.ending.early = None
        for task, why in sorted(lost.items()):
            member = state.members.get(task)
            self.recovery.lost(task, why, now_s, back=member is not None and member.state is Life.ALIVE)
        if not lost:
            self.recovery.again("the last chief died while it filled the parameter servers", now_s)

    # Taking command

    def _led(self) -> None:
        self.state.command(AskStatus(), self._compared)

    def _compared(self, result: CommandResult, now_s: float) -> None:
        """What does not hold the journal's timeline has been found out on the way here, see Program.ps_status."""
        state = self.state
        if self.stage is not Stage.LEADING or not state.returning:
            return
        lost = {task: f"{task} does not answer: {error}" for task, error in result.errors.items()}
        for place in state.placement:
            shard = state.shards.get(place.shard)
            filled = state.plan is not None and bool(state.plan.shards[place.shard].buckets)
            if filled and (shard is None or not shard.initialized):
                lost.setdefault(place.task, f"{place.task} has no values for shard {place.shard}")
        if lost:
            self._go_back(lost, now_s)
            return
        self._release_copies({task: value for task, value in result.values.items() if isinstance(value, PsStatus)})
        state.publish_members(state.history(lambda answers, at_s: self._known_to_all()))

    def _known_to_all(self) -> None:
        state = self.state
        # The last chief may have died between the note and the act.
        state.command(Activate(timeline=state.timeline), state.history(lambda result, at_s: self._activated(at_s)))

    def _activated(self, now_s: float) -> None:
        state = self.state
        if not state.sync or not state.stop_step:
            self._adopted(now_s)
            return
        cut = Cut(timeline=state.timeline, step=state.stop_step, stop=True)
        state.command(cut, state.history(self._bounded))

    def _bounded(self, result: CommandResult, now_s: float) -> None:
        state = self.state
        if state.stop_step != self._bound() and any(passed for passed, _ in result.values.values()):
            # The stop that was asked for reached no server: it is chosen again.
            state.stop_step = self._bound()
            self._activated(now_s)
            return
        self._adopted(now_s)

    def _adopted(self, now_s: float) -> None:
        state = self.state
        state.returning = False
        self._over()
        reassign(state)
        self.recovery.running_again(now_s)
        self.recovery.adopted(state.placement, now_s)
        state.record("adopted", timeline=state.timeline, step=state.step)
        state.say(
            "adopted",
            f"the chief is back after {now_s - self._began_s:.1f} s: training goes on at step {state.step}, nothing is "
            "made again",
            step=state.step,
            seconds=now_s - self._began_s,
        )

    def _over(self) -> None:
        self.stage = Stage.NONE

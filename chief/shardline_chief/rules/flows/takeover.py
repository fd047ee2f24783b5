"""A restarted chief continues the job that the last one left, without a rollback if it can (PROTOCOL 1.6).

First it waits until every server in the journal is heard or known to be gone; workers meanwhile follow their last
orders. Then it takes command (Lead, with its higher term), compares what the servers hold with the journal, and sends
them the table of living tasks. If a server lacks what it should hold, recovery.py rolls back to a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardline import division
from shardline.core.orders import Phase
from shardline.core.spec import JobSpec
from shardline.core.status import PsStatus
from shardline.errors import TaskLostError
from shardline_chief.rules.actions import AskStatus, Finish, Lead, Release
from shardline_chief.rules.codecs.error_memory import applied, goes_back, unbroken
from shardline_chief.rules.events import Arrived, EndAsked, OrderAnswered, ServerLost, ServersReady, Stage, Tick
from shardline_chief.rules.flows.recovery import Recovery
from shardline_chief.rules.replay import Remembered
from shardline_chief.rules.state.checkpoints import CutLedger
from shardline_chief.rules.state.layout import addresses
from shardline_chief.rules.state.membership import Life
from shardline_chief.rules.state.standbys import as_found
from shardline_chief.rules.state.state import State


class Takeover:
    """Rules from the start of a restarted chief until it commands the job again."""

    def __init__(self, state: State, recovery: Recovery) -> None:
        self.state = state
        self.recovery = recovery
        self.failover = recovery.failover
        self.ending = recovery.reconcile.ending
        self._known = Remembered()
        self._unheard: set[str] = set()
        self._gone: dict[str, str] = {}
        """Reason for each known server that is gone."""
        self._began_s = 0.0
        self._said_few = False

    # The start

    def begin(self, known: Remembered, now_s: float, trained_s: float) -> None:
        """Take over the remembered job. trained_s: seconds since training began, by the wall clock."""
        state = self.state
        self._known, self._began_s = known, now_s
        self.ending.early = EndAsked(*known.stopping) if known.stopping is not None else None
        _recall(state, known, now_s, trained_s)
        if known.ended is not None:
            _say_goodbye(state, *known.ended)
            return
        self._unheard = {task for task, member in known.members.items() if member.role == "ps"}
        state.stage = Stage.HEARING
        if known.job is not None and known.timeline:
            self._take_up_history(known.job)
        what = f"job {known.job.name!r}" if known.job is not None else "the job"
        state.say(
            "takeover",
            f"{what} of the chief of term {known.term} has not ended: this chief, of term {state.settings.term}, "
            f"continues it; {len(known.members)} tasks are known",
            term=state.settings.term,
            after=known.term,
        )

    def _take_up_history(self, job: JobSpec) -> None:
        state, known = self.state, self._known
        state.tasks.settings = state.settings.cut_as(known.shares)
        state.layout.plan = state.settings.plan(job)
        state.saves.ledger = CutLedger(state.layout.filled)
        state.layout.placement = known.placement
        state.layout.timeline = known.timeline
        lives = {member.task: member.incarnation for member in known.members.values()}
        whole = [p for p in known.placement if known.active or p.shard in known.kept]
        self.recovery.remember({p.shard: lives[p.task] for p in whole if p.task in lives})
        state.told_phase = Phase.INIT
        if known.active and known.began_s is not None:
            state.told_phase = Phase.RUNNING
            self.recovery.reconcile.checkpointing.remember(known.checkpoint_step)
            state.progress.stop_step = known.stop_step or self.state.last_step
            state.reassign()

    # Who is there

    def heard(self, task: str) -> None:
        self._unheard.discard(task)

    def server_lost(self, event: ServerLost, now_s: float) -> None:
        """A known server is dead, or an order to it failed, or it was started again."""
        if not event.back:
            self.state.tasks.members.declare_dead(event.task)
        self._is_gone(event.task, event.why)

    def _is_gone(self, task: str, why: str) -> None:
        self._unheard.discard(task)
        if task not in self._gone:
            self._gone[task] = why
            self.state.say("life", f"{why}; it may have held shards", "warning", task=task)

    def wait(self, event: Tick, now_s: float) -> None:
        """Continue once every known server has been heard or is known to be gone."""
        if not self._unheard and self._most_are_here(now_s):
            self._decide(now_s)

    def _most_are_here(self, now_s: float) -> bool:
        """Whether more than half of the servers can be led: with fewer, another chief might lead the rest."""
        state = self.state
        held = sorted({place.task for place in self._known.placement})
        here = {member.task for member in state.tasks.members.living("ps")}
        missing = [task for task in held if task not in here]
        if 2 * len(missing) < len(held) or not held:
            return True
        limit_s = state.timeouts.join_s
        waited_s, names = now_s - self._began_s, ", ".join(missing)
        if waited_s >= limit_s:
            state.end(
                TaskLostError.exit_code,
                f"{names} did not appear within {limit_s:g} s, and with at most half of the servers this chief can't "
                f"rule out that another one leads them. {state.saves.how_to_go_on()}",
                now_s,
            )
            return False
        if not self._said_few:
            self._said_few = True
            few = f"{len(held) - len(missing)} of {len(held)} parameter servers are present"
            state.say("takeover", f"{few}: waiting {limit_s - waited_s:.0f} s for {names}", "warning")
        state.outbox.tell_wait(now_s, self._began_s + limit_s, names)
        return False

    def _decide(self, now_s: float) -> None:
        """Ask the servers what they hold, unless the job goes back in any case."""
        state, known = self.state, self._known
        if not known.timeline or known.job is None:
            # No timeline was begun: the tasks are a cluster that waits for its chief.
            state.stage = Stage.GATHERING
            state.emit(Arrived())
            return
        lost, copies = self._missing(), known.promoted or any(place.standby_task for place in known.placement)
        whole = known.began_s is not None and (known.active or known.stays) and not goes_back(state)
        if not whole or (lost and not copies):
            self._go_back(lost, now_s)
            return
        there = {m.task: m.address for m in state.tasks.members.living("ps") if m.task not in self._gone}
        wanted = addresses(known.placement).keys() | {promotion.task for promotion in known.promoted.values()}
        state.layout.reachable = {task: at for task, at in there.items() if task in wanted & known.members.keys()}
        state.layout.forget()
        state.stage = Stage.ASKING

    def _missing(self) -> dict[str, str]:
        """Servers that held shards and whose process has changed or gone: reason by name."""
        held = {place.task for place in self._known.placement}
        lost = {task: why for task, why in self._gone.items() if task in held}
        return lost | {task: f"{task} was gone when the chief returned" for task in held - self._known.members.keys()}

    # What they hold

    def answered(self, event: OrderAnswered, now_s: float) -> bool:
        """The servers obey this chief, or have told what they hold; without those that did not, decide again."""
        state, layout = self.state, self.state.layout
        if event.number != layout.in_flight:
            return True
        layout.in_flight = 0
        if event.result.errors:
            state.stage = Stage.HEARING
            for task, error in event.result.errors.items():
                if isinstance(event.order, AskStatus):
                    self._is_gone(task, f"{task} did not answer: {error}")
        elif isinstance(event.order, Lead):
            layout.have.led = True
        else:
            self._told({task: value for task, value in event.result.values.items() if task not in self._gone}, now_s)
        return True

    def _told(self, servers: Mapping[str, PsStatus], now_s: float) -> None:
        """Continue as it is, with standbys in place of lost primaries, or roll back."""
        state, layout, known = self.state, self.state.layout, self._known
        living = {member.task: member.address for member in state.tasks.members.living("ps")}
        found = as_found(known.placement, known.promoted, servers, since=known.since, living=living)
        if found is None:
            self._go_back(self._missing() or _empty(known, servers), now_s)
            return
        self._release_copies(servers)
        behind = [task for task, status in servers.items() if status.timeline != known.timeline]
        if not found.promoted and not behind and known.active:
            # Nothing is lacking but the table of members, and maybe what the last chief did not come to.
            state.stage = Stage.ADOPTING
            layout.placement = found.placement
            layout.have.placement, layout.have.filled = layout.placement, True
            layout.stop = state.progress.stop_step
            return
        told = [shard for status in servers.values() for shard in status.shards if shard.initialized]
        step = min(map(state.progress.of, told), default=state.progress.base_step)
        gone = "; ".join(self._missing().values())
        why = gone or "the last chief died while standbys were taking over"
        first = next((p.task for p in layout.placement if p.shard in found.promoted), "chief")
        self.failover.promote(found, first, why, now_s, since_s=self._began_s, step=step)

    def _release_copies(self, servers: Mapping[str, PsStatus]) -> None:
        """Drop the copies that only the last chief could have used."""
        state = self.state
        cuts = [cut.step for status in servers.values() for shard in status.shards for cut in shard.cuts]
        if orphaned := set(cuts) - set(state.mode.cuts.reported(cuts)):
            state.command(Release(timeline=state.layout.timeline, step=max(orphaned)))

    def _go_back(self, lost: dict[str, str], now_s: float) -> None:
        """Some shard values are missing, or never existed, or error memory may have moved unseen: roll back."""
        state = self.state
        # As the last chief left it; the loss is handled next.
        state.stage = Stage.TRAINING if state.phase is Phase.RUNNING else Stage.PREPARING
        everything = lost.keys() >= {place.task for place in self._known.placement}
        stopping = self._known.stopping
        if everything and self.ending.early == (EndAsked(*stopping) if stopping is not None else None):
            # Not only the chief but the whole job was restarted, so it is meant to continue.
            self.ending.early = None
        if goes_back(state) and state.job is not None:
            # Standbys that are promoted now don't change that: the job goes back as soon as it trains.
            everything_moved = range(division.of(state.job).units)
            state.work.moved.update(everything_moved)
            state.work.unready.update(everything_moved)
        for task, why in sorted(lost.items()):
            member = state.tasks.members.get(task)
            back = member is not None and member.state is Life.ALIVE
            self.recovery.lost(ServerLost(task, why, back), now_s)
        if not lost:
            exact = goes_back(state) and state.phase is Phase.RUNNING
            kept = "the optimizer's state" if applied(state) else "which error memory"
            kept = "which stage, and at which step" if unbroken(state) else kept
            why = f"does not know who held {kept}" if exact else "died while filling the parameter servers"
            self.recovery.again(f"the {'new' if exact else 'last'} chief {why}", now_s)

    def adopted(self, event: ServersReady, now_s: float) -> None:
        """The servers lack nothing any more."""
        state = self.state
        state.stage = Stage.TRAINING
        state.reassign()
        self.recovery.note_whole()
        self.failover.adopted(now_s)
        step, seconds = state.progress.step, now_s - self._began_s
        state.record("adopted", timeline=state.layout.timeline, step=step)
        state.say(
            "adopted",
            f"the chief is back after {seconds:.1f} s: training continues at step {step}, and no step is repeated",
            step=step,
            seconds=seconds,
        )


def _recall(state: State, known: Remembered, now_s: float, trained_s: float) -> None:
    """Restore what can't be asked for. trained_s: seconds since training began, by the wall clock."""
    if known.job is not None:
        state.adopt(known.job)
    state.tasks.machine, state.tasks.finished = known.machine, set(known.finished)
    state.tasks.drained = set(known.drained)
    for step, metrics in known.metrics.items():
        state.figures.score(step, metrics)
    for step, metrics in known.followed.items():
        state.figures.follow(step, metrics, known.job)
    state.figures.best, state.figures.dropped_memories = known.best, known.dropped_memories
    state.figures.lives |= known.lives
    if known.began_s is not None:
        state.figures.running_s = now_s - trained_s
    state.work.leases = known.leases
    state.choices.recall(known.choices)
    state.progress.first_step, state.progress.base_step = known.first_step, known.base_step
    state.saves.committed(known.checkpoint_step, known.checkpoint_path)
    state.losses.recoveries, state.losses.back = list(known.recoveries), list(known.back)
    state.losses.failovers = known.failovers + 1
    for member in known.members.values():
        state.tasks.members.recall(member, now_s)


def _say_goodbye(state: State, exit_code: int, reason: str) -> None:
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


def _empty(known: Remembered, servers: Mapping[str, PsStatus]) -> dict[str, str]:
    """Running servers that lack what they should hold: reason by name."""
    there = {task: {shard.shard for shard in status.shards if shard.initialized} for task, status in servers.items()}
    lacking = [place for place in known.placement if place.shard not in there.get(place.task, ())]
    return {place.task: f"{place.task} has no values for shard {place.shard}" for place in lacking}

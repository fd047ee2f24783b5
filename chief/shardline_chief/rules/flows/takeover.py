"""A restarted chief continues the job that the last one left, without a rollback if it can (PROTOCOL 1.6).

First it waits until every server in the journal is heard or known to be gone; workers meanwhile follow their last
orders. Then it takes command (Lead, with its higher term), compares what the servers hold with the journal, and sends
them the table of living tasks. If a server lacks what it should hold, recovery.py rolls back to a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardline import pipeline
from shardline.core.orders import Phase
from shardline.core.plan import make_plan
from shardline.core.spec import JobSpec
from shardline.core.status import PsStatus
from shardline.errors import TaskLostError
from shardline_chief.rules.actions import Activate, AskStatus, CommandResult, Cut, Lead, Release
from shardline_chief.rules.codecs.error_memory import applied, goes_back, unbroken
from shardline_chief.rules.events import Arrived, EndAsked, ServerLost, ServerRestarted, Tick
from shardline_chief.rules.flows.recollection import bound, empty, missing, recall, say_goodbye
from shardline_chief.rules.flows.recovery import Recovery
from shardline_chief.rules.replay import Remembered
from shardline_chief.rules.stages import Stage
from shardline_chief.rules.state.cuts import CutLedger
from shardline_chief.rules.state.layout import addresses
from shardline_chief.rules.state.membership import Life
from shardline_chief.rules.state.outbox import Then
from shardline_chief.rules.state.standbys import as_found
from shardline_chief.rules.state.state import State


class Takeover:
    """Rules from the start of a restarted chief until it commands the job again."""

    def __init__(self, state: State, recovery: Recovery) -> None:
        self.state = state
        self.recovery = recovery
        self.failover = recovery.failover
        self.ending = recovery.preparation.ending
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
        recall(state, known, now_s, trained_s)
        if known.ended is not None:
            say_goodbye(state, *known.ended)
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
        state.layout.plan = make_plan(job.tensors, len(state.settings.ps))
        state.saves.ledger = CutLedger(state.layout.filled)
        state.layout.placement = known.placement
        state.layout.timeline = known.timeline
        lives = {member.task: member.incarnation for member in known.members.values()}
        whole = [p for p in known.placement if known.active or p.shard in known.kept]
        self.recovery.remember({p.shard: lives[p.task] for p in whole if p.task in lives})
        state.told_phase = Phase.INIT
        if known.active and known.began_s is not None:
            state.told_phase = Phase.RUNNING
            self.recovery.preparation.checkpointing.remember(known.checkpoint_step)
            state.progress.stop_step = known.stop_step or bound(self.state)
            state.reassign()

    # Who is there

    def heard(self, task: str) -> None:
        self._unheard.discard(task)

    def server_restarted(self, event: ServerRestarted, now_s: float) -> None:
        self._is_gone(event.task, event.why)

    def server_lost(self, event: ServerLost, now_s: float) -> None:
        """A known server is dead, or an order to it failed."""
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
        state, known = self.state, self._known
        state.stage = Stage.ADOPTING
        if not known.timeline or known.job is None:
            # No timeline was begun: the tasks are a cluster that waits for its chief.
            state.stage = Stage.GATHERING
            state.emit(Arrived())
            return
        exact = goes_back(state) and known.began_s is not None
        if state.settings.standbys and known.began_s is not None and (known.active or known.stays) and not exact:
            self._ask()
            return
        lost = missing(self._known, self._gone)
        if state.phase is Phase.INIT or lost or exact:
            self._go_back(lost, now_s)
            return
        state.command(Lead(addresses=addresses(known.placement)), Then(self.led))

    # Standbys

    def _ask(self) -> None:
        """Take command of the reachable servers, to ask what they hold."""
        state, known = self.state, self._known
        state.stage = Stage.ASKING
        living = state.tasks.members.living("ps")
        there = {m.task: m.address for m in living if m.task in known.members.keys() - self._gone}
        promotions = {promotion.task for promotion in known.promoted.values()}
        wanted = addresses(known.placement).keys() | promotions
        servers = {task: at for task, at in there.items() if task in wanted}
        state.command(Lead(addresses=servers), Then(self.led_to_ask, needs_all=False))

    def led_to_ask(self, result: CommandResult, now_s: float) -> None:
        """The reachable servers obey this chief: ask what they hold."""
        if not self._again(result):
            self.state.command(AskStatus(), Then(self.asked, needs_all=False))

    def _again(self, result: CommandResult) -> bool:
        """Whether another server turned out to be gone: the decision is then made again without it."""
        if self.state.stage is not Stage.ASKING:
            return True
        for task, error in result.errors.items():
            self._is_gone(task, f"{task} did not answer: {error}")
        if result.errors:
            self.state.stage = Stage.HEARING
        return bool(result.errors)

    def asked(self, result: CommandResult, now_s: float) -> None:
        """Continue as it is, with standbys in place of lost primaries, or roll back."""
        if self._again(result):
            return
        state, known = self.state, self._known
        servers = {task: value for task, value in result.values.items() if task not in self._gone}
        living = {member.task: member.address for member in state.tasks.members.living("ps")}
        found = as_found(known.placement, known.promoted, servers, since=known.since, living=living)
        state.stage = Stage.ADOPTING
        if found is None:
            self._go_back(missing(self._known, self._gone) or empty(self._known, servers), now_s)
            return
        behind = [task for task, status in servers.items() if status.timeline != known.timeline]
        if not found.promoted and not behind and known.active:
            state.layout.placement = found.placement
            self._compare(result, now_s)
            return
        state.layout.placement = found.placement
        self._release_copies(servers)
        state.layout.placement = known.placement
        told = [shard for status in servers.values() for shard in status.shards if shard.initialized]
        step = min(map(state.progress.of, told), default=state.progress.base_step)
        gone = "; ".join(missing(self._known, self._gone).values())
        why = gone or "the last chief died while standbys were taking over"
        self.failover.stand_in_as_found(found, why, now_s, since_s=self._began_s, step=step)

    def _release_copies(self, servers: Mapping[str, PsStatus]) -> None:
        """Drop copies made one by one: which leases they include died with the last chief, so they are useless."""
        state = self.state
        cuts = [cut.step for status in servers.values() for shard in status.shards for cut in shard.cuts]
        if cuts and not state.mode.consistent_cuts:
            state.command(Release(timeline=state.layout.timeline, step=max(cuts)))

    def _go_back(self, lost: dict[str, str], now_s: float) -> None:
        """Some shard values are missing, or never existed, or error memory may have moved unseen: roll back."""
        state = self.state
        # As the last chief left it; the loss is handled next.
        state.stage = Stage.TRAINING if state.phase is Phase.RUNNING else Stage.LEADING
        everything = lost.keys() >= {place.task for place in self._known.placement}
        stopping = self._known.stopping
        if everything and self.ending.early == (EndAsked(*stopping) if stopping is not None else None):
            # Not only the chief but the whole job was restarted, so it is meant to continue.
            self.ending.early = None
        if goes_back(state) and state.job is not None:
            # Standbys that are promoted now don't change that: the job goes back as soon as it trains.
            state.work.moved.update(range(pipeline.units(state.job)))
            state.work.unready.update(range(pipeline.units(state.job)))
        for task, why in sorted(lost.items()):
            member = state.tasks.members.get(task)
            self.recovery.lost(task, why, now_s, back=member is not None and member.state is Life.ALIVE)
        if not lost:
            exact = goes_back(state) and state.phase is Phase.RUNNING
            kept = "the optimizer's state" if applied(state) else "which error memory"
            kept = "which stage, and at which step" if unbroken(state) else kept
            why = f"does not know who held {kept}" if exact else "died while filling the parameter servers"
            self.recovery.again(f"the {'new' if exact else 'last'} chief {why}", now_s)

    # Taking command

    def led(self, result: CommandResult, now_s: float) -> None:
        self.state.command(AskStatus(), Then(self.compare, needs_all=False))

    def compare(self, result: CommandResult, now_s: float) -> None:
        """The servers have reported what they hold."""
        self._compare(result, now_s)

    def _compare(self, result: CommandResult, now_s: float) -> None:
        """Check that every shard has its values; flows/servers.py has already found servers of another timeline."""
        state, plan = self.state, self.state.layout.plan
        if state.stage is not Stage.ADOPTING:
            return
        lost = {task: f"{task} did not answer: {error}" for task, error in result.errors.items()}
        for place in state.layout.placement:
            shard = state.progress.shards.get(place.shard)
            filled = plan is not None and bool(plan.shards[place.shard].buckets)
            if filled and (shard is None or not shard.initialized):
                lost.setdefault(place.task, f"{place.task} has no values for shard {place.shard}")
        if lost:
            self._go_back(lost, now_s)
            return
        self._release_copies({task: value for task, value in result.values.items() if isinstance(value, PsStatus)})
        state.publish_members(Then(self.known_to_all))

    def known_to_all(self, result: CommandResult, now_s: float) -> None:
        # The last chief may have died after noting that they are active and before activating them.
        self.state.command(Activate(timeline=self.state.layout.timeline), Then(self.activated))

    def activated(self, result: CommandResult, now_s: float) -> None:
        self._stop_again(now_s)

    def _stop_again(self, now_s: float) -> None:
        state, stop_step = self.state, self.state.progress.stop_step
        if not state.mode.consistent_cuts or not stop_step:
            self._adopted(now_s)
            return
        state.command(Cut(timeline=state.layout.timeline, step=stop_step, stop=True), Then(self.bounded))

    def bounded(self, result: CommandResult, now_s: float) -> None:
        """The servers have the stop step, unless they are past it."""
        progress = self.state.progress
        if progress.stop_step != bound(self.state) and any(passed for passed, _ in result.values.values()):
            # The requested stop reached no server: choose it again.
            progress.stop_step = bound(self.state)
            self._stop_again(now_s)
            return
        self._adopted(now_s)

    def _adopted(self, now_s: float) -> None:
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

"""How a job starts, survives the death of each role, and ends: what the servers lack names the next order.

The layout says what the servers are to have: which shard is where, in which timeline, and where its values come from.
Each order that all servers have answered says what they have. `next_order` compares the two: the first difference is
the next order, one at a time.

- Start (flows/start.py): all servers are there. The layout is a placement of a new plan, and nobody has anything.
- A worker joins or dies (flows/joining.py, flows/workers.py): the table of members is out of date. What waits for it,
  an admission or giving the dead one's work to others, follows once all servers have the new one (F4).
- A server dies (flows/recovery.py): the timeline is left, and workers stand still. Once the checkpoint and a home for
  every shard are found, the layout is a placement whose shards go back; those that need not keep their values.
- A server with standbys elsewhere dies (flows/failover.py): the layout has them as primaries, and all values stay.
  Standbys that are missing while the job trains are a placement that differs, in the timeline that is there.
- The chief dies (flows/takeover.py): the next one has the layout from the journal, and asks the servers what they have.
  If that is all of it, only their obedience and the table are lacking.
- End (flows/ending.py): all shards stop at one step, of which the last checkpoint is taken.
"""

from __future__ import annotations

from shardline.core.choices import Choices
from shardline.core.placement import Placement
from shardline_chief.rules.actions import (
    Activate,
    AskStatus,
    CommandResult,
    Configure,
    Cut,
    Lead,
    Members,
    Order,
    Promote,
    Restore,
)
from shardline_chief.rules.events import (
    PREPARATION,
    RECONCILED,
    CheckpointSaved,
    OrderAnswered,
    ServersReady,
    ShardsTold,
    Stage,
    Tick,
    TrainerLost,
)
from shardline_chief.rules.flows.checkpointing import Checkpointing
from shardline_chief.rules.flows.ending import Ending
from shardline_chief.rules.state.checkpoints import CutLedger
from shardline_chief.rules.state.layout import addresses
from shardline_chief.rules.state.membership import Member
from shardline_chief.rules.state.standbys import protected
from shardline_chief.rules.state.state import State


def next_order(state: State) -> Order | Stage | None:
    """The order that removes the first difference; None if there is none, a stage if it is not an order that does."""
    layout, have = state.layout, state.layout.have
    if state.stage is Stage.ASKING:
        # Nothing is changed before it is known what the servers hold.
        return Lead(addresses=layout.reachable) if not have.led else AskStatus()
    if not have.led:
        return Lead(addresses={**layout.former, **addresses(layout.placement)})
    if layout.promoted and not have.promoted:
        return Promote(timeline=layout.timeline, shards=layout.promoted)
    if have.placement != layout.placement:
        return _configure(state)
    if not have.table or state.after_table:
        return state.tasks.table(layout.timeline)
    if not have.filled:
        return _fill(state)
    if not have.active:
        return Activate(timeline=layout.timeline)
    if have.stop != layout.stop:
        return Cut(timeline=layout.timeline, step=layout.stop, stop=True)
    return None


def _configure(state: State) -> Configure:
    """Shards for every server: in a new timeline, or, where only standbys differ, in the one that is there."""
    job, layout = state.job, state.layout
    assert job is not None
    assert layout.plan is not None
    begins = layout.have.placement is None
    return Configure(
        job=job,
        plan=layout.plan,
        timeline=layout.upcoming if begins else layout.timeline,
        placement=layout.placement,
        keep=layout.keep if begins else layout.all_shards,
        keep_standbys=layout.followed,
        replayed=state.settings.replayed.choices if state.settings.replayed is not None else Choices(),
    )


def _fill(state: State) -> Order | Stage:
    """First values: those of a checkpoint, or those that a worker sets, of which a checkpoint is taken at once."""
    layout = state.layout
    if state.saves.resume is not None:
        assert layout.plan is not None
        return Restore(timeline=layout.timeline, plan=layout.plan, placement=layout.placement, keep=layout.keep)
    if layout.have.first_cut:
        return Stage.FIRST_CUT
    if state.progress.all_told and all(shard.initialized for shard in state.progress.shards.values()):
        return Cut(timeline=layout.timeline, step=0)
    return Stage.INITIALIZING


class Reconcile:
    """Gives the next order, notes its answers, and what both mean for the job."""

    def __init__(self, state: State, checkpointing: Checkpointing, ending: Ending) -> None:
        self.state = state
        self.checkpointing = checkpointing
        self.ending = ending
        self._sent = 0
        """Number of events that follow once the table that is under way is known."""
        self._changes = 0
        """State of JobLayout.changes when the last order was given."""
        self._cut_asked_s = 0.0

    # What is wanted

    def place(self, placement: tuple[Placement, ...], keep: frozenset[int] = frozenset()) -> None:
        """Create the shards according to a placement, fill and activate them. keep: shards that keep their values."""
        state, layout = self.state, self.state.layout
        if state.settings.standbys:
            living = {member.task: member.address for member in state.tasks.holders()}
            placement = protected(placement, living, appoint=layout.new_appointment)
        state.stage = Stage.PREPARING
        self._forget_shards()
        layout.forget()
        layout.want(placement, keep=keep)

    def leave(self, stage: Stage) -> None:
        """Abandon the current timeline: its messages are refused from now on, and workers stop."""
        state = self.state
        self.ending.reopen()
        state.layout.new_timeline()
        state.tasks.suspects.clear()
        state.stage = stage
        self._forget_shards()
        self.checkpointing.forget()

    def _forget_shards(self) -> None:
        """What has been said of the shards is of a timeline that is over."""
        self.state.progress.shards.clear()
        self.state.work.initializer = ""

    # Orders

    def turn(self, now_s: float) -> None:
        """Give the next order, if none is under way."""
        state, layout = self.state, self.state.layout
        if state.stage not in RECONCILED:
            # Nobody trains, and servers get a table before anybody does.
            self._table_known(len(state.after_table))
            return
        if layout.in_flight or layout.waits:
            return
        order = next_order(state)
        if order is None:
            if state.stage is Stage.PREPARING:
                state.stage = Stage.READY
                state.emit(ServersReady())
            elif state.stage is Stage.ADOPTING:
                state.emit(ServersReady())
        elif isinstance(order, Stage):
            state.stage = order
            if order is Stage.INITIALIZING:
                self._choose_initializer()
        else:
            self._note(order, now_s)
            layout.in_flight, self._changes = state.command(order), layout.changes

    def retry(self, event: Tick, now_s: float) -> None:
        """An order has failed, and no rule changed what is wanted: give it again."""
        self.state.layout.waits = False

    def _note(self, order: Order, now_s: float) -> None:
        """What an order means for the job once it is given; the journal has it before the servers do."""
        state, resume = self.state, self.state.saves.resume
        match order:
            case Configure():
                if order.timeline != state.layout.timeline:
                    self._begin_timeline()
            case Members():
                state.layout.table_sent = True
                self._sent = len(state.after_table)
            case Restore():
                assert resume is not None
                state.say("restore", f"restoring step {resume.step} from {resume.path}")
            case Cut(stop=True):
                state.progress.stop_step = order.step
                state.record("stop", step=order.step)
            case Cut():
                state.stage, state.layout.have.first_cut = Stage.FIRST_CUT, True
                self._cut_asked_s = now_s
            case Activate():
                if state.stage in PREPARATION:
                    state.record("timeline", timeline=order.timeline, state="active")

    def _begin_timeline(self) -> None:
        """What has been said of the shards is of the past."""
        state, layout, resume = self.state, self.state.layout, self.state.saves.resume
        layout.new_timeline()
        layout.have.led = layout.have.promoted = True
        layout.have.filled = layout.stays
        layout.stop = state.last_step
        self._forget_shards()
        state.saves.ledger = CutLedger(layout.filled)
        back = None if layout.stays else resume
        if not layout.stays:
            state.choices.back_to(resume.step if resume is not None else 0)
        state.record(
            "timeline",
            timeline=layout.timeline,
            state="preparing",
            from_cut=back.step if back is not None else None,
            path=back.path if back is not None else None,
            placement=[[place.shard, place.task, place.address] for place in layout.placement],
            standbys=standbys_of(layout.placement),
            keep=sorted(layout.keep),
            stays=layout.stays,
        )

    # Answers

    def answered(self, event: OrderAnswered, now_s: float) -> None:
        """All servers have answered: note what they have now."""
        layout, order = self.state.layout, event.order
        if event.number != layout.in_flight:
            return
        layout.in_flight = 0
        # Until a rule wants something else, since servers are lost or refuse it.
        layout.waits = bool(event.result.errors)
        if isinstance(order, Members):
            # A server that did not answer is lost, and what it holds with it.
            layout.have.table = True
            self._table_known(self._sent)
        if event.result.errors:
            return
        match order:
            case Lead():
                layout.have.led = self._changes == layout.changes
            case Promote():
                layout.have.promoted = True
            case Configure():
                self._configured(order, event.result)
            case Restore():
                self._restored()
            case Activate():
                layout.have.active = True
            case Cut(stop=True):
                self._bounded(order, event.result)

    def _configured(self, order: Configure, result: CommandResult) -> None:
        state, have = self.state, self.state.layout.have
        have.placement, have.table, have.active = order.placement, False, False
        if state.stage in PREPARATION:
            size = sum(value for value in result.values.values() if isinstance(value, int))
            servers = f"{len(result.values)} parameter servers"
            state.say("configured", f"{servers} hold {size / 1e6:.1f} MB with optimizer state")

    def _restored(self) -> None:
        state, resume = self.state, self.state.saves.resume
        assert resume is not None
        state.layout.have.filled = True
        state.progress.base_step = resume.step
        state.saves.committed(resume.step, resume.path)
        if state.figures.running_s is None:
            state.progress.first_step = resume.step

    def _bounded(self, order: Cut, result: CommandResult) -> None:
        """The servers have the stop step, unless they are past it: then the last chief's order reached none of them."""
        state = self.state
        if order.step != state.last_step and any(passed for passed, _ in result.values.values()):
            state.layout.stop = state.progress.stop_step = state.last_step
        else:
            state.layout.have.stop = order.step

    def _table_known(self, count: int) -> None:
        after = self.state.after_table
        for event in after[:count]:
            self.state.emit(event)
        del after[:count]
        self._sent = 0

    # First values

    def _choose_initializer(self) -> None:
        """Choose the trainer with the lowest index to set the first values; does nothing while there is none."""
        state = self.state
        trainers = state.tasks.trainers()
        if state.work.initializer or not trainers:
            return
        state.work.initializer = trainers[0].task
        state.say("init", f"{trainers[0].task} sets the initial values of all parameters")

    def initializer_lost(self, event: TrainerLost, now_s: float) -> bool:
        """A trainer died. True: it was setting the first values, and another will."""
        member = event.member
        if not self.restart_without(member):
            return False
        self.state.say("life", event.sentence, event.level, task=member.task, state=member.state.value)
        return True

    def restart_without(self, member: Member) -> bool:
        """Start again in a new timeline if this task was setting the first values; returns whether it was."""
        state = self.state
        if state.stage is not Stage.INITIALIZING or state.work.initializer != member.task:
            return False
        state.say("init", f"{member.task} was lost while setting the initial values; starting over", "warning")
        self.place(state.layout.placement)
        return True

    def first_cut_told(self, event: ShardsTold, now_s: float) -> bool:
        """A server reported its shards: once all hold the cut of step 0, save it."""
        state, saves = self.state, self.state.saves
        if state.progress.all_told and saves.saving is None and 0 in saves.ledger.complete():
            leases = state.work.leases
            self.checkpointing.save(0, leases.cursor() if leases is not None else {}, urgent=True)
        return True

    def first_cut_saved(self, event: CheckpointSaved, now_s: float) -> None:
        """Cut 0 was committed, or could not be written: training starts in either case."""
        self.state.stage, self.state.layout.have.filled = Stage.PREPARING, True

    def first_cut_late(self, event: Tick, now_s: float) -> None:
        """Start without cut 0 if it takes too long."""
        state = self.state
        limit_s = state.timeouts.dead_s
        if state.saves.saving is None and now_s - self._cut_asked_s >= limit_s:
            state.say("cut", f"no checkpoint of step 0 within {limit_s:g} s; training starts without it", "error")
            state.stage, state.layout.have.filled = Stage.PREPARING, True


def standbys_of(placement: tuple[Placement, ...]) -> list[list[object]]:
    """[shard, task, address, appointment] of each standby, for the journal."""
    return [
        [place.shard, place.standby_task, place.standby_address, place.appointment]
        for place in placement
        if place.standby_task
    ]

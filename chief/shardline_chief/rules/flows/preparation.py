"""From a placement to servers that accept pushes: lead, configure, set first values or restore, first cut, activate.

Each stage begins once every server has completed the previous one. Start, recovery and failover all take this path;
they differ in which values are kept. If the worker that sets the first values dies, it all starts again in a new
timeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from shardline.core.choices import Choices
from shardline.core.placement import Placement
from shardline_chief.rules.actions import (
    Activate,
    CommandResult,
    Configure,
    Cut,
    Lead,
    Promote,
    Promotion,
    Restore,
)
from shardline_chief.rules.events import CheckpointSaved, ServersReady, ShardsTold, Tick, TrainerLost
from shardline_chief.rules.flows.checkpointing import Checkpointing
from shardline_chief.rules.flows.ending import Ending
from shardline_chief.rules.stages import Stage
from shardline_chief.rules.state.cuts import CutLedger
from shardline_chief.rules.state.layout import addresses
from shardline_chief.rules.state.membership import Member
from shardline_chief.rules.state.outbox import Then
from shardline_chief.rules.state.standbys import protected
from shardline_chief.rules.state.state import State


class Preparation:
    """Rules for the stages from LEADING to READY."""

    def __init__(self, state: State, checkpointing: Checkpointing, ending: Ending) -> None:
        self.state = state
        self.checkpointing = checkpointing
        self.ending = ending
        self.keep: frozenset[int] = frozenset()
        """Shards that keep their values in a timeline that follows another."""
        self.stays = False
        """All values are kept: standbys have been promoted."""
        self.followed: frozenset[int] = frozenset()
        """Shards whose standbys are kept too."""
        self._cut_asked_s = 0.0

    # Begin

    def place(self, placement: tuple[Placement, ...], keep: frozenset[int] = frozenset()) -> None:
        """Create the shards according to a placement, fill and activate them. keep: shards that keep their values."""
        state = self.state
        if state.settings.standbys:
            living = {member.task: member.address for member in state.tasks.members.living("ps")}
            placement = protected(placement, living, appoint=state.layout.new_appointment)
        state.layout.placement = placement
        self.keep, self.stays, self.followed = keep, False, frozenset()
        self._forget(Stage.LEADING)
        state.command(Lead(addresses=addresses(placement)), Then(self.led))

    def take_over(
        self, placement: tuple[Placement, ...], promoted: Mapping[int, Promotion], *, followed: frozenset[int]
    ) -> None:
        """Promote standbys and configure all servers to match, keeping all values.

        promoted: standby by shard. followed: shards whose standbys are kept.
        """
        state = self.state
        assert state.layout.plan is not None
        state.layout.placement = placement
        self.keep, self.stays, self.followed = frozenset(range(len(state.layout.plan.shards))), True, followed
        self._forget(Stage.LEADING)
        state.record("failover", timeline=state.layout.timeline, promoted=_promotions(promoted))
        state.command(Lead(addresses=addresses(placement)), Then(partial(self.promote, promoted)))

    def leave(self, stage: Stage) -> None:
        """Abandon the current timeline: its messages are refused from now on, and workers stop."""
        state = self.state
        self.ending.reopen()
        state.layout.new_timeline()
        state.tasks.suspects.clear()
        self._forget(stage)
        self.checkpointing.forget()
        state.layout.placing_standbys = False

    def _forget(self, stage: Stage) -> None:
        state = self.state
        state.stage = stage
        state.progress.shards.clear()
        state.work.initializer = ""
        state.layout.table_sent = False

    # The servers

    def promote(self, promoted: Mapping[int, Promotion], result: CommandResult, now_s: float) -> None:
        """The servers obey this chief: promote standbys."""
        order = Promote(timeline=self.state.layout.timeline, shards=promoted)
        self.state.command(order, Then(self.led))

    def led(self, result: CommandResult, now_s: float) -> None:
        """The servers obey this chief, and any promotions are done: configure them."""
        self._configure()

    def _configure(self) -> None:
        """Begin a timeline on every server."""
        state, layout, resume = self.state, self.state.layout, self.state.saves.resume
        assert state.job is not None
        assert layout.plan is not None
        layout.new_timeline()
        state.saves.ledger = CutLedger(layout.filled)
        self._forget(Stage.CONFIGURING)
        goes_back = resume is not None and not self.stays
        if not self.stays:
            state.choices.back_to(resume.step if resume is not None else 0)
        state.record(
            "timeline",
            timeline=layout.timeline,
            state="preparing",
            from_cut=resume.step if resume is not None and goes_back else None,
            path=resume.path if resume is not None and goes_back else None,
            placement=[[place.shard, place.task, place.address] for place in layout.placement],
            standbys=standbys_of(layout.placement),
            keep=sorted(self.keep),
            stays=self.stays,
        )
        order = Configure(
            job=state.job,
            plan=layout.plan,
            timeline=layout.timeline,
            placement=layout.placement,
            keep=self.keep,
            keep_standbys=self.followed,
            replayed=state.settings.replayed.choices if state.settings.replayed is not None else Choices(),
        )
        state.command(order, Then(self.configured))

    def configured(self, result: CommandResult, now_s: float) -> None:
        """The servers have their shards: send the table of members."""
        size = sum(value for value in result.values.values() if isinstance(value, int))
        servers = f"{len(result.values)} parameter servers"
        self.state.say("configured", f"{servers} hold {size / 1e6:.1f} MB with optimizer state")
        self.state.publish_members(Then(self.fill))

    def fill(self, result: CommandResult, now_s: float) -> None:
        """The servers have the table of members: fill the shards, unless all values are kept."""
        state, layout, resume = self.state, self.state.layout, self.state.saves.resume
        if self.stays:
            self._activate()
            return
        if resume is None:
            state.stage = Stage.INITIALIZING
            self.choose_initializer()
            return
        assert layout.plan is not None
        state.stage = Stage.RESTORING
        state.say("restore", f"restoring step {resume.step} from {resume.path}")
        order = Restore(timeline=layout.timeline, plan=layout.plan, placement=layout.placement, keep=self.keep)
        state.command(order, Then(self.restored))

    def restored(self, result: CommandResult, now_s: float) -> None:
        state, resume = self.state, self.state.saves.resume
        assert resume is not None
        state.progress.base_step = resume.step
        state.saves.committed(resume.step, resume.path)
        if state.figures.running_s is None:
            state.progress.first_step = resume.step
        self._activate()

    # First values

    def choose_initializer(self) -> None:
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
        self._configure()
        return True

    def values_told(self, event: ShardsTold, now_s: float) -> bool:
        """A server reported its shards: once all have their first values, cut them."""
        state = self.state
        shards = state.progress.shards.values()
        if state.progress.all_told and all(shard.initialized for shard in shards):
            state.stage = Stage.FIRST_CUT
            self._cut_asked_s = now_s
            state.command(Cut(timeline=state.layout.timeline, step=0))
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
        self._activate()

    def first_cut_late(self, event: Tick, now_s: float) -> None:
        """Start without cut 0 if it takes too long."""
        state = self.state
        limit_s = state.timeouts.dead_s
        if state.saves.saving is None and now_s - self._cut_asked_s >= limit_s:
            state.say("cut", f"no checkpoint of step 0 within {limit_s:g} s; training starts without it", "error")
            self._activate()

    def poll(self, event: Tick, now_s: float) -> None:
        """Poll the servers instead of waiting for their heartbeats."""
        if self.state.work.initializer or self.state.stage is Stage.FIRST_CUT:
            self.state.outbox.ask_status()

    # Start

    def _activate(self) -> None:
        state = self.state
        state.stage = Stage.ACTIVATING
        state.record("timeline", timeline=state.layout.timeline, state="active")
        state.command(Activate(timeline=state.layout.timeline), Then(self.activated))

    def activated(self, result: CommandResult, now_s: float) -> None:
        """The servers accept pushes: send the stop step, if it is known."""
        state = self.state
        assert state.job is not None
        if not state.stops_by_itself:
            self._ready()
            return
        state.progress.stop_step = state.job.steps
        state.record("stop", step=state.progress.stop_step)
        order = Cut(timeline=state.layout.timeline, step=state.progress.stop_step, stop=True)
        state.command(order, Then(self.bounded))

    def bounded(self, result: CommandResult, now_s: float) -> None:
        """The servers will stop by themselves at the last step."""
        self._ready()

    def _ready(self) -> None:
        self.state.stage = Stage.READY
        self.state.emit(ServersReady())


def standbys_of(placement: tuple[Placement, ...]) -> list[list[object]]:
    """[shard, task, address, appointment] of each standby, for the journal."""
    return [
        [place.shard, place.standby_task, place.standby_address, place.appointment]
        for place in placement
        if place.standby_task
    ]


def _promotions(promoted: Mapping[int, Promotion]) -> list[list[object]]:
    """[shard, task, appointment] of each standby to be promoted, for the journal."""
    return [[shard, promotion.task, promotion.appointment] for shard, promotion in sorted(promoted.items())]

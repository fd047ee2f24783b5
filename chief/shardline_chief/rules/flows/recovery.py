"""A parameter server is gone with what it held: go back to the newest checkpoint under a new timeline, and go on.

PROTOCOL 1.6. Where cuts are consistent all shards go back, and the workers compute the same bits again. Else only what
the lost server held is restored; updates that it had acknowledged since are lost, and counted. Its shards wait for its
next process for a third of --timeout; then they move to the other servers, where these have room. A loss in the middle
of this starts it over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from shardline.core.orders import Phase
from shardline.core.placement import Placement
from shardline.errors import CheckpointError, ProtocolError, ShardlineError, TaskLostError
from shardline_chief.rules.actions import Configure, Find
from shardline_chief.rules.events import (
    CheckpointFound,
    OrderRefused,
    ServerLost,
    ServerRestarted,
    Tick,
    TrainingBegins,
)
from shardline_chief.rules.flows.failover import Failover
from shardline_chief.rules.flows.preparation import Preparation
from shardline_chief.rules.stages import PREPARATION, Stage
from shardline_chief.rules.state.losses import Loss, Recovered
from shardline_chief.rules.state.membership import Life, Member
from shardline_chief.rules.state.state import State

ATTEMPTS = 8
"""So many losses in a row, with no step made between them, end the job: something is wrong that no restart cures."""

FIND_TIMEOUTS = 10
"""So many times --timeout the checkpoint to go back to is waited for, as the fetch of one is."""


class Recovery:
    """Rules of what follows the loss of a server."""

    def __init__(self, state: State, preparation: Preparation, failover: Failover) -> None:
        self.state = state
        self.preparation = preparation
        self.failover = failover
        self._lost: dict[str, float] = {}
        """When each was known to be lost, while nobody holds its shards."""
        self._whole: dict[int, int] = {}
        """Incarnation of the server on which each shard has its values, of shards that have them."""
        self._full = ""
        """Why the other servers can't take the lost shards."""
        self._finding_s = 0.0
        """Since when the checkpoint to go back to is looked for."""
        self._said_slow = False

    def remember(self, whole: Mapping[int, int]) -> None:
        """Shards that have their values, as an earlier chief left them: incarnation of the server, by shard."""
        self._whole = dict(whole)

    # The loss

    def server_lost(self, event: ServerLost, now_s: float) -> None:
        """A server is gone."""
        self.lost(event.task, event.why, now_s)

    def server_restarted(self, event: ServerRestarted, now_s: float) -> None:
        """A server is empty: its next process asks to be admitted."""
        self.lost(event.task, event.why, now_s, back=True)

    def again(self, why: str, now_s: float) -> None:
        """No server is lost, but what they hold is not whole."""
        self._begin("chief", now_s, now_s)
        self.state.say("again", f"{why}; {self._goes_back()}", "warning")

    def lost(self, task: str, why: str, now_s: float, *, back: bool = False) -> None:
        """A server is gone, or empty. back: its next process is there already."""
        state = self.state
        member = state.tasks.members.get(task)
        if member is None or not (back and member.state is Life.ALIVE):
            state.tasks.members.declare_dead(task)
        if state.ended:
            return
        state.layout.placing_standbys = False
        shards = [str(place.shard) for place in state.layout.placement if place.task == task]
        # From the last checkpoint on nothing is wanted of the servers any more but that they go.
        over = state.stage in (Stage.SCORING, Stage.COUNTING)
        if state.begun and not over and self.failover.stand_in(task, why, now_s):
            return
        if not state.begun or not shards:
            # Commands go to those that hold shards only.
            state.say("life", f"{why}; it held nothing, so the job goes on without it", "warning", task=task)
            return
        if over:
            state.say("life", f"{why}; its part is done", "warning", task=task)
            return
        at = f" at {member.address}" if member is not None else ""
        sentence = f"{why}; {task}{at} held shard {', '.join(shards)}"
        if reason := self._hopeless():
            advice = state.saves.how_to_go_on()
            state.end(TaskLostError.exit_code, f"{sentence}, so the job ends{reason}. {advice}", now_s)
            return
        self._begin(task, now_s, member.last_heard_s if member is not None else now_s)
        wait = f"waiting {state.timeouts.dead_s:g} s for it to come back, before its shards move"
        if not state.tasks.members.living("ps"):
            wait = f"waiting {state.timeouts.lost_s:g} s for it to come back"
        rest = self._goes_back() if back else f"{self._goes_back()}; {wait}"
        state.say("ps_lost", f"{sentence}; {rest}", "warning", task=task, shards=shards)

    def _hopeless(self) -> str:
        """Why the job can't go on after a loss, as the end of a sentence; empty where it can."""
        state = self.state
        if state.phase is Phase.STOPPING and not self.preparation.ending.scoring.done:
            return " as it was about to"
        if state.script and state.tasks.finished:
            # Its gradients of the steps to be made again are gone with it.
            return f": {', '.join(sorted(state.tasks.finished))} has finished and can't go back"
        if state.losses.attempts >= ATTEMPTS:
            return f" after {state.losses.attempts} losses in a row without a step between them"
        return ""

    def _begin(self, task: str, now_s: float, heard_s: float) -> None:
        state, loss = self.state, self.state.losses.now
        # Several that go together are one loss.
        another = loss is None or (not loss.failover and state.stage in PREPARATION)
        state.note_loss(task, heard_s).failover = False
        self._lost.setdefault(task, now_s)
        state.losses.attempts += another
        self._full = ""
        self.failover.forget()
        self.preparation.leave(Stage.FINDING)
        self._finding_s, self._said_slow = now_s, False
        state.outbox.actions.append(Find(lost=tuple(sorted(self._lost))))

    def _goes_back(self) -> str:
        state = self.state
        if state.saves.checkpoint_step < 0:
            if state.figures.running_s is not None:
                return "the first checkpoint is still being written"
            return "there is no checkpoint yet, so the job starts over"
        what = "all shards go back" if state.mode.consistent_cuts else "it goes back"
        return f"{what} to step {state.saves.checkpoint_step}"

    # The checkpoint

    def wait_for_checkpoint(self, event: Tick, now_s: float) -> None:
        """The disk takes its time: say so, and end the job where that is more than the fetch of a cut may take."""
        state = self.state
        waited_s, limit_s = now_s - self._finding_s, FIND_TIMEOUTS * state.timeouts.total_s
        slow = f"the newest checkpoint could not be read within {waited_s:.0f} s (limit {limit_s:.0f} s)"
        if waited_s >= limit_s:
            advice = state.saves.how_to_go_on()
            state.end(CheckpointError.exit_code, f"{slow}: does the disk answer? {advice}", now_s)
        elif waited_s >= state.timeouts.dead_s and not self._said_slow:
            self._said_slow = True
            state.say("slow", f"{slow}: it is being written or read, and waited for", "warning")

    def found(self, event: CheckpointFound, now_s: float) -> None:
        """The checkpoint to go back to is there, or there is none."""
        state, found, loss = self.state, event.found, self.state.losses.now
        assert loss is not None
        if found.error:
            state.end(CheckpointError.exit_code, f"{loss.first} was lost, and {found.error}", now_s)
            return
        if found.resume is None and state.figures.running_s is not None:
            # Those that train hold no first values any more.
            state.end(
                TaskLostError.exit_code,
                f"{loss.first} was lost, and no checkpoint could be written so far, not even one of the first values; "
                "start the job again",
                now_s,
            )
            return
        state.saves.resume = found.resume
        state.progress.base_step = found.resume.step if found.resume is not None else 0
        if found.resume is None and state.work.leases is not None:
            state.work.leases = state.work.leases.anew()
            state.note_cursor()
        state.stage = Stage.PLACING
        self._place(loss, now_s)

    # The servers

    def place(self, event: Tick, now_s: float) -> None:
        """Look again for servers that can hold the shards."""
        loss = self.state.losses.now
        assert loss is not None
        self._place(loss, now_s)

    def _place(self, loss: Loss, now_s: float) -> None:
        """Choose who holds what, if that can be done now."""
        state = self.state
        living = {member.task: member for member in state.tasks.members.living("ps")}
        if self._waits_for(sorted({place.task for place in loss.home} - living.keys()), bool(living), now_s):
            return
        assert state.layout.plan is not None
        sizes = {number: shard.nbytes for number, shard in enumerate(state.layout.plan.shards)}
        placement = moved(loss.home, living, sizes)
        for place, before in zip(placement, loss.home, strict=True):
            if place.task != before.task:
                state.say("moved", f"shard {place.shard} moves from {before.task} to {place.task}", "warning")
        keep = self._kept(placement)
        # The others are empty from here on, whatever becomes of this.
        self._whole = {shard: incarnation for shard, incarnation in self._whole.items() if shard in keep}
        if not keep and state.work.leases is not None and state.saves.resume is not None:
            # No shard has the updates made since: their batches are trained on again.
            state.work.leases = state.work.leases.back_to(state.saves.resume.cursor)
            state.note_cursor()
        self.preparation.place(placement, keep)

    def _waits_for(self, gone: list[str], others: bool, now_s: float) -> bool:
        """Whether servers that are gone are still waited for; ends the job after a time. others: some are there."""
        state = self.state
        self._lost = {task: at_s for task, at_s in self._lost.items() if task in gone}
        if not gone:
            return False
        waited_s = now_s - min(self._lost.setdefault(task, now_s) for task in gone)
        if waited_s >= state.timeouts.lost_s and (self._full or not others):
            full = f"; {self._full}" if self._full else ""
            state.end(
                TaskLostError.exit_code,
                f"{', '.join(gone)} did not come back within {state.timeouts.lost_s:g} s{full}. "
                f"{state.saves.how_to_go_on()}",
                now_s,
            )
            return True
        return not others or bool(self._full) or waited_s < state.timeouts.dead_s

    def _kept(self, placement: tuple[Placement, ...]) -> frozenset[int]:
        """Shards that stay as they are: those that go back alone, on a server that is the process it was."""
        state = self.state
        if state.mode.consistent_cuts or state.saves.resume is None:
            return frozenset()
        lives = {member.task: member.incarnation for member in state.tasks.members.living("ps")}
        return frozenset(p.shard for p in placement if self._whole.get(p.shard) == lives[p.task])

    def refused(self, event: OrderRefused, now_s: float) -> bool:
        """A server did not do what it was told. True: the job goes on all the same, another way."""
        state, loss = self.state, self.state.losses.now
        if loss is None:
            return False
        if loss.failover:
            _, error = sorted(event.errors.items())[0]
            self._begin(loss.first, now_s, loss.began_s)
            state.say("no_standby", f"{error}; {self._goes_back()}", "warning")
            return True
        if not isinstance(event.order, Configure) or state.stage not in PREPARATION:
            return False
        keep = event.order.keep
        empty = {task: error for task, error in event.errors.items() if isinstance(error, ProtocolError) and keep}
        if empty:
            self._found_empty(loss, empty, now_s)
            return True
        if not self._lost:
            return False
        # It had no room for another one's shards, and others may come.
        task, error = sorted(event.errors.items())[0]
        self._full = f"{task} can't take its shards: {error}"
        state.say("no_room", f"{self._full}; waiting for {', '.join(sorted(self._lost))}", "warning")
        state.stage = Stage.PLACING
        return True

    def _found_empty(self, loss: Loss, errors: Mapping[str, ShardlineError], now_s: float) -> None:
        """Servers that were to keep shards do not hold them: they were started again before anybody noticed."""
        gone = {place.shard for place in loss.home if place.task in errors}
        self._whole = {shard: incarnation for shard, incarnation in self._whole.items() if shard not in gone}
        for task, error in sorted(errors.items()):
            self.lost(task, f"{task} does not hold what it should: {error}", now_s, back=True)

    # On

    def goes_on(self, event: TrainingBegins, now_s: float) -> None:
        """Training begins, or goes on."""
        state, loss = self.state, self.state.losses.now
        self.note_whole()
        if loss is None:
            return
        state.losses.now = None
        if loss.failover:
            self.failover.taken_over(loss, now_s)
            return
        self._lost.clear()
        lost = self._count_lost(loss)
        recovered = Recovered(
            task=loss.first,
            at_step=loss.at_step,
            from_step=state.progress.base_step,
            seconds=now_s - loss.began_s,
            lost=lost,
        )
        state.losses.recoveries.append(recovered)
        state.record("recovered", timeline=state.layout.timeline, **dataclasses.asdict(recovered))
        together = state.mode.consistent_cuts
        what = f"{lost} steps are repeated" if together else f"at least {lost} acknowledged updates are lost"
        if state.work.leases is not None and not self.preparation.keep:
            what += " and made again"
        state.say(
            "recovered",
            f"{loss.first} was heard last {recovered.seconds:.1f} s ago; training goes on from step "
            f"{state.progress.base_step}, {what}",
            task=loss.first,
            from_step=recovered.from_step,
            at_step=recovered.at_step,
            lost=lost,
            seconds=recovered.seconds,
        )

    def note_whole(self) -> None:
        """Every shard has its values, where it is placed."""
        state = self.state
        lives = {member.task: member.incarnation for member in state.tasks.members.living("ps")}
        self._whole = {p.shard: lives[p.task] for p in state.layout.placement if p.task in lives}
        state.losses.resumed_at = None

    def count_anew(self, event: Tick, now_s: float) -> None:
        """A loss counts as one in a row until every shard has gone on since the one before."""
        losses, progress = self.state.losses, self.state.progress
        if losses.now is not None or not losses.attempts or not progress.all_told:
            return
        if losses.resumed_at is None:
            losses.resumed_at = progress.step
        elif progress.step > losses.resumed_at:
            losses.attempts = 0

    def _count_lost(self, loss: Loss) -> int:
        state, resume = self.state, self.state.saves.resume
        if state.mode.consistent_cuts or resume is None:
            return max(0, loss.at_step - state.progress.base_step)
        versions, keep = resume.versions, self.preparation.keep
        restored = [number for number in loss.at if number not in keep and number < len(versions)]
        return sum(max(0, loss.at[number][1] - versions[number]) for number in restored)


def moved(
    placement: tuple[Placement, ...], living: Mapping[str, Member], sizes: Mapping[int, int]
) -> tuple[Placement, ...]:
    """The same placement where its servers live, else on the living one that holds least; at their present addresses.

    sizes: bytes by shard.
    """
    load = dict.fromkeys(sorted(living), 0)
    for place in placement:
        if place.task in load:
            load[place.task] += sizes[place.shard]
    result = []
    for place in placement:
        task = place.task
        if task not in load:
            task = min(load, key=lambda name: load[name])
            load[task] += sizes[place.shard]
        result.append(Placement(shard=place.shard, task=task, address=living[task].address))
    return tuple(result)

"""A parameter server and what it held are lost: roll back to the newest checkpoint in a new timeline, and continue.

PROTOCOL 1.6. If cuts are consistent, all shards go back, and the workers compute the same bits again. Otherwise only
the lost shards are restored; updates acknowledged since the checkpoint are lost, and counted. The shards wait a third
of --timeout for a new process of their server; then they move to the other servers, if those have room. A loss during
recovery starts it over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from shardline.core.orders import Phase
from shardline.core.placement import Placement
from shardline.errors import CheckpointError, ProtocolError, TaskLostError
from shardline_chief.rules.actions import Configure, Find
from shardline_chief.rules.events import (
    PREPARATION,
    CheckpointFound,
    OrderRefused,
    ServerLost,
    Stage,
    Tick,
    TrainingBegins,
)
from shardline_chief.rules.flows.failover import Failover
from shardline_chief.rules.reconcile import Reconcile
from shardline_chief.rules.state.losses import Loss, Recovered, WentBack
from shardline_chief.rules.state.membership import Life, Member
from shardline_chief.rules.state.state import State

ATTEMPTS = 8
"""This many losses in a row, with no step between them, end the job: restarting does not cure the cause."""

FIND_TIMEOUTS = 10
"""How long to wait for the checkpoint to roll back to, in multiples of --timeout; the same as for fetching one."""


class Recovery:
    """Rules for what follows the loss of a server."""

    def __init__(self, state: State, reconcile: Reconcile, failover: Failover) -> None:
        self.state = state
        self.reconcile = reconcile
        self.failover = failover
        self._lost: dict[str, float] = {}
        """When each server was found to be lost, while its shards have no holder."""
        self._whole: dict[int, int] = {}
        """Shards that have their values: incarnation of the server that holds them, by shard."""
        self._full = ""
        """Why the other servers can't take the lost shards; empty if they can."""
        self._finding_s = 0.0
        """When the search for the checkpoint to roll back to began."""
        self._said_slow = False

    def remember(self, whole: Mapping[int, int]) -> None:
        """Set which shards have their values, as an earlier chief left them: incarnation of the server, by shard."""
        self._whole = dict(whole)

    # The loss

    def again(self, why: str, now_s: float, *, planned: bool = False) -> None:
        """No server is lost, but what they hold is incomplete: roll back. planned: it is not a loss."""
        self._begin("chief", now_s, now_s)
        assert self.state.losses.now is not None
        self.state.losses.now.planned = planned
        self.state.say("again", f"{why}; {self._goes_back()}", "info" if planned else "warning")

    def lost(self, event: ServerLost, now_s: float) -> None:
        """A server is lost, or empty: its standbys take over, or the job goes back."""
        state, task, why, back = self.state, event.task, event.why, event.back
        member = state.tasks.members.get(task)
        if member is None or not (back and member.state is Life.ALIVE):
            state.tasks.members.declare_dead(task)
        if state.ended:
            return
        held = [place.shard for place in state.layout.placement if place.task == task]
        shards = [str(shard) for shard in held]
        if back:
            self._whole = {shard: life for shard, life in self._whole.items() if shard not in held}
        # Once the last checkpoint is written, the servers are only expected to exit.
        over = state.stage in (Stage.SCORING, Stage.COUNTING)
        if state.begun and not over and self.failover.stand_in(task, why, now_s):
            return
        loss = state.losses.now
        if loss is not None and all(place.task != task for place in loss.home) and self.failover.put_back(why):
            return
        if not state.begun or not shards:
            self.failover.without(task)
            state.say("life", f"{why}; it held nothing, so the job continues without it", "warning", task=task)
            return
        if over:
            state.layout.give_up()
            state.say("life", f"{why}; its work is done", "warning", task=task)
            return
        at = f" at {member.address}" if member is not None else ""
        sentence = f"{why}; {task}{at} held shard {', '.join(shards)}"
        if reason := self.hopeless():
            advice = state.saves.how_to_go_on()
            state.end(TaskLostError.exit_code, f"{sentence}, so the job ends{reason}. {advice}", now_s)
            return
        self._begin(task, now_s, member.last_heard_s if member is not None else now_s)
        wait = f"waiting {state.timeouts.dead_s:g} s for it to return before its shards are moved"
        if not state.tasks.members.living("ps"):
            wait = f"waiting {state.timeouts.lost_s:g} s for it to return"
        rest = self._goes_back() if back else f"{self._goes_back()}; {wait}"
        state.say("ps_lost", f"{sentence}; {rest}", "warning", task=task, shards=shards)

    def hopeless(self) -> str:
        """Why the job can't continue after a loss, as the end of a sentence; empty if it can."""
        state = self.state
        if state.phase is Phase.STOPPING and not self.reconcile.ending.scoring.done:
            return " before its last checkpoint"
        if state.script and state.tasks.finished:
            # The gradients it would have to compute again are gone with it.
            return f": {', '.join(sorted(state.tasks.finished))} has finished and can't be rolled back"
        if state.losses.attempts >= ATTEMPTS:
            return f" after {state.losses.attempts} losses in a row without a step in between"
        return ""

    def _begin(self, task: str, now_s: float, heard_s: float) -> None:
        state, loss = self.state, self.state.losses.now
        # Several servers lost together count as one loss.
        another = loss is None or (not loss.failover and state.stage in PREPARATION)
        noted = state.note_loss(task, heard_s)
        if noted.planned:
            # Nothing was lost until now.
            noted.first, noted.began_s = task, heard_s
        noted.failover = noted.planned = False
        self._lost.setdefault(task, now_s)
        state.losses.attempts += another
        self._full = ""
        self.failover.forget()
        self.reconcile.leave(Stage.FINDING)
        self._finding_s, self._said_slow = now_s, False
        state.outbox.actions.append(Find(lost=tuple(sorted(self._lost))))

    def _goes_back(self) -> str:
        state = self.state
        if state.saves.checkpoint_step < 0:
            if state.figures.running_s is not None:
                return "the first checkpoint is still being written"
            return "there is no checkpoint yet, so the job starts over"
        # One that is being written may be there when it is looked for.
        return f"{state.mode.cuts.goes_back} to the newest checkpoint (step {state.saves.checkpoint_step} or later)"

    # The checkpoint

    def wait_for_checkpoint(self, event: Tick, now_s: float) -> None:
        """Log a slow disk, and end the job if it takes longer than fetching a cut may."""
        state = self.state
        waited_s, limit_s = now_s - self._finding_s, FIND_TIMEOUTS * state.timeouts.total_s
        slow = f"the newest checkpoint could not be read within {waited_s:.0f} s (limit {limit_s:.0f} s)"
        if waited_s >= limit_s:
            advice = state.saves.how_to_go_on()
            state.end(CheckpointError.exit_code, f"{slow}: does the disk respond? {advice}", now_s)
        elif waited_s >= state.timeouts.dead_s and not self._said_slow:
            self._said_slow = True
            state.say("slow", f"{slow}: still waiting for it to be written or read", "warning")

    def found(self, event: CheckpointFound, now_s: float) -> None:
        """The checkpoint to roll back to was found, or there is none."""
        state, found, loss = self.state, event.found, self.state.losses.now
        assert loss is not None
        if found.error:
            state.end(CheckpointError.exit_code, f"{_lost(loss)}, and {found.error}", now_s)
            return
        if found.resume is None and state.figures.running_s is not None:
            # The workers no longer have the first values.
            state.end(
                TaskLostError.exit_code,
                f"{_lost(loss)} before any checkpoint could be written, even of the initial values; start the job "
                "again",
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
        """Choose a holder for every shard, if that is possible now."""
        state = self.state
        living = {member.task: member for member in state.tasks.members.living("ps")}
        if self._waits_for(sorted({place.task for place in loss.home} - living.keys()), bool(living), now_s):
            return
        assert state.layout.plan is not None
        sizes = {number: shard.nbytes for number, shard in enumerate(state.layout.plan.shards)}
        drained = living.keys() - {member.task for member in state.tasks.holders()}
        placement = moved(loss.home, living, sizes, drained)
        for place, before in zip(placement, loss.home, strict=True):
            if place.task != before.task:
                state.say("moved", f"shard {place.shard} moves from {before.task} to {place.task}", "warning")
        keep = self._kept(placement)
        # The others are empty from here on, whatever happens next.
        self._whole = {shard: incarnation for shard, incarnation in self._whole.items() if shard in keep}
        if not keep and state.work.leases is not None and state.saves.resume is not None:
            # No shard has the updates made since: their batches are trained on again.
            state.work.leases = state.work.leases.back_to(state.saves.resume.cursor)
            state.note_cursor()
        self.reconcile.place(placement, keep)

    def _waits_for(self, gone: list[str], others: bool, now_s: float) -> bool:
        """Whether to keep waiting for lost servers; ends the job at the limit. others: whether any server is living."""
        state = self.state
        self._lost = {task: at_s for task, at_s in self._lost.items() if task in gone}
        if not gone:
            return False
        waited_s = now_s - min(self._lost.setdefault(task, now_s) for task in gone)
        if waited_s >= state.timeouts.lost_s and (self._full or not others):
            full = f"; {self._full}" if self._full else ""
            state.end(
                TaskLostError.exit_code,
                f"{', '.join(gone)} did not return within {state.timeouts.lost_s:g} s{full}. "
                f"{state.saves.how_to_go_on()}",
                now_s,
            )
            return True
        return not others or bool(self._full) or waited_s < state.timeouts.dead_s

    def _kept(self, placement: tuple[Placement, ...]) -> frozenset[int]:
        """Shards that keep their values; at most those whose server is still the same process."""
        state = self.state
        if state.saves.resume is None:
            return frozenset()
        lives = {member.task: member.incarnation for member in state.tasks.members.living("ps")}
        whole = frozenset(p.shard for p in placement if self._whole.get(p.shard) == lives[p.task])
        return state.mode.cuts.kept(whole)

    def refused(self, event: OrderRefused, now_s: float) -> bool:
        """A server refused an order. True: the job continues another way."""
        state, loss = self.state, self.state.losses.now
        if loss is None:
            return False
        if loss.failover:
            _, error = sorted(event.errors.items())[0]
            if self.failover.put_back(str(error)):
                return True
            self._begin(loss.first, now_s, loss.began_s)
            state.say("no_standby", f"{error}; {self._goes_back()}", "warning")
            return True
        if not isinstance(event.order, Configure) or state.stage not in PREPARATION:
            return False
        keep = event.order.keep
        empty = {task: error for task, error in event.errors.items() if isinstance(error, ProtocolError) and keep}
        if empty:
            # Servers that were to keep shards don't hold them: they were restarted before anyone noticed.
            for task, error in sorted(empty.items()):
                why = f"{task} does not have the expected shards: {error}"
                self.lost(ServerLost(task, why, back=True), now_s)
            return True
        if not self._lost:
            return False
        # It had no room for another server's shards; wait for others to join.
        task, error = sorted(event.errors.items())[0]
        self._full = f"{task} can't take its shards: {error}"
        state.say("no_room", f"{self._full}; waiting for {', '.join(sorted(self._lost))}", "warning")
        state.stage = Stage.PLACING
        return True

    # Training resumes

    def goes_on(self, event: TrainingBegins, now_s: float) -> None:
        state, loss = self.state, self.state.losses.now
        self.note_whole()
        if loss is None:
            return
        state.losses.now = None
        base = state.progress.base_step
        lost = 0 if loss.failover else self._count_lost(loss)
        recovered = Recovered(
            task=loss.first, at_step=loss.at_step, from_step=base, seconds=now_s - loss.began_s, lost=lost
        )
        if not loss.planned:
            state.losses.recoveries.append(recovered)
            state.record("recovered", timeline=state.layout.timeline, **dataclasses.asdict(recovered))
        if loss.failover:
            self.failover.taken_over(recovered, planned=loss.planned)
            return
        self._lost.clear()
        state.work.moved.clear()
        state.work.unready.clear()
        _note_back(state, state.layout.keep)
        what = state.mode.cuts.loss.format(lost=lost)
        heard = f"{loss.first} was last heard {recovered.seconds:.1f} s ago; " if loss.first != "chief" else ""
        if state.work.leases is not None and not state.layout.keep:
            what += " and repeated"
        state.say(
            "recovered",
            f"{heard}training continues from step {state.progress.base_step}, {what}",
            task=loss.first,
            from_step=recovered.from_step,
            at_step=recovered.at_step,
            lost=lost,
            seconds=recovered.seconds,
        )

    def note_whole(self) -> None:
        """Note that every shard has its values on its current server."""
        state = self.state
        lives = {member.task: member.incarnation for member in state.tasks.members.living("ps")}
        self._whole = {p.shard: lives[p.task] for p in state.layout.placement if p.task in lives}
        state.losses.resumed_at = None

    def count_anew(self, event: Tick, now_s: float) -> None:
        """Reset the count of losses in a row once every shard has advanced since the last one."""
        losses, progress = self.state.losses, self.state.progress
        if losses.now is not None or not losses.attempts or not progress.all_told:
            return
        if losses.resumed_at is None:
            losses.resumed_at = progress.step
        elif progress.step > losses.resumed_at:
            losses.attempts = 0

    def _count_lost(self, loss: Loss) -> int:
        state, resume = self.state, self.state.saves.resume
        steps = max(0, loss.at_step - state.progress.base_step)
        if resume is None:
            return steps
        versions, keep = resume.versions, state.layout.keep
        restored = [number for number in loss.at if number not in keep and number < len(versions)]
        return state.mode.cuts.lost(steps, {at: max(0, loss.at[at][1] - versions[at]) for at in restored})


def _note_back(state: State, keep: frozenset[int]) -> None:
    """Note what each shard that went back by itself has left of each worker's pushes. keep: shards that did not."""
    resume = state.saves.resume
    if resume is None:
        return
    tables = state.mode.cuts.alone({shard: at for shard, at in enumerate(resume.sequences) if shard not in keep})
    if tables is None:
        return
    state.losses.back.append(WentBack(timeline=state.layout.timeline, sequences=tables))
    noted = {
        str(shard): {task: [one.incarnation, one.last_seq] for task, one in table.items()}
        for shard, table in tables.items()
    }
    state.record("went_back", timeline=state.layout.timeline, shards=noted)


def _lost(loss: Loss) -> str:
    return f"{loss.first} was lost" if loss.first != "chief" else "the job had to go back"


def moved(
    placement: tuple[Placement, ...],
    living: Mapping[str, Member],
    sizes: Mapping[int, int],
    drained: Collection[str] = (),
) -> tuple[Placement, ...]:
    """The same placement for shards whose server lives; the others go to the living server with the least load.

    All addresses are brought up to date. sizes: bytes by shard. drained: servers that get nothing if there are others.
    """
    load = dict.fromkeys(sorted(living), 0)
    for place in placement:
        if place.task in load:
            load[place.task] += sizes[place.shard]
    result = []
    for place in placement:
        task = place.task
        if task not in load:
            task = min(load, key=lambda name: (name in drained, load[name]))
            load[task] += sizes[place.shard]
        result.append(Placement(shard=place.shard, task=task, address=living[task].address))
    return tuple(result)

"""Standbys: promoted when a server is lost, and placed again while training continues (PROTOCOL 1.6, 1.8).

A shard moves to another server the same way: it gets a standby there, which is promoted as soon as it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardline.core.orders import Phase
from shardline.core.placement import Placement
from shardline.errors import ShardlineError
from shardline_chief.rules.actions import Configure, Promotion
from shardline_chief.rules.events import OrderRefused, ShardsTold, Stage, Tick
from shardline_chief.rules.flows.moving import Moving, numbers
from shardline_chief.rules.reconcile import Reconcile, standbys_of
from shardline_chief.rules.state.layout import addresses
from shardline_chief.rules.state.losses import Recovered
from shardline_chief.rules.state.standbys import Protection, StandIn, after_loss, protected, without_standbys
from shardline_chief.rules.state.state import State


class Failover:
    def __init__(self, state: State, reconcile: Reconcile) -> None:
        self.state = state
        self.reconcile = reconcile
        self.protection = Protection()
        self._promoted: dict[int, Promotion] = {}
        """Standbys being promoted, by shard."""
        self.moving = Moving(state, self.protection)

    def told(self, event: ShardsTold, now_s: float) -> None:
        """A server reported its shards, including the state of their standbys."""
        mine = [place for place in self.state.layout.placement if place.task == event.task]
        for change in self.protection.observe(mine, event.shards, now_s):
            self.state.say("standby", change.sentence, "info" if change.protected else "warning")

    # A loss

    def stand_in(self, task: str, why: str, now_s: float) -> bool:
        """Promote standbys of what a lost server held, and drop the standbys it held; False if that is impossible."""
        state, loss = self.state, self.state.losses.now
        ending = state.phase is Phase.STOPPING and self.reconcile.ending.scoring.done
        promoting = loss is not None and loss.failover
        if not (promoting or state.phase is Phase.RUNNING or ending):
            return False
        # A new process under the same name is empty.
        left = {m.task: m.address for m in state.tasks.members.living("ps") if m.task != task}
        before = state.layout.placement
        found = after_loss(before, left, self.protection.whole())
        if found is None or found.placement == before:
            return False
        promoted = {
            **{n: promotion for n, promotion in self._promoted.items() if promotion.task in left},
            **found.promoted,
        }
        if promoted:
            self.promote(replace(found, promoted=promoted), task, why, now_s, since_s=now_s)
            return True
        changed = self._forget_changed(found)
        state.say("standby_lost", f"{why}; it had the standbys of shards {numbers(changed)}", "warning")
        self._set_standbys(self._protected(found.placement, now_s))
        return True

    def promote(
        self,
        found: StandIn,
        task: str,
        why: str,
        now_s: float,
        *,
        since_s: float,
        step: int | None = None,
        planned: bool = False,
    ) -> None:
        """Want this placement with all values, in a timeline that follows. step: that all shards have reached.

        planned: nothing is lost; shards move.
        """
        state, layout, promoted = self.state, self.state.layout, found.promoted
        loss = state.note_loss(task, since_s)
        if loss.planned and not planned:
            loss.first, loss.began_s = task, since_s
        loss.failover, loss.planned, loss.at_step = True, planned, loss.at_step if step is None else step
        over = ", ".join(f"shard {n} by {promotion.task}" for n, promotion in sorted(promoted.items()))
        self._forget_changed(found)
        # New standbys are placed once the job trains again, so that none can refuse what matters now.
        placement, self._promoted = found.placement, dict(promoted)
        self.reconcile.leave(Stage.PREPARING)
        # Nothing logged after this step is undone.
        state.progress.base_step = loss.at_step
        kind, level = ("moved", "info") if planned else ("ps_lost", "warning")
        state.say(kind, f"{why}; taken over: {over or 'nothing more'}; no step is lost", level, task=task)
        followed = self.protection.followed(placement)
        former = self._former(placement)
        layout.want(placement, keep=layout.all_shards, stays=True, promoted=promoted, followed=followed, former=former)
        told = [[shard, promotion.task, promotion.appointment] for shard, promotion in sorted(promoted.items())]
        state.record("failover", timeline=layout.timeline, promoted=told)

    def put_back(self, why: str) -> bool:
        """Leave shards that were about to move with their servers, which still have them; False if there are none."""
        layout, loss = self.state.layout, self.state.losses.now
        if loss is None or not loss.planned or not loss.failover or layout.have.placement is not None:
            return False
        self._promoted.clear()
        self.moving.cancel(why)
        placement = without_standbys(loss.home, layout.all_shards)
        former = self._former(placement)
        self.protection.forget(layout.all_shards)
        self.reconcile.leave(Stage.PREPARING)
        layout.want(placement, keep=layout.all_shards, stays=True, former=former)
        return True

    def _former(self, placement: tuple[Placement, ...]) -> dict[str, str]:
        """Living servers that hold something now, and nothing in this placement: address by task."""
        layout, after = self.state.layout, addresses(placement)
        living = {member.task for member in self.state.tasks.members.living("ps")} - after.keys()
        before = {**layout.former, **addresses(layout.placement)}
        return {task: address for task, address in before.items() if task in living}

    def _forget_changed(self, found: StandIn) -> list[int]:
        before = self.state.layout.placement
        changed = [p.shard for p, new in zip(before, found.placement, strict=True) if p != new]
        self.protection.forget(changed)
        return changed

    def taken_over(self, recovered: Recovered, *, planned: bool) -> None:
        """The standbys are primaries now: nothing was rolled back."""
        self._promoted.clear()
        done = f"{recovered.task} was declared lost {recovered.seconds:.1f} s ago; its standbys have taken over"
        if planned:
            done = self.moving.failure or f"shards have moved within {recovered.seconds:.1f} s"
        if self.state.layout.former:
            # Those that have dropped their shards get no further orders.
            layout = self.state.layout
            layout.former = {}
            layout.have_standbys(layout.placement, layout.followed)
        self.state.say(
            "recovered",
            f"{done}. Training continues from step {recovered.at_step}, and no step is repeated",
            task=recovered.task,
            seconds=recovered.seconds,
        )

    def forget(self) -> None:
        """No standby is promoted: all shards are restored instead, and their standbys are copied again."""
        self._promoted.clear()
        self.protection.forget(range(len(self.state.layout.placement)))

    # While training

    def watch(self, event: Tick, now_s: float) -> None:
        """Drop standbys that block training, and find new ones where they are missing."""
        state = self.state
        if not state.layout.settled:
            return
        self.moving.look(now_s)
        placement = state.layout.placement
        limit_s = state.timeouts.dead_s
        silent = self.protection.too_silent(now_s, limit_s)
        for place in placement:
            if place.shard in silent:
                self.protection.avoid(place.shard, place.standby_task, now_s + state.timeouts.total_s)
        if silent:
            self.protection.forget(silent)
            placement = without_standbys(placement, silent)
            who = f"shards {numbers(silent)} continue without their standbys"
            state.say("standby_lost", f"{who}, which did not answer for {limit_s:g} s", "warning")
        placement = self._protected(placement, now_s)
        if placement != state.layout.placement:
            self._set_standbys(placement)
        # A checkpoint that is being fetched would be lost with the timeline.
        elif state.saves.saving is None and (found := self.moving.ready()) is not None:
            source = next(place.task for place in placement if place.shard in found.promoted)
            self.promote(found, source, "the copies are complete", now_s, since_s=now_s, planned=True)

    def adopted(self, now_s: float) -> None:
        """A restarted chief found every primary intact: place standbys again, wherever the last chief had them."""
        if self.state.settings.standbys or any(place.standby_task for place in self.state.layout.placement):
            self.state.layout.have.placement = ()
            self._set_standbys(self._protected(self.state.layout.placement, now_s))

    def _protected(self, placement: tuple[Placement, ...], now_s: float) -> tuple[Placement, ...]:
        return protected(
            placement,
            {member.task: member.address for member in self.state.tasks.holders()},
            appoint=self.state.layout.new_appointment,
            avoid=lambda shard, at: self.protection.avoided(shard, at, now_s),
            moves=self.moving.moves,
            each=self.state.settings.standbys > 0,
        )

    def _set_standbys(self, placement: tuple[Placement, ...]) -> None:
        before = self.state.layout.placement
        # A copy elsewhere is not there yet, whatever was said of the last one.
        self.protection.forget(
            new.shard for old, new in zip(before, placement, strict=True) if old.appointment != new.appointment
        )
        self.state.layout.have_standbys(placement, self.protection.followed(placement))
        self.state.record("standbys", standbys=standbys_of(placement))

    def without(self, task: str) -> None:
        """A server is lost that held standbys, at most, while all shards are being prepared: the others do without."""
        layout = self.state.layout
        if task in layout.former:
            layout.former = {name: at for name, at in layout.former.items() if name != task}
            layout.have_standbys(layout.placement, layout.followed)
        shards = [place.shard for place in layout.placement if place.standby_task == task]
        if shards:
            self.protection.forget(shards)
            layout.have_standbys(without_standbys(layout.placement, shards), layout.followed - set(shards))

    def refused(self, event: OrderRefused, now_s: float) -> bool:
        """A server has no room for standbys: their shards go without. False if it refused some other order."""
        state = self.state
        if state.phase not in (Phase.RUNNING, Phase.STOPPING) or not isinstance(event.order, Configure):
            return False
        self._no_room(event.errors, now_s)
        return True

    def _no_room(self, errors: Mapping[str, ShardlineError], now_s: float) -> None:
        state = self.state
        for task, error in sorted(errors.items()):
            state.say("no_room", f"{task} can't hold standbys: {error}; their shards remain unprotected", "warning")
        placement = state.layout.placement
        there = [place for place in placement if place.standby_task in errors]
        if not there:
            # It refused something other than a standby; its next status will show what is wrong.
            state.layout.give_up()
            return
        followed = self.protection.followed(placement)
        # A standby that it already held has its memory. If even that was refused, drop all standbys there.
        gone = [place for place in there if place.shard not in followed] or there
        for place in gone:
            self.protection.avoid(place.shard, place.standby_task, now_s + state.timeouts.total_s)
        shards = [place.shard for place in gone]
        self.protection.forget(shards)
        # Their primaries may be blocked on their old standbys until they get the new placement.
        self._set_standbys(without_standbys(placement, shards))

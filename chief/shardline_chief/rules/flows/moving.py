"""Moves of shards to other servers while the job trains: to drain a server, or to even out the load.

A shard that moves gets a standby at its new place. Once those of all shards that move are complete, they are promoted
together, as if the servers before them were lost (failover.py): a new timeline begins, and no step is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardline.core.orders import Phase
from shardline.core.placement import Placement
from shardline.errors import JobError, UsageError, nearest
from shardline.fit import check_fit
from shardline_chief.rules.actions import Promotion
from shardline_chief.rules.messages import MoveAnswer
from shardline_chief.rules.state.standbys import Protection, StandIn, spread
from shardline_chief.rules.state.state import State


class Moving:
    """The newest request for moves; earlier ones are forgotten."""

    def __init__(self, state: State, protection: Protection) -> None:
        self.state, self.protection = state, protection
        self.moves: dict[int, str] = {}
        """The new server of each shard that has not moved yet."""
        self._number = state.settings.term << 32
        self._drains = self.failure = ""
        """The server that is drained; why the request was given up."""

    def ask(self, task: str, now_s: float) -> MoveAnswer:
        """Move the shards of a server elsewhere, or, if task is empty, from the fullest servers to the emptiest.

        Raises UsageError if that is not possible now, JobError if this job's shards can't be copied while it trains.
        """
        state = self.state
        if state.phase is not Phase.RUNNING or state.job is None:
            raise UsageError("no shard can be moved now: the job is not training")
        try:
            check_fit(state.job, standbys=1, workers=state.settings.workers)
        except JobError as error:
            raise JobError(f"no shard can be moved, since it is first copied, as for --standbys 1: {error}") from error
        if task:
            living = {member.task: member.incarnation for member in state.tasks.members.living("ps")}
            if task not in living:
                raise UsageError(f"{task} is no living server of this job{nearest(task, living)}")
            if all(member.task == task for member in state.tasks.holders()):
                raise UsageError(f"no other server than {task} may hold shards; start one first")
            state.tasks.drained.add((task, living[task]))
            state.record("drained", task=task, incarnation=living[task])
        self._number, self._drains, self.failure = self._number + 1, task, ""
        self.moves = self._spread()
        told = ", ".join(f"shard {shard} to {aim}" for shard, aim in sorted(self.moves.items()))
        why = f"{task} is drained" if task else "the load is evened out"
        state.say("move", f"{why}: {told or 'no shard has to move'}")
        return self.told(self._number)

    def told(self, number: int) -> MoveAnswer:
        """How the newest request goes. Raises UsageError if it has another number."""
        if number != self._number:
            raise UsageError("the chief was restarted, or asked for other moves, meanwhile; ask again")
        layout = self.state.layout
        if self.moves and self.state.phase in (Phase.STOPPING, Phase.ENDED):
            self.cancel("the job ends")
        left = [place for place in layout.placement if self._drains in (place.task, place.standby_task)]
        done = layout.settled and not self.moves and not (self._drains and left)
        return MoveAnswer(number=number, moves=self.moves, failure=self.failure, done=done)

    def _spread(self) -> dict[int, str]:
        state = self.state
        assert state.layout.plan is not None
        assert state.job is not None
        sizes = {number: shard.nbytes for number, shard in enumerate(state.layout.plan.shards)}
        holders, plan, settings = state.tasks.holders(), state.layout.plan, state.settings
        moves: dict[int, str] = {}
        for place in settings.places(state.job) or [""]:
            # Where nobody of its kind is left, any server will do.
            fit = [member.task for member in holders if settings.suits(member.index, place)]
            here = tuple(one for one in state.layout.placement if not place or plan.place(one.shard) == place)
            fit = fit or [member.task for member in holders]
            moves |= spread(here, sizes, fit, even=not self._drains) if fit else {}
        return moves

    def look(self, now_s: float) -> None:
        """Note what is done, and choose other servers for the shards whose new server is gone."""
        at = {place.shard: place.task for place in self.state.layout.placement}
        left = {shard: aim for shard, aim in self.moves.items() if at[shard] != aim}
        gone = set(left.values()) - {member.task for member in self.state.tasks.holders()}
        others = self._spread() if gone else left
        self.moves = left
        if left.keys() - others.keys():
            self.cancel(f"{', '.join(sorted(gone))} is gone")
        elif gone:
            self.moves = others
        for shard, aim in self.moves.items():
            if self.protection.avoided(shard, aim, now_s):
                self.cancel(f"{aim} could not take, or keep, a copy of shard {shard}")
                return

    def cancel(self, why: str) -> None:
        """The shards stay where they are, and a server that was to be drained may hold more again."""
        state = self.state
        if not self.moves:
            return
        self.failure = f"{why}; what has not moved stays: shard {numbers(self.moves)}"
        self.moves = {}
        state.say("move", f"the move is given up: {self.failure}", "warning")
        member = state.tasks.members.get(self._drains)
        if member is not None and (member.task, member.incarnation) in state.tasks.drained:
            state.tasks.drained.discard((member.task, member.incarnation))
            state.record("drained", task=member.task, incarnation=member.incarnation, off=True)

    def ready(self) -> StandIn | None:
        """The placement after the moves, once there are complete copies of all shards that move; else None."""
        promoted, after = {}, []
        for place in self.state.layout.placement:
            aim = self.moves.get(place.shard)
            if aim is None:
                after.append(place)
            elif self.protection.states.get(place.shard) == "synced" and place.standby_task == aim:
                promoted[place.shard] = Promotion(aim, place.appointment)
                after.append(Placement(shard=place.shard, task=aim, address=place.standby_address))
            else:
                return None
        return StandIn(placement=tuple(after), promoted=promoted) if promoted else None


def numbers(shards: Iterable[int]) -> str:
    """Shards in order, for a message: "0, 2"."""
    return ", ".join(map(str, sorted(shards)))

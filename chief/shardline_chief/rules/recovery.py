"""A parameter server is gone with what it held: go back to the newest checkpoint under a new timeline, and go on.

PROTOCOL 1.6. Synchronous: all shards go back, and the workers compute the same bits again. Asynchronous: only what the
lost server held is restored; updates that it had acknowledged since are lost, and counted. Its shards wait for its next
process for a third of --timeout; then they move to the other servers, where these have room. A loss in the middle of
this starts it over.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping

from shardline.core.orders import Phase
from shardline.core.placement import Placement
from shardline.core.status import ShardStatus
from shardline.errors import CheckpointError, ProtocolError, ShardlineError, TaskLostError
from shardline_chief.rules.actions import Configure, Find, Found, Heir, Order
from shardline_chief.rules.ending import Ending
from shardline_chief.rules.membership import Member
from shardline_chief.rules.membership import State as Life
from shardline_chief.rules.running import Running
from shardline_chief.rules.standbys import Protection, StandIn, after_loss, protected, without_standbys
from shardline_chief.rules.start import Setup
from shardline_chief.rules.state import Recovered, State

ATTEMPTS = 8
"""So many losses in a row, with no step made between them, end the job: something is wrong that no restart cures."""

FIND_TIMEOUTS = 10
"""So many times --timeout the checkpoint to go back to is waited for, as the fetch of one is."""


class Stage(enum.Enum):
    """Where the recovery is."""

    PROMOTING = -1
    """Standbys take over; nothing goes back."""
    NONE = 0
    FINDING = 1
    """Waiting for the checkpoint to go back to, which may be being written."""
    SERVERS = 2
    """Waiting for somebody to hold the shards."""
    SETUP = 3
    """The servers are being filled; see setup.py."""


class Recovery:
    """Rules of what follows the loss of a server."""

    def __init__(self, state: State, setup: Setup, running: Running, ending: Ending) -> None:
        self.state = state
        self.setup = setup
        self.running = running
        self.ending = ending
        self.stage = Stage.NONE
        self._first = ""
        self._lost: dict[str, float] = {}
        """When each was known to be lost, while nobody holds its shards."""
        self._began_s = 0.0
        self._at: dict[int, tuple[int, int]] = {}
        """Step and version of each shard, as last told before the loss."""
        self._at_step = 0
        self._home: tuple[Placement, ...] = ()
        """Who held what before the loss."""
        self._whole: dict[int, int] = {}
        """Incarnation of the server on which each shard has its values, of shards that have them."""
        self._full = ""
        """Why the other servers can't take the lost shards."""
        self._attempts = 0
        self._resumed_at: int | None = None
        """Step (sync) or updates (async) that all shards had when the job went on; None until they have told."""
        self._finding_s = 0.0
        """Since when the checkpoint to go back to is looked for."""
        self._said_slow = False
        self.protection = Protection()
        self._promoted: dict[int, Heir] = {}
        """Shards whose standbys are taking over."""
        self._placing = False
        """Standbys are being placed while training goes on."""
        state.on_ps_lost = self.lost
        state.on_refused = self.refused
        setup.on_running = self.running_again

    @property
    def active(self) -> bool:
        """Whether the job stands still for this."""
        return self.stage is not Stage.NONE

    def remember(self, whole: Mapping[int, int]) -> None:
        """Shards that have their values, as an earlier chief left them: incarnation of the server, by shard."""
        self._whole = dict(whole)

    # The loss

    def again(self, why: str, now_s: float) -> None:
        """No server is lost, but what they hold is not whole."""
        self._begin("chief", now_s, now_s)
        self.state.say("again", f"{why}; {self._goes_back()}", "warning")

    def lost(self, task: str, why: str, now_s: float, *, back: bool = False) -> None:
        """A server is gone, or empty. back: its next process is there already."""
        state = self.state
        member = state.members.get(task)
        if member is None or not (back and member.state is Life.ALIVE):
            state.members.declare_dead(task)
        if state.ended:
            return
        self._placing = False
        shards = [str(place.shard) for place in state.placement if place.task == task]
        if self.setup.begun and not self.ending.over and self._stand_in(task, why, now_s):
            return
        if not self.setup.begun or not shards:
            # Commands go to those that hold shards only.
            state.say("life", f"{why}; it held nothing, so the job goes on without it", "warning", task=task)
            return
        if self.ending.over:
            state.say("life", f"{why}; its part is done", "warning", task=task)
            return
        at = f" at {member.address}" if member is not None else ""
        sentence = f"{why}; {task}{at} held shard {', '.join(shards)}"
        if reason := self._hopeless():
            state.end(TaskLostError.exit_code, f"{sentence}, so the job ends{reason}. {state.what_remains()}", now_s)
            return
        self._begin(task, now_s, member.last_heard_s if member is not None else now_s)
        wait = f"waiting {state.timeouts.dead_s:g} s for it to come back, before its shards move"
        if not state.members.living("ps"):
            wait = f"waiting {state.timeouts.lost_s:g} s for it to come back"
        rest = self._goes_back() if back else f"{self._goes_back()}; {wait}"
        state.say("ps_lost", f"{sentence}; {rest}", "warning", task=task, shards=shards)

    def _stand_in(self, task: str, why: str, now_s: float) -> bool:
        """Let standbys take over what a server held, and others go on without theirs; False where that can't be."""
        state = self.state
        running = state.phase is Phase.RUNNING or (state.phase is Phase.STOPPING and self.ending.done)
        if not state.settings.standbys or not (self.stage is Stage.PROMOTING or (self.stage is Stage.NONE and running)):
            return False
        # A new process of the same name is empty.
        left = {m.task: m.address for m in state.members.living("ps") if m.task != task}
        found = after_loss(state.placement, left, self.protection.whole())
        if found is None or found.placement == state.placement:
            self._promoted.clear()
            return False
        promoted = {**{n: heir for n, heir in self._promoted.items() if heir.task in left}, **found.promoted}
        changed = [p.shard for p, new in zip(state.placement, found.placement, strict=True) if p != new]
        self.protection.forget(changed)
        placement = self._protected(found.placement, now_s)
        if not promoted:
            state.say("standby_lost", f"{why}; shards {_numbers(changed)} lost their standbys there", "warning")
            self._set_standbys(placement)
            return True
        self._note_loss(task, now_s)
        self._promoted = promoted
        self._turn(Stage.PROMOTING)
        # Nothing that was logged beyond it is undone.
        state.base_step = self._at_step
        state.say("ps_lost", f"{why}; taken over: {_over(found)}; nothing goes back", "warning", task=task)
        self.setup.take_over(placement, promoted, followed=self.protection.followed(placement))
        return True

    def stand_in(self, found: StandIn, why: str, now_s: float, *, since_s: float, step: int) -> None:
        """Let standbys take over as a chief that came back has found it; step: that the shards have reached."""
        state = self.state
        first = next((p.task for p in state.placement if p.shard in found.promoted), "chief")
        self._note_loss(first, since_s)
        self._at_step = step
        placement = self._protected(found.placement, now_s)
        self._promoted = dict(found.promoted)
        self.protection.forget(found.promoted)
        self._turn(Stage.PROMOTING)
        state.base_step = step
        state.say("ps_lost", f"{why}; taken over: {_over(found)}; nothing goes back", "warning", task=first)
        self.setup.take_over(placement, found.promoted, followed=self.protection.followed(placement))

    def adopted(self, placement: tuple[Placement, ...], now_s: float) -> None:
        """A chief that came back has found every primary as it was: place standbys anew, wherever its last one had."""
        if self.state.settings.standbys:
            self._set_standbys(self._protected(placement, now_s))

    def _protected(self, placement: tuple[Placement, ...], now_s: float) -> tuple[Placement, ...]:
        living = {member.task: member.address for member in self.state.members.living("ps")}
        return protected(
            placement,
            living,
            appoint=self.state.new_appointment,
            avoid=lambda shard, at: self.protection.avoided(shard, at, now_s),
        )

    def _set_standbys(self, placement: tuple[Placement, ...]) -> None:
        self._placing = True

        def placed() -> None:
            self._placing = False

        self.setup.set_standbys(placement, placed, followed=self.protection.followed(placement))

    def _watch_standbys(self, now_s: float) -> None:
        """While training goes on: give up standbys that hold it up, and find new ones where they lack."""
        state = self.state
        ready = state.phase is Phase.RUNNING and self.setup.active and not state.returning
        if not state.settings.standbys or self._placing or not ready:
            return
        placement = state.placement
        silent = self.protection.too_silent(now_s, state.timeouts.dead_s)
        for place in placement:
            if place.shard in silent:
                self.protection.avoid(place.shard, place.standby_task, now_s + state.timeouts.total_s)
        if silent:
            self.protection.forget(silent)
            placement = without_standbys(placement, silent)
            state.say(
                "standby_lost",
                f"shards {_numbers(silent)} go on without their standbys, which did not answer for "
                f"{state.timeouts.dead_s:g} s",
                "warning",
            )
        placement = self._protected(placement, now_s)
        if placement != state.placement:
            self._set_standbys(placement)

    def told(self, task: str, shards: Iterable[ShardStatus], now_s: float) -> None:
        """A ps described its shards."""
        if not self.state.settings.standbys:
            return
        mine = [place for place in self.state.placement if place.task == task]
        for sentence in self.protection.observe(mine, shards, now_s):
            self.state.say("standby", sentence, "info" if "is protected" in sentence else "warning")

    def _hopeless(self) -> str:
        """Why the job can't go on after a loss, as the end of a sentence; empty where it can."""
        state = self.state
        if state.phase is Phase.STOPPING and not self.ending.done:
            return " as it was about to"
        if state.script and state.finished:
            # Its gradients of the steps to be made again are gone with it.
            return f": {', '.join(sorted(state.finished))} has finished and can't go back"
        if self._attempts >= ATTEMPTS:
            return f" after {self._attempts} losses in a row without a step between them"
        return ""

    def _note_loss(self, task: str, heard_s: float) -> None:
        state = self.state
        if not self.active:
            self._first, self._began_s = task, heard_s
            self._at = {number: (shard.step_min, shard.version) for number, shard in state.shards.items()}
            self._at_step = state.step
            self._home = state.placement

    def _begin(self, task: str, now_s: float, heard_s: float) -> None:
        state = self.state
        self._note_loss(task, heard_s)
        self._lost.setdefault(task, now_s)
        # Several that go together are one loss.
        self._attempts += self.stage in (Stage.NONE, Stage.SETUP)
        self._full = ""
        self._promoted.clear()
        self.protection.forget(range(len(state.placement)))
        self._turn(Stage.FINDING)
        self._finding_s, self._said_slow = now_s, False
        state.actions.append(Find(lost=tuple(sorted(self._lost))))

    def _turn(self, stage: Stage) -> None:
        """Leave the history so far: what comes back of it is not taken any more, and workers stop what they do."""
        state = self.state
        if state.phase is Phase.STOPPING:
            self.ending.reopen()
        state.new_timeline()
        state.returning = False
        state.suspects.clear()
        self.setup.forget()
        self.running.forget()
        self._placing = False
        self.stage = stage

    def _goes_back(self) -> str:
        state = self.state
        if state.checkpoint_step < 0:
            if state.running_s is not None:
                return "there is no checkpoint yet, but for one that is being written now"
            return "there is no checkpoint yet, so the job begins anew"
        what = "all shards go back" if state.sync else "it goes back"
        return f"{what} to step {state.checkpoint_step}"

    # On

    def tick(self, now_s: float) -> None:
        """Go on as far as possible."""
        state = self.state
        if state.ended:
            return
        if self.stage is Stage.FINDING:
            self._wait_for_checkpoint(now_s)
        elif self.stage is Stage.SERVERS:
            self._place(now_s)
        elif self.stage is Stage.NONE:
            self._count_anew()
            self._watch_standbys(now_s)

    def _count_anew(self) -> None:
        """A loss counts as one in a row until every shard has gone on since the one before."""
        state = self.state
        if not self._attempts or not state.all_told:
            return
        if self._resumed_at is None:
            self._resumed_at = state.step
        elif state.step > self._resumed_at:
            self._attempts = 0

    def _wait_for_checkpoint(self, now_s: float) -> None:
        """The disk takes its time: say so, and end the job where that is more than the fetch of a cut may take."""
        state = self.state
        waited_s, limit_s = now_s - self._finding_s, FIND_TIMEOUTS * state.timeouts.total_s
        slow = f"the newest checkpoint was not there to go back to within {waited_s:.0f} s (limit {limit_s:.0f} s)"
        if waited_s >= limit_s:
            state.end(CheckpointError.exit_code, f"{slow}: does the disk answer? {state.what_remains()}", now_s)
        elif waited_s >= state.timeouts.dead_s and not self._said_slow:
            self._said_slow = True
            state.say("slow", f"{slow}: it is being written or read, and waited for", "warning")

    def found(self, found: Found, now_s: float) -> bool:
        """The answer to Find; False where nobody waits for it any more."""
        state = self.state
        if state.ended or self.stage is not Stage.FINDING:
            return False
        if found.error:
            state.end(CheckpointError.exit_code, f"{self._first} was lost, and {found.error}", now_s)
            return True
        if found.resume is None and state.running_s is not None:
            # Those that train hold no first values any more.
            state.end(
                TaskLostError.exit_code,
                f"{self._first} was lost, and no checkpoint could be written so far, not even one of the first values; "
                "start the job again",
                now_s,
            )
            return True
        state.resume = found.resume
        state.base_step = found.resume.step if found.resume is not None else 0
        if found.resume is None and state.leases is not None:
            state.leases = state.leases.anew()
            state.note_cursor()
        self.stage = Stage.SERVERS
        self._place(now_s)
        return True

    def _place(self, now_s: float) -> None:
        """Choose who holds what, if that can be done now."""
        state = self.state
        living = {member.task: member for member in state.members.living("ps")}
        gone = sorted({place.task for place in self._home} - living.keys())
        self._lost = {task: at_s for task, at_s in self._lost.items() if task in gone}
        if gone:
            waited_s = now_s - min(self._lost.setdefault(task, now_s) for task in gone)
            if waited_s >= state.timeouts.lost_s and (self._full or not living):
                full = f"; {self._full}" if self._full else ""
                state.end(
                    TaskLostError.exit_code,
                    f"{', '.join(gone)} did not come back within {state.timeouts.lost_s:g} s{full}. "
                    f"{state.what_remains()}",
                    now_s,
                )
                return
            if not living or self._full or waited_s < state.timeouts.dead_s:
                return
        placement = moved(self._home, living, self._sizes())
        for place, before in zip(placement, self._home, strict=True):
            if place.task != before.task:
                state.say("moved", f"shard {place.shard} moves from {before.task} to {place.task}", "warning")
        self.stage = Stage.SETUP
        keep = self._kept(placement)
        # The others are empty from here on, whatever becomes of this.
        self._whole = {shard: incarnation for shard, incarnation in self._whole.items() if shard in keep}
        if not keep and state.leases is not None and state.resume is not None:
            # No shard has the updates made since: their batches are trained on again.
            state.leases = state.leases.back_to(state.resume.cursor)
            state.note_cursor()
        self.setup.place(placement, keep)

    def _sizes(self) -> Mapping[int, int]:
        plan = self.state.plan
        assert plan is not None
        return {number: shard.nbytes for number, shard in enumerate(plan.shards)}

    def _kept(self, placement: tuple[Placement, ...]) -> frozenset[int]:
        """Shards that stay as they are: asynchronous ones on a server that is the process it was."""
        state = self.state
        if state.sync or state.resume is None:
            return frozenset()
        lives = {member.task: member.incarnation for member in state.members.living("ps")}
        return frozenset(p.shard for p in placement if self._whole.get(p.shard) == lives[p.task])

    def refused(self, order: Order, errors: Mapping[str, ShardlineError], now_s: float) -> bool:
        """A server did not do what it was told. True: it had no room for another one's shards, and others may come."""
        state = self.state
        if self.stage is Stage.PROMOTING:
            _, error = sorted(errors.items())[0]
            self._begin(self._first, now_s, self._began_s)
            state.say("no_standby", f"{error}; {self._goes_back()}", "warning")
            return True
        if self.stage is Stage.NONE and self._placing and isinstance(order, Configure):
            self._no_room_for_standbys(errors, now_s)
            return True
        if not isinstance(order, Configure) or self.stage is not Stage.SETUP:
            return False
        empty = {task: error for task, error in errors.items() if isinstance(error, ProtocolError) and order.keep}
        if empty:
            self._found_empty(empty, now_s)
            return True
        if not self._lost:
            return False
        task, error = sorted(errors.items())[0]
        self._full = f"{task} can't take its shards: {error}"
        state.say("no_room", f"{self._full}; waiting for {', '.join(sorted(self._lost))}", "warning")
        self.stage = Stage.SERVERS
        return True

    def _found_empty(self, errors: Mapping[str, ShardlineError], now_s: float) -> None:
        """Servers that were to keep shards do not hold them: they were started again before anybody noticed."""
        gone = {place.shard for place in self._home if place.task in errors}
        self._whole = {shard: incarnation for shard, incarnation in self._whole.items() if shard not in gone}
        for task, error in sorted(errors.items()):
            self.lost(task, f"{task} does not hold what it should: {error}", now_s, back=True)

    def _no_room_for_standbys(self, errors: Mapping[str, ShardlineError], now_s: float) -> None:
        state = self.state
        for task, error in sorted(errors.items()):
            state.say("no_room", f"{task} can't hold standbys: {error}; their shards stay unprotected", "warning")
        there = [place for place in state.placement if place.standby_task in errors]
        if not there:
            # It is no standby that is refused; what is wrong there is found by what it tells.
            self._placing = False
            return
        held = self.protection.followed(state.placement)
        # What it held before has its memory already; where that is refused too it holds none.
        gone = [place for place in there if place.shard not in held] or there
        for place in gone:
            self.protection.avoid(place.shard, place.standby_task, now_s + state.timeouts.total_s)
        shards = [place.shard for place in gone]
        self.protection.forget(shards)
        # Their primaries may be waiting for the standbys that they had before, until they are told.
        self._set_standbys(without_standbys(state.placement, shards))

    def running_again(self, now_s: float) -> None:
        """Training begins, or goes on."""
        state = self.state
        lives = {member.task: member.incarnation for member in state.members.living("ps")}
        self._whole = {place.shard: lives[place.task] for place in state.placement if place.task in lives}
        self._resumed_at = None
        if not self.active:
            return
        if self.stage is Stage.PROMOTING:
            self._taken_over(now_s)
            return
        self.stage = Stage.NONE
        self._lost.clear()
        lost = self._count_lost()
        recovered = Recovered(
            task=self._first,
            at_step=self._at_step,
            from_step=state.base_step,
            seconds=now_s - self._began_s,
            lost=lost,
        )
        state.recoveries.append(recovered)
        state.record("recovered", timeline=state.timeline, **dataclasses.asdict(recovered))
        what = f"{lost} steps are made again" if state.sync else f"at least {lost} acknowledged updates are lost"
        if state.leases is not None and not self.setup.keep:
            what += " and made again"
        state.say(
            "recovered",
            f"{self._first} was heard last {recovered.seconds:.1f} s ago; training goes on from step "
            f"{state.base_step}, {what}",
            task=self._first,
            from_step=recovered.from_step,
            at_step=recovered.at_step,
            lost=lost,
            seconds=recovered.seconds,
        )

    def _taken_over(self, now_s: float) -> None:
        """Standbys are the primaries now: nothing went back."""
        state = self.state
        self.stage = Stage.NONE
        self._promoted.clear()
        recovered = Recovered(
            task=self._first, at_step=self._at_step, from_step=self._at_step, seconds=now_s - self._began_s, lost=0
        )
        state.recoveries.append(recovered)
        state.record("recovered", timeline=state.timeline, **dataclasses.asdict(recovered))
        state.say(
            "recovered",
            f"{self._first} was known to be lost {recovered.seconds:.1f} s ago; its standbys have taken over, training "
            f"goes on from step {self._at_step}, nothing is made again",
            task=self._first,
            seconds=recovered.seconds,
        )

    def _count_lost(self) -> int:
        state = self.state
        if state.sync or state.resume is None:
            return max(0, self._at_step - state.base_step)
        versions = state.resume.versions
        restored = [number for number in self._at if number not in self.setup.keep]
        return sum(max(0, self._at[number][1] - versions[number]) for number in restored if number < len(versions))


def _over(found: StandIn) -> str:
    return ", ".join(f"shard {n} by {heir.task}" for n, heir in sorted(found.promoted.items())) or "nothing more"


def _numbers(shards: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(shards)))


def moved(
    placement: tuple[Placement, ...], living: Mapping[str, Member], sizes: Mapping[int, int]
) -> tuple[Placement, ...]:
    """The same placement where its servers live, else on the living one that holds least; at their present addresses.

    sizes: bytes by shard. Pure.
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

"""While the job trains: cuts become checkpoints, leases are handed out, and the end is seen when it comes."""

from __future__ import annotations

from shardline.core.orders import Phase
from shardline_chief.rules.actions import CommandResult, Cut, Release, Save, Saved
from shardline_chief.rules.leases import Lease, Leases
from shardline_chief.rules.messages import TRAINERS, LeaseAnswer
from shardline_chief.rules.pacing import StepClock, least_interval
from shardline_chief.rules.state import State

RETRY_S = 0.2
"""How soon a worker without a lease asks again: the leases of a dead one may come back."""


class Running:
    """Rules of the phase RUNNING; those of checkpoints hold in STOPPING too."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.cut_asked = False
        """Asynchronous mode: the servers are copying themselves."""
        self._last_cut = 0
        self._clock = StepClock()
        self._advised = False
        self._warned = False

    def forget(self) -> None:
        """The timeline is over: cuts that were asked for in it will not come."""
        self.cut_asked = False
        self._last_cut = 0

    def remember(self, last_cut: int) -> None:
        """Go on where an earlier chief was. last_cut: step of its newest checkpoint, -1 = none."""
        self._last_cut = max(0, last_cut)

    # Checkpoints

    def shards_told(self, now_s: float) -> None:
        """A ps described its shards: fetch what is whole, give up what can't become whole."""
        state = self.state
        if state.phase is Phase.RUNNING:
            self._clock.observe(state.step, now_s)
        if state.phase not in (Phase.RUNNING, Phase.STOPPING) or state.saving is not None or state.returning:
            return
        if state.sync:
            ready = state.ledger.complete()
            if ready:
                self.save(ready[0])
                return
            for step in state.ledger.lost():
                state.ledger.close(step)
                state.say("cut", f"the cut at step {step} is not whole on all shards and is given up", "warning")
                state.command(Release(timeline=state.timeline, step=step))
        elif state.phase is Phase.RUNNING:
            self._maybe_cut()

    def _maybe_cut(self) -> None:
        """Asynchronous mode: a cut whenever every shard has gone another checkpoint_every versions."""
        state = self.state
        every = state.job.checkpoint_every if state.job is not None else 0
        start = max(self._last_cut, state.base_step)
        # At the last batch the last cut is near, and its leases are all done.
        at_end = state.leases is not None and state.step >= state.leases.steps
        if every > 0 and not at_end and not self.cut_asked and state.step // every > start // every:
            self.cut_now(stop=False)

    def cut_now(self, *, stop: bool) -> int:
        """Asynchronous mode: all shards copy themselves at once, under the lowest version as the number, returned.

        The number is one higher where the lowest version has a checkpoint already and others have gone on.
        """
        state = self.state
        assert not state.sync
        assert not self.cut_asked
        self.cut_asked = True
        step = state.step
        if step == state.checkpoint_step and any(shard.version > step for shard in state.shards.values()):
            # One shard was restored from that checkpoint, and others have gone on: this is another state.
            step += 1
        self._last_cut = step
        # Noted first: then every update of a done lease is inside the copies (PROTOCOL 1.7).
        cursor = state.leases.cursor() if state.leases is not None else {}

        def taken(result: CommandResult, now_s: float) -> None:
            self.cut_asked = False
            self.save(step, cursor)

        state.command(Cut(timeline=state.timeline, step=step, stop=stop), state.history(taken))
        return step

    def save(self, step: int, cursor: dict[str, object] | None = None) -> None:
        """Have a cut that all shards hold fetched and committed."""
        state = self.state
        assert state.plan is not None
        assert state.job is not None
        if step == state.checkpoint_step:
            # Nothing was applied since: the checkpoint is there already.
            self._release(step)
            return
        state.saving = step
        state.actions.append(
            Save(
                step=step,
                timeline=state.timeline,
                plan=state.plan,
                job=state.job,
                placement=state.placement,
                cursor=cursor or {},
                urgent=state.phase is Phase.STOPPING or step == state.stop_step,
            )
        )

    def saved(self, saved: Saved) -> None:
        """A checkpoint was committed, or could not be."""
        state = self.state
        state.saving = None
        self._release(saved.step)
        if saved.error:
            step, _ = state.newest()
            rest = f"the last one stays: step {step}" if step >= 0 else "there is none"
            state.say("checkpoint_failed", f"no checkpoint at step {saved.step}: {saved.error}; {rest}", "error")
            state.failed_saves += 1
            many = f" ({state.failed_saves} in a row failed)" if state.failed_saves > 1 else ""
            state.faults["checkpoint"] = f"no checkpoint at step {saved.step}{many}: {saved.error}; {state.last_good()}"
            return
        state.failed_saves = 0
        state.faults.pop("checkpoint", None)
        state.record("cut", step=saved.step, path=saved.path, timeline=state.timeline)
        state.checkpoint_step = saved.step
        state.checkpoint_path = saved.path
        state.say(
            "checkpoint",
            f"checkpoint of step {saved.step}: {saved.nbytes / 1e6:.1f} MB in {saved.seconds:.2f} s, {saved.path}",
            step=saved.step,
            seconds=saved.seconds,
            bytes=saved.nbytes,
        )
        self._advise(saved)

    def _advise(self, saved: Saved) -> None:
        """Say once how many steps must lie between checkpoints, and once more where that comes to be too many."""
        state = self.state
        every = state.job.checkpoint_every if state.job is not None else 0
        if state.phase is not Phase.RUNNING or not every or not saved.step or not self._clock.seconds:
            return
        least = least_interval(saved.nbytes, saved.least_s, saved.link_rate, self._clock.seconds, every)
        state.least_interval = least.steps
        if self._advised and (self._warned or not least.too_small):
            return
        self._advised, self._warned = True, least.too_small
        level = "warning" if least.too_small else "info"
        state.say("checkpoint_interval", least.sentence, level, steps=least.steps, seconds=saved.least_s)

    def _release(self, step: int) -> None:
        state = self.state
        state.ledger.close(step)
        state.command(Release(timeline=state.timeline, step=step))

    # Leases

    def lease(self, task: str, incarnation: int, done: tuple[int, ...]) -> LeaseAnswer:
        """Asynchronous mode: note finished leases, hand out the next batches."""
        state = self.state
        if not state.members.current(task, incarnation, TRAINERS):
            return LeaseAnswer(outcome="FENCED", reason=f"{task} incarnation {incarnation:#x} is no living trainer")
        leases = state.leases
        if leases is None:
            why = "synchronous: batches follow from the step" if state.sync else "a script, which chooses its batches"
            return LeaseAnswer(outcome="REFUSED", reason=f"this job is {why}")
        noted = [number for number in done if leases.finish(number, incarnation)]
        answer, issued = self._next_lease(leases, incarnation)
        if noted or issued is not None:
            # In the journal before the answer goes out: the next chief neither takes it back nor gives it to another.
            batches = [issued.number, issued.first, issued.count] if issued is not None else None
            state.record("lease", incarnation=incarnation, done=noted, issued=batches)
        return answer

    def _next_lease(self, leases: Leases, incarnation: int) -> tuple[LeaseAnswer, Lease | None]:
        """The answer, and the lease where it is a new one."""
        state = self.state
        if leases.all_done or state.phase in (Phase.STOPPING, Phase.ENDED):
            return LeaseAnswer(outcome="STOPPED", reason=state.reason or "all batches are done"), None
        going = state.phase is Phase.RUNNING and not state.too_few() and not state.returning
        held = leases.held_by(incarnation)
        lease = held or leases.take(incarnation, workers=len(state.trainers())) if going else None
        if lease is None:
            return LeaseAnswer(outcome="WAITING", reason="no batch is free now", retry_after_s=RETRY_S), None
        answer = LeaseAnswer(outcome="SERVED", lease=lease.number, first=lease.first, count=lease.count)
        return answer, lease if lease is not held else None

    # The end

    def ahead(self) -> list[str]:
        """Synchronous script: workers that have pushed a step which one that has finished will never push."""
        state = self.state
        if not (state.script and state.sync and state.finished):
            return []
        gone = {int(task.rpartition("/")[2]) for task in state.finished}
        # A report from before the end of the finished one lacks its replica too.
        last = max(state.steps.get(task, 0) for task in state.finished)
        open_ = [set(s.waiting_for) for s in state.shards.values() if s.step_min >= last and gone & set(s.waiting_for)]
        return [m.task for m in state.working() if any(m.index not in missing for missing in open_)]

    def complete(self) -> bool:
        """Whether the job has done all its steps."""
        state = self.state
        if state.phase is not Phase.RUNNING:
            return False
        if state.script:
            return len(state.finished) >= state.settings.trainers
        if state.leases is not None:
            return state.leases.all_done
        return state.all_told and state.stop_step > 0 and state.step >= state.stop_step

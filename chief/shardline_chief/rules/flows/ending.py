"""How the job ends: a common step, a checkpoint there, then the evaluator's word on it (scoring.py).

Done, stopped and failed jobs take the same way; they differ in how the last step is chosen and how long it is tried.
Past its deadline the last committed checkpoint stays (PROTOCOL 1.6).
"""

from __future__ import annotations

from shardline.errors import CheckpointError
from shardline_chief.rules.actions import AskStatus, CommandResult, Cut, Hurry
from shardline_chief.rules.continuations import StandThenCut, StatusThenChoose, StatusThenFinalCut, StopThenReach
from shardline_chief.rules.events import CheckpointSaved, EndAsked, Progressed, Tick
from shardline_chief.rules.flows.checkpointing import Checkpointing
from shardline_chief.rules.flows.scoring import Scoring
from shardline_chief.rules.stages import ENDING, Stage
from shardline_chief.rules.state.state import State

MARGIN_S = 0.25
"""A stop step lies this many seconds of progress ahead, so that it isn't gone by when the last ps hears of it."""


class Ending:
    """Rules from the wish to end until the last checkpoint is there."""

    def __init__(self, state: State, checkpointing: Checkpointing, scoring: Scoring) -> None:
        self.state = state
        self.checkpointing = checkpointing
        self.scoring = scoring
        self.early: EndAsked | None = None
        """An end that was asked for while nobody commanded the servers."""
        self._clear()

    def _clear(self) -> None:
        self.scoring.done = False
        self.scoring.exit_code = 0
        self._failed = False
        self._deadline_s = 0.0
        self._asked_s = 0.0
        self._told = False
        """Shards that are cut one by one: how far they are has been asked once more."""
        self._last_cut = False
        """Shards that are cut one by one: the last cut is asked for; its number is the stop step."""
        self._margin_s = MARGIN_S
        self._settled = False
        """The step at which the job stops is reached, or given up."""

    # The wish to end

    def begin(self, event: EndAsked, now_s: float) -> None:
        """The job trains: start to end."""
        state = self.state
        self._failed = event.exit_code != 0
        self.scoring.exit_code, self.scoring.done = event.exit_code, event.done
        if not event.done:
            state.record("stopping", reason=event.reason, exit_code=event.exit_code)
        self._deadline_s = now_s + (state.timeouts.suspect_s if self._failed else state.timeouts.dead_s)
        state.stage = Stage.CHOOSING
        state.outbox.actions.append(Hurry())
        state.reason = event.reason
        sentence = "training is done, the last checkpoint follows" if event.done else event.reason
        state.say("failure" if self._failed else "stopping", sentence, "error" if self._failed else "info")
        if event.done and state.stops_by_itself:
            self._reached(now_s)
        else:
            state.command(AskStatus(), StatusThenChoose())

    def end_at_once(self, event: EndAsked, now_s: float) -> None:
        """Nothing trains yet, or nothing at present: there is nothing to wait for."""
        self.state.end(event.exit_code, event.reason, now_s)

    def remember(self, event: EndAsked, now_s: float) -> None:
        """Nobody commands the servers yet: end once somebody does."""
        if not event.done and (self.early is None or (event.exit_code and not self.early.exit_code)):
            self.early = event

    def end_as_remembered(self, event: Progressed, now_s: float) -> None:
        """Somebody commands the servers again."""
        if self.early is not None:
            early, self.early = self.early, None
            self.begin(early, now_s)

    def second_reason(self, event: EndAsked, now_s: float) -> None:
        """The job ends already. Where it fails now, what was to be reached can't be reached any more."""
        state = self.state
        reaching = state.stage in (Stage.CHOOSING, Stage.REACHING)
        if event.exit_code and not self.scoring.exit_code and reaching:
            self._failed, self.scoring.exit_code, state.reason = True, event.exit_code, event.reason
            state.record("stopping", reason=event.reason, exit_code=event.exit_code)
            self._deadline_s = min(self._deadline_s, now_s + state.timeouts.suspect_s)
            state.say("failure", event.reason, "error")

    def reopen(self) -> None:
        """The steps that were made are lost: there is no end yet."""
        if self.state.stage in ENDING:
            self._clear()
            self.state.figures.training_end_s = None
            self.state.reason = ""

    @property
    def stop_step(self) -> int:
        """The step at which the job stops; 0 while it is not reached, since the plan for it may still change."""
        return self.state.progress.stop_step if self._settled else 0

    # The last step

    def choose(self, after: StatusThenChoose, result: CommandResult, now_s: float) -> None:
        """Statuses are fresh now: choose where to stop."""
        state, progress = self.state, self.state.progress
        if state.stage is not Stage.CHOOSING:
            return
        state.stage = Stage.REACHING
        if not state.mode.consistent_cuts:
            return
        if self._failed or self._nobody_goes_on():
            self._stop_where_equal()
            return
        rate = (progress.step - progress.first_step) / max(state.figures.seconds(now_s), 1e-3)
        step = progress.step_max + 2 + int(rate * self._margin_s)
        if 0 < progress.stop_step <= step:
            # The end was near anyway.
            return
        state.record("stop", step=step)
        state.command(Cut(timeline=state.layout.timeline, step=step, stop=True), StopThenReach(step))

    def stop_asked(self, after: StopThenReach, result: CommandResult, now_s: float) -> None:
        """The servers know the step to stop at, unless some are past it already."""
        state = self.state
        if self._failed or state.stage is not Stage.REACHING:
            # Something broke meanwhile, so that step will not be reached; or all of it took too long.
            return
        if any(passed for passed, _ in result.values.values()):
            self._margin_s *= 4
            state.stage = Stage.CHOOSING
            state.command(AskStatus(), StatusThenChoose())
            return
        state.progress.stop_step = after.step
        state.say("stop_step", f"the job stops at step {after.step}")

    def _nobody_goes_on(self) -> bool:
        """No step will be closed any more: a script's worker that has finished contributes nothing further.

        A job file's worker that has finished only waits at the stop step.
        """
        tasks = self.state.tasks
        return bool(tasks.finished) or not tasks.working() if self.state.script else not tasks.trainers()

    def _stop_where_equal(self) -> None:
        """Nobody goes on, so the shards must stop where they are, if that is one step."""
        state = self.state
        step = state.progress.common_step()
        if step is None:
            return
        # Until the answer comes nothing else is tried.
        state.stage = Stage.CHOOSING
        state.record("stop", step=step)
        state.command(Cut(timeline=state.layout.timeline, step=step, stop=True), StandThenCut(step))

    def stands(self, after: StandThenCut, result: CommandResult, now_s: float) -> None:
        """The servers were told to stop where they stand."""
        state = self.state
        if state.stage is not Stage.CHOOSING:
            return
        if any(passed for passed, _ in result.values.values()):
            # What was told of the shards was old: they went on before they stood still.
            state.command(AskStatus(), StatusThenChoose())
            return
        state.progress.stop_step = after.step
        state.saves.ledger.reopen(after.step)
        self._reached(now_s)

    def _reached(self, now_s: float) -> None:
        self._enter_cutting(now_s)
        self._asked_s = now_s
        self._cut(now_s)

    def _enter_cutting(self, now_s: float) -> None:
        self.state.stage = Stage.CUTTING
        self._settled = True
        # From here on each call has its own deadline; this one is for cuts that never become whole.
        self._deadline_s = now_s + self.state.timeouts.dead_s
        self.state.figures.end_training(now_s)

    # Time

    def poll(self, event: Tick, now_s: float) -> None:
        """Ask the servers rather than wait for their heartbeats."""
        self.state.outbox.ask_status()

    def choosing(self, event: Progressed, now_s: float) -> None:
        """The servers have a time to tell how far they are."""
        if now_s >= self._deadline_s:
            self._give_up("the servers did not report how far they are", now_s)

    def reaching(self, event: Progressed, now_s: float) -> None:
        """Every shard is to reach the stop step, or every lease to be done."""
        state, progress = self.state, self.state.progress
        if not state.mode.consistent_cuts:
            # A script has no leases to finish: its next push is told that the job stops.
            out = state.work.leases.outstanding if state.work.leases is not None else 0
            drained = out == 0 or not state.tasks.working() or self._failed
            if drained or now_s >= self._deadline_s - state.timeouts.dead_s / 2:
                # How far the shards are is asked once more, so that the cut is named right.
                self._enter_cutting(now_s)
                state.command(AskStatus(), StatusThenFinalCut())
            return
        if 0 < progress.stop_step <= progress.step:
            self._reached(now_s)
        elif self._failed or self._nobody_goes_on():
            self._stop_where_equal()
        if state.stage is Stage.REACHING and now_s >= self._deadline_s:
            at = f"{progress.step} to {progress.step_max}"
            self._give_up(f"stop step {progress.stop_step} was not reached (shards are at {at})", now_s)

    def told(self, after: StatusThenFinalCut, result: CommandResult, now_s: float) -> None:
        """It is known how far the shards are."""
        self._told = True

    # The last checkpoint

    def cutting(self, event: Progressed, now_s: float) -> None:
        """The last checkpoint is to be taken."""
        self._cut(now_s)

    def _cut(self, now_s: float) -> None:
        state, saves = self.state, self.state.saves
        if saves.saving is not None or saves.cutting:
            return
        stop_step = state.progress.stop_step
        if not state.mode.consistent_cuts and not self._last_cut:
            if self._told:
                # Named now and not before: while an earlier checkpoint was written, workers may have gone on.
                self._last_cut = True
                state.progress.stop_step = self.checkpointing.cut_now(stop=True)
            return
        if saves.checkpoint_step == stop_step:
            self.scoring.begin(now_s)
        elif now_s >= self._deadline_s:
            self._give_up(f"no complete cut at step {stop_step}", now_s)
        elif state.mode.consistent_cuts and now_s - self._asked_s >= state.timeouts.heartbeat_s:
            # The servers may have left this cut out while an earlier one was held: they stand still now, so ask again.
            self._asked_s = now_s
            saves.ledger.reopen(stop_step)
            state.command(Cut(timeline=state.layout.timeline, step=stop_step, stop=True))

    def saved(self, event: CheckpointSaved, now_s: float) -> None:
        """A checkpoint was committed, or could not be."""
        state, saved = self.state, event.saved
        if saved.step != state.progress.stop_step or not (state.mode.consistent_cuts or self._last_cut):
            return
        if saved.error:
            self._give_up(f"it could not be written ({saved.error})", now_s)
        else:
            self.scoring.begin(now_s)

    def _give_up(self, why: str, now_s: float) -> None:
        state = self.state
        self._settled = True
        what = f"no checkpoint at the end: {why}. {state.saves.how_to_go_on()}"
        state.say("no_last_checkpoint", what, "error")
        if not self.scoring.exit_code:
            self.scoring.exit_code = CheckpointError.exit_code
            state.reason = f"{state.reason}; {what}"
        self.scoring.begin(now_s)

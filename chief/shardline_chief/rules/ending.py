"""How the job ends: a common step, a checkpoint there, the evaluator's word on it, last figures, then everybody goes.

Done, stopped and failed jobs take the same way; they differ in how the last step is chosen and how long it is tried.
Past its deadline the last committed checkpoint stays (PROTOCOL 1.6).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from shardline.core.orders import Phase
from shardline.errors import CheckpointError
from shardline_chief.rules.actions import AskStatus, CommandResult, Cut, Hurry, Saved
from shardline_chief.rules.membership import Member
from shardline_chief.rules.running import Running
from shardline_chief.rules.state import State

MARGIN_S = 0.25
"""A stop step lies this many seconds of progress ahead, so that it isn't gone by when the last ps hears of it."""


class Stage(enum.Enum):
    """Where the end is."""

    NOT_YET = 0
    CHOOSE = 1
    """Asking how far the shards are."""
    REACH = 2
    """Waiting until every shard is at the stop step, or every lease is done."""
    CUT = 3
    """The last checkpoint is being taken."""
    SCORE = 4
    """Waiting for the evaluator."""
    FIGURES = 5
    """Last traffic and versions are asked for."""


class Ending:
    """Rules of the phase STOPPING."""

    def __init__(self, state: State, running: Running) -> None:
        self.state = state
        self.running = running
        self.early: tuple[str, int] | None = None
        """(reason, exit code) of an end that was asked for while nobody commanded the servers."""
        self._clear()

    def _clear(self) -> None:
        self.stage = Stage.NOT_YET
        self.done = False
        """The job ends because all its steps are made."""
        self._failed = False
        self._deadline_s = 0.0
        self._asked_s = 0.0
        self._told = False
        """Asynchronous mode: how far the shards are has been asked once more."""
        self._last_cut = False
        """Asynchronous mode: the last cut is asked for; its number is the stop step."""
        self._margin_s = MARGIN_S
        self._exit_code = 0

    def begin(self, reason: str, now_s: float, *, exit_code: int = 0, done: bool = False) -> None:
        """Start to end. done: every step is made; exit_code != 0: a failure, so no further step can be made."""
        state = self.state
        if state.ended:
            return
        if state.returning:
            if not done and (self.early is None or (exit_code and not self.early[1])):
                self.early = (reason, exit_code)
            return
        if self.stage is not Stage.NOT_YET:
            if exit_code and not self._exit_code and self.stage in (Stage.CHOOSE, Stage.REACH):
                # What was to be reached can't be reached any more.
                self._failed, self._exit_code, state.reason = True, exit_code, reason
                state.record("stopping", reason=reason, exit_code=exit_code)
                self._deadline_s = min(self._deadline_s, now_s + state.timeouts.suspect_s)
                state.say("failure", reason, "error")
            return
        if state.phase is not Phase.RUNNING:
            state.end(exit_code, reason, now_s)
            return
        self._failed, self._exit_code, self.done = exit_code != 0, exit_code, done
        if not done:
            state.record("stopping", reason=reason, exit_code=exit_code)
        self._deadline_s = now_s + (state.timeouts.suspect_s if self._failed else state.timeouts.dead_s)
        state.phase = Phase.STOPPING
        state.actions.append(Hurry())
        state.reason = reason
        sentence = "training is done, the last checkpoint follows" if done else reason
        state.say("failure" if self._failed else "stopping", sentence, "error" if self._failed else "info")
        if done and state.sync and not state.script:
            state.training_end_s = now_s
            self._reached(now_s)
        else:
            self.stage = Stage.CHOOSE
            state.command(AskStatus(), self._choose)

    @property
    def over(self) -> bool:
        """Whether nothing is wanted of the servers any more but that they go."""
        return self.stage in (Stage.SCORE, Stage.FIGURES)

    def reopen(self) -> None:
        """The steps that were made are lost: there is no end yet."""
        self._clear()
        self.state.training_end_s = None
        self.state.reason = ""

    @property
    def stop_step(self) -> int:
        """The step at which the job stops; 0 while it is not reached, since the plan for it may still change."""
        found = self.stage not in (Stage.NOT_YET, Stage.CHOOSE, Stage.REACH)
        return self.state.stop_step if found else 0

    # The last step

    def _choose(self, result: CommandResult, now_s: float) -> None:
        """Statuses are fresh now: choose where to stop."""
        state = self.state
        if self.stage is not Stage.CHOOSE or state.ended:
            return
        self.stage = Stage.REACH
        if not state.sync:
            return
        if self._failed or self._nobody_goes_on():
            self._stop_where_equal()
            return
        rate = (state.step - state.first_step) / max(state.seconds(now_s), 1e-3)
        step = state.step_max + 2 + int(rate * self._margin_s)
        if 0 < state.stop_step <= step:
            # The end was near anyway.
            return
        state.record("stop", step=step)
        state.command(
            Cut(timeline=state.timeline, step=step, stop=True),
            state.history(lambda answers, at_s: self._stop_asked(step, answers)),
        )

    def _stop_asked(self, step: int, result: CommandResult) -> None:
        if self._failed or self.stage is not Stage.REACH:
            # Something broke meanwhile, so that step will not be reached; or all of it took too long.
            return
        if any(passed for passed, _ in result.values.values()):
            self._margin_s *= 4
            self.stage = Stage.CHOOSE
            self.state.command(AskStatus(), self._choose)
            return
        self.state.stop_step = step
        self.state.say("stop_step", f"the job stops at step {step}")

    def _nobody_goes_on(self) -> bool:
        """No step will be closed any more: a script's worker that has finished contributes nothing further.

        A job file's worker that has finished only waits at the stop step.
        """
        state = self.state
        return bool(state.finished) or not state.working() if state.script else not state.trainers()

    def _stop_where_equal(self) -> None:
        """Nobody goes on, so the shards must stop where they are, if that is one step."""
        state = self.state
        step = state.common_step()
        if step is None:
            return
        # Until the answer comes nothing else is tried.
        self.stage = Stage.CHOOSE
        state.record("stop", step=step)

        def asked(result: CommandResult, at_s: float) -> None:
            if self.stage is not Stage.CHOOSE:
                return
            if any(passed for passed, _ in result.values.values()):
                # What was told of the shards was old: they went on before they stood still.
                state.command(AskStatus(), self._choose)
                return
            state.stop_step = step
            state.ledger.reopen(step)
            self._reached(at_s)

        state.command(Cut(timeline=state.timeline, step=step, stop=True), state.history(asked))

    def _reached(self, now_s: float) -> None:
        self.stage = Stage.CUT
        self._asked_s = now_s
        # From here on each call has its own deadline; this one is for cuts that never become whole.
        self._deadline_s = now_s + self.state.timeouts.dead_s
        if self.state.training_end_s is None:
            self.state.training_end_s = now_s
        self._cut(now_s)

    # Time

    def poll(self) -> None:
        """Ask the servers rather than wait for their heartbeats; about ten times a second."""
        if not self.state.ended and self.stage in (Stage.REACH, Stage.CUT):
            self.state.ask_status()

    def tick(self, now_s: float) -> None:
        """Go on with the end."""
        state = self.state
        if self.early is not None and not state.returning and state.phase is Phase.RUNNING:
            (reason, exit_code), self.early = self.early, None
            self.begin(reason, now_s, exit_code=exit_code)
        if state.ended or self.stage in (Stage.NOT_YET, Stage.FIGURES):
            return
        if self.stage is Stage.REACH:
            self._reach(now_s)
        elif self.stage is Stage.CUT:
            self._cut(now_s)
        elif self.stage is Stage.SCORE:
            self._score(now_s)
        elif self.stage is Stage.CHOOSE and now_s >= self._deadline_s:
            self._give_up("the servers did not tell where they are", now_s)

    def _reach(self, now_s: float) -> None:
        state = self.state
        if not state.sync:
            # A script has no leases to finish: its next push is told that the job stops.
            out = state.leases.outstanding if state.leases is not None else 0
            drained = out == 0 or not state.working() or self._failed
            if drained or now_s >= self._deadline_s - state.timeouts.dead_s / 2:
                self._take_final(now_s)
            return
        if 0 < state.stop_step <= state.step:
            self._reached(now_s)
        elif self._failed or self._nobody_goes_on():
            self._stop_where_equal()
        if self.stage is Stage.REACH and now_s >= self._deadline_s:
            waiting = f"stop step {state.stop_step} was not reached (shards are at {state.step} to {state.step_max})"
            self._give_up(waiting, now_s)

    def _take_final(self, now_s: float) -> None:
        """Asynchronous mode: ask once more how far the shards are, so that the cut is named right, then cut."""
        state = self.state
        self.stage = Stage.CUT
        self._deadline_s = now_s + state.timeouts.dead_s
        if state.training_end_s is None:
            state.training_end_s = now_s

        def told(result: CommandResult, at_s: float) -> None:
            self._told = True

        state.command(AskStatus(), told)

    def _cut(self, now_s: float) -> None:
        state = self.state
        if state.saving is not None or self.running.cut_asked:
            return
        if not state.sync and not self._last_cut:
            if self._told:
                # Named now and not before: while an earlier checkpoint was written, workers may have gone on.
                self._last_cut = True
                state.stop_step = self.running.cut_now(stop=True)
            return
        if state.checkpoint_step == state.stop_step:
            self._score_next(now_s)
        elif now_s >= self._deadline_s:
            self._give_up(f"no whole cut at step {state.stop_step}", now_s)
        elif state.sync and now_s - self._asked_s >= state.timeouts.heartbeat_s:
            # The servers may have left this cut out while an earlier one was held: they stand still now, so ask again.
            self._asked_s = now_s
            state.ledger.reopen(state.stop_step)
            state.command(Cut(timeline=state.timeline, step=state.stop_step, stop=True))

    def saved(self, saved: Saved, now_s: float) -> None:
        """A checkpoint was committed, or could not be."""
        if self.stage is not Stage.CUT or saved.step != self.state.stop_step:
            return
        if not self.state.sync and not self._last_cut:
            return
        if saved.error:
            self._give_up(f"it could not be written ({saved.error})", now_s)
        else:
            self._score_next(now_s)

    def _give_up(self, why: str, now_s: float) -> None:
        state = self.state
        state.say("no_last_checkpoint", f"no checkpoint at the end: {why}. {state.what_remains()}", "error")
        if not self._exit_code:
            self._exit_code = CheckpointError.exit_code
            state.reason = f"{state.reason}; no checkpoint at the end: {why}. {state.what_remains()}"
        self._score_next(now_s)

    # The last word

    def _score_next(self, now_s: float) -> None:
        state = self.state
        self.stage = Stage.SCORE
        state.final_step = state.checkpoint_step
        self._deadline_s = now_s + state.timeouts.lost_s
        late = self._late_evaluator()
        if late and state.final_step >= 0:
            wait = f"waiting up to {state.timeouts.lost_s:g} s for {late} to join and to score the last checkpoint"
            state.say("evaluator", wait, "warning")
        self._score(now_s)

    def _late_evaluator(self) -> str:
        """The evaluator that is still to come when all steps are made; empty where none is, or nobody would wait."""
        state = self.state
        if not self.done or self._exit_code or state.script:
            return ""
        came = {member.index for member in state.members if member.role == "evaluator"}
        return next((f"evaluator/{n}" for n in range(state.settings.evaluators) if not came), "")

    def _score(self, now_s: float) -> None:
        state = self.state
        evaluators = state.members.living("evaluator")
        scored = state.final_step < 0 or state.final_step in state.metrics
        if not scored and now_s < self._deadline_s and (evaluators or self._late_evaluator()):
            return
        if not scored:
            self._tell_unscored(evaluators)
        self.stage = Stage.FIGURES
        state.command(AskStatus(), self._figures)

    def _tell_unscored(self, evaluators: Sequence[Member]) -> None:
        """Note, and say, why the last checkpoint has no score."""
        state = self.state
        limit = f"within {state.timeouts.lost_s:g} s"
        gone = next((member for member in state.members if member.role == "evaluator" and not member.living), None)
        if evaluators:
            why = f"{evaluators[0].task} did not score it {limit}"
            state.say("evaluator", f"{evaluators[0].task} did not score the last checkpoint {limit}", "warning")
        elif state.lost_scores:
            why = state.lost_scores
        elif gone is not None:
            why = f"{gone.task} was {gone.state.value}"
        elif not state.settings.evaluators:
            return
        elif late := self._late_evaluator():
            why = f"{late} did not join {limit} of the last step"
            state.say("evaluator", f"the last checkpoint was not scored: {why}", "warning")
        else:
            why = "evaluator/0 had not joined when the job was stopped"
        state.unscored[state.final_step] = why

    def _figures(self, result: CommandResult, now_s: float) -> None:
        self.state.end(self._exit_code, self.state.reason, now_s)

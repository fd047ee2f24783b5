"""How the job ends: all shards stop at one step, a checkpoint is taken there, and the evaluator scores it (scoring.py).

Finished, stopped and failed jobs end the same way; they differ in how the stop step is chosen and how long it is tried.
Past the deadline the last committed checkpoint stands (PROTOCOL 1.6).
"""

from __future__ import annotations

from shardline import division
from shardline.errors import CheckpointError
from shardline_chief.rules.actions import AskStatus, Cut, Hurry
from shardline_chief.rules.events import ENDING, CheckpointSaved, EndAsked, OrderAnswered, Progressed, Stage
from shardline_chief.rules.flows.checkpointing import Checkpointing
from shardline_chief.rules.flows.scoring import Scoring
from shardline_chief.rules.state.state import State

MARGIN_S = 0.25
"""A stop step is this many seconds of progress ahead, so that no ps is past it when the order arrives."""


class Ending:
    """Rules from the request to end until the last checkpoint is written."""

    def __init__(self, state: State, checkpointing: Checkpointing, scoring: Scoring) -> None:
        self.state = state
        self.checkpointing = checkpointing
        self.scoring = scoring
        self.early: EndAsked | None = None
        """A request to end made before this chief commanded the servers."""
        self._clear()

    def _clear(self) -> None:
        self.scoring.done = False
        self.scoring.exit_code = 0
        self._failed = False
        self._deadline_s = 0.0
        self._asked_s = 0.0
        self._order = 0
        """Number of the order whose answers are awaited."""
        self._told = False
        """Shards cut one by one: their progress has been asked for once more."""
        self._last_cut: int | None = None
        """The cut that the job ends with; None until it has its number."""
        self._margin_s = MARGIN_S
        self._settled = False
        """The stop step has been reached, or given up."""

    # The request to end

    def begin(self, event: EndAsked, now_s: float) -> None:
        state = self.state
        self._failed = event.exit_code != 0
        self.scoring.exit_code, self.scoring.done = event.exit_code, event.done
        if not event.done:
            state.record("stopping", reason=event.reason, exit_code=event.exit_code)
        self._deadline_s = now_s + (state.timeouts.suspect_s if self._failed else state.timeouts.dead_s)
        state.stage = Stage.CHOOSING
        state.outbox.actions.append(Hurry())
        state.reason = event.reason
        sentence = "training is done; writing the last checkpoint" if event.done else event.reason
        state.say("failure" if self._failed else "stopping", sentence, "error" if self._failed else "info")
        if event.done and state.last_step:
            self._reached(now_s)
        else:
            self._ask()

    def end_at_once(self, event: EndAsked, now_s: float) -> None:
        """Nothing is training yet, or at present: end without waiting, unless all values are about to be there."""
        loss = self.state.losses.now
        if loss is not None and loss.failover:
            self.remember(event, now_s)
            return
        self.state.end(event.exit_code, event.reason, now_s)

    def remember(self, event: EndAsked, now_s: float) -> None:
        """No chief commands the servers yet: remember the request until one does."""
        if not event.done and (self.early is None or (event.exit_code and not self.early.exit_code)):
            self.early = event

    def end_as_remembered(self, event: Progressed, now_s: float) -> None:
        """The servers are commanded again: end if that was requested meanwhile."""
        if self.early is not None:
            early, self.early = self.early, None
            self.begin(early, now_s)

    def second_reason(self, event: EndAsked, now_s: float) -> None:
        """The job is ending already. If it now fails, the chosen stop step can't be reached any more."""
        state = self.state
        reaching = state.stage in (Stage.CHOOSING, Stage.REACHING)
        if event.exit_code and not self.scoring.exit_code and reaching:
            self._failed, self.scoring.exit_code, state.reason = True, event.exit_code, event.reason
            state.record("stopping", reason=event.reason, exit_code=event.exit_code)
            self._deadline_s = min(self._deadline_s, now_s + state.timeouts.suspect_s)
            state.say("failure", event.reason, "error")

    def reopen(self) -> None:
        """A rollback lost the last steps: the job is no longer ending."""
        if self.state.stage in ENDING:
            self._clear()
            self.state.progress.stop_step = self.state.last_step
            self.state.figures.training_end_s = None
            self.state.reason = ""

    @property
    def stop_step(self) -> int:
        """The step at which the job stops; 0 until it is reached, since it may still change."""
        return self.state.progress.stop_step if self._settled else 0

    # The stop step

    def _ask(self) -> None:
        self._order = self.state.command(AskStatus())

    def answered(self, event: OrderAnswered, now_s: float) -> None:
        """The servers have answered what was asked or ordered last."""
        stage, order = self.state.stage, event.order
        if event.number != self._order:
            return
        if isinstance(order, AskStatus):
            # Fresh statuses have arrived.
            if stage is Stage.CHOOSING:
                self._choose(now_s)
            elif stage is Stage.CUTTING:
                self._told = True
        elif isinstance(order, Cut) and event.done and stage in (Stage.CHOOSING, Stage.REACHING):
            passed = any(passed for passed, _ in event.result.values.values())
            self._ordered(order.step, passed, now_s)

    def _choose(self, now_s: float) -> None:
        state, progress = self.state, self.state.progress
        state.stage = Stage.REACHING
        if self._failed or self._nobody_goes_on():
            self._stop_where_equal()
            return
        rate = (progress.step - progress.first_step) / max(state.figures.seconds(now_s), 1e-3)
        step = state.mode.cuts.stop_ahead(progress.step_max, int(rate * self._margin_s))
        if step is None or 0 < progress.stop_step <= step:
            # Shards stop once all work is done, or the job's own last step comes first.
            return
        state.record("stop", step=step)
        self._order = state.command(Cut(timeline=state.layout.timeline, step=step, stop=True))

    def _ordered(self, step: int, passed: bool, now_s: float) -> None:
        """The servers were ordered to stop at a step, or where they are. passed: some are past it."""
        state, standing = self.state, self.state.stage is Stage.CHOOSING
        if self._failed and not standing:
            # Something failed meanwhile, so that step will not be reached.
            return
        if passed:
            self._margin_s *= 1 if standing else 4
            state.stage = Stage.CHOOSING
            self._ask()
            return
        state.progress.stop_step = step
        if standing:
            state.saves.ledger.reopen(step)
            self._reached(now_s)
        else:
            state.say("stop_step", f"the job stops at step {step}")

    def _nobody_goes_on(self) -> bool:
        """Whether no further step will be closed: a script's worker contributes nothing once it has finished.

        With a job file, a finished worker is only waiting at the stop step.
        """
        tasks = self.state.tasks
        return bool(tasks.finished) or not tasks.working() if self.state.script else not tasks.trainers()

    def _stop_where_equal(self) -> None:
        """No further step will be closed: stop the shards where they are, if all are at one step."""
        state = self.state
        step = state.mode.cuts.stop_here(state.progress.common_step())
        if step is None:
            return
        # Try nothing else until the answers arrive.
        state.stage = Stage.CHOOSING
        state.record("stop", step=step)
        self._order = state.command(Cut(timeline=state.layout.timeline, step=step, stop=True))

    def _reached(self, now_s: float) -> None:
        state = self.state
        state.stage = Stage.CUTTING
        self._settled = True
        # From here on each call has its own deadline; this one is for a cut that never becomes complete.
        self._deadline_s = now_s + state.timeouts.dead_s
        self._asked_s = now_s
        state.figures.end_training(now_s)
        self._last_cut = state.mode.cuts.last_cut(state.progress.stop_step)
        if self._last_cut is None:
            # Ask for the shards' progress once more, so that the cut gets the right number.
            self._ask()
        else:
            self._cut(now_s)

    # Time

    def choosing(self, event: Progressed, now_s: float) -> None:
        """Give up if the servers don't report their progress in time."""
        if now_s >= self._deadline_s:
            self._give_up("the servers did not report their progress", now_s)

    def reaching(self, event: Progressed, now_s: float) -> None:
        """Wait until every shard has reached the stop step, or every lease is done."""
        state, progress = self.state, self.state.progress
        # A script has no leases to finish: the reply to its next push says that the job stops.
        out = state.work.leases.outstanding if state.work.leases is not None else 0
        late = now_s >= self._deadline_s - state.timeouts.dead_s / 2
        drained = out == 0 or not state.tasks.working() or self._failed or late
        if state.mode.cuts.stopped(progress.stop_step, progress.step, drained=drained):
            self._reached(now_s)
        elif self._failed or self._nobody_goes_on():
            self._stop_where_equal()
        if state.stage is Stage.REACHING and now_s >= self._deadline_s:
            at = f"{progress.step} to {progress.step_max}"
            self._give_up(f"stop step {progress.stop_step} was not reached (shards are at {at}{self._lost()})", now_s)

    def _lost(self) -> str:
        """What others wait for in vain: a job that has failed does not go back to a checkpoint."""
        state = self.state
        if state.job is None or not state.work.moved or not division.of(state.job).goes_back:
            return ""
        named = division.of(state.job).named(sorted(state.work.moved))
        return f"; {named} moved, and what was in the pipeline is lost"

    # The last checkpoint

    def cutting(self, event: Progressed, now_s: float) -> None:
        """Take the last checkpoint."""
        self._cut(now_s)

    def _cut(self, now_s: float) -> None:
        state, saves = self.state, self.state.saves
        if saves.saving is not None or saves.cutting:
            return
        if self._last_cut is None:
            if self._told:
                # Numbered only now: workers may have advanced while an earlier checkpoint was being written.
                self._last_cut = state.progress.stop_step = self.checkpointing.cut_now(stop=True)
                self._asked_s = now_s
        elif saves.checkpoint_step == self._last_cut:
            self.scoring.begin(now_s)
        elif now_s >= self._deadline_s:
            self._give_up(f"no complete cut at step {self._last_cut}", now_s)
        elif now_s - self._asked_s >= state.timeouts.heartbeat_s:
            # The servers may have skipped this cut while they held an earlier one. They stand still now, so order it
            # again.
            self._asked_s = now_s
            saves.ledger.reopen(self._last_cut)
            state.command(Cut(timeline=state.layout.timeline, step=self._last_cut, stop=True))

    def saved(self, event: CheckpointSaved, now_s: float) -> None:
        """A checkpoint was committed, or could not be written."""
        saved = event.saved
        if saved.step != self._last_cut:
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

"""The evaluator's scores: for each checkpoint, and for the last one before the job ends."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from shardline.core.orders import Phase
from shardline.core.scores import Scores, awaited, known
from shardline.errors import FencedError, JobError, nearest
from shardline_chief.rules import credible
from shardline_chief.rules.actions import AskStatus, MarkBest
from shardline_chief.rules.events import EndAsked, OrderAnswered, Progressed, ShardsTold, Stage
from shardline_chief.rules.state.membership import Member
from shardline_chief.rules.state.state import State

SHOWN = 16
"""Metrics of a score that its event names; the logs have all."""


class Scoring:
    """Rules for scores, and for the end of the job once the last checkpoint is written."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.done = False
        """The job ends because all its steps are done."""
        self.exit_code = 0
        """Exit code of the job."""
        self._deadline_s = 0.0
        self._order = 0
        """Number of the last question for figures."""
        self._waiting: tuple[int, float] | None = None
        """The step whose score workers wait for, and since when nobody makes it."""

    def report(self, task: str, incarnation: int, step: int, metrics: Mapping[str, float], failure: str) -> bool:
        """Take in a checkpoint's score; returns whether it is the best so far.

        Raises FencedError if the task is not a member, ProtocolError if there can be no such score.
        """
        state, figures = self.state, self.state.figures
        if not state.tasks.members.current(task, incarnation, lambda role: role.scores):
            raise FencedError(
                f"{task} incarnation {incarnation:#x} is not admitted; its score of step {step} is ignored"
            )
        credible.score(state, task, step, metrics)
        state.saves.scores += 1
        best = False
        if not metrics:
            figures.unscored[step] = failure or "the job has no `evaluate`"
        if failure:
            state.say(
                "evaluation_failed", f"{task} could not score step {step}: {failure}; training continues", "warning"
            )
        else:
            best = figures.better(metrics, state.job)
            first = ", ".join(f"{name} {value:.4g}" for name, value in itertools.islice(metrics.items(), SHOWN))
            more = f" and {len(metrics) - SHOWN} more" if len(metrics) > SHOWN else ""
            sentence = f"step {step}: {first}{more}{' (best so far)' if best else ''}"
            state.say("evaluation", sentence, step=step, metrics=dict(metrics))
            if best:
                figures.best = (step, dict(metrics))
                state.outbox.actions.append(MarkBest(step=step, metrics=dict(metrics)))
        figures.score(step, metrics)
        figures.follow(step, metrics, state.job)
        # A list of pairs, to keep the order: the first metric may decide which is best.
        state.record("evaluation", step=step, metrics=list(metrics.items()), best=best)
        self._miss_best(metrics)
        self._lose_patience()
        return best

    def _miss_best(self, metrics: Mapping[str, float]) -> None:
        """End the job at a score without the metric that says which one is the best: none would ever be."""
        state = self.state
        name = state.job.best_metric if state.job is not None else ""
        if not name or not metrics or name in metrics:
            return
        shown = ", ".join(itertools.islice(metrics, SHOWN))
        sentence = f"best_metric is {name!r}, but evaluate(model) returns {shown}{nearest(name, metrics)}"
        if state.phase is Phase.RUNNING:
            state.emit(EndAsked(sentence, JobError.exit_code))
        else:
            # All steps are done.
            state.say("evaluator", f"{sentence}; no checkpoint is marked as the best", "warning")

    def _lose_patience(self) -> None:
        """End the job once as many scores as it says are no better than the best."""
        job, best = self.state.job, self.state.figures.best
        if job is None or not job.patience or best is None or self.state.phase is not Phase.RUNNING:
            return
        since = sum(bool(metrics) for step, metrics in self.state.figures.metrics.items() if step > best[0])
        if since >= job.patience:
            self.state.emit(EndAsked(f"stopped: the {since} scores since step {best[0]} are no better than its own"))

    # Scores that the learning rate follows

    def observe(self, event: ShardsTold, now_s: float) -> None:
        """Give up a score that workers wait for, once nobody is about to make it."""
        state, job = self.state, self.state.job
        if job is None or not job.follows_scores or state.phase is not Phase.RUNNING:
            return
        step = awaited(state.progress.step, job.checkpoint_every)
        if known(self.followed, state.progress.step, job.checkpoint_every):
            self._waiting = None
        elif self._waiting is None or self._waiting[0] != step or self._works():
            self._waiting = step, now_s
        elif now_s - self._waiting[1] >= state.timeouts.lost_s:
            state.figures.follow(step, {}, job)
            state.record("evaluation", step=step, metrics=[], best=False)
            why = f"no evaluator scored step {step} within {state.timeouts.lost_s:g} s"
            state.say("evaluator", f"{why}; the learning rate stays as it is", "warning")

    def _works(self) -> bool:
        """Return whether an evaluator has something to score."""
        newest = self.state.saves.checkpoint_step
        return bool(self.state.tasks.members.living("evaluator")) and newest not in self.state.figures.metrics

    @property
    def followed(self) -> Scores:
        return tuple(self.state.figures.followed.items())

    # The last checkpoint

    def begin(self, now_s: float) -> None:
        """The last checkpoint is written, or will not be."""
        state = self.state
        state.stage = Stage.SCORING
        state.saves.final_step = state.saves.checkpoint_step
        self._deadline_s = now_s + state.timeouts.lost_s
        late = self._late_evaluator()
        if late and state.saves.final_step >= 0:
            wait = f"waiting up to {state.timeouts.lost_s:g} s for {late} to join and to score the last checkpoint"
            state.say("evaluator", wait, "warning")
        self._score(now_s)

    def scoring(self, event: Progressed, now_s: float) -> None:
        """Continue once the last checkpoint has its score, or none is to be expected."""
        self._score(now_s)

    def _late_evaluator(self) -> str:
        """The evaluator that has yet to join when all steps are done; empty if there is none to wait for."""
        state = self.state
        if not self.done or self.exit_code or state.script:
            return ""
        came = {member.index for member in state.tasks.members if member.row.scores}
        return next((f"evaluator/{n}" for n in range(state.settings.evaluators) if not came), "")

    def _score(self, now_s: float) -> None:
        state, final_step = self.state, self.state.saves.final_step
        evaluators = state.tasks.members.living("evaluator")
        scored = final_step < 0 or final_step in state.figures.metrics
        if not scored and now_s < self._deadline_s and (evaluators or self._late_evaluator()):
            return
        if not scored:
            self._tell_unscored(evaluators)
        state.stage = Stage.COUNTING
        self._order = state.command(AskStatus())

    def _tell_unscored(self, evaluators: Sequence[Member]) -> None:
        """Note and log why the last checkpoint has no score."""
        state = self.state
        limit = f"within {state.timeouts.lost_s:g} s"
        came = [member for member in state.tasks.members if member.row.scores]
        gone = next((member for member in came if not member.living), None)
        if evaluators:
            why = f"{evaluators[0].task} did not score it {limit}"
            state.say("evaluator", f"{evaluators[0].task} did not score the last checkpoint {limit}", "warning")
        elif state.figures.lost_scores:
            why = state.figures.lost_scores
        elif gone is not None:
            why = f"{gone.task} was {gone.state.value}"
        elif not state.settings.evaluators:
            return
        elif late := self._late_evaluator():
            why = f"{late} did not join {limit} of the last step"
            state.say("evaluator", f"the last checkpoint was not scored: {why}", "warning")
        else:
            why = "evaluator/0 had not joined when the job was stopped"
        state.figures.unscored[state.saves.final_step] = why

    def counted(self, event: OrderAnswered, now_s: float) -> None:
        """The last figures have arrived: end the job."""
        if event.number == self._order:
            self.state.end(self.exit_code, self.state.reason, now_s)

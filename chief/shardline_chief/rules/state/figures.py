"""What is counted and scored, for people and for the summary."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.core.spec import JobSpec
from shardline.core.status import Traffic
from shardline.job import lowest_is_best


class JobFigures:
    """Times, traffic, scores and faults."""

    def __init__(self, now_s: float) -> None:
        self.started_s = now_s
        self.running_s: float | None = None
        """When training first began."""
        self.training_end_s: float | None = None
        self.traffic: dict[str, Traffic] = {}
        self.lives: dict[tuple[str, int], Mapping[str, float]] = {}
        """What each life of a task counts of itself; see shardline.core.orders."""
        self.faults: dict[str, str] = {}
        """What fails at present while the job goes on, by what it is: "checkpoint", "journal"."""
        self.metrics: dict[int, Mapping[str, float]] = {}
        """The evaluator's scores, by step."""
        self.best: tuple[int, Mapping[str, float]] | None = None
        self.unscored: dict[int, str] = {}
        """Why the evaluator gave a checkpoint no score, by step."""
        self.lost_scores = ""
        """Why there is no evaluator any more."""

    def total(self, name: str) -> int:
        """Sum of a figure over all lives of all tasks."""
        return int(sum(figures.get(name, 0.0) for figures in self.lives.values()))

    def seconds(self, now_s: float) -> float:
        """Seconds of training so far."""
        if self.running_s is None:
            return 0.0
        return (now_s if self.training_end_s is None else self.training_end_s) - self.running_s

    def end_training(self, now_s: float) -> None:
        """No step is made any more; the first call stands."""
        if self.training_end_s is None:
            self.training_end_s = now_s

    def better(self, metrics: Mapping[str, float], job: JobSpec | None) -> bool:
        """Whether these metrics beat the best so far; the first ones always do. A NaN never does.

        The job's best_metric decides; without one the first that evaluate gives, and less is better where its name
        says so.
        """
        if not metrics or job is None:
            return False
        name = job.best_metric or next(iter(metrics))
        lowest = job.best_is_lowest if job.best_metric else lowest_is_best(name)
        value = metrics.get(name)
        if value is None or value != value:
            return False
        best = self.best[1].get(name) if self.best is not None else None
        if best is None or best != best:
            return True
        return value < best if lowest else value > best

"""Counts and scores, for people and for the summary."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from shardline.core.scores import counts
from shardline.core.spec import JobSpec
from shardline.core.status import TaskLinks, Traffic, Usage
from shardline.job import lowest_is_best

KEPT_SCORES = 100
"""Scores that are kept: a long run has any number of checkpoints."""


class JobFigures:
    """Times, traffic, scores and faults."""

    def __init__(self, now_s: float) -> None:
        self.started_s = now_s
        self.running_s: float | None = None
        """When training first began; None before."""
        self.training_end_s: float | None = None
        self.traffic: dict[str, Traffic] = {}
        self.usage: dict[str, Usage] = {}
        self.links: dict[str, TaskLinks] = {}
        self.lives: dict[tuple[str, int], Mapping[str, float]] = {}
        """Counters that each life of a task reports, by (task, incarnation); see shardline.core.orders."""
        self.dropped_memories = 0
        """How many times a replica's, or a worker's, error memory was dropped."""
        self.faults: dict[str, str] = {}
        """Current faults that do not stop the job, by subject: "checkpoint", "journal"."""
        self.metrics: dict[int, Mapping[str, float]] = {}
        """The evaluator's newest scores, by step."""
        self.followed: dict[int, float | None] = {}
        """Scores that the learning rate follows, if it does, by rising steps; see shardline.core.scores."""
        self.best: tuple[int, Mapping[str, float]] | None = None
        self.names: set[str] = set()
        """Names of all metrics of this run."""
        self.unscored: dict[int, str] = {}
        """Why a checkpoint has no score, by step."""
        self.lost_scores = ""
        """Why there is no evaluator any more; empty if none was lost."""

    def told(self, lives: Collection[tuple[str, int]]) -> list[list[object]]:
        """The counters of these lives, for the journal."""
        return [[*life, dict(figures)] for life, figures in sorted(self.lives.items()) if life in lives]

    def total(self, name: str) -> int:
        """Sum of a figure over all lives of all tasks."""
        return int(sum(figures.get(name, 0.0) for figures in self.lives.values()))

    def seconds(self, now_s: float) -> float:
        if self.running_s is None:
            return 0.0
        return (now_s if self.training_end_s is None else self.training_end_s) - self.running_s

    def end_training(self, now_s: float) -> None:
        """Note when training ended; only the first call counts."""
        if self.training_end_s is None:
            self.training_end_s = now_s

    def score(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note a checkpoint's score, {} if it has none."""
        self.metrics.pop(step, None)
        self.metrics[step] = dict(metrics)
        self.names |= metrics.keys()
        if len(self.metrics) > KEPT_SCORES:
            oldest = next(iter(self.metrics))
            del self.metrics[oldest]
            self.unscored.pop(oldest, None)

    def follow(self, step: int, metrics: Mapping[str, float], job: JobSpec | None) -> None:
        """Have the learning rate follow a score, {} if there is none, where it does; the first one of a step counts."""
        last = next(reversed(self.followed), 0)
        if job is None or not job.follows_scores or step <= last or not counts(step, job.checkpoint_every):
            return
        name = job.best_metric or next(iter(metrics), "")
        self.followed[step] = metrics.get(name)

    def better(self, metrics: Mapping[str, float], job: JobSpec | None) -> bool:
        """Whether these metrics beat the best so far; the first ones do, unless they are not finite.

        The job's best_metric decides; without one, the first metric that evaluate returns, and lower is better if its
        name implies it.
        """
        if not metrics or job is None:
            return False
        name = job.best_metric or next(iter(metrics))
        lowest = job.best_is_lowest if job.best_metric else lowest_is_best(name)
        value = metrics.get(name)
        if value is None or not math.isfinite(value):
            return False
        best = self.best[1].get(name) if self.best is not None else None
        if best is None or not math.isfinite(best):
            return True
        return value < best if lowest else value > best

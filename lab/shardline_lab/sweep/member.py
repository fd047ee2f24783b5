"""One model of a sweep: trains in one process, with the bits of a cluster of its own, and writes its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardline import codecs
from shardline.checkpoint import CheckpointContents, CheckpointStore
from shardline.checkpoint.manifest import step_folder
from shardline.errors import CheckpointError, JobError, UsageError, as_error, nearest
from shardline.host import files
from shardline.host.process import resolve_device, torch_threads
from shardline.job import Job
from shardline.testing import Training
from shardline_lab.sweep.space import Point

LOSS = "training loss"
"""The metric of a job without `evaluate`: the mean of its last steps, LOSSES at most."""
LOSSES = 50
RESULT = "result.json"
RESULT_BYTES = 16 << 20
KEY = "sweep"
"""Field of a checkpoint's `extra` with the MemberHistory up to there."""


@dataclass
class MemberHistory:
    """What has become of a model so far. None among metrics: NaN or infinity, which JSON lacks."""

    settings: dict[str, str] = field(default_factory=dict)
    """All fields that the command line has set."""
    step: int = 0
    metric: str = LOSS
    """By which models are compared."""
    lowest: bool = True
    """The lowest value of the metric is best."""
    scores: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)
    """(step, metrics) of each checkpoint."""
    losses: list[float] = field(default_factory=list)
    followed: list[tuple[int, float | None]] = field(default_factory=list)
    """The scores that its learning rate follows."""
    seconds: float = 0.0
    """Of training, scoring and writing, in its own process."""
    stopped: bool = False
    """Its scores have got no better for as long as the job's `patience` says."""
    sha256: str = ""
    """Of its parameters, once it has come as far as it was asked to."""
    failure: str = ""

    @property
    def best(self) -> tuple[int, float]:
        """(step, value) of the best score; NaN without one."""
        known = [(at, value) for at, metrics in self.scores if (value := metrics[self.metric]) is not None]
        return (min if self.lowest else max)(known, key=lambda pair: pair[1], default=(self.step, math.nan))

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Sorts the best model first, and those that have failed last."""
        value = self.best[1]
        return bool(self.failure), math.isnan(value), value if self.lowest else -value

    def until(self, step: int) -> MemberHistory:
        """What it was at a step: without later scores."""
        return dataclasses.replace(self, scores=[(at, metrics) for at, metrics in self.scores if at <= step])


@dataclass(kw_only=True, eq=False)
class SweepMember:
    """A model to train. point: the fields in which it differs from others. settings: all that are set."""

    point: Point
    settings: dict[str, str]
    job: Job
    folder: Path
    found: MemberHistory = field(default_factory=MemberHistory)
    """What is known of it here, in the sweep's own process."""

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.point)

    @property
    def best_checkpoint(self) -> Path:
        return self.folder / "checkpoints" / step_folder(self.found.best[0])

    def steps(self, share: float) -> int:
        return math.ceil(self.job.steps * share)

    def history(self) -> MemberHistory:
        """What its last process has written. Raises UsageError for a model with other settings."""
        try:
            found = MemberHistory(**json.loads(files.read_text(self.folder / RESULT, RESULT_BYTES)))
        except FileNotFoundError:
            return MemberHistory()
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{self.folder / RESULT} can't be read: {error}; choose another --out") from None
        if found.settings != self.settings:
            before, now = (", ".join(map("=".join, one.items())) for one in (found.settings, self.settings))
            raise UsageError(
                f"{self.folder} was trained with {before}, and this sweep sets {now}; choose another --out"
            )
        return found

    def write(self, history: MemberHistory) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**dataclasses.asdict(history), "settings": self.settings})
        files.replace(self.folder / RESULT, text.encode())

    def train(self, device: str, share: float) -> None:
        """Train, from its newest checkpoint on, up to a share of its steps; result.json says how it ended.

        An error of the job ends this model alone.
        """
        history = self.history()
        self.write(history)
        try:
            with torch_threads(self.job.threads):
                run = MemberRun(self, device)
                history = run.history
                run.to(self.steps(share))
                history.sha256 = run.training.result(()).sha256
        except Exception as error:
            history.failure = told(error)
        self.write(history)


def told(error: Exception) -> str:
    """The sentence of an error; a defect's stack goes into the log."""
    known = as_error(error)
    if known is None:
        traceback.print_exc()
    return str(known or f"{type(error).__name__}: {error}")


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as JSON can have them."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


class MemberRun:
    """A model's training in progress."""

    def __init__(self, member: SweepMember, device: str) -> None:
        self._job = member.job
        self._begun_s = time.monotonic()
        self.training = checked(self._job, device)
        self._store = CheckpointStore(member.folder / "checkpoints", self._job.checkpoint_keep or sys.maxsize)
        self.history = MemberHistory()
        if self._store.list():
            stored = self._store.newest_valid()
            self.training.restore(stored.images(self.training.plan, 0))
            self.history = MemberHistory(**stored.manifest.extra[KEY])  # type: ignore[arg-type]
            self.training.scores = [(step, value) for step, value in self.history.followed]
            self._begun_s -= self.history.seconds

    def to(self, steps: int) -> None:
        """Train up to a number of steps, with a checkpoint and a score there and as often as the job wants."""
        training, history, every = self.training, self.history, self._job.checkpoint_every
        while training.at < steps and not history.stopped:
            history.losses = [*history.losses, training.step()][-LOSSES:]
            if training.at == steps or (every and training.at % every == 0):
                self._checkpoint()

    def _checkpoint(self) -> None:
        training, history = self.training, self.history
        metrics = training.score()
        if metrics:
            name, history.lowest = self._job.best(metrics)
            if name not in metrics:
                returned = f"{', '.join(metrics)}{nearest(name, metrics)}"
                raise JobError(f"best_metric is {name!r}, but evaluate(model) returns {returned}")
            history.metric = name
        metrics[LOSS] = sum(history.losses) / len(history.losses)
        history.step, history.followed = training.at, list(training.scores)
        history.scores.append((training.at, finite(metrics)))
        best, _ = history.best
        history.stopped = 0 < self._job.patience <= sum(step > best for step, _ in history.scores)
        history.seconds = time.monotonic() - self._begun_s
        cut = CheckpointContents(
            job=training.spec,
            plan=training.plan,
            step=training.at,
            timeline=0,
            term=0,
            consistent=True,
            versions=[training.version],
            images={0: training.images()},
            extra={KEY: dataclasses.asdict(history)},
        )
        self._store.commit(cut)
        if best == training.at:
            self._store.mark_best(best, metrics)
        history.seconds = time.monotonic() - self._begun_s


def checked(job: Job, device: str = "cpu") -> Training:
    """The job's training in this process. Raises JobError for a job that would end otherwise than on a cluster."""
    training = Training(job, device=resolve_device(device), in_buckets=True)
    used = codecs.of(training.spec)
    if not all(codec.exact for codec in (*used.ups, *used.downs)):
        raise JobError(
            f"the job's codec ({used}) rounds, but a model that trains alone sends nothing; sweep it with --codec raw, "
            "or compare codecs with shardline train"
        )
    return training

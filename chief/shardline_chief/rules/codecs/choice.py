"""Codec auto: measure steps without a codec, choose, go back to the newest checkpoint with the choice, and check it.

The journal has the job with its choice, so that it is made once; tasks whose job says auto are admitted to it.
"""

from __future__ import annotations

import dataclasses
import enum
import statistics
from collections.abc import Sequence

from shardline import codecs
from shardline.codecs.auto import Option, StepCost, choose, options
from shardline.core.orders import StepReport
from shardline.core.spec import JobSpec, TensorKind, itemsize
from shardline.core.spec_json import job_to_json
from shardline.errors import JobError
from shardline.fit import check_fit
from shardline_chief.rules.actions import MeasureCodecs
from shardline_chief.rules.events import TRAINING, CodecsMeasured, Progressed
from shardline_chief.rules.flows.recovery import Recovery
from shardline_chief.rules.state.state import State

LEAST_S, LEAST_STEPS = 10.0, 8
"""For how long, and how many steps, are measured at least."""


class StepMeter:
    """What steps cost, from reports of the tasks that train. Pure."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        """The last step of each task."""
        self._reset()

    def _reset(self) -> None:
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)
        self._computed: dict[int, float] = {}
        """Seconds, of all replicas, by step."""
        self._exchanged: dict[int, float] = {}

    def add(self, task: str, reports: Sequence[StepReport], now_s: float) -> None:
        """Note a task's finished steps. The first ones count for nothing: lanes open, memory grows."""
        steps = [report.step for report in reports]
        if min(steps) < self._newest.get(task, 0):
            # Those before were of the timeline before.
            self._reset()
        self._newest[task] = max(steps)
        if self._first is None:
            self._first = (max(steps), now_s)
        for report in reports:
            if report.step <= self._first[0]:
                continue
            self._last = max(self._last, (report.step, now_s))
            self._computed[report.step] = self._computed.get(report.step, 0.0) + report.data_s + report.compute_s
            seconds = max(report.exchange_s - report.blocked_s, 0.0)
            self._exchanged[report.step] = min(self._exchanged.get(report.step, seconds), seconds)

    @property
    def ready(self) -> bool:
        first = self._first or self._last
        return self._last[0] - first[0] >= LEAST_STEPS and self._last[1] - first[1] >= LEAST_S

    @property
    def step_s(self) -> float:
        assert self._first is not None
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])

    def cost(self, job: JobSpec, *, workers: int, servers: int) -> StepCost:
        trained = [tensor for tensor in job.tensors if tensor.kind is TensorKind.PARAM]
        return StepCost(
            step_s=self.step_s,
            compute_s=statistics.median(self._computed.values()) / workers,
            exchange_s=statistics.median(self._exchanged.values()),
            nbytes=sum(tensor.elements * itemsize(tensor.dtype) for tensor in trained),
            replicas=job.replicas,
            workers=workers,
            servers=servers,
        )


class _Stage(enum.Enum):
    MEASURING = enum.auto()
    """Steps without a codec."""
    TIMING = enum.auto()
    """Waiting for the speeds of the codecs."""
    TRYING = enum.auto()
    """Steps with the choice."""
    DONE = enum.auto()


class CodecChoice:
    """Rules for jobs that leave the choice of codecs to the chief."""

    def __init__(self, state: State, recovery: Recovery) -> None:
        self.state = state
        self.recovery = recovery
        self._stage = _Stage.MEASURING
        self._meter = StepMeter()
        self._timeline = 0
        self._plain_s = 0.0
        """Seconds of a step without a codec."""

    def told(self, task: str, reports: Sequence[StepReport], now_s: float) -> None:
        state = self.state
        replays = state.settings.replayed is not None
        undecided = state.job is not None and codecs.of(state.job).undecided and not replays
        if not reports or state.stage not in TRAINING or not (undecided or self._stage is _Stage.TRYING):
            return
        if state.layout.timeline != self._timeline:
            self._timeline, self._meter = state.layout.timeline, StepMeter()
        self._meter.add(task, reports, now_s)

    def look(self, event: Progressed, now_s: float) -> bool:
        """Choose, or judge the choice, once enough steps were measured. True: the job goes back."""
        if self.state.layout.timeline != self._timeline or not self._meter.ready:
            return False
        if self._stage is _Stage.MEASURING:
            self._stage = _Stage.TIMING
            self.state.outbox.actions.append(MeasureCodecs())
        elif self._stage is _Stage.TRYING:
            return self._judge(now_s)
        return False

    def measured(self, event: CodecsMeasured, now_s: float) -> None:
        state, job = self.state, self.state.job
        if self._stage is not _Stage.TIMING or job is None:
            return
        if not event.speeds or state.saves.checkpoint_step < 0:
            self._stage = _Stage.DONE
            why = "the codecs could not be measured" if not event.speeds else "there is no checkpoint to go back to"
            self._say(f"{why}, so none is used")
            return
        if state.stage not in TRAINING or not self._meter.ready:
            # A loss came between: measure again, in the new timeline.
            self._stage = _Stage.MEASURING
            return
        workers = max(1, len(state.tasks.trainers()))
        cost = self._meter.cost(job, workers=workers, servers=state.layout.filled)
        found = [one for one in options(job.checkpoint_every) if self._fits(job, one)]
        best = choose(found, cost, event.speeds)
        self._plain_s = cost.step_s
        figures = (
            f"a step takes {cost.step_s:.3g} s, in which a worker computes for {cost.compute_s:.3g} s and exchanges "
            f"{2 * cost.nbytes / 1e6:.3g} MB in {cost.exchange_s:.3g} s"
        )
        if best.option == found[0]:
            self._stage = _Stage.DONE
            self._say(f"{figures}; no codec would save a fifth of it, so none is used")
            return
        self._stage = _Stage.TRYING
        changed = encoded(job, best.option)
        self._say(
            f"{figures}; with {changed.codec_up} for gradients and {changed.codec_down} for parameters the exchange "
            f"should take {best.exchange_s:.3g} s and a step {best.step_s:.3g} s"
        )
        self.change(changed, now_s)

    def _judge(self, now_s: float) -> bool:
        """Keep the choice unless steps are slower now."""
        job, step_s = self.state.job, self._meter.step_s
        assert job is not None
        self._stage = _Stage.DONE
        figures = f"a step takes {step_s:.3g} s, {self._plain_s:.3g} s without a codec"
        if step_s <= self._plain_s:
            self._say(f"{figures}: the choice stands")
            return False
        self._say(f"{figures}, so none is used")
        self.change(encoded(job, None), now_s)
        return True

    def change(self, job: JobSpec, now_s: float) -> None:
        """Go on with other codecs, from the newest checkpoint."""
        state = self.state
        state.adopt(job)
        state.record("job", spec=job_to_json(job))
        # They may not be for shards that are copied.
        self.recovery.failover.moving.cancel("the codecs change")
        self.recovery.again("the codecs change", now_s, planned=True)

    def _fits(self, job: JobSpec, option: Option) -> bool:
        try:
            check_fit(encoded(job, option), standbys=self.state.settings.standbys)
        except JobError:
            return False
        return True

    def _say(self, sentence: str) -> None:
        job = self.state.job
        assert job is not None
        self.state.say("codec", f"codec auto: {sentence}")


def encoded(job: JobSpec, option: Option | None) -> JobSpec:
    """The job with these codecs; None = without any."""
    chosen = (option.up, option.down) if option is not None else ()
    up, down = [str(codecs.CODECS.parse(text)) for text in chosen] or ("", "")
    return dataclasses.replace(job, codec="raw", codec_up=up, codec_down=down)

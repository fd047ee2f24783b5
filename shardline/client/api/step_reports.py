"""Reports on a worker's steps, for the chief and the metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardline.cadence.base import Hyper
from shardline.client.api.profile import StepProfile
from shardline.client.api.workplace import Workplace
from shardline.client.exchange.shard_exchange import StepFigures
from shardline.core.orders import StepReport
from shardline.core.spec import JobSpec
from shardline.observability.metrics import Metrics
from shardline.rpc.link import ChiefLink
from shardline.schedule import factor


@dataclass(frozen=True)
class SentStep:
    """A step that was sent and is not closed yet."""

    reports: Sequence[StepReport]
    began_s: float
    batch: int
    """Asynchronous mode: the number of its batch."""


class StepReports:
    """The open step's reports, one per replica. Used by the session's thread."""

    def __init__(self, metrics: Metrics, profile: StepProfile | None) -> None:
        self._metrics = metrics
        self._profile = profile
        self._reports: dict[int, StepReport] = {}
        self._losses: dict[int, list[float]] = {}
        self.contributed = False
        """Some replica has contributed to the open tick."""
        self._data_s = 0.0
        """Seconds of waiting for batches since the last report."""
        self.began_s = time.monotonic()
        """When the open step began."""
        self.skipped = False
        """The last step was skipped because a gradient was not finite."""
        self._accounted_s = time.monotonic()

    def read(self, seconds: float) -> None:
        """Note that the next report's batch took so long to come."""
        self._data_s += seconds

    def add(self, report: StepReport, *, waited_s: float) -> None:
        """Add a replica's report on the open tick. waited_s: seconds it had to wait for the previous step.

        compute_s and data_s are measured here; loss and samples are those of the tick.
        """
        before = self._reports.get(report.replica)
        losses = self._losses.setdefault(report.replica, [])
        losses.append(report.loss)
        spent_s = sum(item.compute_s + item.data_s for item in self._reports.values())
        compute_s = time.monotonic() - self.began_s - waited_s - spent_s - self._data_s
        self._reports[report.replica] = replace(
            report,
            loss=losses[0] if len(losses) == 1 else math.fsum(losses) / len(losses),
            samples=report.samples + (before.samples if before is not None else 0),
            compute_s=compute_s + (before.compute_s if before is not None else 0.0),
            data_s=self._data_s + (before.data_s if before is not None else 0.0),
            logged={**(before.logged if before is not None else {}), **report.logged},
        )
        self._data_s = 0.0
        self.contributed = True

    def next_tick(self) -> None:
        self.contributed = False

    def take(self, batch: int) -> SentStep:
        """Return the reports, one per replica, when the step is sent, and start over. batch: see SentStep."""
        taken = SentStep(tuple(self._reports.values()), self.began_s, batch)
        self.clear()
        return taken

    def clear(self) -> None:
        """Begin another step, or the same one again."""
        self._reports.clear()
        self._losses.clear()
        self.contributed = False
        self._data_s = 0.0
        self.began_s = time.monotonic()

    def account(self, sent: SentStep, figures: StepFigures, place: Workplace, link: ChiefLink) -> None:
        """Report a closed step to the metrics and the chief."""
        place.resting = False
        self.skipped = figures.skipped
        step_s = time.monotonic() - max(sent.began_s, self._accounted_s)
        self._accounted_s = time.monotonic()
        if self._profile is not None:
            self._profile.exchanged(figures)
        meter_step(self._metrics, place, figures, sent, step_s)
        for item in sent.reports:
            if place.partners is not None and not place.partners.reports(item.replica):
                continue
            link.report(
                replace(
                    item,
                    exchange_s=figures.seconds,
                    staleness=figures.staleness,
                    blocked_s=figures.blocked_s,
                    gap=figures.gap or 0.0,
                )
            )


def figures_of(job: JobSpec, step: int, gradients: Mapping[str, torch.Tensor], hyper: Hyper) -> dict[str, float]:
    """The learning rate of the first parameter group and, where there are gradients, their norm: a pass over memory."""
    found = {}
    rate = hyper.get(0, {}).get("lr", job.rule.groups[0].get("lr"))
    if isinstance(rate, int | float):
        found["learning_rate"] = rate * factor(job.schedule, step)
    dense = [one.detach() for one in gradients.values() if one.is_floating_point() or one.is_complex()]
    if dense:
        found["gradient_norm"] = float(torch.stack([norm.float() for norm in torch._foreach_norm(dense)]).norm())
    return found


def meter_step(metrics: Metrics, place: Workplace, figures: StepFigures, sent: SentStep, step_s: float) -> None:
    """Record the metrics of one finished step. step_s: seconds."""
    trainer, reports = place.trainer, sent.reports
    metrics.histogram("shardline_step_seconds").observe(step_s)
    metrics.histogram("shardline_data_seconds").observe(sum(item.data_s for item in reports))
    metrics.histogram("shardline_compute_seconds").observe(sum(item.compute_s for item in reports))
    metrics.histogram("shardline_exchange_seconds").observe(figures.seconds)
    metrics.counter("shardline_examples_total").inc(sum(item.samples for item in reports))
    metrics.gauge("shardline_step").set(trainer.step)
    for item in reports:
        if not math.isnan(item.loss):
            metrics.gauge("shardline_loss").set(item.loss)
        if item.drift:
            metrics.gauge("shardline_drift").set(item.drift)
    if trainer.half.clock is not None:
        metrics.gauge("shardline_clock_pushes").set(trainer.half.clock)
    if figures.gap is not None:
        metrics.histogram("shardline_gap").observe(figures.gap)
    push = trainer.weights.coding.push
    if push.relative_error is not None:
        metrics.gauge("shardline_codec_error_ratio", codec=push.name, way="push").set(push.relative_error)
    if trainer.encoders.memory_norm is not None:
        metrics.gauge("shardline_codec_memory_norm", codec=push.name).set(trainer.encoders.memory_norm)
    for shard, outcome in figures.outcomes.items():
        peer = place.peers.get(shard, "ps")
        coding = trainer.weights.coding
        for kind, raw, wire in trainer.meter.take(shard):
            codec = (coding.push if kind == "push" else coding.pull).name
            labels = {"peer": peer, "codec": codec, "lane": trainer.exchange.lanes[shard].name}
            metrics.counter(f"shardline_{kind}_raw_bytes_total", **labels).inc(raw)
            metrics.counter(f"shardline_{kind}_wire_bytes_total", **labels).inc(wire)
        push_s, wait_s, pull_s = outcome.parts(figures.computed_s)
        metrics.histogram("shardline_push_seconds", peer=peer).observe(push_s)
        metrics.histogram("shardline_barrier_wait_seconds", shard=shard).observe(wait_s)
        metrics.histogram("shardline_pull_seconds", peer=peer).observe(pull_s)
        for ack in outcome.acks:
            name = ack.outcome.name.lower()
            metrics.counter("shardline_pushes_total", peer=peer, outcome=name).inc()
            if name == "applied":
                metrics.histogram("shardline_staleness_updates", shard=shard).observe(ack.staleness)

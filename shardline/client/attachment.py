"""Small parts of a session: named tensors as a module, figures of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from shardline.client.trainer import StepFigures, Trainer
from shardline.metrics import Metrics
from shardline.rpc.link import StepReport


class TensorHolder(nn.Module):
    """Named tensors as a module, so that one function describes models and bare tensors alike."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._held = dict(tensors)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The tensors, whatever dots their names have."""
        yield from self._held.items()  # type: ignore[misc]  # bare tensors are trained like parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The tensors."""
        for _, tensor in self.named_parameters():
            yield tensor


def meter_step(
    metrics: Metrics,
    trainer: Trainer,
    figures: StepFigures,
    reports: Sequence[StepReport],
    step_s: float,
    peers: Mapping[int, str],
) -> None:
    """Figures of one finished step. peers: the ps of each shard."""
    metrics.histogram("shardline_step_seconds").observe(step_s)
    metrics.histogram("shardline_compute_seconds").observe(sum(item.compute_s for item in reports))
    metrics.histogram("shardline_exchange_seconds").observe(figures.seconds)
    metrics.counter("shardline_examples_total").inc(sum(item.samples for item in reports))
    metrics.gauge("shardline_step").set(trainer.step)
    for item in reports:
        if not math.isnan(item.loss):
            metrics.gauge("shardline_loss").set(item.loss)
    for shard, outcome in figures.outcomes.items():
        peer = peers.get(shard, "ps")
        for kind, raw, wire in trainer.take_traffic(shard):
            labels = {"peer": peer, "codec": trainer.job.codec, "lane": "grpc"}
            metrics.counter(f"shardline_{kind}_raw_bytes_total", **labels).inc(raw)
            metrics.counter(f"shardline_{kind}_wire_bytes_total", **labels).inc(wire)
        metrics.histogram("shardline_push_seconds", peer=peer).observe(outcome.push_s)
        metrics.histogram("shardline_pull_seconds", peer=peer).observe(outcome.seconds)
        if outcome.waits:
            metrics.histogram("shardline_barrier_wait_seconds", shard=shard).observe(outcome.seconds)
        for ack in outcome.acks:
            name = ack.outcome.name.lower()
            metrics.counter("shardline_pushes_total", peer=peer, outcome=name).inc()
            if name == "applied":
                metrics.histogram("shardline_staleness_updates", shard=shard).observe(ack.staleness)

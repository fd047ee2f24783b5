"""What a session trains with: lanes, trainer and gate for the plan and the timeline in force."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from shardline.client.overlap.gate import Gate, why_not
from shardline.client.step.trainer import Trainer
from shardline.config import RoleConfig, environment
from shardline.errors import UsageError
from shardline.lanes.base import Lane
from shardline.lanes.open import open_lane
from shardline.model import named_values
from shardline.observability.metrics import Metrics
from shardline.rpc.channel import Peers
from shardline.rpc.client import JobView
from shardline.rpc.link import ChiefLink

log = logging.getLogger("shardline.client")


class Workplace:
    """One worker's trainer, made anew when plan or timeline change.

    wait_for, still_ordered: see Gate and Exchange.
    """

    def __init__(
        self,
        config: RoleConfig,
        metrics: Metrics,
        *,
        wait_for: Callable[[Iterable[int]], None],
        still_ordered: Callable[[], bool],
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._wait_for = wait_for
        self._still_ordered = still_ordered
        self._peers = Peers(config.timeouts, config.security)
        self._model: nn.Module | None = None
        self.values: Mapping[str, torch.Tensor] = {}
        """The person's own tensors by name."""
        self.overlaps = False
        """Gradients leave during the backward pass."""
        self.zero_copy = False
        """Tensors may lie in shared memory."""
        self.view: JobView | None = None
        self.current: Trainer | None = None
        self.lost_updates = 0
        """Asynchronous mode: pushes that a shard had acknowledged and has no more, since it was lost and restored."""
        self._acknowledged: dict[int, int] = {}
        """Last push by shard, of the trainer before."""
        self.gate: Gate | None = None
        """Where there is one, the next forward pass waits per layer."""

    def furnish(
        self, model: nn.Module | Mapping[str, torch.Tensor], *, from_file: bool, overlap: bool, zero_copy: bool = False
    ) -> None:
        """Take the model. from_file: a job file's; its passes are watched, so the next one may wait per layer.

        Raises UsageError where gradients would leave during the backward pass although they lie in shared memory.
        """
        if zero_copy and (overlap or (from_file and self._config.overlap)):
            remedy = "give attach() one of them" if overlap else "a job overlaps by itself, but for SHARDLINE_OVERLAP=0"
            raise UsageError(
                f"overlap and zero_copy exclude each other, since there is nothing left to overlap with; {remedy}"
            )
        self.zero_copy = zero_copy
        self.overlaps = self._config.overlap and (overlap or from_file)
        if isinstance(model, nn.Module):
            self.values = named_values(model)
            self._model = model if from_file and self.overlaps else None
        else:
            self.values = dict(model)

    @property
    def trainer(self) -> Trainer:
        """State of training; raises UsageError before attach()."""
        if self.current is None:
            raise UsageError("the session is not attached yet: call session.attach(model, optimizer) first")
        return self.current

    @property
    def peers(self) -> dict[int, str]:
        """The ps of each shard."""
        return {place.shard: place.task for place in self.view.placement} if self.view is not None else {}

    def renew(self, link: ChiefLink) -> None:
        """Make the trainer of the plan and timeline in force, where it isn't there already."""
        view = link.ask(lambda: link.client.get_job(link.identity))
        if (
            self.view is not None
            and view.plan.plan_id == self.view.plan.plan_id
            and view.timeline == self.view.timeline
        ):
            return
        # Before anything is changed: where a server's name has no address now, all of this is tried again.
        lanes = self._open_lanes(view)
        pushed = 0
        if self.current is not None and not self.current.is_sync:
            pushed = self.current.step
            self._acknowledged = self._acknowledged or dict(self.current.acknowledged)
        self._close_trainer()
        self.view = view
        trainer = Trainer(
            view,
            self.values,
            lanes,
            self._config.timeouts,
            who=link.identity,
            index=self._config.index,
            on_retry=self._count_retry,
            overlap=self.overlaps,
            zero_copy=self.zero_copy,
            credit_bytes=credit_bytes(),
        )
        if self.current is not None:
            trainer.encoders.inherit(self.current.encoders)
        # In asynchronous mode a worker counts its own pushes, whatever became of them.
        trainer.step = pushed
        trainer.exchange.still_ordered = self._still_ordered
        hosts = {place.shard: place.task for place in view.placement}
        trainer.exchange.on_silence = lambda shards: link.suspect({hosts[shard] for shard in shards}, view.timeline)
        link.suspect((), view.timeline)
        trainer.on_nonfinite = lambda name: self._metrics.counter("shardline_nonfinite_total", what=name).inc()
        self._open_gate(trainer)
        self.current = trainer

    def located(self) -> None:
        """The trainer knows what the shards have: what is missing of what they had is lost."""
        held = self.trainer.acknowledged
        self.lost_updates += sum(max(0, number - held[shard]) for shard, number in self._acknowledged.items())
        self._acknowledged = {}

    def _open_lanes(self, view: JobView) -> dict[int, Lane]:
        lanes: dict[int, Lane] = {}
        for place in view.placement:
            peer = self._peers.get(place.task, place.address)
            # Its name must be known before it can be told whether it is on this host.
            peer.await_name()
            peer.on_retry = self._metrics.counter("shardline_rpc_retries_total", peer=place.task).inc
            lanes[place.shard] = open_lane(
                self._config, peer, place.shard, view.plan.shards[place.shard], on_fallback=self._count_fallback
            )
        return lanes

    def _open_gate(self, trainer: Trainer) -> None:
        if self._model is None:
            return
        reason = why_not(self._model)
        if reason:
            log.info("the next forward pass waits for the whole model: %s", reason)
            return
        numbers = {id(tensor): number for number, tensor in enumerate(trainer.layout.tensors)}
        self.gate = Gate(
            self._model,
            numbers,
            wait_for=self._wait_for,
            waiting=lambda: trainer.waiting,
        )

    def _count_retry(self, shard: int) -> None:
        self._metrics.counter("shardline_rpc_retries_total", peer=self.peers.get(shard, "ps")).inc()

    def _count_fallback(self, lane: str, reason: str) -> None:
        self._metrics.counter("shardline_lane_fallbacks_total", lane=lane).inc()

    def _close_trainer(self) -> None:
        if self.gate is not None:
            self.gate.close()
            self.gate = None
        if self.current is not None:
            self.current.close()

    def close(self) -> None:
        """Free lanes, threads and hooks."""
        self._close_trainer()
        self._peers.close()


def credit_bytes() -> int:
    """SHARDLINE_CREDIT_MB: bytes that may be on their way to a shard at once; 0 = derived from its buckets."""
    text = environment("credit_mb") or "0"
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 <= found < 1e6:
        raise UsageError(f"SHARDLINE_CREDIT_MB is {text!r}; give megabytes, such as 4, or 0 to have them derived")
    return int(found * 2**20)

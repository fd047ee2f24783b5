"""Workers whose gradients leave during the backward pass and whose next forward pass waits per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from shardline.client.gate import Gate
from shardline.client.overlap import Expected
from shardline.client.trainer import Trainer
from shardline.client.watching import StepWatch
from shardline.data import replica_gradients
from shardline.lanes.base import Lane
from tests.integration.cluster import COMPUTE, Cluster, Worker

T = TypeVar("T")


class OverlapWorker(Worker):
    """One life of a worker that overlaps. Used by one thread.

    per_layer: the next forward pass begins before the parameters have come. COMPUTE is let go of while it waits, since
    other workers of this process may have to compute what it waits for.
    """

    def __init__(
        self,
        cluster: Cluster,
        index: int,
        *,
        incarnation: int = 1,
        wrap: Callable[[Lane], Lane] = lambda lane: lane,
        per_layer: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(cluster, index, incarnation=incarnation, wrap=wrap)
        plain = self.trainer
        plain.close()
        self.trainer = Trainer(
            cluster.view,
            self.values,
            plain._lanes,
            cluster.timeouts,
            task=f"worker/{index}",
            incarnation=incarnation,
            index=index,
            overlap=True,
            **settings,
        )
        self.early_steps = 0
        self.per_layer = per_layer
        trainer = self.trainer
        self.gate = Gate(
            self.model,
            {id(tensor): number for number, tensor in enumerate(trainer.layout.tensors)},
            wait_for=self._wait_for,
            waiting=lambda: trainer.waiting,
        )

    def run(self, replicas: Sequence[int], steps: int) -> OverlapWorker:
        """Train these replicas from where the shards stand up to `steps`."""
        self.trainer.exchange.arm()
        todo = self.trainer.locate(replicas, self.cluster.timeline)
        while self.trainer.step < steps:
            with COMPUTE:
                for replica in sorted(todo):
                    self.pass_of(self.trainer.step, replica, sorted(todo))
            self.send()
            todo = set(replicas)
        self.settle()
        return self

    def run_async(self, batches: Sequence[int]) -> OverlapWorker:
        """Push the gradient of each batch as an update of its own."""
        self.trainer.exchange.arm()
        self.trainer.locate([0], self.cluster.timeline)
        for batch in batches:
            with COMPUTE:
                self.pass_of(batch, 0, [0])
            self.send()
        self.settle()
        return self

    def pass_of(self, step: int, replica: int, owned: Sequence[int]) -> None:
        """Compute one replica's gradients; they may leave meanwhile. COMPUTE held."""
        trainer = self.trainer

        def expect(loss: Callable[[], float], samples: int) -> None:
            self.yielding(self.settle)
            trainer.expect(Expected(replica=replica, owned=owned, samples=samples, loss=loss()))

        self.yielding(trainer.begin)
        watch = StepWatch(self.gate, lambda: trainer.uses if trainer.starting else None, expect)
        loss, samples = replica_gradients(self.model, self.job, self.source, step, replica, watch)
        self.early_steps += trainer._early is not None
        if not trainer.is_sync and self.job.clip_norm > 0.0:
            torch.nn.utils.clip_grad_norm_([v for v in self.values.values() if v.grad is not None], self.job.clip_norm)
        gradients = {name: value.grad for name, value in self.values.items() if value.grad is not None}
        trainer.contribute(replica, gradients, samples=samples, loss=loss, keep=True)

    def send(self) -> None:
        """Close the step, or let it be on its way."""
        if self.per_layer and not self.trainer.starting:
            self.trainer.send()
        else:
            self.figures.append(self.trainer.finish())

    def settle(self) -> None:
        """Wait for what is on its way."""
        figures = self.trainer.settle()
        if figures is not None:
            self.figures.append(figures)

    def _wait_for(self, tensors: Iterable[int]) -> None:
        self.yielding(lambda: self.trainer.wait_for(tensors))

    def yielding(self, function: Callable[[], T]) -> T:
        """Call a function that waits, without COMPUTE and without touching this replica's random numbers."""
        if not self.trainer.pending:
            return function()
        state = torch.get_rng_state()
        COMPUTE.release()
        try:
            return function()
        finally:
            COMPUTE.acquire()
            torch.set_rng_state(state)

    def close(self) -> None:
        self.gate.close()
        super().close()

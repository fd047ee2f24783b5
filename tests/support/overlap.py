"""Workers that send gradients during the backward pass and whose next forward pass waits per layer.

Also models whose passes can be paused, and a lane that breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from shardline.client.api.workplace import Wishes
from shardline.client.overlap.gate import Gate, Reach, StepWatch
from shardline.client.step.early_push import Expected
from shardline.data import replica_gradients
from shardline.errors import UnreachableError
from shardline.lanes.base import Lane
from shardline.waist import Exchanged, Push, Sender, Sink, Standing, Want
from tests.support.cluster import COMPUTE, Cluster, Worker

T = TypeVar("T")


class OverlapWorker(Worker):
    """One life of a worker that overlaps. Used by one thread.

    per_layer: the next forward pass begins before the parameters have arrived. COMPUTE is released while it waits,
    since other workers of this process may have to compute what it waits for.
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
        wishes = Wishes(overlap=True, **settings)
        super().__init__(cluster, index, incarnation=incarnation, lane=cluster.lane, wrap=wrap, wishes=wishes)
        self.early_steps = 0
        self.hyper: dict[int, dict[str, float]] = {}
        """What its optimizer says instead of the job's numbers."""
        self.per_layer = per_layer
        trainer = self.trainer
        tensors = trainer.weights.layout.tensors
        reach = Reach(self.model, tensors)
        # What refers to them here reads nothing while they arrive.
        reach.loose.clear()
        self.gate = Gate(
            tensors,
            reach,
            # A test may put another function in its place.
            wait_for=lambda tensors: self.wait_for(tensors),  # noqa: PLW0108
            waiting=lambda: trainer.open.sent and trainer.weights.incomplete,
        )

    def run(self, replicas: Sequence[int], steps: int) -> OverlapWorker:
        """Train these replicas from the shards' current step up to `steps`."""
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
        """Compute one replica's gradients; they may be sent meanwhile. COMPUTE must be held."""
        trainer = self.trainer

        def expect(loss: Callable[[], float], samples: int) -> None:
            self.yielding(self.settle)
            trainer.expect(
                Expected(replica=replica, owned=owned, samples=samples, loss=loss(), hyper=lambda: self.hyper)
            )

        self.yielding(lambda: trainer.begin(replica))
        watch = StepWatch(self.gate, lambda: trainer.open.uses, expect)
        loss, samples = replica_gradients(self.model, self.job, self.source, step, replica, watch)
        self.early_steps += trainer.open.leaves_early
        if self.clips:
            torch.nn.utils.clip_grad_norm_([v for v in self.values.values() if v.grad is not None], self.job.clip_norm)
        gradients = {name: value.grad for name, value in self.values.items() if value.grad is not None}
        trainer.contribute(replica, gradients, samples=samples, loss=loss, hyper=self.hyper, keep=True)

    def send(self) -> None:
        """Close the step, or start sending it."""
        if self.per_layer and not (self.trainer.open.first or self.trainer.watch.waits):
            self.trainer.send()
            with COMPUTE:
                self.gate.shut()
        else:
            self.figures.append(self.trainer.finish())

    def settle(self) -> None:
        """Wait for what is being sent."""
        figures = self.trainer.settle()
        self.gate.open()
        if figures is not None:
            self.figures.append(figures)

    def wait_for(self, tensors: Iterable[int]) -> None:
        self.yielding(lambda: self.trainer.wait_for(tensors))

    def yielding(self, function: Callable[[], T]) -> T:
        """Call a function that waits, with COMPUTE released and this replica's random state preserved."""
        if not self.trainer.open.sent:
            return function()
        state = torch.get_rng_state()
        COMPUTE.release()
        try:
            return function()
        finally:
            COMPUTE.acquire()
            torch.set_rng_state(state)

    def close(self) -> None:
        self.gate.open()
        super().close()


class Middle(nn.Module):
    """Two layers; calls a function when the gradient between them is known."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 64), nn.Linear(64, 1)
        self.between: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.between())  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, self.last(hidden))


class Layers(nn.Module):
    """Five layers, each in a bucket of its own, whose backward pass can be paused after the last layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.out = nn.Linear(8, 1, bias=False)
        self.ran: list[int] = []
        self.after_last: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, x[:, :3]], dim=1)
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            self.ran.append(number)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.after_last())  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, self.out(x))


class LosingLane(Lane):
    """Breaks every exchange of some steps a few times, after some of its payloads or with the reply lost."""

    name = "losing"

    def __init__(self, lane: Lane, *, steps: Sequence[int], times: int) -> None:
        self._lane = lane
        self._left = dict.fromkeys(steps, times)
        self.broken = 0

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        step = contributions[0].step if contributions else -1
        left = self._left.get(step, 0)
        if left:
            self._left[step] -= 1
            self.broken += 1
            if left % 2:
                next(iter(contributions[0].payloads.batches()))
                raise UnreachableError("the link broke after the first batch")
            self._lane.exchange(sender, contributions, want, sink, timeout_s=timeout_s)
            raise UnreachableError("the reply was lost")
        return self._lane.exchange(sender, contributions, want, sink, timeout_s=timeout_s)

    def standing(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        return self._lane.standing(sender, replicas, timeout_s=timeout_s)

    def cancel(self) -> None:
        self._lane.cancel()

    def close(self) -> None:
        self._lane.close()

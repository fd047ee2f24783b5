"""State that a worker keeps as long as its process trains, across servers, plans and timelines."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardline import cadence as cadences
from shardline import consistency
from shardline import topology as topologies
from shardline.cadence import Held, Ticks
from shardline.codecs.coding import Coding
from shardline.codecs.push import PushEncoders
from shardline.core.spec import JobSpec


class WorkerMethods:
    """A worker's progress in its job, and its half of the job's cadence. Used by the computing thread.

    tensors: the model's, by name.
    """

    def __init__(self, job: JobSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self._job = job
        self.mode = consistency.of(job.consistency)
        self.half = self.mode.worker_half(job)
        self.cadence = cadences.of(job)
        self.ticks = Ticks(self.cadence)
        self.streams = self.cadence.streams and topologies.of(job).streams
        """Gradients are sent to the hops just as backward() computes them: see Cadence.streams and Topology.streams."""
        pulled = tensors
        if self.cadence.copies:
            names = [spec.name for spec in job.tensors]
            pulled = {name: tensors[name].detach().clone() for name in names if name in tensors}
        self.held = Held(model=tensors, pulled=pulled, specs=job.tensors)
        self.local = self.cadence.local(self.held)
        self._encoders: PushEncoders | None = None

    def encoders(self, coding: Coding, index: int) -> PushEncoders:
        """Encoders for the pushes of worker `index` under a plan; takes over the previous plan's error memory."""
        made = PushEncoders(
            coding,
            seed=self._job.seed,
            sender=index if self.mode.whole_pushes else None,
            keep_every=self._job.checkpoint_every,
        )
        if self._encoders is not None:
            made.inherit(self._encoders)
        self._encoders = made
        return made

    def restart(self) -> None:
        """Start the open step over with the servers' parameters."""
        self.ticks.restart()
        self.local.began(self.half.step)

    def next_step(self) -> None:
        """Begin the next step, once its parameters have arrived."""
        self.ticks.restart()
        self.local.began(self.half.step)

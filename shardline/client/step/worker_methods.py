"""State that a worker keeps as long as its process trains, across servers, plans and timelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardline import cadence as cadences
from shardline import codecs, consistency, division
from shardline import topology as topologies
from shardline.cadence import Held, Sends, Ticks, Told
from shardline.client.applied.worker_optimizer import WorkerOptimizer
from shardline.client.exchange.outcomes import ShardOutcome
from shardline.codecs.coding import Coding
from shardline.codecs.push import PushEncoders
from shardline.core.settings import EXACT, WORKER
from shardline.core.spec import JobSpec
from shardline.division import Key, Share
from shardline.update.torch_optim.inner import InnerOptimizers


class WorkerMethods:
    """A worker's progress in its job, and its half of the job's cadence. Used by the computing thread.

    tensors: the model's, by name.
    """

    def __init__(self, job: JobSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self._job = job
        self.mode = consistency.of(job.consistency)
        self.half = self.mode.worker_half(job)
        self.cadence = cadences.of(job)
        self.ticks = Ticks(self.cadence.rounds)
        applies = job.apply == WORKER
        self.streams = self.cadence.sends is Sends.GRADIENTS and topologies.of(job).streams and not applies
        """Gradients are sent to the hops just as backward() computes them: see Topology.streams."""
        parts = division.of(job)
        self.unbroken = parts.goes_back
        """A pipeline of which no stage can begin a step again: passes compute with versions that the worker keeps."""
        self.resends = parts.partial
        """A failed exchange is repeated with the same gradients: to compute them again takes other workers."""
        self.copies = self.cadence.sends is Sends.DELTAS or self.unbroken
        """Passes compute with other tensors than those that pulls fill."""
        codec = codecs.of(job)
        self.fetches_again = self.half.exact is not None and not applies and all(down.is_view for down in codec.downs)
        """A step's parameters can be pulled a second time, with the same bits."""
        self.goes_on = self.cadence.rounds.overlap > 0 or self.unbroken
        """The next step begins while this one is exchanged."""
        names = [spec.name for spec in job.tensors if spec.name in tensors]

        def copied() -> dict[str, torch.Tensor]:
            return {name: tensors[name].detach().clone() for name in names}

        pulled = copied() if self.copies or applies else tensors
        inner = InnerOptimizers(job.inner, job.tensors, tensors) if job.inner is not None else None
        self.held = Held(
            # The optimizer needs tensors that stay; those of passes are pointed at one version and another.
            model=copied() if applies and self.unbroken else tensors,
            pulled=pulled,
            specs=job.tensors,
            inner=inner,
            replicas=job.replicas,
            contributors=self.mode.contributors(job.replicas),
            brings_buffers=self.half.brings_buffers,
        )
        self.applied = WorkerOptimizer(job, self.held) if applies else None
        """Runs the job's optimizer here on what the servers sum; None: they run it."""
        self.local = self.applied or self.cadence.local(self.held)
        self.arrived: Mapping[str, torch.Tensor] = self.held.model if applies else pulled
        """The tensors of the newest step that has arrived, by name."""
        self._ahead = False
        """The open step has begun before its parameters have arrived."""
        self._encoders: PushEncoders | None = None
        self.versions: Mapping[int, int] = {}
        """Version of each shard's parameters, as they were last pulled."""

    def encoders(self, coding: Coding, index: int) -> PushEncoders:
        """Encoders for the pushes of worker `index` under a plan; takes over the previous plan's error memory."""
        made = PushEncoders(
            coding,
            seed=self._job.seed,
            sender=None if self.half.shares_steps else index,
            keep_every=self._job.checkpoint_every,
            cut_after=self._cut_after,
        )
        if self._encoders is not None:
            made.inherit(self._encoders)
        self._encoders = made
        return made

    def _cut_after(self, number: int) -> bool:
        """Whether nothing may be owed after this push."""
        return self._job.error_memory == EXACT and codecs.sent_whole(self._job, number + 1)

    @property
    def needs_pull(self) -> bool:
        """Whether the open pass needs the parameters of its step to begin. Cadences that stream wait per layer."""
        return not self.streams and self.ticks.tick >= self.cadence.rounds.overlap

    def own(self, share: Share) -> Sequence[Key]:
        """Exchange these buckets from the step that is located now on; returns them."""
        if self.applied is not None:
            self.applied.own(share)
        return share.keys

    def restart(self, outcomes: Mapping[int, ShardOutcome]) -> None:
        """Start the open step over with the servers' parameters. Raises UnreachableError, Restart."""
        self._ahead = False
        self._arrived(_told(outcomes, located=True))

    def sent(self) -> None:
        """Advance after the open step was sent. With an overlap the next one begins now."""
        self.half.advance()
        if self.cadence.rounds.overlap:
            self._begin()
            self._ahead = True

    def next_step(self, outcomes: Mapping[int, ShardOutcome]) -> None:
        """The parameters of the next step have arrived: begin it, unless it has begun already."""
        self._arrived(_told(outcomes))

    def _arrived(self, told: Told) -> None:
        if not self._ahead:
            self._begin()
        self._ahead = False
        self.local.arrived(self.half.step, told)

    def _begin(self) -> None:
        self.ticks.begin(self.half.step)
        self.local.began(self.half.step)


def _told(outcomes: Mapping[int, ShardOutcome], *, located: bool = False) -> Told:
    wants_state: list[int] = []
    hyper: dict[int, Mapping[str, float]] = {}
    for shard, outcome in outcomes.items():
        if outcome.wants_state:
            wants_state.append(shard)
        hyper.update(outcome.hyper)
    return Told(located=located, wants_state=wants_state, hyper=hyper)

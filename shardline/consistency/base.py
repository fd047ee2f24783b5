"""Consistency: which contributions make an update, and what a worker may pull. One file per mode. Pure.

A resident is the choice and its traits: what the rest of the system has to know about a mode, as properties with a
meaning. Code outside this package never asks for a mode's name or class.

How modes that do not exist yet would use it:

* Backup workers (Chen et al. 2016): a subclass of ReplicaSteps with `waits_for_verdict`. ready() returns True for N of
  N + b contributions, divisor is N, and admit() answers LATE_DROPPED once the set of a step is closed.
* n-softsync (Zhang et al. 2016): a subclass of NumberedPushes. take() sums pushes and applies the sum, divided by c, at
  every c-th push; the PushContext has each push's staleness, for a weight of 1 / staleness.
* Stale synchronous parallel (Ho et al. 2013): a subclass of NumberedPushes without `replies_with_push`. A worker's
  clock is the number of its last push. serve() answers WAITING to a worker that is too far ahead of the slowest one;
  members_changed() removes workers that left from the minimum, and waiting pulls are checked again.
* Local SGD and DiLoCo: a subclass of EagerSteps, where a step is a round and deltas are averaged. The update rule turns
  the mean delta into an outer gradient.

A mode is one file with two classes: the resident, and its server half. CONSISTENCIES.add() lists it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from shardline.consistency.server import ServerHalf, Storage, Terms
from shardline.consistency.worker.base import WorkerHalf
from shardline.consistency.worker.own_pushes import OwnPushes
from shardline.consistency.worker.shared_steps import SharedSteps
from shardline.core.spec import ConsistencySpec, JobSpec
from shardline.seams import Resident


class Clock(enum.Enum):
    """The unit in which a job's progress is counted."""

    STEP = "step"
    """Closed rounds: every replica takes part in each."""
    VERSION = "version"
    """Applied updates; each worker has its own."""


@dataclass(frozen=True)
class Consistency(Resident):
    """A mode: its settings are the fields, its traits the class variables."""

    clock: ClassVar[Clock]
    """The unit of steps, the learning-rate schedule, stops and metrics."""
    keeps_previous: ClassVar[bool] = False
    """A bucket publishes the values of its step and of the previous step, which a replaced worker may still need."""
    whole_pushes: ClassVar[bool] = False
    """A push is numbered, kept until its commit and counted in all buckets at once, with one outcome. False: it names
    its step and its block of replicas, and each of its buckets counts as soon as it is complete."""
    sums_in_tree: ClassVar[bool] = False
    """Contributions of replicas are added in the canonical tree, so that a worker may add up a whole block first."""
    waits_for_verdict: ClassVar[bool] = False
    """A complete step is applied after the lead's decision for all shards."""
    pulls_by_step: ClassVar[bool] = False
    """A pull asks for the values of one step, and gets exactly those or none."""
    replies_with_push: ClassVar[bool] = False
    """A pull in the same call as a push is answered with the values right after that push."""
    publishes_after_standby: ClassVar[bool] = False
    """An update is published once the standby has it. False: it is published at once, and answers wait instead."""
    consistent_cuts: ClassVar[bool] = False
    """All shards are cut at the same step, which can be agreed on in advance; a rollback takes all of them back to it.
    False: each shard is cut at its own time and goes back alone."""
    leases_batches: ClassVar[bool] = False
    """The chief leases batches one by one, and again if a worker dies. False: it assigns replicas, and a replica's
    batches follow from the step."""
    bit_exact: ClassVar[bool] = False
    """The final parameters do not depend on the number of workers or on which of them died."""
    clips_at_worker: ClassVar[bool] = False
    """A worker clips its own gradient and decides itself to skip one that is not finite."""

    @property
    def assigns_replicas(self) -> bool:
        """Whether the chief assigns replicas to workers."""
        return not self.leases_batches

    def contributors(self, replicas: int) -> int:
        """Number of replicas that make one update, for a job with `replicas`."""
        return replicas

    def under(self, spec: ConsistencySpec) -> Consistency:
        """The mode for this choice with a job's other settings, such as clipping."""
        return self

    def worker_half(self, job: JobSpec) -> WorkerHalf:
        """A worker's half for a job of this mode, at the job's beginning."""
        return OwnPushes(job) if self.whole_pushes else SharedSteps(job)

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        """The server half of this mode for one shard."""
        raise NotImplementedError(f"consistency {self} has no implementation for servers")

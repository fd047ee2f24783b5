"""Consistency: which contributions make an update, and what a worker may pull. One file per mode. Pure.

A resident is the choice and its traits: what the rest of the system has to know about a mode, as properties with a
meaning. Code outside this package never asks for a mode's name or class.

A mode is one file with two classes: the resident, and its server half. CONSISTENCIES.add() lists it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from shardline import plugins
from shardline.consistency.server import ServerHalf, Terms
from shardline.consistency.worker.base import WorkerHalf
from shardline.consistency.worker.own_pushes import OwnPushes
from shardline.consistency.worker.shared_steps import SharedSteps
from shardline.core.spec import ConsistencySpec, JobSpec
from shardline.seams import Resident
from shardline.storage.shard import Storage


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
    sums_pushes: ClassVar[bool] = False
    """Whole pushes are added up, and one update has several of them: it comes from no single worker."""
    holds_back: ClassVar[bool] = False
    """A pull waits for workers that are behind, so a worker that has nothing to push for a while must say so."""
    sums_in_tree: ClassVar[bool] = False
    """Contributions of replicas are added in the canonical tree, so that a worker may add up a whole block first."""
    waits_for_verdict: ClassVar[bool] = False
    """A complete step is applied after the lead's decision for all shards."""
    drops_late: ClassVar[bool] = False
    """A step closes once enough replicas have contributed, at the lead's choice; what comes later is dropped."""
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
    """The final parameters do not depend on the number of workers or on which of them died; with `drops_late`, they
    follow from the choices, which the journal has."""
    by_stage: ClassVar[bool] = False
    """For pipelines: each replica's contribution to a bucket is an update, and its steps are numbered by replica."""
    pulls_follow_pushes: ClassVar[bool] = False
    """A pull in the same call as pushes is answered with values that contain them."""
    clips_at_worker: ClassVar[bool] = False
    """A worker clips its own gradient and decides itself to skip one that is not finite."""

    @property
    def assigns_replicas(self) -> bool:
        """Whether the chief assigns replicas to workers."""
        return not self.leases_batches

    @property
    def lends_values(self) -> bool:
        """Whether a pull may be answered with the published memory itself: nothing is written to what somebody reads,
        since an update that overwrites it needs the reader's contribution.
        """
        return self.pulls_by_step and not self.drops_late

    def contributors(self, replicas: int) -> int:
        """Number of replicas that may contribute to one update, for a job with `replicas`."""
        return replicas

    def needed(self, replicas: int) -> int:
        """Number of contributions that make one update. Raises JobError if the mode can't train `replicas`."""
        return self.contributors(replicas)

    def under(self, spec: ConsistencySpec) -> Consistency:
        """The mode for this choice with a job's other settings, such as clipping."""
        return self

    def staged(self) -> Consistency:
        """The choice for a job with a pipeline."""
        return self

    def plain(self) -> Consistency:
        """The choice as users make it: the inverse of staged()."""
        return self

    def worker_half(self, job: JobSpec) -> WorkerHalf:
        """A worker's half for a job of this mode, at the job's beginning."""
        return OwnPushes(job) if self.whole_pushes else SharedSteps(job, by_bucket=not self.waits_for_verdict)

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        """The server half of this mode for one shard."""
        raise NotImplementedError(f"consistency {self} has no implementation for servers")


def in_stages(mode: str, *settings: int) -> Consistency:
    """The mode with this name for jobs whose workers have parts of a replica, from the package that divides them."""
    found: Consistency = plugins.installed("shardline.modes", mode, f"consistency {mode} in stages")(*settings)
    return found

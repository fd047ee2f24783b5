"""Consistency: which contributions make an update, and what a worker may pull. One file per mode. Pure.

A resident is the choice, and the objects that it gives to others: each does what differs between modes in one part of
the system. Code outside this package never asks for a mode's name, class or kind.

A mode is one file with two classes: the resident, and its server half. CONSISTENCIES.add() lists it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from shardline import plugins
from shardline.consistency.cuts import EACH_BY_ITSELF, Cuts
from shardline.consistency.intake import BOTH_STEPS, INITIAL, LATEST, OF_REPLICAS, BatchChoice, Intake, Publishing
from shardline.consistency.server import ServerHalf, Terms
from shardline.consistency.worker import WorkerHalf
from shardline.core.spec import ConsistencySpec, JobSpec
from shardline.errors import JobError, ShardlineError
from shardline.seams import Resident
from shardline.storage.shard import Storage
from shardline.update.base import Need


class Clock(enum.Enum):
    """The unit in which a job's progress is counted."""

    STEP = "step"
    """Closed rounds: every replica takes part in each."""
    VERSION = "version"
    """Applied updates; each worker has its own."""


class Gives(enum.Enum):
    """What a mode gives to other methods, as the sentence that refuses those which need it where it is missing."""

    COMMON_STEPS = "in consistency {mode} workers have no common steps"
    ONE_STEP_CUTS = "consistency {mode} has no checkpoint of one step"
    EVERY_GRADIENT = "consistency {mode} drops what comes too late"
    EQUAL_MOVES = "consistency {mode} divides what several replicas send"
    WEIGHED_SUMS = "consistency {mode} adds up no pushes of different staleness"
    SAME_BITS = "in consistency {mode} the bits depend on the order in which pushes arrive, which no journal has"
    WHOLE_PUSHES = "in consistency {mode} each gradient of a stage of a pipeline is an update of its own"
    PARTS = "consistency {mode} does not take every step with all parts of all replicas"
    LASTING_VALUES = "in consistency {mode} the servers go on without a slow worker"
    CLIPS_FIRST = "in consistency {mode} servers clip the mean, after everything that workers do to a gradient"

    def need(self, mode: Consistency, who: str, remedy: str, error: type[ShardlineError] = JobError) -> None:
        """Raise an error unless the mode gives this. who: which method needs it, and for what."""
        if self not in mode.gives:
            raise error(f"{who}, but {self.value.format(mode=mode)}; {remedy}")


COMMON = frozenset({Gives.SAME_BITS, Gives.COMMON_STEPS, Gives.ONE_STEP_CUTS, Gives.EQUAL_MOVES, Gives.WHOLE_PUSHES})
"""What every mode gives whose replicas make steps together."""
OWN = frozenset({Gives.EVERY_GRADIENT, Gives.WHOLE_PUSHES, Gives.CLIPS_FIRST})
"""What every mode gives whose workers push by themselves."""


@dataclass(frozen=True)
class Consistency(Resident):
    """A mode: its settings are the fields, what it gives to others the class variables."""

    clock: ClassVar[Clock]
    """The unit of steps, the learning-rate schedule, stops and metrics."""
    gives: ClassVar[frozenset[Gives]] = frozenset()
    """What methods of other seams may need; shardline.fit refuses those that need more."""
    tells: ClassVar[frozenset[Need]] = frozenset()
    """What servers know of a push when they apply it, for update rules."""
    cuts: ClassVar[Cuts] = EACH_BY_ITSELF
    """When shards are cut for checkpoints, where they stop, and which of them go back."""
    batches: ClassVar[BatchChoice] = OF_REPLICAS
    """Who says which batch a worker trains on."""
    intake: ClassVar[Intake] = INITIAL
    """How servers take in pushes of gradients."""

    @property
    def publishing(self) -> Publishing:
        """Which values servers publish, and when."""
        return BOTH_STEPS if self.clock is Clock.STEP else LATEST

    @property
    def assigns_replicas(self) -> bool:
        """Whether the chief assigns replicas to workers."""
        return self.batches is OF_REPLICAS

    def contributors(self, replicas: int) -> int:
        """Number of replicas that may contribute to one update, for a job with `replicas`; a lease belongs to one."""
        return replicas if self.assigns_replicas else 1

    def needed(self, replicas: int) -> int:
        """Number of contributions that make one update. Raises JobError if the mode can't train `replicas`."""
        return self.contributors(replicas)

    def held(self, nbytes: int, replicas: int) -> dict[str, int]:
        """Most bytes that contributions to open updates take, by kind, for a server with `nbytes` of parameters."""
        return {}

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
        return self.intake.worker_half(job)

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        """The server half of this mode for one shard."""
        raise NotImplementedError(f"consistency {self} has no implementation for servers")


def in_stages(mode: str, *settings: int) -> Consistency:
    """The mode with this name for jobs whose workers have parts of a replica, from the package that divides them."""
    found: Consistency = plugins.installed("shardline.modes", mode, f"consistency {mode} in stages")(*settings)
    return found

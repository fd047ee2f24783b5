"""What a worker has to know of its job's consistency: where it stands, how it labels a push, what it pulls. Pure."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardline.core.exchange import Standing
from shardline.core.reduce import Block
from shardline.core.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """How one push to one shard is labelled; what does not apply stays 0."""

    step: int = 0
    seq: int = 0
    base: int = 0
    """Version of the parameters that its gradients were computed with."""

    @property
    def number(self) -> int:
        """Which of the pushes to the shard it is: the step, or the worker's own count."""
        return self.seq or self.step


@dataclass(frozen=True, kw_only=True)
class ComputedAt:
    """Where a worker stood when it computed something."""

    step: int
    acknowledged: Mapping[int, int]
    base: Mapping[int, int]


class WorkerHalf(abc.ABC):
    """One worker's place in its job. Used by one thread; outlives servers and histories."""

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self.step = 0
        """The step whose parameters the model holds, or will hold when what is under way has come."""
        self.acknowledged: dict[int, int] = {}
        """Number of this worker's last push that each shard has applied."""
        self.base: dict[int, int] = {}
        """Version of the parameters in the model, by shard; a broken exchange leaves it."""
        self.lost = 0
        """Pushes that a shard had acknowledged and has no more, since it was lost and restored."""

    # Where the job stands

    @property
    @abc.abstractmethod
    def job_step(self) -> int:
        """Steps that the job has made, as far as this worker knows."""

    @abc.abstractmethod
    def asks_for(self, owned: Sequence[int]) -> Sequence[int]:
        """Replicas to ask every shard about when the step has to be found."""

    @abc.abstractmethod
    def located(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> set[int]:
        """Every shard has said where it stands; returns the replicas that still have to contribute to the open step."""

    @abc.abstractmethod
    def awaited(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> Mapping[tuple[int, int], int]:
        """By (slot, shard), Stamp.number of the first push that the shard has not counted yet."""

    def arrived(self, base: Mapping[int, int]) -> None:
        """The model holds parameters of these versions, by shard."""
        self.base = dict(base)

    def advance(self) -> None:
        """The open step is sent: what is computed from now on belongs to the next one."""
        self.step += 1

    @property
    @abc.abstractmethod
    def exact(self) -> int | None:
        """The one step whose parameters the worker may compute with now; None = the latest there are."""

    # A contribution

    @property
    @abc.abstractmethod
    def tree_replicas(self) -> int:
        """Replicas over which the servers add up this worker's contributions; 1 = they take each by itself."""

    @abc.abstractmethod
    def slot(self, replica: int) -> int:
        """The replica as which a contribution is filed."""

    @abc.abstractmethod
    def brings_buffers(self, replica: int) -> bool:
        """Whether this replica's buffers (batch norm statistics) are sent."""

    @abc.abstractmethod
    def blocks(self, owned: Collection[int]) -> Sequence[Block]:
        """What these replicas' gradients count as, when all of them have contributed."""

    @abc.abstractmethod
    def stamp(self, shard: int) -> Stamp:
        """How the open step's push to a shard is labelled."""

    @property
    @abc.abstractmethod
    def target(self) -> int | None:
        """The step to pull after the open step's contributions; None = the latest."""

    @abc.abstractmethod
    def closed(self, step: int, shards: Collection[int], base: Mapping[int, int], *, dropped: bool) -> bool:
        """These shards have acknowledged the open step, and the model holds what they answered.

        step: the next one. base: versions that came. dropped: the worker gave its own contribution up. Returns whether
        the step changed nothing.
        """

    # A loop that can't be run again

    def mark(self) -> ComputedAt:
        """Where the worker stands."""
        return ComputedAt(step=self.step, acknowledged=dict(self.acknowledged), base=dict(self.base))

    @abc.abstractmethod
    def went_back(self, mark: ComputedAt) -> bool:
        """Whether the job that was just located holds less than it did at the mark."""

    @abc.abstractmethod
    def counted(self, mark: ComputedAt) -> bool:
        """Whether all shards have what was sent at the mark, so that only the answer was on its way."""

    @abc.abstractmethod
    def resume(self, mark: ComputedAt) -> None:
        """What was computed at the mark is about to be sent again, as what it was."""

    @abc.abstractmethod
    def accept(self, mark: ComputedAt) -> bool:
        """Close the step of a contribution that is counted; returns whether it changed nothing."""

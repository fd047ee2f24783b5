"""What a worker knows of its job's consistency: its position, the labels of its pushes, what it pulls. Pure."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardline.consistency.numbered_pushes import resume
from shardline.core.fixed import fixed
from shardline.core.orders import ACKNOWLEDGED, LOST, SINCE
from shardline.core.reduce import Block, cover
from shardline.core.spec import JobSpec
from shardline.waist import Standing


@fixed(kw_only=True)
class Stamp:
    """Labels of one push to one shard; those that do not apply are 0."""

    step: int = 0
    seq: int = 0
    base: int = 0
    """Version of the parameters from which its gradients were computed."""
    clock: int = 0
    """The worker's clock after this push."""

    @property
    def number(self) -> int:
        """The push's number: the step, or the worker's own count."""
        return self.seq or self.step


@dataclass(frozen=True, kw_only=True)
class ComputedAt:
    """A worker's position when it computed something."""

    step: int
    acknowledged: Mapping[int, int]
    base: Mapping[int, int]


class WorkerHalf(abc.ABC):
    """One worker's position in its job. Used by one thread; outlives servers and timelines."""

    shares_steps: ClassVar[bool]
    """A gradient is a part of a step that all replicas make together, whose numbers the chief and all shards know.
    False: it is an update by itself, which the worker numbers, clips, or gives up alone."""
    presums: ClassVar[bool] = False
    """Gradients of a block of this worker's replicas may be added up before they are sent."""

    def __init__(self, job: JobSpec, *, steps_with_all: bool = True, by_bucket: bool = True) -> None:
        """steps_with_all: in a pipeline all replicas have the same step, so that all are asked about; False: those that
        are bound to the worker's own. by_bucket: a shard can answer with one bucket before it has all of a push.
        """
        self.job = job
        self.steps_with_all = steps_with_all
        self.by_bucket = by_bucket
        self.step = 0
        """The step of the parameters that the model has, or will have after the running exchange."""
        self.acknowledged: dict[int, int] = {}
        """Number of this worker's last push that each shard has applied."""
        self.base: dict[int, int] = {}
        """Version of the parameters in the model, by shard; a failed exchange does not change it."""
        self.lost = 0
        """Acknowledged pushes that are gone because a shard was lost and restored."""

        self.known: tuple[int, int, dict[int, int]] | None = None
        """Timeline, `lost` and `acknowledged`, which belong together, of a worker that numbers its pushes."""
        self.clock: int | None = None
        """Pushes done, where the servers compare workers (see SSP): counted from where the slowest was
        when this one began."""
        self.ahead: int | None = None
        """Want.ahead of the pull after the open step's contributions; None = nobody has to wait."""

    @property
    def figures(self) -> Mapping[str, float]:
        """Figures for heartbeats: what this worker's pushes have come to. Any thread may ask."""
        if self.known is None:
            return {}
        timeline, lost, acknowledged = self.known
        numbers = {f"{ACKNOWLEDGED}{shard}": float(number) for shard, number in dict(acknowledged).items()}
        return {LOST: float(lost), SINCE: float(timeline), **numbers}

    # The job's position

    @property
    @abc.abstractmethod
    def job_step(self) -> int:
        """Steps that the job has done, as far as this worker knows."""

    @abc.abstractmethod
    def asks_for(self, owned: Sequence[int]) -> Sequence[int]:
        """Replicas to ask every shard about to find the step."""

    @abc.abstractmethod
    def located(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> set[int]:
        """Find the step from the shards' standings; returns the replicas that still have to contribute to it."""

    def woken(self, standings: Mapping[int, Standing]) -> None:
        """The worker computes again after a rest, from the values that it has: where the slowest one is."""
        if self.clock is not None:
            self.clock = max(self.clock, *(standing.replicas[0] for standing in standings.values()))

    @abc.abstractmethod
    def awaited(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> Mapping[tuple[int, int], int]:
        """By (slot, shard): Stamp.number of the first push that the shard has not counted yet."""

    def arrived(self, base: Mapping[int, int]) -> None:
        """The model has parameters of these versions, by shard."""
        self.base = dict(base)

    def advance(self) -> None:
        """Advance after the open step was sent: later computations belong to the next step."""
        self.step += 1

    @property
    @abc.abstractmethod
    def exact(self) -> int | None:
        """The only step whose parameters the worker may compute with now; None = the latest."""

    # A contribution

    @property
    @abc.abstractmethod
    def tree_replicas(self) -> int:
        """Number of replicas over which the servers sum this worker's contributions; 1 = they are not summed."""

    @abc.abstractmethod
    def slot(self, replica: int) -> int:
        """The replica under which a contribution is stored."""

    @abc.abstractmethod
    def brings_buffers(self, replica: int) -> bool:
        """Whether this replica's buffers (batch norm statistics) are sent."""

    @abc.abstractmethod
    def blocks(self, owned: Collection[int]) -> Sequence[Block]:
        """Blocks that these replicas' gradients make when all of them have contributed."""

    @abc.abstractmethod
    def why_not_early(self, replica: int, owned: Collection[int]) -> str:
        """Why a replica's gradients can't leave before all are computed; "" if they can. owned: the worker's."""

    @abc.abstractmethod
    def stamp(self, shard: int) -> Stamp:
        """Labels of the open step's push to a shard."""

    @property
    @abc.abstractmethod
    def target(self) -> int | None:
        """The step to pull after the open step's contributions; None = the latest."""

    @abc.abstractmethod
    def closed(self, step: int, shards: Collection[int], base: Mapping[int, int], *, dropped: bool) -> bool:
        """Close the open step, which these shards have acknowledged; the model has their answers.

        step: the next one. base: versions of the new parameters. dropped: the worker gave up its own contribution.
        Returns whether the step changed nothing.
        """

    # A loop that can't repeat a step

    def mark(self) -> ComputedAt:
        """The worker's current position."""
        return ComputedAt(step=self.step, acknowledged=dict(self.acknowledged), base=dict(self.base))

    @abc.abstractmethod
    def went_back(self, mark: ComputedAt) -> bool:
        """Whether the job, as just located, is behind the mark."""

    @abc.abstractmethod
    def counted(self, mark: ComputedAt) -> bool:
        """Whether all shards have what was sent at the mark, so that only the answer is missing."""

    @abc.abstractmethod
    def resume(self, mark: ComputedAt) -> None:
        """Prepare to resend, with the same labels, what was computed at the mark."""

    @abc.abstractmethod
    def accept(self, mark: ComputedAt) -> bool:
        """Close the step of a counted contribution; returns whether it changed nothing."""


class OwnPushes(WorkerHalf):
    """Asynchronous updates: a worker numbers its pushes, and each shard applies them in that order. PROTOCOL 1.5.

    A contribution belongs to (worker, number, shard) and is computed from the latest parameters.

    `step` counts this worker's pushes, whatever their outcomes.
    """

    shares_steps: ClassVar[bool] = False

    def __init__(self, job: JobSpec) -> None:
        super().__init__(job, by_bucket=False)
        self.known = 0, 0, {}

    @property
    def job_step(self) -> int:
        return min(self.base.values(), default=0)

    def asks_for(self, owned: Sequence[int]) -> Sequence[int]:
        """See WorkerHalf.asks_for: the reply contains the asking worker's own number anyway."""
        return ()

    def located(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> set[int]:
        found = {shard: standing.last_seq for shard, standing in standings.items()}
        self.lost += sum(max(0, number - found.get(shard, 0)) for shard, number in self.acknowledged.items())
        self.acknowledged = found
        timeline = max((standing.timeline for standing in standings.values()), default=0)
        self.known = timeline, self.lost, self.acknowledged
        return set(owned)

    def awaited(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> Mapping[tuple[int, int], int]:
        return {(0, shard): standing.last_seq + 1 for shard, standing in standings.items()}

    @property
    def exact(self) -> int | None:
        return None

    @property
    def tree_replicas(self) -> int:
        return 1

    def slot(self, replica: int) -> int:
        return 0

    def brings_buffers(self, replica: int) -> bool:
        """See WorkerHalf.brings_buffers: there is no replica 0 to wait for."""
        return True

    def blocks(self, owned: Collection[int]) -> Sequence[Block]:
        return (Block(0, 1),)

    def why_not_early(self, replica: int, owned: Collection[int]) -> str:
        if self.job.consistency.clip_norm > 0.0:
            return "clipping in asynchronous mode needs all of them"
        if self.job.consistency.nan_policy == "skip":
            return "all shards must skip a gradient that is not finite, which the worker decides in asynchronous mode"
        return ""

    def stamp(self, shard: int) -> Stamp:
        return Stamp(seq=self.acknowledged.get(shard, 0) + 1, base=self.base.get(shard, 0))

    @property
    def target(self) -> int | None:
        return None

    def closed(self, step: int, shards: Collection[int], base: Mapping[int, int], *, dropped: bool) -> bool:
        for shard in shards:
            self.acknowledged[shard] = self.acknowledged.get(shard, 0) + 1
        self.base, self.step = dict(base), step
        return dropped

    def went_back(self, mark: ComputedAt) -> bool:
        """See WorkerHalf.went_back: any shard, and others' pushes too, since the loop computes from all of them."""
        held, sent = self.acknowledged, {shard: number + 1 for shard, number in mark.acknowledged.items()}
        lost = any(resume(seq, last_seq=held.get(shard, 0)) is None for shard, seq in sent.items())
        return lost or any(self.base.get(shard, 0) < version for shard, version in mark.base.items())

    def counted(self, mark: ComputedAt) -> bool:
        return all(self.acknowledged.get(shard, 0) > number for shard, number in mark.acknowledged.items())

    def resume(self, mark: ComputedAt) -> None:
        """See WorkerHalf.resume: shards that applied it know its number; its base does not change."""
        self.acknowledged = dict(mark.acknowledged)
        self.known = self.known[0] if self.known else 0, self.lost, self.acknowledged
        self.base = dict(mark.base)

    def accept(self, mark: ComputedAt) -> bool:
        self.step += 1
        return False


class SharedSteps(WorkerHalf):
    """Synchronous steps, to each of which every replica contributes once. PROTOCOL 1.4.

    A contribution belongs to (step, replica): resending is harmless, and only that step is waited for.
    """

    shares_steps: ClassVar[bool] = True
    presums: ClassVar[bool] = True

    @property
    def job_step(self) -> int:
        return self.step

    def asks_for(self, owned: Sequence[int]) -> Sequence[int]:
        return owned

    def located(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> set[int]:
        steps = self._steps(standings, owned)
        self.step = min(steps.values())
        return {replica for replica, step in steps.items() if step == self.step}

    @staticmethod
    def _steps(standings: Mapping[int, Standing], owned: Sequence[int]) -> dict[int, int]:
        return {replica: min(found.replicas[replica] for found in standings.values()) for replica in owned}

    def awaited(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> Mapping[tuple[int, int], int]:
        """See WorkerHalf.awaited: a step that some shard lacks is resent to all of them."""
        steps = self._steps(standings, owned)
        return {(replica, shard): step for replica, step in steps.items() for shard in standings}

    @property
    def exact(self) -> int | None:
        return self.step

    @property
    def tree_replicas(self) -> int:
        return self.job.replicas

    def slot(self, replica: int) -> int:
        return replica

    def brings_buffers(self, replica: int) -> bool:
        return replica == 0

    def blocks(self, owned: Collection[int]) -> Sequence[Block]:
        return cover(owned, self.job.replicas)

    def why_not_early(self, replica: int, owned: Collection[int]) -> str:
        if len(self.blocks(owned)) > 1 or max(owned) != replica:
            return "the replicas of this worker need more than one push"
        return ""

    def stamp(self, shard: int) -> Stamp:
        return Stamp(step=self.step)

    @property
    def target(self) -> int | None:
        return self.step + 1

    def closed(self, step: int, shards: Collection[int], base: Mapping[int, int], *, dropped: bool) -> bool:
        before, self.base, self.step = self.base, dict(base), step
        return self._stood_still(before)

    def _stood_still(self, base: Mapping[int, int]) -> bool:
        """Whether the step since these versions made no new version of any shard: all have skipped it."""
        return self.job.consistency.nan_policy == "skip" and self.base == base

    def went_back(self, mark: ComputedAt) -> bool:
        return self.step < mark.step

    def counted(self, mark: ComputedAt) -> bool:
        return self.step > mark.step

    def resume(self, mark: ComputedAt) -> None:
        """See WorkerHalf.resume: the step identifies it."""

    def accept(self, mark: ComputedAt) -> bool:
        return self._stood_still(mark.base)

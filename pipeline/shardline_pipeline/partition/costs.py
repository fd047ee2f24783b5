"""What stages cost on a cluster: time, bytes and memory, as plans are compared by. Pure.

A step has `microbatches` microbatches; a stage on r workers computes every r-th of them on each (PipeDream's 1F1B-RR),
and exchanges its parameters once per step. Everything that a worker sends and receives shares its link, which carries
both directions at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardline.errors import UsageError
from shardline_pipeline.base import PipelineSchedule, StageLayout
from shardline_pipeline.partition.activations import Activations
from shardline_pipeline.partition.profile import Profile

SERVERS, ALL_REDUCE = "servers", "all-reduce"


@dataclass(frozen=True, kw_only=True)
class LinkLevel:
    """So many workers, or groups of the level before, each with a link of this bandwidth, each way."""

    count: int
    bytes_per_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers and their links.

    levels: innermost first. One level is a flat network; (4, 5 GB/s), (2, 125 MB/s) are two hosts of four workers each.
    """

    levels: tuple[LinkLevel, ...]
    servers: int = 1
    """Parameter servers, each with a link of the outermost level."""
    sync: str = SERVERS
    """How the workers of a stage get their parameters: "servers" = each pushes gradients and pulls parameters;
    "all-reduce" = a ring among them, 2 (r - 1) / r of the parameters each way."""
    memory_bytes: float = math.inf
    """Of a worker, for its stages."""
    cores: float = math.inf
    """That all workers share, each of which computes on one at a time."""

    @property
    def workers(self) -> int:
        return math.prod(level.count for level in self.levels)

    @property
    def servers_bytes_per_s(self) -> float:
        return self.servers * self.levels[-1].bytes_per_s


@dataclass(frozen=True, kw_only=True)
class LayerTraffic:
    """What one worker with a layer exchanges with the servers in a step, after the codec."""

    push_bytes: float
    pull_bytes: float
    once_bytes: float = 0.0
    """Pushed by one worker of the stage only: buffers."""


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """Layers first to end - 1, and the workers that have them."""

    first: int
    end: int
    workers: tuple[int, ...]


Stages = tuple[PlannedStage, ...]
"""Stages in order. A worker may have several."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """A model on a cluster, under a schedule."""

    profile: Profile
    cluster: Cluster
    schedule: PipelineSchedule
    microbatches: int
    """Of a step, of all replicas together."""
    exchange: Sequence[LayerTraffic] = ()
    """By layer; empty = gradients and parameters as they are."""
    coded: Sequence[tuple[float, float]] = ()
    """What coded() finds: `handed` after the job's codec_parcels; empty = as they are."""
    optimizer_bytes: float = 0.0
    """Of optimizer state on the worker, per byte of its trained parameters: 0 where the servers have it."""
    bucket_bytes: float = 0.0
    """What travels at a time: the last bucket's parameters come when all gradients have gone."""
    keeps: bool = False
    """Where no stage has several workers, gradients and parameters stay on them: see kept()."""

    def __post_init__(self) -> None:
        if self.cluster.sync not in (SERVERS, ALL_REDUCE):
            raise UsageError(f"sync is {self.cluster.sync!r}; it must be {SERVERS!r} or {ALL_REDUCE!r}")

    @property
    def ring(self) -> bool:
        """Whether workers sum gradients among themselves."""
        return self.cluster.sync == ALL_REDUCE

    @property
    def count(self) -> int:
        return len(self.profile.layers)

    @cached_property
    def exchanges(self) -> Sequence[LayerTraffic]:
        if self.exchange:
            return self.exchange
        return [
            LayerTraffic(
                push_bytes=layer.trained_bytes,
                pull_bytes=layer.trained_bytes + layer.fixed_bytes,
                once_bytes=layer.fixed_bytes,
            )
            for layer in self.profile.layers
        ]

    @cached_property
    def handed(self) -> Sequence[tuple[float, float]]:
        """By layer: bytes of the activation that it hands to another stage, and of its gradient, of one microbatch."""
        return self.coded or [(layer.output_bytes, layer.gradient_bytes) for layer in self.profile.layers]

    @cached_property
    def _sums(self) -> dict[str, list[float]]:
        layers, exchanges = self.profile.layers, self.exchanges
        columns: dict[str, list[float]] = {
            "seconds": [layer.seconds + self.schedule.recompute * layer.forward_s for layer in layers],
            "trained": [layer.trained_bytes for layer in layers],
            "fixed": [layer.fixed_bytes for layer in layers],
            "push": [one.push_bytes for one in exchanges],
            "pull": [one.pull_bytes for one in exchanges],
            "once": [one.once_bytes for one in exchanges],
        }
        return {name: list(itertools.accumulate(values, initial=0.0)) for name, values in columns.items()}

    def total(self, what: str, first: int, end: int) -> float:
        """Sum over layers: "seconds" of a microbatch; bytes "trained", "fixed", "push", "pull", "once"."""
        sums = self._sums[what]
        return sums[end] - sums[first]

    def cut_allowed(self, layer: int) -> bool:
        """Whether a stage may begin with this layer."""
        return layer not in self.profile.joined

    def stage_allowed(self, first: int, end: int) -> bool:
        """Whether these layers can be a stage: something is trained, and no weights are shared with others."""
        return self._sums["trained"][end] > self._sums["trained"][first] and all(map(self.cut_allowed, (first, end)))

    # Of one worker of a stage on `copies` workers

    def share(self, copies: int) -> int:
        """Microbatches of a step that the busiest of so many workers computes."""
        return math.ceil(self.microbatches / copies)

    def compute_s(self, first: int, end: int, copies: int) -> float:
        return self.share(copies) * self.total("seconds", first, end)

    def activation_bytes(self, first: int, end: int, copies: int) -> tuple[float, float]:
        """Bytes of activations and gradients (out, in) in a step."""
        before = self.handed[first - 1] if first else (0, 0)
        after = self.handed[end - 1] if end < self.count else (0, 0)
        share = self.microbatches / copies
        return share * (after[0] + before[1]), share * (before[0] + after[1])

    def ring_bytes(self, first: int, end: int, copies: int) -> float:
        """Bytes that each of `copies` workers sends in an all-reduce of these layers' gradients."""
        return 2 * (copies - 1) / copies * self.total("trained", first, end)

    def link_s(self, first: int, end: int, copies: int) -> float:
        """Time of a worker's own link in a step, the longer direction."""
        nbytes = max(self.activation_bytes(first, end, copies)) + self.exchange_bytes(first, end, copies)
        return nbytes / self.cluster.levels[0].bytes_per_s

    def exchange_bytes(self, first: int, end: int, copies: int) -> float:
        """Bytes of a worker's exchange of parameters, the larger direction."""
        return self.ring_bytes(first, end, copies) if self.ring else self.load(first, end)

    def load(self, first: int, end: int) -> float:
        """Bytes of a worker's exchange with the servers, the larger direction; 0 with an all-reduce."""
        if self.ring:
            return 0.0
        return max(self.total("push", first, end) + self.total("once", first, end), self.total("pull", first, end))

    def last_s(self, first: int, end: int) -> float:
        """Time of a worker's link for the last buckets of parameters, one of each server."""
        return min(self.load(first, end), self.cluster.servers * self.bucket_bytes) / self.cluster.levels[0].bytes_per_s

    def servers_s(self, load: float) -> float:
        """Time of the servers' links for so many bytes of all workers."""
        return load / self.cluster.servers_bytes_per_s

    # Memory

    @cached_property
    def activations(self) -> Activations:
        """What microbatches keep."""
        return Activations(self.profile, recompute=self.schedule.recompute)

    def ahead(self, copies: int, behind: int, slots: int) -> tuple[int, int]:
        """Microbatches that each of `copies` workers of a stage is ahead, and one of the first stage.

        behind: workers of the stages after it. slots: of all stages. As PipeDream's runtime counts them.
        """
        ahead = (copies + behind - 1) // copies
        return ahead, max(ahead, (slots - 1) // copies)

    def memory_bytes(self, first: int, end: int, *, copies: int, behind: int, slots: int) -> float:
        """Memory of one worker of a stage: parameters, their versions, gradients, optimizer state, held activations.

        behind, slots: see ahead().
        """
        ahead, most = self.ahead(copies, behind, slots)
        trained, fixed = self.total("trained", first, end), self.total("fixed", first, end)
        share, flushes = self.share(copies), self.schedule.flushes
        count = self.schedule.held(0, ahead + 1, share) if flushes else ahead + 1
        # Of its own microbatches: a worker that is as far ahead, in a straight pipeline.
        place, layout = most - ahead, StageLayout.straight(most + 1, share)
        passes, arrival = versions(self.schedule, place, layout)
        more = beside(self.schedule, place, layout)
        largest = max(layer.largest_bytes for layer in self.profile.layers[first:end])
        busiest = self.activations.busiest_bytes(first, end, held=count, share=share, flushes=flushes)
        kept = count * self.activations.held_bytes(first, end)
        moments = (
            (trained + fixed) * passes + trained * (more.kept + max(0, more.runs - 1)) + busiest,
            (trained + fixed) * arrival + trained * (more.kept + more.runs) + largest * more.moment + kept,
        )
        return trained * (1 + self.optimizer_bytes) + max(moments)

    def all_exchange_bytes(self, first: int, end: int, copies: int) -> float:
        """Bytes that all workers of a stage exchange, in both directions."""
        if self.ring:
            return copies * self.ring_bytes(first, end, copies)
        each = self.total("push", first, end) + self.total("pull", first, end)
        return copies * each + self.total("once", first, end)


def kept(costs: Costs, plan: Sequence[PlannedStage]) -> Costs:
    """The costs of this plan: it may exchange nothing, see Costs.keeps, and a worker pushes each replica by itself."""
    if len(plan) == 1 or costs.ring:
        return costs
    replicas = math.lcm(*(len(stage.workers) for stage in plan))
    if costs.keeps and replicas == 1:
        return replace(costs, exchange=[replace(one, push_bytes=0.0, pull_bytes=0.0) for one in costs.exchanges])
    found = list(costs.exchanges)
    for stage in plan:
        for layer in range(stage.first, stage.end):
            found[layer] = replace(found[layer], push_bytes=found[layer].push_bytes * replicas / len(stage.workers))
    return replace(costs, exchange=found)


def versions(schedule: PipelineSchedule, stage: int, layout: StageLayout) -> tuple[int, int]:
    """Copies of its parameters that a worker of a stage has: at most during passes, and when new ones have come.

    With a flush there is one. Without, there is what pulls fill, and those that passes of a step need, from the oldest
    on, until the step is over, or the one that is kept.
    """
    if schedule.keeps_one:
        return 2, 2
    if schedule.flushes:
        return 1, 1
    during = after = 0
    for step in range(2 * (layout.stages + 1)):
        begins = layout.first(step)
        # Its worker's last microbatch of the step, and those by which it is ahead then.
        ends = layout.first(step + 1) - 1 + layout.ahead(stage) * layout.workers[stage]
        oldest, newest = (schedule.version(one, stage, layout) for one in (begins, ends))
        during = max(during, min(newest, step) - oldest + 1)
        after = max(after, step - oldest + 1)
    return 1 + during, 1 + after


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Copies of its trained parameters that a worker of a stage has besides versions and gradients."""

    kept: int = 0
    """Predictions, and the average step of gaps."""
    runs: int = 0
    """With gaps, gradients by the version of their passes, for each replica; what they become is as much again when new
    parameters have come."""
    moment: int = 0
    """Then also copies of one parameter at a time."""


def beside(schedule: PipelineSchedule, stage: int, layout: StageLayout) -> Beside:
    """What predictions take, and gaps."""
    if schedule.flushes:
        return Beside()
    predicted = runs = average = 0
    for step in range(2 * (layout.stages + 1)):
        begins, ends = layout.first(step), layout.first(step + 1)
        oldest = schedule.version(begins, stage, layout)
        late = [len(schedule.late(one, stage, layout) - {0}) for one in range(oldest, step + 1)]
        predicted, average = max(predicted, sum(late)), average or int(oldest < step)
        own = range(begins, ends, layout.workers[stage])
        runs = max(runs, len({schedule.version(one, stage, layout) for one in own}))
    predicted *= schedule.predict
    if not schedule.gap_aware:
        return Beside(kept=predicted)
    # A stage that is never late drops each version before the next one comes, and has no average step.
    return Beside(kept=predicted + average, runs=runs, moment=2 * average)

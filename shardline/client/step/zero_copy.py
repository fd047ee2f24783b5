"""Parameters and gradients that lie in shared memory: on lane shm a step then copies nothing on the worker.

A parameter becomes a view of what its shard publishes: of area 0 at even steps, of area 1 at odd ones. The memory is
mapped for reading only, so an in-place write to such a parameter ends the process with SIGSEGV: hence only on request.
A gradient becomes a view of the segment that the shard reads; whoever computes it there has nothing to send.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from shardline.client.exchange.arrivals import Key
from shardline.client.step.layout import ModelLayout
from shardline.client.step.worker_methods import WorkerMethods
from shardline.codecs import CODECS
from shardline.codecs.coding import pulled, pushed
from shardline.core.plan import Plan
from shardline.core.spec import DTYPES, JobSpec, TensorKind
from shardline.core.tensor_bytes import borrowed_tensor, tensor_from_bytes
from shardline.errors import UsageError
from shardline.host.segments import layout as offsets_of
from shardline.lanes.base import Lane, SharedMemory

log = logging.getLogger("shardline.client")


@dataclass(frozen=True)
class Region:
    """One tensor's bytes within the areas of one shard, and the buckets that they lie in."""

    tensor: int
    shard: int
    start: int
    nbytes: int
    buckets: frozenset[Key]


def regions(plan: Plan, without: Collection[int] = ()) -> dict[int, Region]:
    """Tensors whose whole value lies in one piece within one shard's area, by number. without: these can't anyway.

    A bucket counts only if everything in it does, so that it is either read where it lies or copied as a whole.
    """
    numbers = [number for number in range(len(plan.tensors)) if number not in without]
    found = {number: region for number in numbers if (region := _region(plan, number)) is not None}
    while True:
        whole = {
            (s, b)
            for s, shard in enumerate(plan.shards)
            for b, bucket in enumerate(shard.buckets)
            if all(piece.tensor in found for piece in bucket.slices)
        }
        left = {number: region for number, region in found.items() if region.buckets <= whole}
        if len(left) == len(found):
            return left
        found = left


def _region(plan: Plan, number: int) -> Region | None:
    spec = plan.tensors[number]
    if spec.kind is not TensorKind.PARAM or spec.elements == 0:
        return None
    pieces = []
    for s, shard in enumerate(plan.shards):
        offsets = offsets_of([bucket.nbytes for bucket in shard.buckets])
        for b, bucket in enumerate(shard.buckets):
            size = DTYPES[bucket.dtype].itemsize
            for piece in bucket.slices:
                if piece.tensor == number:
                    start = offsets[b] + piece.offset * size
                    pieces.append((piece.first_row, s, b, start, start + piece.elements * size))
    pieces.sort()
    in_one = len({piece[1] for piece in pieces}) == 1
    if not in_one or any(left[4] != right[3] for left, right in itertools.pairwise(pieces)):
        return None
    start, end = pieces[0][3], pieces[-1][4]
    return Region(number, pieces[0][1], start, end - start, frozenset((s, b) for _, s, b, _, _ in pieces))


def check_shareable(job: JobSpec, methods: WorkerMethods) -> None:
    """Raises UsageError where a job's replies are made for one worker, so that nobody can read them where they lie."""
    codec = CODECS.parse(job.codec)
    if not (methods.mode.pulls_by_step and pushed(codec).is_view and pulled(codec).is_view):
        raise UsageError(
            f"zero_copy needs a synchronous job whose codec leaves numbers as they are (raw), this one is "
            f"{job.consistency.mode} with codec {job.codec}"
        )
    if not methods.streams:
        raise UsageError(
            "zero_copy needs a cadence and a topology that send each gradient as it is, to the server itself; this job "
            f"has {job.cadence} and {job.topology}"
        )


class ZeroCopy:
    """Points a worker's tensors at shared memory, step by step. Used between exchanges.

    For synchronous jobs whose codec leaves numbers as they are.

    take() alone is called on exchange threads.
    """

    def __init__(self, plan: Plan, layout: ModelLayout, lanes: Mapping[int, Lane]) -> None:
        self._plan = plan
        self._layout = layout
        self._lanes = lanes
        # What an area holds is contiguous, in the machine's memory.
        other = [n for n, item in enumerate(layout.tensors) if item.device.type != "cpu" or not item.is_contiguous()]
        self._regions = regions(plan, other)
        self._covered = {key for region in self._regions.values() for key in region.buckets}
        self._private = {number: layout.tensors[number].data for number in self._regions}
        self._left: dict[Key, memoryview] = {}
        """Where buckets lie whose present values were left in an area instead of copied into the private tensors.

        As long as a bucket doesn't change these are its values, in whichever of the two areas they were first seen.
        """
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._mapped: dict[int, SharedMemory | None] = {}

    @property
    def shared(self) -> list[str]:
        """Names of the tensors that lie in shared memory now."""
        return [self._plan.tensors[number].name for number in self._views]

    def take(self, key: Key, memory: memoryview) -> bool:
        """Whether a bucket that the shard refers to may stay where it lies."""
        if key not in self._covered:
            return False
        self._left[key] = memory
        return True

    def loaded(self, key: Key) -> None:
        """A bucket was copied into the private tensors: its lane does not share memory (any more)."""
        self._left.pop(key, None)

    def settle(self, step: int) -> None:
        """Point every tensor at its value of `step`, which is all there."""
        self._map()
        for number, region in self._regions.items():
            views = self._views.get(number)
            if views is not None and all(key in self._left for key in region.buckets):
                self._layout.tensors[number].data = views[step & 1]
                continue
            # Some of it came by another lane: put together once, then private until all of it is left in an area again.
            for key in region.buckets:
                self._bring_home(key)
            self._layout.tensors[number].data = self._private[number]
        torch.autograd.graph.increment_version([self._layout.tensors[number] for number in self._regions])

    def _bring_home(self, key: Key) -> None:
        """Copy a bucket that was left in its area, which may be one of a lane that is not there any more."""
        memory = self._left.pop(key, None)
        if memory is not None:
            with torch.no_grad():
                dtype = self._plan.shards[key[0]].buckets[key[1]].dtype
                self._layout.load(*key, borrowed_tensor(memory, dtype))

    def _map(self) -> None:
        """Make the views anew where a lane has new segments."""
        now = {shard: lane.published for shard, lane in self._lanes.items()}
        if now == self._mapped:
            return
        self._mapped = now
        self._views = {
            number: self._views_of(region, mapped)
            for number, region in self._regions.items()
            if (mapped := now.get(region.shard)) is not None
        }
        log.info(
            "%d of %d tensors lie in shared memory, %.1f MB",
            len(self._views),
            len(self._plan.tensors),
            sum(self._regions[number].nbytes for number in self._views) / 1e6,
        )

    def _views_of(self, region: Region, mapped: SharedMemory) -> tuple[torch.Tensor, ...]:
        spec = self._plan.tensors[region.tensor]
        return tuple(
            borrowed_tensor(mapped.area(which)[region.start : region.start + region.nbytes], spec.dtype).view(
                spec.shape
            )
            for which in (0, 1)
        )

    def gradient(self, number: int) -> torch.Tensor | None:
        """A view of the segment that the shard reads, in the tensor's shape, to compute the gradient in.

        Good for one step. None where the tensor isn't shared, or the shard may still read what a step that was given up
        has left there.
        """
        region = self._regions.get(number)
        mapped = self._lanes[region.shard].published if region is not None else None
        if region is None or mapped is None or mapped.is_read:
            return None
        spec = self._plan.tensors[number]
        return tensor_from_bytes(mapped.slot(region.start, region.nbytes), spec.dtype).view(spec.shape)

    def release(self) -> None:
        """Give every tensor private memory with its present value, before the segments go."""
        for number in list(self._views):
            tensor = self._layout.tensors[number]
            if tensor.data_ptr() != self._private[number].data_ptr():
                self._private[number].copy_(tensor.data)
                tensor.data = self._private[number]
        self._views.clear()
        self._mapped.clear()
        self._left.clear()

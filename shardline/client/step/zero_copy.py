"""Parameters and gradients in shared memory: on lane shm the worker then copies nothing in a step.

A parameter becomes a view of its shard's publication: of area 0 at even steps, of area 1 at odd ones. An in-place write
to such a parameter stays in this process and lasts until the next step, as in private memory. A gradient becomes a view
of the segment that the shard reads, so nothing has to be sent.
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
    """One tensor's byte range within the areas of one shard, and its buckets."""

    tensor: int
    shard: int
    start: int
    nbytes: int
    buckets: frozenset[Key]


def regions(plan: Plan, without: Collection[int] = ()) -> dict[int, Region]:
    """Tensors whose whole value is contiguous within one shard's area, by number. without: tensors to exclude.

    A bucket counts only if all its tensors do, so that it is either read in place or copied as a whole.
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
    """Raise UsageError if the job's replies are made for a single worker and so can't be read from shared memory."""
    codec = CODECS.parse(job.codec)
    if not (methods.mode.pulls_by_step and pushed(codec).is_view and pulled(codec).is_view):
        raise UsageError(
            f"zero_copy needs a synchronous job with codec raw; this one is {job.consistency.mode} with codec "
            f"{job.codec}"
        )
    if not methods.streams:
        raise UsageError(
            "zero_copy needs a cadence and a topology that send each gradient unchanged to its server; this job has "
            f"{job.cadence} and {job.topology}"
        )


class ZeroCopy:
    """Points a worker's tensors at shared memory, step by step. Used between exchanges.

    For synchronous jobs whose codec does not change the numbers.

    Only take() is called on exchange threads.
    """

    def __init__(self, plan: Plan, layout: ModelLayout, lanes: Mapping[int, Lane]) -> None:
        self._plan = plan
        self._layout = layout
        self._lanes = lanes
        # Areas are contiguous and in host memory.
        other = [n for n, item in enumerate(layout.tensors) if item.device.type != "cpu" or not item.is_contiguous()]
        self._regions = regions(plan, other)
        self._covered = {key for region in self._regions.values() for key in region.buckets}
        self._private = {number: layout.tensors[number].data for number in self._regions}
        self._left: dict[Key, memoryview] = {}
        """Memory of buckets whose current values were left in an area instead of being copied into the private tensors.

        While a bucket is unchanged these are its values, in whichever of the two areas they were first seen.
        """
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._mapped: dict[int, SharedMemory | None] = {}

    @property
    def shared(self) -> list[str]:
        """Names of the tensors that are currently in shared memory."""
        return [self._plan.tensors[number].name for number in self._views]

    def pulling(self) -> None:
        """See Residence: drop what was written to either area; a script may have kept a view of the other one."""
        for mapped in self._mapped.values():
            if mapped is not None:
                for area in (0, 1):
                    mapped.forget_writes(area)

    def take(self, key: Key, memory: memoryview) -> bool:
        """Whether a bucket that the shard refers to may stay in its memory."""
        if key not in self._covered:
            return False
        self._left[key] = memory
        return True

    def loaded(self, key: Key) -> None:
        """Note that a bucket was copied into private tensors: its lane does not share memory (any more)."""
        self._left.pop(key, None)

    def settle(self, step: int) -> None:
        """Point every tensor at its value of `step`, which has fully arrived."""
        self._map()
        for number, region in self._regions.items():
            views = self._views.get(number)
            if views is not None and all(key in self._left for key in region.buckets):
                self._layout.tensors[number].data = views[step & 1]
                continue
            # Part of it came by another lane: copied together once, then private until all of it is in an area again.
            for key in region.buckets:
                self._bring_home(key)
            self._layout.tensors[number].data = self._private[number]
        torch.autograd.graph.increment_version([self._layout.tensors[number] for number in self._regions])

    def _bring_home(self, key: Key) -> None:
        """Copy a bucket out of its area, which may belong to a closed lane."""
        memory = self._left.pop(key, None)
        if memory is not None:
            with torch.no_grad():
                dtype = self._plan.shards[key[0]].buckets[key[1]].dtype
                self._layout.load(*key, borrowed_tensor(memory, dtype))

    def _map(self) -> None:
        """Recreate the views if a lane has new segments."""
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
            "%d of %d tensors are in shared memory, %.1f MB",
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

        Valid for one step. None if the tensor isn't shared, or if the shard may still be reading what an abandoned step
        left there.
        """
        region = self._regions.get(number)
        mapped = self._lanes[region.shard].published if region is not None else None
        if region is None or mapped is None or mapped.is_read:
            return None
        spec = self._plan.tensors[number]
        return tensor_from_bytes(mapped.slot(region.start, region.nbytes), spec.dtype).view(spec.shape)

    def release(self) -> None:
        """Move every tensor with its current value to private memory before the segments are freed."""
        for number in list(self._views):
            tensor = self._layout.tensors[number]
            if tensor.data_ptr() != self._private[number].data_ptr():
                self._private[number].copy_(tensor.data)
                tensor.data = self._private[number]
        self._views.clear()
        self._mapped.clear()
        self._left.clear()

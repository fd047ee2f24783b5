"""Parameters that are read where the servers publish them: on lane shm a pull then copies nothing.

Every parameter moves once, before training, into a window: one per shard, laid out as the shard's areas. A pull of step
t shows the pages of area t & 1 there, so the tensor's address and all that refers to it stay as they are. An in-place
write stays in this process and lasts until the next pull. With zero_copy, gradients are computed in the segment that
the shard reads, so nothing has to be sent either.
"""

from __future__ import annotations

import functools
import itertools
import logging
import mmap
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shardline.client.layout import ModelLayout
from shardline.core.plan import Plan
from shardline.core.spec import DTYPES, TensorKind, TensorSpec
from shardline.core.tensor_bytes import is_stored, memory_uses, tensor_from_bytes
from shardline.division import Key
from shardline.host.addresses import address_of, pages_of
from shardline.host.segments import Segment, layout as offsets_of
from shardline.host.window import Run, Window
from shardline.lanes.base import Lane

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
    found = {number: region for number, region in _contiguous(plan).items() if number not in without}
    while True:
        whole = _whole_buckets(plan, found)
        left = {number: region for number, region in found.items() if region.buckets <= whole}
        if len(left) == len(found):
            return left
        found = left


def _whole_buckets(plan: Plan, found: Collection[int]) -> set[Key]:
    return {
        (s, b)
        for s, shard in enumerate(plan.shards)
        for b, bucket in enumerate(shard.buckets)
        if all(piece.tensor in found for piece in bucket.slices)
    }


def _contiguous(plan: Plan) -> dict[int, Region]:
    pieces: dict[int, list[tuple[int, int, int, int, int]]] = {}
    for s, shard in enumerate(plan.shards):
        for b, (bucket, (begin, _)) in enumerate(zip(shard.buckets, _spans(plan, s), strict=True)):
            size = DTYPES[bucket.dtype].itemsize
            for piece in bucket.slices:
                start = begin + piece.offset * size
                held = pieces.setdefault(piece.tensor, [])
                held.append((piece.first_row, s, b, start, start + piece.elements * size))
    found = {}
    for number, held in sorted(pieces.items()):
        held.sort()
        spec = plan.tensors[number]
        in_one = len({piece[1] for piece in held}) == 1
        joined = all(left[4] == right[3] for left, right in itertools.pairwise(held))
        if spec.kind is TensorKind.PARAM and spec.elements and in_one and joined:
            start, end = held[0][3], held[-1][4]
            buckets = frozenset((s, b) for _, s, b, _, _ in held)
            found[number] = Region(number, held[0][1], start, end - start, buckets)
    return found


def _spans(plan: Plan, shard: int) -> list[tuple[int, int]]:
    """Bytes [start, end) of each bucket in an area."""
    sizes = [bucket.nbytes for bucket in plan.shards[shard].buckets]
    return [(start, start + nbytes) for start, nbytes in zip(offsets_of(sizes), sizes, strict=False)]


def _area_bytes(plan: Plan, shard: int) -> int:
    return offsets_of([bucket.nbytes for bucket in plan.shards[shard].buckets])[-1]


@dataclass(frozen=True)
class Places:
    """Tensors in windows, by number, and the windows by shard."""

    regions: Mapping[int, Region]
    windows: Mapping[int, Window]


def place(plan: Plan, tensors: Mapping[str, torch.Tensor], lanes: Mapping[int, Lane]) -> Places:
    """Move the tensors (by name) that can be read in place into windows; call before anything refers to their memory.

    Those that an earlier call has moved stay where they are, if the plan has them at the same place. Those of shards
    whose lane shares no memory aren't moved, nor those that other tensors share memory with: these would not follow.
    """
    own = {number: tensors[spec.name] for number, spec in enumerate(plan.tensors) if spec.name in tensors}
    windows: dict[int, Window] = {}
    movable: set[int] = set()
    for number, region in regions(plan).items():
        lane = lanes.get(region.shard)  # None where the job had ended before its servers came
        if number not in own or lane is None or not lane.by_reference:
            continue
        tensor, spec = own[number], plan.tensors[number]
        nbytes = _area_bytes(plan, region.shard)
        window = windows.get(region.shard) or Window.at(tensor.data_ptr() - region.start)
        inside = window is not None and window.nbytes == nbytes and tensor.data_ptr() == window.address + region.start
        if not inside and not _can_move(tensor, spec):
            continue
        movable.add(number)
        if window is not None and inside:
            windows[region.shard] = window
    found = regions(plan, [number for number in range(len(plan.tensors)) if number not in movable])
    for region in found.values():
        if region.shard not in windows:
            try:
                windows[region.shard] = Window(_area_bytes(plan, region.shard))
            except OSError as error:
                log.info("parameters are copied, not read in place: %s", error)
                return Places({}, {})
    for number, region in found.items():
        _move(own[number], windows[region.shard], region, plan.tensors[number])
    return Places(found, {shard: windows[shard] for shard in {region.shard for region in found.values()}})


def _can_move(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether a tensor is alone in ordinary host memory of its own."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu":
        return False
    if tensor.layout != torch.strided or not is_stored(tensor) or tensor.is_inference():
        return False
    if tuple(tensor.shape) != spec.shape or tensor.dtype != DTYPES[spec.dtype]:
        # ModelLayout has the error for this.
        return False
    storage = tensor.untyped_storage()
    if storage.is_shared() or storage.is_pinned():
        return False
    # Memory that torch did not allocate may belong to an array of numpy, or to a file.
    return storage.resizable() and storage.nbytes() == tensor.nbytes and memory_uses(tensor) == _uses_of_one()


@functools.cache
def _uses_of_one() -> int:
    """memory_uses() of a tensor that is known to be alone; 0 if torch can't tell."""
    return max(0, memory_uses(torch.zeros(1)))


def _move(tensor: torch.Tensor, window: Window, region: Region, spec: TensorSpec) -> None:
    if tensor.data_ptr() == window.address + region.start:
        return
    memory = window.memory[region.start : region.start + region.nbytes]
    values = tensor_from_bytes(memory, spec.dtype).view(spec.shape)
    values.copy_(tensor.detach())
    tensor.data = values


class _Shard:
    """What one pull has brought of one shard, by pages: one is shown when all buckets in it have come.

    spans: bytes [start, end) of the buckets that are read in place.
    """

    def __init__(self, window: Window, spans: Mapping[int, tuple[int, int]]) -> None:
        self.window = window
        self.spans = dict(spans)
        self._buckets = np.zeros(pages_of(window.nbytes), np.int32)
        """Number of buckets in each page."""
        self._missing = self._done = self._buckets
        """By page: buckets of this pull that are yet to come, and whether it is shown; set once some have come."""
        for bucket in spans:
            self._buckets[self._pages(bucket)] += 1
        self._all = _runs(self._buckets > 0)
        self.begin()

    def begin(self) -> None:
        self.taken: dict[int, Segment] = {}
        """Segments that have buckets of this pull."""
        self.whole: set[int] = set()
        """Buckets whose values of this pull are in the window."""
        self.mixed = False
        """Some came otherwise: what isn't shown yet has to be copied."""
        self._counted: set[int] = set()

    def _pages(self, bucket: int) -> slice:
        start, end = self.spans[bucket]
        return slice(start // mmap.PAGESIZE, pages_of(end))

    def near(self) -> dict[int, list[int]]:
        """For each bucket, those that share a page with it, and itself."""
        found: dict[int, list[int]] = {bucket: [bucket] for bucket in self.spans}
        last: list[int] = []
        for bucket in self.spans:
            first = self._pages(bucket).start
            last = [other for other in last if self._pages(other).stop > first]
            for other in last:
                found[bucket].append(other)
                found[other].append(bucket)
            last.append(bucket)
        return found

    @property
    def complete(self) -> bool:
        """Whether all of this pull is shown, and not copied."""
        return not self.mixed and len(self.whole) == len(self.spans)

    def show(self) -> list[int]:
        """Bring all that has come into the window; returns the buckets that are whole now and weren't before."""
        self.mixed = self.mixed or len(set(self.taken.values())) > 1
        if self.complete:
            return []
        if self.mixed:
            for bucket, segment in self.taken.items():
                if bucket not in self.whole:
                    start, end = self.spans[bucket]
                    self.window.fill(start, segment.memory[start:end])
            found = set(self.taken)
        elif len(self.taken) == len(self.spans) and not self._counted:
            # All at once, as in small models: nothing has to be counted.
            (segment,) = set(self.taken.values())
            self.window.show(segment, self._all)
            self._counted.update(self.taken)
            found = set(self.taken)
        else:
            if not self._counted:
                self._missing, self._done = self._buckets.copy(), self._buckets == 0
            for bucket in self.taken.keys() - self._counted:
                self._missing[self._pages(bucket)] -= 1
            self._counted.update(self.taken)
            ready = (self._missing == 0) & ~self._done
            for segment in set(self.taken.values()):
                self.window.show(segment, _runs(ready))
            self._done |= ready
            found = {bucket for bucket in self.taken if self._done[self._pages(bucket)].all()}
        new = found - self.whole
        self.whole |= found
        return sorted(new)


def _runs(chosen: NDArray[np.bool_]) -> list[Run]:
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class InPlace:
    """Reads pulled parameters where the shards publish them: decides which pulled buckets stay there.

    places: from place(), made before the layout. lends: gradients may be computed in memory that the shards read.

    take(), stands() and loaded() are called on exchange threads, release() on any.
    """

    def __init__(
        self, plan: Plan, layout: ModelLayout, lanes: Mapping[int, Lane], places: Places, *, lends: bool
    ) -> None:
        self._plan = plan
        self._layout = layout
        self._lanes = lanes
        self._regions = places.regions
        covered = _whole_buckets(plan, self._regions)
        self._shards = {
            shard: _Shard(window, {b: span for b, span in enumerate(_spans(plan, shard)) if (shard, b) in covered})
            for shard, window in places.windows.items()
        }
        self._places: dict[Key, tuple[list[torch.Tensor], list[int]]] = {}
        """Of each bucket that is read in place: its tensors, and where they have to be."""
        for s, shard in self._shards.items():
            for b in shard.spans:
                held = [piece.tensor for piece in plan.shards[s].buckets[b].slices]
                where = [shard.window.address + self._regions[number].start for number in held]
                self._places[s, b] = [layout.tensors[number] for number in held], where
        self._near = {
            (s, b): [(s, other) for other in near]
            for s, shard in self._shards.items()
            for b, near in shard.near().items()
        }
        other = [n for n, item in enumerate(layout.tensors) if item.device.type != "cpu" or not is_stored(item)]
        self._lent = regions(plan, other) if lends else {}
        """Tensors whose gradients can be computed in the segment of their shard."""
        self._lock = threading.Lock()
        self.pending = False
        """show() has something to do."""
        self._over = False
        self._told = all(shard.window.copies for shard in self._shards.values())

    @property
    def shared(self) -> list[str]:
        """Names of the tensors that are currently in shared memory."""
        showing = {shard for shard, held in self._shards.items() if held.window.shows}
        return [self._plan.tensors[number].name for number, region in self._regions.items() if region.shard in showing]

    def with_neighbours(self, keys: Iterable[Key]) -> list[Key]:
        """These buckets and those without which show() can't show all of them."""
        found: dict[Key, None] = {}
        for key in keys:
            found.update(dict.fromkeys(self._near.get(key, (key,))))
        return list(found)

    def begin(self) -> None:
        with self._lock:
            self.pending = False
            for shard in self._shards.values():
                shard.begin()

    def pulling(self) -> None:
        """Use the time in which nothing has arrived yet."""
        for shard in self._shards.values():
            shard.window.forget()

    def take(self, key: Key, memory: memoryview) -> bool:
        """Whether a bucket that the shard refers to may stay in its memory; show() then makes the tensors show it."""
        shard = self._shards.get(key[0])
        if shard is None:
            return False
        shown = key[1] in shard.spans
        segment = Segment.of(memory) if shown else None
        with self._lock:
            stays = not self._over and segment is not None and self._fits(shard, key, segment, memory)
            if stays and segment is not None:
                shard.taken[key[1]] = segment
            shard.mixed = shard.mixed or (shown and not stays)
            self.pending = self.pending or shown
        if not stays:
            # Its caller copies it out of the segment. A write to a neighbour of the bucket may hide their common page
            # there, and pulling() is too late for a quick bucket.
            shard.window.forget()
        return stays

    def _fits(self, shard: _Shard, key: Key, segment: Segment, memory: memoryview) -> bool:
        """Whether the memory lies as in the window, and the tensors are still there: share_memory_() moves them."""
        start, end = shard.spans[key[1]]
        if segment.nbytes != shard.window.nbytes or len(memory) != end - start:
            return False
        tensors, addresses = self._places[key]
        return [*map(torch.Tensor.data_ptr, tensors)] == addresses and address_of(memory) - segment.address == start

    def stands(self, key: Key, step: int) -> None:
        """A bucket of `step` is unchanged: both areas have it, and the one that is shown will be overwritten."""
        published = self._lanes[key[0]].published
        if key not in self._near:
            return
        if published is None:
            self.loaded(key)
            return
        start, end = self._shards[key[0]].spans[key[1]]
        self.take(key, published.area(step & 1)[start:end])

    def loaded(self, key: Key) -> None:
        """A bucket is copied into the tensors."""
        if key in self._near:
            with self._lock:
                self._shards[key[0]].mixed = self.pending = True

    def show(self) -> None:
        """Make the tensors show the buckets that have arrived. On the computing thread, between two uses of tensors."""
        if not self.pending:
            return
        with self._lock:
            new = [(s, b) for s, shard in self._shards.items() for b in shard.show()]
            # Not earlier: other threads don't wait if nothing is pending.
            self.pending = False
        for key in new:
            self._layout.mark_written(*key)

    def settle(self) -> None:
        """show() at the end of a pull: the tensors have their values of one step, wherever it came from."""
        self.show()
        with self._lock:
            for number, shard in self._shards.items():
                if self._lanes[number].published is None or not shard.complete:
                    # Otherwise pages would remain that the shard will overwrite, or that belong to one that is gone.
                    shard.mixed = True
                    shard.show()
                    shard.window.keep()
        shared = self.shared if not self._told else []
        if shared:
            self._told = True
            nbytes = sum(self._regions[self._plan.index[name]].nbytes for name in shared)
            log.info(
                "%d of %d tensors are in shared memory, %.1f MB", len(shared), len(self._plan.tensors), nbytes / 1e6
            )

    def gradient(self, number: int) -> torch.Tensor | None:
        """A view of the segment that the shard reads, in the tensor's shape, to compute the gradient in.

        Valid for one step. None if the tensor isn't shared, or if the shard may still be reading what an abandoned step
        left there.
        """
        region = self._lent.get(number)
        mapped = self._lanes[region.shard].published if region is not None else None
        if region is None or mapped is None or mapped.is_read:
            return None
        spec = self._plan.tensors[number]
        return tensor_from_bytes(mapped.slot(region.start, region.nbytes), spec.dtype).view(spec.shape)

    def release(self) -> None:
        """Leave every tensor's current value in private memory, where nothing changes it but a copying pull."""
        with self._lock:
            self._over = True
            for shard in self._shards.values():
                shard.mixed = True
                shard.window.keep()

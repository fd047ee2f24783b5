"""A worker's tensors in the plan's layout: gradients into flat buckets, flat buckets into parameters."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Mapping, Sequence

import torch

from shardline.core.plan import Plan, span_of
from shardline.core.spec import DTYPES, TensorKind
from shardline.core.tensor_bytes import digest, is_stored, same_bits, tensor_bytes
from shardline.division import Key
from shardline.errors import MismatchError, TensorError


class ModelLayout:
    """Maps each bucket's slices to the worker's own tensors.

    tensors: by canonical name, on any device; written by pulls. Tensors that aren't stored as they are read are written
    through a flat mirror. Tensors that get other memory (`p.data = ...`) are followed there, see moved(). Raises
    MismatchError, TensorError.
    """

    def __init__(self, plan: Plan, tensors: Mapping[str, torch.Tensor]) -> None:
        self.plan = plan
        missing = [spec.name for spec in plan.tensors if spec.name not in tensors]
        if missing:
            raise MismatchError(f"the plan of the job has tensor {missing[0]!r}, but this model does not")
        self.tensors = [tensors[spec.name] for spec in plan.tensors]
        """The worker's own, in plan order."""
        self._tensors = [tensor.detach() for tensor in self.tensors]
        for spec, tensor in zip(plan.tensors, self._tensors, strict=True):
            if tuple(tensor.shape) != spec.shape or tensor.dtype != DTYPES[spec.dtype]:
                raise TensorError(
                    f"{spec.name!r} has shape {tuple(tensor.shape)} and dtype {tensor.dtype} in this model; the plan "
                    f"says {spec.shape} and {spec.dtype}"
                )
        self.moves = 0
        """How often tensors have got other memory."""
        self._map()
        self.buffers = [number for number, spec in enumerate(plan.tensors) if spec.kind is TensorKind.BUFFER]
        self._saved = {
            number: self._tensors[number].clone(memory_format=torch.contiguous_format) for number in self.buffers
        }
        self._unsettled: set[int] = set()
        """Tensors whose mirror is newer than the tensor itself."""
        self._counting = threading.Lock()
        self._versions = self._counters()
        """torch's counters of in-place writes as they are if nobody else has written."""

    def _map(self) -> None:
        """Find where each bucket's slices are in memory."""
        self._mirrors = {
            number: torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            for number, tensor in enumerate(self._tensors)
            if not is_stored(tensor)
        }
        flats = [self._mirrors.get(number, tensor).reshape(-1) for number, tensor in enumerate(self._tensors)]
        buckets = [[bucket.slices for bucket in shard.buckets] for shard in self.plan.shards]
        self._views = [
            [[flats[piece.tensor][span_of(self.plan, piece)] for piece in slices] for slices in shard]
            for shard in buckets
        ]
        self._written = [[[self._tensors[piece.tensor] for piece in slices] for slices in shard] for shard in buckets]
        """The tensors of each bucket, whose writes autograd is told of."""
        self._places = self._memory()

    def load(self, shard: int, bucket: int, values: torch.Tensor) -> None:
        """Write one pulled bucket (flat CPU tensor) into the tensors it contains slices of."""
        spec = self.plan.shards[shard].buckets[bucket]
        sources = [values[piece.offset : piece.end] for piece in spec.slices]
        targets = self._views[shard][bucket]
        if targets and targets[0].device.type == "cuda" and values.is_pinned():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        else:
            copy_each(targets, sources)
        if self._mirrors:
            self._unsettled.update(piece.tensor for piece in spec.slices if piece.tensor in self._mirrors)
        self._count([piece.tensor for piece in spec.slices if piece.tensor not in self._mirrors])

    def memory(self, shard: int, bucket: int) -> memoryview | None:
        """Writable bytes of the CPU tensor slice that is the whole bucket; None if there is no such slice."""
        piece = self.whole(shard, bucket)
        return tensor_bytes(piece) if piece is not None and piece.device.type == "cpu" else None

    def whole(self, shard: int, bucket: int) -> torch.Tensor | None:
        """The tensor slice, flat, that is the whole bucket; None if there is no such slice."""
        spec = self.plan.shards[shard].buckets[bucket]
        first = spec.slices[0]
        if len(spec.slices) != 1 or first.offset or first.elements != spec.elements or spec.elements == 0:
            return None
        return self._views[shard][bucket][0] if first.tensor not in self._mirrors else None

    def mark_written(self, shard: int, bucket: int) -> None:
        """Tell autograd of writes that bypassed it: code that read the tensors too early then fails in backward()."""
        torch.autograd.graph.increment_version(self._written[shard][bucket])
        self._count([piece.tensor for piece in self.plan.shards[shard].buckets[bucket].slices])

    @property
    def unsettled(self) -> bool:
        return bool(self._unsettled)

    def settle(self, tensors: Iterable[int] | None = None) -> None:
        """Copy the mirrors of these tensors (default: all) into them, once all their buckets are loaded."""
        for number in self._unsettled.intersection(tensors) if tensors is not None else list(self._unsettled):
            self._tensors[number].copy_(self._mirrors[number])
            self._count([number])
            self._unsettled.discard(number)

    def values(self, shard: int, bucket: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The tensors' current values as one flat bucket on a device, padding zero."""
        spec = self.plan.shards[shard].buckets[bucket]
        for piece in spec.slices:
            if piece.tensor in self._mirrors:
                self._mirrors[piece.tensor].copy_(self._tensors[piece.tensor])
        flat = torch.zeros(spec.elements, dtype=DTYPES[spec.dtype], device=device)
        copy_each([flat[p.offset : p.end] for p in spec.slices], self._views[shard][bucket])
        return flat

    def keep(self, shard: int, bucket: int) -> None:
        """Save the buffers of a bucket that was just loaded as those of this step."""
        spec = self.plan.shards[shard].buckets[bucket]
        copy_each(
            [self._saved[piece.tensor].reshape(-1)[span_of(self.plan, piece)] for piece in spec.slices],
            self._views[shard][bucket],
        )

    def restore(self) -> None:
        for number in self.buffers:
            self._tensors[number].copy_(self._saved[number])

    def changed_buffers(self) -> dict[int, torch.Tensor]:
        """Buffers whose bits differ from the saved ones, by tensor number."""
        return {
            number: self._tensors[number]
            for number in self.buffers
            if not same_bits(self._tensors[number], self._saved[number])
        }

    # What others do to the tensors

    def _counters(self) -> list[int]:
        return [*map(_VERSION, self.tensors)]

    def _count(self, numbers: Iterable[int]) -> None:
        """Count a write of this layout to each of these tensors. Exchange threads write too."""
        with self._counting:
            for number in numbers:
                self._versions[number] += 1

    def written(self) -> list[int]:
        """Tensors that others have written to, by torch's counters, which don't see writes through `.data`.

        No pull may be running.
        """
        now = self._counters()
        if now == self._versions:
            return []
        return [number for number, count in enumerate(now) if count != self._versions[number]]

    def recount(self) -> None:
        """Forget what others have written."""
        with self._counting:
            self._versions = self._counters()

    def digest(self, number: int) -> int:
        return digest(tensor_bytes(self.tensors[number].detach().cpu().resolve_conj().resolve_neg()))

    def _memory(self) -> list[list[object]]:
        return [[*map(ask, self.tensors)] for ask in (torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride)]

    def moved(self) -> list[int]:
        """Tensors that have other memory than this layout knows; see follow(). No pull may be running."""
        now = self._memory()
        if now == self._places:
            return []
        return [
            number
            for number, (new, old) in enumerate(
                zip(zip(*now, strict=True), zip(*self._places, strict=True), strict=True)
            )
            if new != old
        ]

    def mapped(self, number: int) -> torch.Tensor:
        """The tensor as this layout knows it, in the memory that it had."""
        return self._tensors[number]

    def follow(self) -> None:
        """Read and write every tensor where it is now; shapes, dtypes and devices must not have changed."""
        self._tensors = [tensor.detach() for tensor in self.tensors]
        self.moves += 1
        self._map()


_VERSION = operator.attrgetter("_version")


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors pairwise, in one call if torch supports it."""
    if targets:
        torch._foreach_copy_(targets, sources)


def homes(plan: Plan) -> list[list[Key]]:
    """Buckets that contain a slice of each tensor, by tensor number."""
    found: list[list[Key]] = [[] for _ in plan.tensors]
    for s, shard in enumerate(plan.shards):
        for b, bucket in enumerate(shard.buckets):
            for tensor in dict.fromkeys(piece.tensor for piece in bucket.slices):
                found[tensor].append((s, b))
    return found


def keys_of(places: Sequence[Sequence[Key]], tensors: Iterable[int]) -> list[Key]:
    """Every bucket that contains a slice of one of these tensors. places: from homes()."""
    return list(dict.fromkeys(key for tensor in tensors for key in places[tensor]))

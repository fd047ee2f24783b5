"""A worker's tensors in the plan's layout: gradients into flat buckets, flat buckets into parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardline.errors import MismatchError, TensorError
from shardline.lanes.base import Arrival
from shardline.rpc.convert import pack_bits
from shardline.sharding import BucketSpec, Plan, Slice
from shardline.spec import DTYPES, TensorKind
from shardline.wire.codecs import RAW, codec_for
from shardline.wire.frames import memory_of, tensor_bytes


class ModelLayout:
    """Where each bucket's slices live in the worker's own tensors.

    tensors: by canonical name, on any device; written by pulls. Tensors that aren't contiguous are written through a
    flat mirror.
    """

    def __init__(self, plan: Plan, tensors: Mapping[str, torch.Tensor]) -> None:
        self.plan = plan
        missing = [spec.name for spec in plan.tensors if spec.name not in tensors]
        if missing:
            raise MismatchError(f"the job's plan has tensor {missing[0]!r}, this model has not")
        self._tensors = [tensors[spec.name].detach() for spec in plan.tensors]
        for spec, tensor in zip(plan.tensors, self._tensors, strict=True):
            if tuple(tensor.shape) != spec.shape or tensor.dtype != DTYPES[spec.dtype]:
                raise TensorError(
                    f"{spec.name!r} has shape {tuple(tensor.shape)} and dtype {tensor.dtype} here, the plan says "
                    f"{spec.shape} and {spec.dtype}"
                )
        self._mirrors = {
            number: torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            for number, tensor in enumerate(self._tensors)
            if not tensor.is_contiguous()
        }
        flats = [self._mirrors.get(number, tensor).reshape(-1) for number, tensor in enumerate(self._tensors)]
        self._views = [
            [[flats[piece.tensor][_span(plan, piece)] for piece in bucket.slices] for bucket in shard.buckets]
            for shard in plan.shards
        ]
        self.buffers = [number for number, spec in enumerate(plan.tensors) if spec.kind is TensorKind.BUFFER]

    def load(self, shard: int, bucket: int, values: torch.Tensor) -> None:
        """Write one pulled bucket (flat CPU tensor) into the tensors it holds slices of."""
        spec = self.plan.shards[shard].buckets[bucket]
        sources = [values[piece.offset : piece.end] for piece in spec.slices]
        copy_each(self._views[shard][bucket], sources)

    def memory(self, shard: int, bucket: int) -> memoryview | None:
        """The bytes of the one CPU tensor piece that a bucket is, writable; None where it is something else."""
        spec = self.plan.shards[shard].buckets[bucket]
        if len(spec.slices) != 1 or spec.slices[0].offset or spec.slices[0].elements != spec.elements:
            return None
        piece = self._views[shard][bucket][0]
        if piece.device.type != "cpu" or spec.slices[0].tensor in self._mirrors or spec.elements == 0:
            return None
        return tensor_bytes(piece)

    def settle(self) -> None:
        """After all buckets of a step are loaded: carry mirrors over."""
        for number, mirror in self._mirrors.items():
            self._tensors[number].copy_(mirror)

    def values(self, shard: int, bucket: int) -> torch.Tensor:
        """The tensors' present values as one flat CPU bucket, padding zero."""
        spec = self.plan.shards[shard].buckets[bucket]
        for piece in spec.slices:
            if piece.tensor in self._mirrors:
                self._mirrors[piece.tensor].copy_(self._tensors[piece.tensor])
        flat = torch.zeros(spec.elements, dtype=DTYPES[spec.dtype])
        copy_each([flat[p.offset : p.end] for p in spec.slices], self._views[shard][bucket])
        return flat

    def snapshot(self) -> list[torch.Tensor]:
        """Copies of the buffers (batch norm statistics)."""
        return [self._tensors[number].clone() for number in self.buffers]

    def restore(self, snapshot: Sequence[torch.Tensor]) -> None:
        """Put copies of the buffers back."""
        for number, saved in zip(self.buffers, snapshot, strict=True):
            self._tensors[number].copy_(saved)

    def changed_buffers(self, snapshot: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Buffers whose bits differ from the snapshot, by tensor number."""
        return {
            number: self._tensors[number]
            for number, saved in zip(self.buffers, snapshot, strict=True)
            if not same_bits(self._tensors[number], saved)
        }


def _span(plan: Plan, piece: Slice) -> slice:
    start = piece.first_row * plan.tensors[piece.tensor].row_elements
    return slice(start, start + piece.elements)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors pairwise, in one call where torch has one."""
    if targets:
        torch._foreach_copy_(targets, sources)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes: 0.0 is not -0.0, a NaN is itself."""
    return bool(torch.equal(_octets(a), _octets(b)))


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def fill_bucket(
    plan: Plan, bucket: BucketSpec, target: torch.Tensor, gradients: Mapping[int, torch.Tensor]
) -> tuple[bool, ...]:
    """Write gradients (by tensor number, any device) into a flat CPU bucket; returns which slices are present.

    Slices without a gradient become zero: they travel, but count as absent.
    """
    present = tuple(piece.tensor in gradients for piece in bucket.slices)
    sources, targets = [], []
    for piece, there in zip(bucket.slices, present, strict=True):
        view = target[piece.offset : piece.end]
        if there:
            sources.append(gradients[piece.tensor].reshape(-1)[_span(plan, piece)])
            targets.append(view)
        else:
            view.zero_()
    copy_each(targets, sources)
    return present


def present_bits(present: Sequence[bool]) -> bytes:
    """Bitmap for the wire; empty = all."""
    return b"" if all(present) else pack_bits(present)


class BucketSink:
    """Receives the pulled buckets of one shard and loads them into the model."""

    def __init__(self, layout: ModelLayout, shard: int, codec: str) -> None:
        self._layout = layout
        self._shard = shard
        self._codec = codec
        self.num_buckets = len(layout.plan.shards[shard].buckets)
        self.shard_bytes = layout.plan.shards[shard].nbytes
        self._memory: dict[int, torch.Tensor] = {}
        self._pieces: dict[int, memoryview | None] = {}
        self.arrived: set[int] = set()
        """Buckets of the running pull that are whole."""
        self._held: dict[int, tuple[int, int]] = {}
        """(step, version) of what the model holds of each bucket, whatever pull brought it."""
        self.raw_bytes = 0
        self.wire_bytes = 0

    def begin(self) -> None:
        """Start a new pull."""
        self.arrived.clear()

    def _direct(self, arrival: Arrival) -> memoryview | None:
        """The model's own memory, where the payload is the bits of one contiguous piece of one tensor.

        A pull that ends half-way leaves such a tensor torn, as it leaves the model with buckets of two steps: nothing
        is computed with it before a pull ended whole.
        """
        if arrival.codec != RAW.name:
            return None
        if arrival.bucket not in self._pieces:
            self._pieces[arrival.bucket] = self._layout.memory(self._shard, arrival.bucket)
        held = self._pieces[arrival.bucket]
        return held if held is not None and len(held) == arrival.payload_bytes else None

    def buffer(self, arrival: Arrival) -> memoryview:
        """Where one bucket's bytes go: the model itself, or memory reused from step to step. See lanes.base.Sink."""
        direct = self._direct(arrival)
        if direct is not None:
            return direct
        held = self._memory.get(arrival.bucket)
        if held is None or held.numel() != arrival.payload_bytes:
            held = self._memory[arrival.bucket] = torch.empty(arrival.payload_bytes, dtype=torch.uint8)
        return memory_of(held)

    def done(self, arrival: Arrival) -> None:
        """Load a whole bucket. See lanes.base.Sink."""
        if not arrival.unchanged:
            spec = self._layout.plan.shards[self._shard].buckets[arrival.bucket]
            if arrival.payload_bytes == 0 or self._direct(arrival) is None:
                payload = memory_of(self._memory[arrival.bucket]) if arrival.payload_bytes else memoryview(b"")
                self._decode(arrival, spec, payload)
            self.wire_bytes += arrival.payload_bytes
            self.raw_bytes += spec.nbytes
        self._note(arrival)

    def take(self, arrival: Arrival, memory: memoryview) -> None:
        """Load a whole bucket from shared memory; it counts no bytes on the wire. See lanes.base.Sink."""
        spec = self._layout.plan.shards[self._shard].buckets[arrival.bucket]
        self._decode(arrival, spec, memory)
        self.raw_bytes += spec.nbytes
        self._note(arrival)

    def _decode(self, arrival: Arrival, spec: BucketSpec, payload: memoryview) -> None:
        codec = codec_for(arrival.codec, spec)
        with torch.no_grad():
            self._layout.load(self._shard, arrival.bucket, codec.decode(payload, spec.dtype, spec.elements))

    def _note(self, arrival: Arrival) -> None:
        self.arrived.add(arrival.bucket)
        self._held[arrival.bucket] = (arrival.step, arrival.version)

    @property
    def base_step(self) -> int | None:
        """Lowest step over what the model holds of each bucket; None where some never came."""
        if len(self._held) < self.num_buckets:
            return None
        return min(step for step, _ in self._held.values())

    @property
    def base_version(self) -> int:
        """Lowest version over what the model holds of each bucket."""
        return min((version for _, version in self._held.values()), default=0)

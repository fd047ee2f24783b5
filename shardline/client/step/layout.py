"""A worker's tensors in the plan's layout: gradients into flat buckets, flat buckets into parameters."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from shardline.client.exchange.device import Copy, HostPath
from shardline.client.overlap.arrivals import Arrivals
from shardline.codecs.base import Turn
from shardline.codecs.coding import BucketCoding, Coding, JobCoding
from shardline.core.plan import BucketSpec, Plan, Slice
from shardline.core.spec import DTYPES, TensorKind
from shardline.core.tensor_bytes import borrowed_tensor, memory_of, tensor_bytes
from shardline.errors import MismatchError, ProtocolError, TensorError, UnreachableError
from shardline.lanes.base import Arrival
from shardline.rpc.messages.convert import pack_bits

if TYPE_CHECKING:
    from shardline.client.step.zero_copy import ZeroCopy


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
        self.tensors = [tensors[spec.name] for spec in plan.tensors]
        """The worker's own, in plan order."""
        self._tensors = [tensor.detach() for tensor in self.tensors]
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
        self._saved = {
            number: self._tensors[number].clone(memory_format=torch.contiguous_format) for number in self.buffers
        }
        self._unsettled: set[int] = set()
        """Tensors whose mirror is ahead of them."""

    def load(self, shard: int, bucket: int, values: torch.Tensor) -> None:
        """Write one pulled bucket (flat CPU tensor) into the tensors it holds slices of."""
        spec = self.plan.shards[shard].buckets[bucket]
        sources = [values[piece.offset : piece.end] for piece in spec.slices]
        targets = self._views[shard][bucket]
        if targets and targets[0].device.type == "cuda" and values.is_pinned():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        else:
            copy_each(targets, sources)
        self._unsettled.update(piece.tensor for piece in spec.slices if piece.tensor in self._mirrors)

    def memory(self, shard: int, bucket: int) -> memoryview | None:
        """The bytes of the one CPU tensor piece that a bucket is, writable; None where it is something else."""
        spec = self.plan.shards[shard].buckets[bucket]
        if len(spec.slices) != 1 or spec.slices[0].offset or spec.slices[0].elements != spec.elements:
            return None
        piece = self._views[shard][bucket][0]
        if piece.device.type != "cpu" or spec.slices[0].tensor in self._mirrors or spec.elements == 0:
            return None
        return tensor_bytes(piece)

    def mark_written(self, shard: int, bucket: int) -> None:
        """Tell autograd of bytes that went past it: whoever read the tensors too early then fails in backward()."""
        torch.autograd.graph.increment_version(
            [self._tensors[piece.tensor] for piece in self.plan.shards[shard].buckets[bucket].slices]
        )

    @property
    def unsettled(self) -> bool:
        """Whether settle() has anything to do."""
        return bool(self._unsettled)

    def settle(self, tensors: Iterable[int] | None = None) -> None:
        """After all buckets of these tensors (default: of all) are loaded: carry their mirrors over."""
        for number in self._unsettled.intersection(tensors) if tensors is not None else list(self._unsettled):
            self._tensors[number].copy_(self._mirrors[number])
            self._unsettled.discard(number)

    def values(self, shard: int, bucket: int) -> torch.Tensor:
        """The tensors' present values as one flat CPU bucket, padding zero."""
        spec = self.plan.shards[shard].buckets[bucket]
        for piece in spec.slices:
            if piece.tensor in self._mirrors:
                self._mirrors[piece.tensor].copy_(self._tensors[piece.tensor])
        flat = torch.zeros(spec.elements, dtype=DTYPES[spec.dtype])
        copy_each([flat[p.offset : p.end] for p in spec.slices], self._views[shard][bucket])
        return flat

    def keep(self, shard: int, bucket: int) -> None:
        """Remember the buffers of a bucket that was just loaded as those of this step."""
        copy_each(self._saved_views(shard, bucket), self._views[shard][bucket])

    def keep_all(self) -> None:
        """Remember all buffers (batch norm statistics) as they are now."""
        for number in self.buffers:
            self._saved[number].copy_(self._tensors[number])

    def restore(self) -> None:
        """Put the remembered buffers back."""
        for number in self.buffers:
            self._tensors[number].copy_(self._saved[number])

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """The tensors that gradients change, by name."""
        kinds = zip(self.plan.tensors, self._tensors, strict=True)
        return {spec.name: tensor for spec, tensor in kinds if spec.kind is TensorKind.PARAM}

    def changed_buffers(self) -> dict[int, torch.Tensor]:
        """Buffers whose bits differ from the remembered ones, by tensor number."""
        return {
            number: self._tensors[number]
            for number in self.buffers
            if not same_bits(self._tensors[number], self._saved[number])
        }

    def _saved_views(self, shard: int, bucket: int) -> list[torch.Tensor]:
        spec = self.plan.shards[shard].buckets[bucket]
        return [self._saved[piece.tensor].reshape(-1)[_span(self.plan, piece)] for piece in spec.slices]


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
    plan: Plan,
    bucket: BucketSpec,
    target: torch.Tensor,
    gradients: Mapping[int, torch.Tensor],
    copy: Copy | None = None,
) -> tuple[bool, ...]:
    """Write gradients (by tensor number, any device) into a flat CPU bucket; returns which slices are present.

    copy: how; None = copy_each.

    Slices without a gradient become zero: they travel, but count as absent.
    """
    present = tuple(piece.tensor in gradients for piece in bucket.slices)
    sources, targets = [], []
    for piece, there in zip(bucket.slices, present, strict=True):
        view = target[piece.offset : piece.end]
        if there:
            source = gradients[piece.tensor].reshape(-1)[_span(plan, piece)]
            if source.data_ptr() != view.data_ptr() or source.device != view.device:
                sources.append(source)
                targets.append(view)
        else:
            view.zero_()
    (copy or copy_each)(targets, sources)
    return present


def tensor_piece(plan: Plan, bucket: BucketSpec, gradients: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """The piece of one contiguous CPU gradient that is the bucket, flat, in its own memory; None where it is not so."""
    piece = bucket.slices[0]
    if len(bucket.slices) != 1 or piece.offset or piece.elements != bucket.elements:
        return None
    gradient = gradients.get(piece.tensor)
    if gradient is None or gradient.device.type != "cpu" or not gradient.is_contiguous():
        return None
    return gradient.detach().reshape(-1)[_span(plan, piece)]


def present_bits(present: Sequence[bool]) -> bytes:
    """Bitmap for the wire; empty = all."""
    return b"" if all(present) else pack_bits(present)


class BucketSink:
    """Receives the pulled buckets of one shard and loads them into the model.

    arrivals: told of every bucket; says whether the model may be written to yet. None = it always may.
    hold_s: how long a lane's own memory waits for that.
    """

    def __init__(
        self,
        layout: ModelLayout,
        shard: int,
        coding: JobCoding,
        arrivals: Arrivals | None = None,
        *,
        host: HostPath | None = None,
        hold_s: float = 3600.0,
    ) -> None:
        self._layout = layout
        self._shard = shard
        self._coding = coding
        self._arrivals = arrivals or Arrivals([(shard, b) for b in range(len(layout.plan.shards[shard].buckets))])
        self._host = host
        self._hold_s = hold_s
        self.zero_copy: ZeroCopy | None = None
        self.num_buckets = len(layout.plan.shards[shard].buckets)
        self.shard_bytes = layout.plan.shards[shard].nbytes
        self._memory: dict[int, torch.Tensor] = {}
        self._pieces: dict[int, memoryview | None] = {}
        self._in_place: set[int] = set()
        """Buckets whose bytes are being received into the model itself."""
        self.arrived: set[int] = set()
        """Buckets of the running pull that are whole."""
        self._held: dict[int, tuple[int, int]] = {}
        """(step, version) of what came of each bucket, whatever pull brought it."""
        self.raw_bytes = 0
        self.wire_bytes = 0
        self.first_s = 0.0
        """When the running pull's first bucket began to come, by the monotonic clock; 0 = none has."""

    def begin(self) -> None:
        """Start a new pull."""
        self.first_s = 0.0
        self.arrived.clear()
        self._in_place.clear()

    def _direct(self, arrival: Arrival) -> memoryview | None:
        """The model's own memory, where the payload is the bits of one contiguous piece of one tensor.

        A pull that ends half-way leaves such a tensor torn, as it leaves the model with buckets of two steps: nothing
        is computed with it before a pull ended whole.
        """
        if not self._written(arrival).codec.is_view or self._arrivals.holding or arrival.bucket in self.arrived:
            return None
        if arrival.bucket not in self._pieces:
            self._pieces[arrival.bucket] = self._layout.memory(self._shard, arrival.bucket)
        held = self._pieces[arrival.bucket]
        return held if held is not None and len(held) == arrival.payload_bytes else None

    def _named(self, arrival: Arrival) -> Coding:
        try:
            return self._coding.of_pull(arrival.codec)
        except ProtocolError as error:
            raise ProtocolError(f"shard {self._shard}, bucket {arrival.bucket}: {error}") from None

    def _written(self, arrival: Arrival) -> BucketCoding:
        """How a bucket that comes is written. Raises ProtocolError for another codec than the job's."""
        return self._named(arrival).bucket(self._shard, arrival.bucket)

    def buffer(self, arrival: Arrival) -> memoryview:
        """Where one bucket's bytes go: the model itself, or memory reused from step to step. See lanes.base.Sink."""
        self.first_s = self.first_s or time.monotonic()
        misfit = self._written(arrival).misfit(arrival.payload_bytes)
        if misfit:
            raise ProtocolError(
                f"shard {self._shard}, bucket {arrival.bucket}: payload of {arrival.payload_bytes} bytes, {misfit}"
            )
        direct = self._direct(arrival)
        if direct is not None:
            self._in_place.add(arrival.bucket)
            return direct
        self._in_place.discard(arrival.bucket)
        if self._host is not None:
            self._host.await_host_memory((self._shard, arrival.bucket))
        held = self._memory.get(arrival.bucket)
        if held is None or held.numel() != arrival.payload_bytes:
            held = self._memory[arrival.bucket] = self._new_memory(arrival.payload_bytes)
        return memory_of(held)

    def _new_memory(self, nbytes: int) -> torch.Tensor:
        if self._host is not None:
            return self._host.pinned(nbytes, torch.uint8)
        return torch.empty(nbytes, dtype=torch.uint8)

    def done(self, arrival: Arrival) -> None:
        """Load a whole bucket. See lanes.base.Sink."""
        self.first_s = self.first_s or time.monotonic()
        load: Callable[[], None] = _nothing
        if not arrival.unchanged:
            spec = self._spec(arrival)
            if arrival.bucket in self._in_place:
                load = functools.partial(self._received, arrival.bucket)
            else:
                payload = memory_of(self._memory[arrival.bucket]) if arrival.payload_bytes else memoryview(b"")
                load = functools.partial(self._load, arrival, payload)
            self.wire_bytes += arrival.payload_bytes
            self.raw_bytes += spec.nbytes
            if self.zero_copy is not None:
                self.zero_copy.loaded((self._shard, arrival.bucket))
        self._landed(arrival, load)

    def take(self, arrival: Arrival, memory: memoryview) -> None:
        """Load a whole bucket from shared memory; it counts no bytes on the wire. See lanes.base.Sink.

        Waits while the model must not be written to: a copy in between would cost more than it gains.
        """
        self.first_s = self.first_s or time.monotonic()
        if not self._arrivals.await_release(self._hold_s):
            raise UnreachableError(f"shard {self._shard}: what it published was not taken within {self._hold_s:.0f} s")
        self.raw_bytes += self._spec(arrival).nbytes
        stays = (
            self.zero_copy is not None
            and arrival.area < 2
            and self.zero_copy.take((self._shard, arrival.bucket), memory)
        )
        self._landed(arrival, _nothing if stays else functools.partial(self._load, arrival, memory))
        if self._host is not None:
            # The memory is the lane's again when this returns.
            self._host.await_host_memory((self._shard, arrival.bucket))

    def _spec(self, arrival: Arrival) -> BucketSpec:
        return self._layout.plan.shards[self._shard].buckets[arrival.bucket]

    def _load(self, arrival: Arrival, payload: memoryview) -> None:
        copy = functools.partial(self._copy_in, arrival, payload)
        if self._host is None:
            copy()
        else:
            self._host.load((self._shard, arrival.bucket), copy)

    def _copy_in(self, arrival: Arrival, payload: memoryview) -> None:
        spec = self._spec(arrival)
        named = self._named(arrival)
        written = named.bucket(self._shard, arrival.bucket)
        # Shared memory is read-only, and read where it lies.
        as_it_is = written.codec.is_view and len(payload) == spec.nbytes
        with torch.no_grad():
            if as_it_is:
                values = borrowed_tensor(payload, spec.dtype)
            else:
                turn = Turn(arrival.step, memory=named.memory(self._shard, arrival.bucket, ""))
                values = written.decoder.decode(payload, turn)
            self._layout.load(self._shard, arrival.bucket, values)
        self._keep_buffers(arrival.bucket)

    def _received(self, bucket: int) -> None:
        self._layout.mark_written(self._shard, bucket)
        self._keep_buffers(bucket)

    def _keep_buffers(self, bucket: int) -> None:
        if self._layout.plan.shards[self._shard].buckets[bucket].kind is TensorKind.BUFFER:
            with torch.no_grad():
                self._layout.keep(self._shard, bucket)

    def _landed(self, arrival: Arrival, load: Callable[[], None]) -> None:
        if arrival.bucket in self.arrived:
            # It came a second time, after a broken call: a forward pass may have changed it since (batch norm).
            return
        self._held[arrival.bucket] = (arrival.step, arrival.version)
        self.arrived.add(arrival.bucket)
        self._arrivals.landed((self._shard, arrival.bucket), load)

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


def _nothing() -> None:
    """Load nothing: the model holds these bits already."""

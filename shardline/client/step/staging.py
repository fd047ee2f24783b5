"""Gradients on their way out: copied into buckets, summed over whole tree blocks, encoded once, cut into pushes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from shardline.client.exchange.device import Copy, HostPath
from shardline.client.exchange.shard_exchange import Observer
from shardline.client.exchange.streaming_payloads import (
    LivePayloads,
    ReadyPayloads,
    SendQueue,
    default_credit,
)
from shardline.client.layout import ModelLayout, copy_each
from shardline.codecs.base import PLAIN_TURN
from shardline.codecs.coding import Coding, PushEncoders
from shardline.consistency.worker import Stamp
from shardline.core import rows
from shardline.core.contributions import Contributions, Partial, dim_of
from shardline.core.gradients import nonfinite_id
from shardline.core.plan import BucketSpec, Plan, span_of, tensor_piece
from shardline.core.reduce import Block, is_finite, magnitude
from shardline.core.spec import DTYPES, TensorKind, TensorSpec
from shardline.core.tensor_bytes import digest, fingerprint, tensor_bytes, tensor_from_bytes
from shardline.division import Key
from shardline.errors import JobError, NonFiniteError
from shardline.host.device_memory import settle
from shardline.host.process import usable_cores
from shardline.host.segments import Segment
from shardline.native.kernels import Copies, outgrows_cache
from shardline.rpc.messages import data
from shardline.rpc.messages.convert import pack_bits
from shardline.waist import Memory, Payload, Payloads, Push, Whole, octets

Allocate = Callable[[int, int, int], Memory | None]
"""(shard, bucket, bytes) -> the lane's own memory for this bucket's gradient in this step, or None.

Its padding is zero: the memory was never written, or contained the same bucket before.
"""


MOST_THREADS = 4
"""A few saturate the memory bandwidth."""
WORTH_BYTES = 8 << 20
"""Fewer bytes are copied before another thread wakes up."""


def no_memory(shard: int, bucket: int, nbytes: int) -> None:
    """For lanes without memory of their own."""


@dataclass
class StepExtras:
    """Data sent with a step's pushes besides gradients."""

    hyper: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    nonfinite: list[str] = field(default_factory=list)
    samples: dict[int, int] = field(default_factory=dict)
    """Number of samples by replica."""


class GradientMemory:
    """Memory of one bucket's gradient. values: all of it; parts: views of its slices, in order.

    away: nobody reads it before it has left the cache.
    """

    def __init__(self, plan: Plan, spec: BucketSpec, values: torch.Tensor, *, away: bool = False) -> None:
        self.values = values
        self.parts = [values[piece.offset : piece.end] for piece in spec.slices]
        self.tensors = [piece.tensor for piece in spec.slices]
        """The tensor of each slice, by number."""
        self.copies = Copies(
            values,
            [
                (piece.offset, span_of(plan, piece).start, piece.elements, plan.tensors[piece.tensor].elements)
                for piece in spec.slices
            ],
            away=away,
        )


class GradientStaging:
    """A worker's flat bucket tensors, reused in every step.

    Different buckets may be added and encoded by different threads at the same time.
    """

    def __init__(
        self,
        plan: Plan,
        replicas: int,
        encoders: PushEncoders,
        allocate: Allocate = no_memory,
        host: HostPath | None = None,
    ) -> None:
        self._plan = plan
        self._replicas = replicas
        self.encoders = encoders
        self._allocate = allocate
        self._host = host
        self._threads = min(MOST_THREADS, usable_cores())
        self._pool: ThreadPoolExecutor | None = None
        self._free: dict[Key, list[GradientMemory]] = {}
        self._lent: dict[Key, list[GradientMemory]] = {}
        self._asked: set[Key] = set()
        """Buckets for which the lane was asked for memory in this step."""
        self._places: dict[Key, tuple[Memory, GradientMemory]] = {}
        """Memory that the lane gave, and tensors over it: lanes give the same again and again."""
        self._shared: set[Key] = set()
        """Buckets whose gradient of this step is in memory that the shard reads."""
        self._locked: list[Segment | None] = []
        """Segments that a GPU copies into, kept alive because their lane may release them meanwhile."""
        self._sums: dict[Key, Contributions] = {}
        self._singles: dict[Key, dict[Block, Partial]] = {}
        self._marks: dict[Key, dict[Block, int]] = {}
        """Fingerprints of gradients in memory that the shard reads."""
        self.keys = [(s, b) for s, shard in enumerate(plan.shards) for b in range(len(shard.buckets))]
        """Every bucket."""
        self._away = outgrows_cache(sum(shard.nbytes for shard in plan.shards))
        self._specs = {(s, b): plan.shards[s].buckets[b] for s, b in self.keys}
        self._tensors = {key: [piece.tensor for piece in spec.slices] for key, spec in self._specs.items()}
        """The tensor of each slice, by number."""
        self.extras = StepExtras()

    def clear(self) -> None:
        """Start a step: all memory is free again, since the previous pushes are acknowledged or given up."""
        for key, lent in self._lent.items():
            self._free.setdefault(key, []).extend(lent)
        self._lent.clear()
        self._asked.clear()
        self._shared.clear()
        self._locked.clear()
        self._sums.clear()
        self._singles.clear()
        self._marks.clear()
        self.extras = StepExtras()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self.clear()
        self._free.clear()
        self._places.clear()

    def _lane_memory(self, key: Key) -> GradientMemory | None:
        """The lane's own memory, once per step: the peer may still be reading what an earlier attempt left there."""
        if key in self._asked:
            return None
        self._asked.add(key)
        spec = self._specs[key]
        # Other codecs write their bytes elsewhere anyway.
        wanted = spec.nbytes > 0 and self.encoders.coding.bucket(*key).codec.is_view
        memory = self._allocate(*key, spec.nbytes) if wanted else None
        if memory is None:
            self._places.pop(key, None)
            return None
        if self._host is not None and not isinstance(memory, torch.Tensor):
            # A GPU's gradients need memory that stays page-locked while the device may copy into it.
            self._locked.append(Segment.of(memoryview(memory)))
            if not self._host.lock_pages(memoryview(memory)):
                return None
        self._shared.add(key)
        place = self._places.get(key)
        if place is None or place[0] is not memory:
            if isinstance(memory, torch.Tensor):
                values = memory.view(DTYPES[spec.dtype])
            else:
                values = tensor_from_bytes(memory, spec.dtype)
            place = self._places[key] = memory, GradientMemory(self._plan, spec, values, away=self._away)
        return place[1]

    def _buffer(self, key: Key) -> GradientMemory:
        spec, place, free = self._specs[key], self._places.get(key), self._free.get(key, [])
        # Beside what the lane gave, to be added to it.
        device = place[1].values.device if place is not None else torch.device("cpu")
        for number, buffer in enumerate(free):
            if buffer.values.device == device:
                del free[number]
                break
        else:
            dtype = DTYPES[spec.dtype]
            if self._host is not None and device.type == "cpu":
                values = self._host.pinned(spec.elements, dtype)
            else:
                values = torch.zeros(spec.elements, dtype=dtype, device=device)
            buffer = GradientMemory(self._plan, spec, values)
        self._lent.setdefault(key, []).append(buffer)
        return buffer

    def add(
        self,
        replica: int,
        gradients: Mapping[int, torch.Tensor],
        buffers: Mapping[int, torch.Tensor],
        *,
        presum: bool,
        keep: bool = False,
        keys: Sequence[Key] | None = None,
    ) -> list[str]:
        """Add one replica's gradients and (for replica 0) changed buffers, by tensor number, to these buckets.

        keys: None = every bucket. See add_bucket. Returns the names of gradients that are not finite, each once, in the
        plan's order. Raises JobError naming a tensor whose gradient is sparse.
        """
        for number, gradient in gradients.items():
            if gradient.layout != torch.strided:
                raise JobError(
                    f"the gradient of {self._plan.tensors[number].name!r} has layout {gradient.layout}; Shardline "
                    "supports only dense gradients: pass its to_dense(), or take shardline.nn.Embedding, which sends "
                    "the rows of a step alone"
                )
        after = [self._host.mark()] if self._host is not None else ()

        def add(key: Key) -> list[int]:
            is_buffer = self._specs[key].kind is TensorKind.BUFFER
            source = buffers if is_buffer else gradients
            # Buffers are restored before the push has left, so these are always copied.
            return self.add_bucket(key, replica, source, presum=presum, keep=keep and not is_buffer, after=after)

        # A GPU's copies run one after another anyway.
        chosen = self.keys if keys is None else keys
        nbytes = sum([self._specs[key].nbytes for key in chosen]) if self._host is None and gradients else 0
        if self._threads < 2 or nbytes < WORTH_BYTES:
            found = [add(key) for key in chosen]
        else:
            self._pool = self._pool or ThreadPoolExecutor(self._threads, thread_name_prefix="map")
            added = [self._pool.submit(add, key) for key in chosen]
            # After an error, too, nothing may be under way any more.
            wait(added)
            found = [one.result() for one in added]
        bad = set(itertools.chain.from_iterable(found))
        return [_named(self._plan.tensors[number], gradients[number]) for number in sorted(bad)]

    def add_bucket(
        self,
        key: Key,
        replica: int,
        source: Mapping[int, torch.Tensor],
        *,
        presum: bool,
        keep: bool,
        after: Sequence[torch.cuda.Event] = (),
    ) -> list[int]:
        """Add one replica's part of one bucket; returns the tensors whose gradients have NaN or infinity.

        presum: add up the gradients of a whole block of replicas before sending (with the same bits). Off in the first
        step after a (re)start, when parts of a block may already be counted.
        keep: the gradients do not change until clear(): a bucket that is one slice of one of them is not copied.
        after: on a GPU, events after which the source is complete.
        """
        spec = self._specs[key]
        values: torch.Tensor | None = None
        present = tuple(map(source.__contains__, self._tensors[key]))
        borrowed = False
        checked, bound = spec.kind is not TensorKind.BUFFER, math.inf
        if spec.kind is TensorKind.TABLE:
            values, bound = _rows_of(spec, source)
            present = (values is not None,)
        elif any(present):
            flat = self._lane_memory(key)
            if flat is None and keep:
                piece = tensor_piece(self._plan, spec, source)
                borrowed = piece is not None and piece.device.type == "cpu"
                values = piece if borrowed else None
            seen = None
            if values is None:
                with self._host.after(after) if self._host is not None else nullcontext() as copy:
                    flat = flat or self._buffer(key)
                    values = flat.values
                    seen = fill_bucket(self._plan, spec, flat, source, copy)
            if checked:
                bound = magnitude(values) if seen is None else seen
        block = Block(replica, 1)
        if values is not None and self._replicas > 1 and key in self._shared and values.device.type == "cpu":
            # Now, while all of it is in the cache.
            self._marks.setdefault(key, {})[block] = fingerprint(tensor_bytes(values))
        if presum and self._replicas > 1:
            sums = self._sums.setdefault(key, Contributions(spec, self._replicas))
            sums.add(block, values, present, 0, borrowed=borrowed, bound=bound)
            if values is not None:
                settle(values.device)
        else:
            self._singles.setdefault(key, {})[block] = Partial(values, present, borrowed, bound, dim_of(spec))
        if values is None or not checked or math.isfinite(bound):
            return []
        if spec.kind is TensorKind.TABLE:
            return self._tensors[key]
        return [piece.tensor for piece in spec.slices if not is_finite(values[piece.offset : piece.end])]

    @property
    def has_gradients(self) -> bool:
        return bool(self._sums or self._singles)

    def partials(self, key: Key) -> Mapping[Block, Partial]:
        """What was added to a bucket for the open step, by block."""
        singles, sums = self._singles.get(key, {}), self._sums.get(key)
        return singles if sums is None else {**singles, **sums.partials()}

    def buffers(self) -> dict[int, torch.Tensor]:
        """Copies of the changed buffers added for the open step, flat, by tensor number."""
        found: dict[int, torch.Tensor] = {}
        for key in self.keys:
            spec = self._specs[key]
            for partial in self.partials(key).values() if spec.kind is TensorKind.BUFFER else ():
                if partial.values is None:
                    continue
                for piece, there in zip(spec.slices, partial.present, strict=True):
                    if there:
                        elements = self._plan.tensors[piece.tensor].elements
                        whole = found.setdefault(piece.tensor, partial.values.new_empty(elements))
                        part = piece.first_row * self._plan.tensors[piece.tensor].row_elements
                        whole[part : part + piece.elements] = partial.values[piece.offset : piece.end]
        return found

    def blocks(self, keys: Iterable[Key]) -> list[Block]:
        return sorted({block for key in keys for block in self.partials(key)})

    def added(self, key: Key, block: Block) -> bool:
        return block in self.partials(key)

    def in_place(self, shard: int, buckets: Iterable[int]) -> bool:
        """Whether these gradients are in memory that their shard reads, so that no bytes have to be sent."""
        return self._shared.issuperset([(shard, bucket) for bucket in buckets])

    def payload(self, block: Block, shard: int, bucket: int, nonfinite: Sequence[str] = ()) -> Payload:
        """One bucket of a block's push, encoded. Raises KeyError if it is empty in this block."""
        key = shard, bucket
        spec = self._specs[key]
        partial = self.partials(key)[block]
        if partial.values is None:
            raise KeyError(f"bucket {key} of block {block} is empty")
        place = self._places.get(key)
        if place is not None and place[1].values is partial.values:
            # Where the lane has memory for a bucket, its codec sends it as it is.
            data: Memory = place[0]
        elif partial.values.device.type != "cpu":
            # The sum of several replicas; only lanes whose codec sends values as they are have memory there.
            data = partial.values.view(torch.uint8)
        else:
            data = self.encoders.encode(shard, bucket, block.first, partial.values, partial.present)
        return Payload(
            bucket=bucket,
            dtype=spec.dtype,
            elements=spec.elements,
            present=b"" if all(partial.present) else pack_bits(partial.present),
            data=data,
            raw_bytes=partial.nbytes(spec),
            # The digest protects bytes in transit; these stay in place.
            digest=0 if key in self._shared else digest(octets(data)),
            nonfinite=tuple(nonfinite),
            bound=partial.bound if math.isfinite(partial.bound) else 0.0,
            # Nobody asks for it if no other worker can compute these bytes again.
            fingerprint=0 if self._replicas == 1 else self._marks.get(key, {}).get(block) or _mark(data),
        )

    def contribution(
        self, block: Block, payloads: Payloads, stamp: Stamp, *, skip: bool = False, partial: bool = False
    ) -> Push:
        """A block's push with these payloads and the other data. partial: see Push."""
        samples = self.extras.samples
        return Push(
            payloads=payloads,
            block=block,
            hyper=self.extras.hyper,
            nonfinite=tuple(self.extras.nonfinite),
            num_samples=sum([samples.get(replica, 0) for replica in range(block.first, block.end)]),
            codec=self.encoders.name,
            step=stamp.step,
            seq=stamp.seq,
            clock=stamp.clock,
            base_min=stamp.base,
            base_max=stamp.base,
            skip=skip,
            partial=partial,
        )


def fill_bucket(
    plan: Plan,
    bucket: BucketSpec,
    target: GradientMemory,
    gradients: Mapping[int, torch.Tensor],
    copy: Copy | None = None,
) -> float | None:
    """Write gradients (by tensor number, any device) into a flat bucket, whose padding is zero.

    copy: how; None = in one call where that is possible, else copy_each. Returns the bucket's largest magnitude, not
    finite where an element isn't, if the copies have looked.

    Slices without a gradient become zero: they are sent, but count as absent.
    """
    if copy is None:
        whole = all(map(gradients.__contains__, target.tensors))
        found = target.copies.fill([*map(gradients.__getitem__, target.tensors)]) if whole else None
        if found is not None:
            return found
    sources, targets = [], []
    for piece, view in zip(bucket.slices, target.parts, strict=True):
        gradient = gradients.get(piece.tensor)
        if gradient is None:
            view.zero_()
            continue
        source = gradient.detach()
        if source.dim() != 1:
            source = source.reshape(-1)
        if source.shape != view.shape:
            source = source[span_of(plan, piece)]
        if source.data_ptr() != view.data_ptr() or source.device != view.device:
            sources.append(source)
            targets.append(view)
    if copy is None:
        copy_each(targets, sources)
        return None
    return copy(targets, sources)


def _mark(data: Memory) -> int:
    """The fingerprint of bytes in host memory; 0 = unknown."""
    return 0 if isinstance(data, torch.Tensor) else fingerprint(data)


def initial_contribution(coding: Coding, shard: int, layout: ModelLayout) -> Push:
    """The INIT push of one shard. coding: JobCoding.plain."""
    payloads = []
    for b, bucket in enumerate(coding.plan.shards[shard].buckets):
        if bucket.kind is TensorKind.TABLE:
            continue
        data = coding.bucket(shard, b).coder.encode(layout.values(shard, b), PLAIN_TURN)
        payloads.append(
            Payload(
                bucket=b,
                dtype=bucket.dtype,
                elements=bucket.elements,
                present=b"",
                data=data,
                raw_bytes=bucket.nbytes,
                digest=digest(data),
            )
        )
    named = {payload.bucket for payload in payloads}
    tables = [b for b in range(len(coding.plan.shards[shard].buckets)) if b not in named]
    return Push(payloads=Whole(payloads, tables), init=True)


class NonFinite:
    """A worker's handling of NaN and infinity. policy: the job's nan_policy."""

    def __init__(self, policy: str, staging: GradientStaging, observer: Observer) -> None:
        self._policy = policy
        self._staging = staging
        self._observer = observer

    def judge(self, step: int, replica: int, bad: Sequence[str], *, early: bool = False) -> None:
        """Handle a loss ("loss") or gradients (by name) that are not finite. Raises NonFiniteError under "stop".

        early: found on a lane's thread, while other gradients of the step are being sent.
        """
        if not bad:
            return
        for name in bad:
            self._observer.not_finite(name)
        if self._policy == "stop":
            if not early:
                self._staging.clear()
            sent = (
                "other gradients of this step may already have been sent and applied" if early else "nothing was sent"
            )
            names = ", ".join(name if name == "loss" else f"the gradient of {name!r}" for name in bad)
            raise NonFiniteError(
                f"step {step}, replica {replica}: {names} has NaN or infinity; {sent}. "
                "Lower the learning rate, clip gradients (clip_norm), or set nan_policy='skip'"
            )
        if not early:
            named = self._staging.extras.nonfinite
            named.extend(name for name in bad if name not in named)


def loss_names(loss: float | None) -> list[str]:
    """["loss"] if it is NaN or infinite, else []."""
    return [] if loss is None or -float("inf") < loss < float("inf") else ["loss"]


def _named(tensor: TensorSpec, gradient: torch.Tensor) -> str:
    """The name of a tensor whose gradient is not finite; of a table with the id of a row."""
    if tensor.kind is not TensorKind.TABLE:
        return tensor.name
    return f"{tensor.name}[{nonfinite_id(gradient, tensor.row_elements)}]"


def _rows_of(spec: BucketSpec, source: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor | None, float]:
    """A bucket's part of the packed rows of its table, None if it has none, and the largest magnitude in it."""
    piece, dim = spec.slices[0], dim_of(spec)
    packed = source.get(piece.tensor)
    if packed is None:
        return None, 0.0
    if piece.rows < rows.PARTS:
        ids = rows.ids_of(packed, dim)
        part = rows.part_of(ids) - piece.first_row
        own = ((part >= 0) & (part < piece.rows)).nonzero().squeeze(1)
        packed = rows.pack(ids[own], rows.rows_of(packed, dim).index_select(0, own))
        if not len(own):
            return None, 0.0
    return packed, magnitude(rows.rows_of(packed, dim).reshape(-1))


@dataclass(frozen=True, kw_only=True)
class PushTools:
    """What is needed to make a worker's pushes."""

    plan: Plan
    staging: GradientStaging
    interrupted: Callable[[], Exception | None]
    credit_bytes: int = 0
    """See SendQueue; 0 = derived from the buckets."""
    gpu: HostPath | None = None
    """Set if the gradients are on a GPU."""


def filled_payloads(
    tools: PushTools, shard: int, block: Block, ranks: Sequence[int], buckets: Sequence[int]
) -> LivePayloads | ReadyPayloads:
    """A block's push to one shard, with these buckets, all in staging; each is encoded when it is sent.

    ranks: see SendQueue.
    """
    spec, staging = tools.plan.shards[shard], tools.staging
    empty: list[int] = []
    coming: list[int] = []
    nbytes = 0
    for bucket in buckets:
        partial = staging.partials((shard, bucket))[block]
        (empty if partial.values is None else coming).append(bucket)
        nbytes += partial.nbytes(spec.buckets[bucket])
    in_place = staging.in_place(shard, buckets)
    exact = staging.encoders.coding.is_view
    if nbytes <= data.SMALL_BYTES or (exact and nbytes <= data.QUICK_BYTES):
        # They leave in one message, so there is nothing to choose while others are encoded.
        items = [staging.payload(block, shard, bucket) for bucket in sorted(coming, key=ranks.__getitem__)]
        return ReadyPayloads(items, empty=empty, in_place=in_place, interrupted=tools.interrupted)
    # Nothing can overtake any more, so use a few large batches: the shard begins with the first while others are
    # encoded. If all bytes are already in place, one is enough. The shard then handles many workers' pushes one after
    # another; with small batches its threads would keep contending for the same buckets.
    window = tools.credit_bytes or (spec.nbytes if in_place else max(default_credit(spec), spec.nbytes // 4))
    payloads = LivePayloads(
        SendQueue(ranks, [bucket.nbytes for bucket in spec.buckets], window),
        functools.partial(staging.payload, block, shard),
        nbytes=nbytes,
        in_place=in_place,
        interrupted=tools.interrupted,
    )
    for bucket in coming:
        payloads.offer(bucket)
    payloads.close(empty)
    return payloads

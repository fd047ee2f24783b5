"""Where pulled buckets go: into the worker's tensors, or into memory kept for them until they may be written."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from shardline.client.exchange.arrivals import Arrivals
from shardline.client.exchange.device import HostPath
from shardline.client.step.layout import ModelLayout
from shardline.client.step.residence import PRIVATE, Residence
from shardline.codecs.base import Turn
from shardline.codecs.coding import BucketCoding, Coding, JobCoding
from shardline.core.exchange import Arrival
from shardline.core.plan import BucketSpec
from shardline.core.spec import TensorKind
from shardline.core.tensor_bytes import borrowed_tensor, memory_of
from shardline.errors import ProtocolError, UnreachableError

HOLD_S = 3600.0
"""How long a lane's own memory waits until the model may be written to."""


class BucketSink:
    """Receives the pulled buckets of one shard and loads them into the model.

    arrivals: told of every bucket; says whether the model may be written to yet. None = it always may.
    """

    def __init__(
        self,
        layout: ModelLayout,
        shard: int,
        coding: JobCoding,
        arrivals: Arrivals | None = None,
        *,
        host: HostPath | None = None,
        residence: Residence = PRIVATE,
    ) -> None:
        self._layout = layout
        self._shard = shard
        self._coding = coding
        self._arrivals = arrivals or Arrivals([(shard, b) for b in range(len(layout.plan.shards[shard].buckets))])
        self._host = host
        self._residence = residence
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
        """Where one bucket's bytes go: the model itself, or memory reused from step to step. See core.exchange.Sink."""
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
        """Load a whole bucket. See core.exchange.Sink."""
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
            self._residence.loaded((self._shard, arrival.bucket))
        self._landed(arrival, load)

    def take(self, arrival: Arrival, memory: memoryview) -> None:
        """Load a whole bucket from shared memory; it counts no bytes on the wire. See core.exchange.Sink.

        Waits while the model must not be written to: a copy in between would cost more than it gains.
        """
        self.first_s = self.first_s or time.monotonic()
        if not self._arrivals.await_release(HOLD_S):
            raise UnreachableError(f"shard {self._shard}: what it published was not taken within {HOLD_S:.0f} s")
        self.raw_bytes += self._spec(arrival).nbytes
        stays = arrival.area < 2 and self._residence.take((self._shard, arrival.bucket), memory)
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

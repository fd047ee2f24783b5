"""Where pulled buckets go: into the model's own memory, or memory shared with the servers (in_place.py)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from shardline.client.exchange.arrivals import Arrivals, Key
from shardline.client.exchange.device import HostPath
from shardline.client.layout import ModelLayout
from shardline.codecs.base import Turn
from shardline.codecs.coding import BucketCoding, Coding, JobCoding
from shardline.core.plan import BucketSpec
from shardline.core.spec import TensorKind
from shardline.core.tensor_bytes import borrowed_tensor, copy_bytes, memory_of
from shardline.errors import ProtocolError, UnreachableError
from shardline.waist import Arrival, Memory, octets


class ParameterMemory:
    """Decides which pulled buckets stay where a server published them: here none.

    Lanes call take(), stands() and loaded().
    """

    pending = False
    """Whether show() has anything to do."""

    @property
    def shared(self) -> Sequence[str]:
        """Names of the tensors that are currently in shared memory."""
        return ()

    def with_neighbours(self, keys: Iterable[Key]) -> Sequence[Key]:
        """These buckets and those without which show() can't show all of them."""
        return list(keys)

    def begin(self) -> None:
        """Note that a pull is about to begin."""

    def pulling(self) -> None:
        """Use the time in which nothing has arrived yet."""

    def take(self, key: Key, memory: memoryview) -> bool:
        """Whether a bucket that the shard refers to may stay in its memory; show() then makes the tensors show it."""
        return False

    def stands(self, key: Key, step: int) -> None:
        """Note that a bucket of `step` is unchanged."""

    def loaded(self, key: Key) -> None:
        """Note that a bucket is copied into the tensors."""

    def show(self) -> None:
        """Make the tensors show the buckets that have arrived. On the computing thread, between two uses of tensors."""

    def settle(self) -> None:
        """show() at the end of a pull: the tensors have their values of one step, wherever it came from."""

    def gradient(self, number: int) -> torch.Tensor | None:
        """Memory that the shard reads, in the shape of tensor `number` of the plan; None if there is currently none."""
        return None

    def release(self) -> None:
        """Leave every tensor's current value in private memory, where nothing changes it but a copying pull."""


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
        memory: ParameterMemory | None = None,
    ) -> None:
        self._layout = layout
        self._shard = shard
        self._coding = coding
        self._arrivals = arrivals or Arrivals([(shard, b) for b in range(len(layout.plan.shards[shard].buckets))])
        self._host = host
        self._kept = memory or ParameterMemory()
        self.num_buckets = len(layout.plan.shards[shard].buckets)
        self.shard_bytes = layout.plan.shards[shard].nbytes
        self._memory: dict[int, torch.Tensor] = {}
        # All of them now: what refers to the model's memory later is somebody else's (see Reach).
        self._pieces = [layout.memory(shard, bucket) for bucket in range(self.num_buckets)]
        self._moves = layout.moves
        self._in_place: set[int] = set()
        """Buckets that are received directly into the model."""
        self.arrived: set[int] = set()
        """Complete buckets of the running pull."""
        self._held: dict[int, tuple[int, int]] = {}
        """(step, version) of each bucket's last arrival, in any pull."""
        self.raw_bytes = 0
        self.wire_bytes = 0
        self.first_s = 0.0
        """When the running pull's first bucket began to arrive, by the monotonic clock; 0 = none has."""

    def begin(self) -> None:
        """Start a new pull."""
        self.first_s = 0.0
        self.arrived.clear()
        self._in_place.clear()

    def _direct(self, arrival: Arrival) -> memoryview | None:
        """The model's own memory, if the payload has the bits of one contiguous slice of one tensor.

        An interrupted pull leaves such a tensor torn, just as it leaves the model with buckets of two steps: nothing is
        computed with it until a pull is complete.
        """
        if not self._written(arrival).codec.is_view or self._arrivals.holding or arrival.bucket in self.arrived:
            return None
        if self._moves != self._layout.moves:
            self._moves = self._layout.moves
            self._pieces = [self._layout.memory(self._shard, bucket) for bucket in range(self.num_buckets)]
        held = self._pieces[arrival.bucket]
        return held if held is not None and len(held) == arrival.payload_bytes else None

    def _named(self, arrival: Arrival) -> Coding:
        try:
            return self._coding.of_pull(arrival.codec)
        except ProtocolError as error:
            raise ProtocolError(f"shard {self._shard}, bucket {arrival.bucket}: {error}") from None

    def _written(self, arrival: Arrival) -> BucketCoding:
        """Coding of an arriving bucket. Raises ProtocolError if its codec is not the job's."""
        return self._named(arrival).bucket(self._shard, arrival.bucket)

    def buffer(self, arrival: Arrival) -> memoryview:
        """Memory for one bucket's bytes: the model itself, or memory reused in every step. See waist.Sink.

        Raises ProtocolError for a payload of the wrong length.
        """
        self.first_s = self.first_s or time.monotonic()
        self._check(arrival)
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

    def _check(self, arrival: Arrival) -> None:
        misfit = self._written(arrival).misfit(arrival.payload_bytes)
        if misfit:
            raise ProtocolError(
                f"shard {self._shard}, bucket {arrival.bucket}: payload of {arrival.payload_bytes} bytes, {misfit}"
            )

    def _new_memory(self, nbytes: int) -> torch.Tensor:
        if self._host is not None:
            return self._host.pinned(nbytes, torch.uint8)
        return torch.empty(nbytes, dtype=torch.uint8)

    def done(self, arrival: Arrival) -> None:
        self.first_s = self.first_s or time.monotonic()
        if arrival.unchanged:
            self._kept.stands((self._shard, arrival.bucket), arrival.step)
            self._landed(arrival, _nothing)
        elif arrival.bucket in self._in_place:
            self._moved(arrival, functools.partial(self._received, arrival.bucket))
        else:
            payload = memory_of(self._memory[arrival.bucket]) if arrival.payload_bytes else memoryview(b"")
            self._moved(arrival, functools.partial(self._load, arrival, payload))

    def whole(self, arrival: Arrival, payload: Memory) -> None:
        """Load a complete bucket from the message that it came in. See waist.Sink."""
        if self._host is not None or self._direct(arrival) is not None:
            # What goes to a device leaves from pinned memory.
            copy_bytes(self.buffer(arrival), octets(payload))
            self.done(arrival)
            return
        self.first_s = self.first_s or time.monotonic()
        self._check(arrival)
        self._moved(arrival, functools.partial(self._load, arrival, payload))

    def _moved(self, arrival: Arrival, load: Callable[[], None]) -> None:
        """Count a bucket's bytes, which went over the wire."""
        self.wire_bytes += arrival.payload_bytes
        self.raw_bytes += self._spec(arrival).nbytes
        self._kept.loaded((self._shard, arrival.bucket))
        self._landed(arrival, load)

    def take(self, arrival: Arrival, memory: Memory) -> None:
        """Load a complete bucket from shared memory; adds no wire bytes. See waist.Sink.

        Waits while the model must not be written to: an intermediate copy would cost more than it gains. Raises
        UnreachableError after hold_s.
        """
        self.first_s = self.first_s or time.monotonic()
        if self._arrivals.holding and not self._arrivals.await_release(HOLD_S):
            raise UnreachableError(f"shard {self._shard}: its published values were not read within {HOLD_S:.0f} s")
        self.raw_bytes += self._spec(arrival).nbytes
        stays = arrival.lasting and self._kept.take((self._shard, arrival.bucket), memoryview(octets(memory)))
        self._landed(arrival, _nothing if stays else functools.partial(self._load, arrival, memory))
        if self._host is not None:
            # The lane may reuse the memory when this returns.
            self._host.await_host_memory((self._shard, arrival.bucket))

    def _spec(self, arrival: Arrival) -> BucketSpec:
        return self._layout.plan.shards[self._shard].buckets[arrival.bucket]

    def _load(self, arrival: Arrival, payload: Memory) -> None:
        copy = functools.partial(self._copy_in, arrival, payload)
        if self._host is None:
            copy()
        else:
            self._host.load((self._shard, arrival.bucket), copy)

    def _copy_in(self, arrival: Arrival, payload: Memory) -> None:
        spec = self._spec(arrival)
        named = self._named(arrival)
        written = named.bucket(self._shard, arrival.bucket)
        raw = written.codec.is_view
        if raw and isinstance(payload, torch.Tensor):
            values = payload
        elif raw and len(octets(payload)) == spec.nbytes:
            # Shared memory is read-only and read in place.
            values = borrowed_tensor(octets(payload), spec.dtype)
        else:
            turn = Turn(arrival.step, memory=named.memory(self._shard, arrival.bucket, ""))
            values = written.coder.decode(octets(payload), turn)
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
            # A second arrival after a failed call: a forward pass may have changed the bucket since (batch norm).
            return
        self._held[arrival.bucket] = (arrival.step, arrival.version)
        self.arrived.add(arrival.bucket)
        self._arrivals.landed((self._shard, arrival.bucket), load)

    @property
    def base_step(self) -> int | None:
        """Lowest step of the model's buckets; None if some never arrived."""
        if len(self._held) < self.num_buckets:
            return None
        return min(step for step, _ in self._held.values())

    @property
    def base_version(self) -> int:
        return min([version for _, version in self._held.values()], default=0)


def _nothing() -> None:
    """Load nothing: the model already contains these bits."""

"""Parameters on their way in: received, decoded, held back while a backward pass runs, loaded into the tensors."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from shardline.client.exchange.device import HostPath, host_path
from shardline.client.exchange.shard_exchange import LOOK_S, PullSink, Running
from shardline.client.layout import ModelLayout, homes, keys_of
from shardline.client.step.in_place import InPlace
from shardline.codecs.base import Turn
from shardline.codecs.coding import BucketCoding, Coding, JobCoding
from shardline.core.plan import BucketSpec, Plan
from shardline.core.spec import DTYPES, TensorKind
from shardline.core.tensor_bytes import borrowed_tensor, copy_bytes, memory_of
from shardline.division import Key
from shardline.errors import ProtocolError, UnreachableError
from shardline.waist import Arrival, Memory, octets


class Arrivals:
    """Buckets of one pull of all shards. Lanes report them; the computing thread waits for them.

    While it is holding, nothing is written to the model: the backward pass may need a parameter after its own gradient
    is complete (weights read by a function that has no gradient for them, recomputation). What arrives before the end
    of the step is kept aside, and the computing thread loads it when it is needed.
    """

    def __init__(self, keys: Iterable[Key]) -> None:
        self.keys = tuple(keys)
        """What the next pull returns."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiters = 0
        """Threads that wait for a change: without any, as in a small step, nobody has to be told."""
        self.holding = False
        """Arriving buckets must not be written to the model yet."""
        self._held: dict[Key, Callable[[], None]] = {}
        self._missing: set[Key] = set()
        self._over = True
        self.on_end: Callable[[], None] = lambda: None
        """Called after end(), on the thread that ended the waits."""

    def begin(self, *, hold: bool) -> None:
        """Begin a pull of all keys. hold: keep arriving buckets aside until release()."""
        with self._lock:
            self._missing = set(self.keys)
            self._held.clear()
            self.holding = hold
            self._over = False

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for this; False after timeout_s. Call with the lock held."""
        self._waiters += 1
        try:
            return self._changed.wait_for(ready, timeout_s)
        finally:
            self._waiters -= 1

    @property
    def waiting(self) -> bool:
        return bool(self._missing)

    # Lanes

    def landed(self, key: Key, load: Callable[[], None]) -> None:
        """Note a complete bucket. load() writes it to the model, now on this thread or later on the computing one."""
        if self.holding:
            with self._lock:
                # It may have been released meanwhile; it is never held again in the same pull.
                if self.holding:
                    self._held[key] = load
                    if self._waiters:
                        self._changed.notify_all()
                    return
        load()
        with self._lock:
            self._missing.discard(key)
            if self._waiters:
                self._changed.notify_all()

    def await_release(self, timeout_s: float) -> bool:
        """Wait until nothing is held back any more; False after timeout_s or if the pull was given up."""
        if not self.holding:
            return True
        with self._lock:
            self._wait(lambda: not self.holding or self._over, timeout_s)
            return not self.holding

    def end(self) -> None:
        """End all waits: the exchange has ended, or the pull was given up."""
        with self._lock:
            self._over = True
            if self._waiters:
                self._changed.notify_all()
        self.on_end()

    # The computing thread

    def release(self) -> None:
        """Allow writing to the model from now on."""
        with self._lock:
            self.holding = False
            if self._waiters:
                self._changed.notify_all()

    def load(self, keys: Iterable[Key], look: Callable[[], None] = lambda: None) -> bool:
        """Wait until these buckets are in the model; False if the exchange ended without one of them.

        look: called every LOOK_S while nothing arrives; an exception that it raises ends the wait.
        """
        wanted = [key for key in keys if key in self._missing]

        def some() -> bool:
            return self._over or any(key in self._held or key not in self._missing for key in wanted)

        while wanted:
            with self._lock:
                moved = self._wait(some, LOOK_S)
                ready = [key for key in wanted if key in self._held]
                stuck = self._over and not ready
                loads = [(key, self._held.pop(key)) for key in ready]
            if not moved:
                look()
            for key, load in loads:
                load()
                with self._lock:
                    self._missing.discard(key)
                    if self._waiters:
                        self._changed.notify_all()
            wanted = [key for key in wanted if key in self._missing]
            if stuck and wanted:
                return False
        return True


HOLD_S = 3600.0
"""How long a lane's own memory waits until the model may be written to."""


class BucketSink(PullSink):
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
        memory: InPlace | None = None,
    ) -> None:
        self._layout = layout
        self._shard = shard
        self._coding = coding
        self._arrivals = arrivals or Arrivals([(shard, b) for b in range(len(layout.plan.shards[shard].buckets))])
        self._host = host
        self._kept = memory
        super().__init__(len(layout.plan.shards[shard].buckets), layout.plan.shards[shard].nbytes)
        self._memory: dict[int, torch.Tensor] = {}
        # All of them now: what refers to the model's memory later is somebody else's (see Reach).
        self._pieces = [layout.memory(shard, bucket) for bucket in range(self.num_buckets)]
        self._moves = layout.moves
        self._in_place: set[int] = set()
        """Buckets that are received directly into the model."""
        self._held: dict[int, tuple[int, int]] = {}
        """(step, version) of each bucket's last arrival, in any pull."""

    def begin(self) -> None:
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
        return self._own(arrival)

    def _own(self, arrival: Arrival) -> memoryview:
        """Memory of this sink for one bucket's bytes, page-locked if they go on to a device."""
        if self._host is not None:
            self._host.await_host_memory((self._shard, arrival.bucket))
        held = self._memory.get(arrival.bucket)
        if held is None or held.numel() != arrival.payload_bytes:
            empty = torch.empty if self._host is None else self._host.pinned
            held = self._memory[arrival.bucket] = empty(arrival.payload_bytes, dtype=torch.uint8)
        return memory_of(held)

    def _check(self, arrival: Arrival) -> None:
        misfit = self._written(arrival).misfit(arrival.payload_bytes)
        if misfit:
            raise ProtocolError(
                f"shard {self._shard}, bucket {arrival.bucket}: payload of {arrival.payload_bytes} bytes, {misfit}"
            )

    def done(self, arrival: Arrival) -> None:
        self.first_s = self.first_s or time.monotonic()
        if arrival.unchanged:
            if self._kept is not None:
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
        if self._kept is not None:
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
        key, kept = (self._shard, arrival.bucket), self._kept
        mapped = None if isinstance(memory, torch.Tensor) else memoryview(memory)
        stays = kept is not None and mapped is not None and arrival.lasting and kept.take(key, mapped)
        copied = self._host is not None and mapped is not None and not self._host.lock_pages(mapped)
        if copied and mapped is not None:
            # From ordinary memory the driver would copy in small pieces.
            memory = self._own(arrival)
            copy_bytes(memoryview(memory), mapped)
        self._landed(arrival, _nothing if stays else functools.partial(self._load, arrival, memory))
        if self._host is not None and not copied:
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
            values = payload.view(DTYPES[spec.dtype])
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
    """There is nothing to do."""


class Weights:
    """A worker's copy of the job's tensors. Lanes write to it through `sinks`; the rest is for the computing thread,
    wait_for() for any thread of the user.

    apart: passes compute with other tensors, see WorkerMethods.copies.
    """

    def __init__(
        self,
        plan: Plan,
        layout: ModelLayout,
        coding: JobCoding,
        memory: InPlace | None,
        gap: GapMeter,
        *,
        apart: bool = False,
    ) -> None:
        self._plan = plan
        self._apart = apart
        self.gap = gap
        self.layout = layout
        self.coding = coding
        self.memory = memory
        """Set if tensors may be where the shards publish them."""
        self.arrivals = Arrivals((s, b) for s, shard in enumerate(plan.shards) for b in range(len(shard.buckets)))
        self.gpu = host_path(layout.tensors)
        """Copies to and from the GPU of all tensors; None if they aren't all on one."""
        self.sinks = {
            s: BucketSink(layout, s, coding, self.arrivals, host=self.gpu, memory=memory)
            for s in range(len(plan.shards))
        }
        self._homes = homes(plan)
        self._buffer_keys = keys_of(self._homes, layout.buffers)
        self._loads = threading.RLock()
        """Held while arrived buckets are brought into the tensors: other threads of the user may ask for some too."""
        self.have: int | None = None
        """Step of the parameters in the tensors, if they are known to be complete."""
        self._touched = False
        """A forward pass of the open step may have changed the buffers."""

    # A pull

    def forget(self) -> None:
        self.have = None
        self.gap.start_over()

    def begin_pull(self, *, hold: bool) -> None:
        """Begin a pull. hold: a backward pass is still reading the tensors, see release()."""
        self.have = None
        if self.gpu is not None and not hold:
            self.gpu.fence()
        self.gap.begin()
        if self.memory is not None:
            self.memory.begin()
        self.arrivals.begin(hold=hold)

    def release(self) -> None:
        """Allow writing to the tensors: the backward pass is over."""
        if self.arrivals.holding:
            if self.gpu is not None:
                self.gpu.fence()
            self.arrivals.release()

    def await_all(self, running: Running) -> None:
        """Wait until every bucket of a successful exchange is in the tensors."""
        with self._loads:
            self._load(self.arrivals.keys, running)

    def wait_for(self, tensors: Iterable[int], running: Running | None) -> None:
        """Wait until these tensors (numbers in the plan) contain the running exchange's values.

        Raises the error that ended the exchange if they did not arrive.
        """
        numbers = list(tensors)
        wanted = [number for number in numbers if self._plan.tensors[number].kind is not TensorKind.FROZEN]
        keys = keys_of(self._homes, wanted)
        with self._loads:
            self._load(keys if self.memory is None else self.memory.with_neighbours(keys), running)
            with torch.no_grad():
                self.layout.settle(numbers)

    @property
    def incomplete(self) -> bool:
        """Whether wait_for() may have to wait."""
        hidden = self.memory is not None and self.memory.pending
        loading = self.gpu is not None and self.gpu.unjoined
        return self.arrivals.waiting or hidden or self.layout.unsettled or loading

    def _load(self, wanted: Iterable[Key], running: Running | None) -> None:
        keys = list(wanted)
        if self.arrivals.load(keys, running.look if running is not None else _nothing):
            if self.gpu is not None:
                self.gpu.join(keys)
            if self.memory is not None:
                self.memory.show()
            return
        if running is not None:
            running.wait()
        raise ProtocolError("a pull succeeded without all the buckets that it was to return")

    def settle(self, step: int | None) -> Mapping[int, int]:
        """Complete the tensors when all buckets are here. step: set if all are of one step.

        Returns versions by shard.
        """
        with self._loads:
            if self.gpu is not None:
                self.gpu.join(self.arrivals.keys)
            if self.layout.unsettled:
                with torch.no_grad():
                    self.layout.settle()
            if step is not None and self.memory is not None:
                self.memory.settle()
        self.have = step
        self.gap.end()
        return {shard: sink.base_version for shard, sink in self.sinks.items()}

    def pulling(self) -> None:
        """Use the time in which nothing has arrived yet."""
        if self.memory is not None:
            self.memory.pulling()

    def keep(self) -> None:
        """Leave every tensor's current value in private memory, where nothing changes it but a copying pull."""
        if self.memory is not None:
            self.memory.release()

    # Buffers

    def changed_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers changed by forward passes since theta_t arrived, by name."""
        if not self._buffer_keys:
            return {}
        return {self._plan.tensors[number].name: values for number, values in self.layout.changed_buffers().items()}

    def enter_pass(self, *, pending: bool, running: Running | None) -> None:
        """Restore the buffers of theta_t before each replica's forward pass, whichever replica ran before.

        pending: theta_t has not fully arrived.
        """
        if self._apart:
            return
        # Arriving buffers are right, unless a forward pass has changed them.
        if self._touched or not pending:
            if pending:
                self._load(self._buffer_keys, running)
            self.restore()
        self._touched = True

    def restore(self) -> None:
        if self._buffer_keys:
            with torch.no_grad():
                self.layout.restore()
        self._touched = False

    def untouched(self) -> None:
        """Forget the changes of forward passes: their step is given up."""
        self._touched = False


EVERY = 20
"""Pushes from one measurement to the next."""
SAMPLE = 1 << 20
"""Elements that are compared, of all or evenly spaced: a copy of a whole model might not fit."""


class GapMeter:
    """RMS distance of the parameters from before an exchange to after it, where workers push for themselves.

    This is the gap G = ||theta_now - theta_then||_2 / sqrt(d) of Barkai, Hakimi and Schuster, "Gap-Aware Mitigation of
    Gradient Staleness", ICLR 2020, section 4, with this worker's own update in it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = (), *, every: int = EVERY) -> None:
        """tensors: the trained ones; read in place. every: pushes from one measurement to the next, 0 = none."""
        self._tensors = tensors
        self._every = every
        self._stride = max(1, -(-sum(tensor.numel() for tensor in tensors) // SAMPLE))
        self._then: list[torch.Tensor] | None = None
        self._number = -1
        """Of the exchange; -1 is the pull that a worker begins with."""
        self.last: float | None = None
        """Of the last exchange; None if it wasn't measured."""

    def begin(self) -> None:
        """An exchange begins: from here on the tensors may change. Again if it is repeated."""
        if self._then is None and self._every and self._number >= 0 and self._number % self._every == 0:
            self._then = [one.clone() for one in self._now()]

    def end(self) -> None:
        """The exchange has ended, and the tensors have their new values."""
        self._number += 1
        then, self._then, self.last = self._then, None, None
        if then is not None:
            moved = (now - before for now, before in zip(self._now(), then, strict=True))
            squares = sum(
                float(torch.linalg.vector_norm(one if one.is_complex() else one.float())) ** 2 for one in moved
            )
            self.last = math.sqrt(squares / max(1, sum(tensor.numel() for tensor in then)))

    def _now(self) -> list[torch.Tensor]:
        return [tensor.detach().reshape(-1)[:: self._stride] for tensor in self._tensors]

    def start_over(self) -> None:
        """The exchange, if any, is given up, and the next one only pulls."""
        self._then, self._number = None, -1

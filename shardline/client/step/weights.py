"""The tensors that pulls fill: which have arrived, when they may be written, and what a forward pass changed."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence

import torch

from shardline.client.exchange.arrivals import Arrivals, Key
from shardline.client.exchange.device import ON_HOST, host_path
from shardline.client.exchange.shard_exchange import Running
from shardline.client.layout import ModelLayout, homes, keys_of
from shardline.client.step.sink import BucketSink, ParameterMemory
from shardline.codecs.coding import JobCoding
from shardline.core.plan import Plan
from shardline.core.spec import TensorKind
from shardline.errors import ProtocolError


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
        memory: ParameterMemory,
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
        self.arrivals = Arrivals((s, b) for s, shard in enumerate(plan.shards) for b in range(len(shard.buckets)))
        self.gpu = host_path(layout.tensors)
        """Copies to and from the GPU of all tensors; None if they aren't all on one."""
        self._host = self.gpu or ON_HOST
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

    def pull_only(self, keys: Iterable[Key]) -> None:
        self.arrivals.keys = tuple(keys)

    def forget(self) -> None:
        self.have = None
        self.gap.start_over()

    def begin_pull(self, *, hold: bool) -> None:
        """Begin a pull. hold: a backward pass is still reading the tensors, see release()."""
        self.have = None
        if not hold:
            self._host.fence()
        self.gap.begin()
        self.memory.begin()
        self.arrivals.begin(hold=hold)

    def release(self) -> None:
        """Allow writing to the tensors: the backward pass is over."""
        if self.arrivals.holding:
            self._host.fence()
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
        with self._loads:
            self._load(self.memory.with_neighbours(keys_of(self._homes, wanted)), running)
            with torch.no_grad():
                self.layout.settle(numbers)

    @property
    def incomplete(self) -> bool:
        """Whether wait_for() may have to wait."""
        return self.arrivals.waiting or self.memory.pending or self.layout.unsettled or self._host.unjoined

    def _load(self, wanted: Iterable[Key], running: Running | None) -> None:
        keys = list(wanted)
        if self.arrivals.load(keys, running.look if running is not None else _nothing):
            self._host.join(keys)
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
            self._host.join(self.arrivals.keys)
            if self.layout.unsettled:
                with torch.no_grad():
                    self.layout.settle()
            if step is not None:
                self.memory.settle()
        self.have = step
        self.gap.end()
        return {shard: sink.base_version for shard, sink in self.sinks.items()}

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
        """Restore the buffers of theta_t."""
        if self._buffer_keys:
            with torch.no_grad():
                self.layout.restore()
        self._touched = False

    def untouched(self) -> None:
        """Forget the changes of forward passes: their step is given up."""
        self._touched = False


def _nothing() -> None:
    """There is no exchange to check."""


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

"""A worker's side of a codec: encodes its pushes, and keeps the error memory of each of its replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardline.codecs.base import Memory, MemoryKey, Scope, Turn
from shardline.codecs.coding import MEASURED_EVERY, Coding
from shardline.codecs.parts import ERROR
from shardline.core.tensor_bytes import Buffer

Memories = dict[int, dict[MemoryKey, torch.Tensor]]
"""By bucket."""
HELD_CHECKPOINTS = 2
"""Number of checkpoints to keep memory for: the last may not be committed when the job goes back."""


@dataclass
class _Held:
    """Memory of one replica at one shard."""

    next: int
    """Number of the push that it is for."""
    memories: Memories = field(default_factory=dict)
    pending: Memories = field(default_factory=dict)
    """Memory after the push `next`; becomes valid when that counts."""
    kept: dict[int, Memories] = field(default_factory=dict)
    """Memory before these pushes, for a rollback."""

    def count(self, *, forget: bool) -> None:
        """Note that the push counts. forget: nothing is remembered after it."""
        self.memories = {} if forget else {**self.memories, **self.pending}
        self.pending = {}
        self.next += 1


class PushEncoders:
    """Encodes the pushes of one worker. Different buckets may be encoded by different threads at the same time.

    seed: the job's. sender: the number for random numbers if workers push for themselves; None = each replica's.
    keep_every: pushes between two checkpoints, 0 = there are none; see Memory.RESTORED. cut_after: pushes that are
    sent whole, so that nothing is remembered after them.

    A push is numbered (begin), its buckets are encoded, possibly again if the exchange is given up and the step
    computed again, and it counts (settle) or not: only then is the memory that of the next push.
    """

    def __init__(
        self,
        coding: Coding,
        *,
        seed: int = 0,
        sender: int | None = None,
        keep_every: int = 0,
        cut_after: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self.coding = coding
        self._cut_after = cut_after
        self.leaving = False
        """Set when this worker is asked to leave: every push that begins from then on is sent whole. Not with
        error_memory="exact": bits in a checkpoint would depend on who was about to leave."""
        self._seed = seed
        self._sender = sender
        restored = any(codec.memory is Memory.RESTORED for codec in coding.codecs)
        self._keep_every = keep_every if restored else 0
        self._numbers: dict[int, int] = {}
        """Number of the open push, by shard."""
        self._whole: set[int] = set()
        """Shards whose open push is sent whole."""
        self._held: dict[tuple[int, int], _Held] = {}
        """By (replica, shard)."""
        self._owed: dict[tuple[int, int, int], float] = {}
        """Norm of the memory by (replica, shard, bucket), when it was last measured."""

    @property
    def name(self) -> str:
        return self.coding.name

    def begin(self, shard: int, number: int) -> None:
        """Set a shard's open push for the encodings that follow: the step, or the worker's count of pushes."""
        self._numbers[shard] = number
        (self._whole.add if self.leaving or self._cut_after(number) else self._whole.discard)(shard)

    def encode(
        self, shard: int, bucket: int, replica: int, values: torch.Tensor, present: Sequence[bool] = ()
    ) -> Buffer:
        coding = self.coding.bucket(shard, bucket)
        encoder = coding.coder
        number = self._numbers.get(shard, 0)
        who = replica if self._sender is None else self._sender
        if coding.codec.memory is Memory.NONE:
            turn = Turn(number, who, self._seed, present)
            data = encoder.encode(values, turn)
            self.coding.measure(shard, bucket, values, data, turn)
            return data
        held = self._held.setdefault((replica, shard), _Held(number))
        memory = dict(held.memories.get(bucket, {}))
        turn = Turn(number, who, self._seed, present, whole=shard in self._whole, memory=memory)
        data = encoder.encode(values, turn)
        held.pending[bucket] = memory
        self.coding.measure(shard, bucket, values, data, turn)
        if number % MEASURED_EVERY == 0:
            owed = (values for (_, _, what), values in memory.items() if what == ERROR)
            self._owed[replica, shard, bucket] = math.hypot(*map(float, map(torch.linalg.vector_norm, owed)))
        return data

    @property
    def memory_norm(self) -> float | None:
        """L2 norm of what these replicas' error memory holds, when it was last measured; None if nothing was."""
        return math.hypot(*self._owed.values()) if self._owed else None

    def settle(self, *, skipped: bool = False) -> None:
        """The open push counts at every shard; the next one follows. skipped: its step changed nothing."""
        for (_, shard), held in self._held.items():
            again = held.next > self._numbers.get(shard, held.next)
            if skipped or again:
                held.pending = {}
            if again:
                # It was already counted there, and was resent only for the other shards.
                continue
            self._count(held)

    def _count(self, held: _Held) -> None:
        # Of a tensor without a gradient, or in a skipped step, what was owed is given up: no checkpoint has it.
        held.count(forget=self._cut_after(held.next))
        if self._keep_every and held.next % self._keep_every == 0:
            held.kept[held.next] = held.memories
            for number in sorted(held.kept)[:-HELD_CHECKPOINTS]:
                del held.kept[number]

    def locate(self, standing: Mapping[tuple[int, int], int], *, skipped: bool = False) -> None:
        """Adjust after a (re)start.

        standing: number of the next push by (replica, shard), for all replicas of this worker. skipped: the last step
        that counts changed nothing.

        This settles a push that counts but whose answer was lost. In other cases of a mismatch the codec's rule
        decides: the memory is that of a checkpoint, or zero.
        """
        for key, held in list(self._held.items()):
            number = standing.get(key)
            if number is None:
                del self._held[key]
                continue
            if number == held.next + 1:
                held.pending = {} if skipped else held.pending
                self._count(held)
            elif number != held.next:
                held.memories, held.next = held.kept.get(number, {}), number
            held.pending = {}
            held.kept = {kept: memories for kept, memories in held.kept.items() if kept <= number}
        # What it showed of a replica that is another worker's now would be counted there too.
        self._owed = {key: norm for key, norm in self._owed.items() if key[:2] in self._held}

    def inherit(self, before: PushEncoders) -> None:
        """Take over the memory of earlier encoders of the same job; locate() then decides what remains valid."""
        if before.coding.plan.plan_id == self.coding.plan.plan_id:
            self._held = before._held
            return
        for replica in {replica for replica, _ in before._held}:
            numbers = {held.next for (whose, _), held in before._held.items() if whose == replica}
            if len(numbers) == 1:
                self.load_state_dict(replica, before.state_dict(replica), numbers.pop())

    # As part of a replica's state

    def state_dict(self, replica: int) -> dict[str, dict[str, torch.Tensor]]:
        """A replica's memory by tensor and name; flat over the tensor, however the plan cuts it."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        plan = self.coding.plan
        for (whose, _), held in self._held.items():
            for memory in held.memories.values() if whose == replica else ():
                for (name, row, what), values in memory.items():
                    tensor, slots = plan.tensors[plan.index[name]], found.setdefault(name, {})
                    if what not in slots and self._is_whole(name):
                        slots[what] = values
                        continue
                    whole = slots.setdefault(what, values.new_zeros(tensor.elements))
                    start = row * tensor.row_elements
                    whole[start : start + values.numel()] = values.reshape(-1)
        return found

    def _is_whole(self, name: str) -> bool:
        """Whether a tensor is a single part, whose memory may have any shape."""
        pieces = list(self.coding.plan.pieces(self.coding.plan.index[name]))
        own = self.coding.codec_of(self.coding.plan.tensors[self.coding.plan.index[name]])
        return len(pieces) == 1 and own.scope is not Scope.QUANTUM

    def load_state_dict(self, replica: int, state: Mapping[str, Mapping[str, torch.Tensor]], number: int) -> None:
        """Load a replica's memory for the push `number`, from the same plan or one with other cuts."""
        for shard, spec in enumerate(self.coding.plan.shards):
            memories: Memories = {}
            for bucket in range(len(spec.buckets)):
                memory = memories.setdefault(bucket, {})
                coding = self.coding.bucket(shard, bucket)
                for part in coding.layout.parts(coding.codec.scope):
                    for what, values in state.get(part.tensor.name, {}).items():
                        start = part.first_row * part.tensor.row_elements
                        mine = values if part.is_whole else values[start : start + part.elements]
                        memory[part.tensor.name, part.first_row, what] = mine.clone()
            self._held[replica, shard] = _Held(number, memories)

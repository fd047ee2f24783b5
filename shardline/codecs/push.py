"""A worker's side of a codec: encodes its pushes, and keeps the error memory of each of its replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardline.codecs.base import Memory, MemoryKey, Scope, Turn
from shardline.codecs.coding import Coding
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

    def count(self) -> None:
        """Note that the push counts."""
        self.memories = {**self.memories, **self.pending}
        self.pending = {}
        self.next += 1


class PushEncoders:
    """Encodes the pushes of one worker. Different buckets may be encoded by different threads at the same time.

    seed: the job's. sender: the number for random numbers if workers push for themselves; None = each replica's.
    keep_every: pushes between two checkpoints, 0 = there are none; see Memory.RESTORED.

    A push is numbered (begin), its buckets are encoded, possibly again if the exchange is given up and the step
    computed again, and it counts (settle) or not: only then is the memory that of the next push.
    """

    def __init__(self, coding: Coding, *, seed: int = 0, sender: int | None = None, keep_every: int = 0) -> None:
        self.coding = coding
        self._seed = seed
        self._sender = sender
        self._keep_every = keep_every if coding.codec.memory is Memory.RESTORED else 0
        self._remembers = coding.codec.memory is not Memory.NONE
        self._numbers: dict[int, int] = {}
        """Number of the open push, by shard."""
        self._held: dict[tuple[int, int], _Held] = {}
        """By (replica, shard)."""

    @property
    def name(self) -> str:
        """The codec's name in pushes."""
        return self.coding.name

    def begin(self, shard: int, number: int) -> None:
        """Set a shard's open push for the encodings that follow: the step, or the worker's count of pushes."""
        self._numbers[shard] = number

    def encode(
        self, shard: int, bucket: int, replica: int, values: torch.Tensor, present: Sequence[bool] = ()
    ) -> Buffer:
        """One bucket of the open push; see Encoder.encode."""
        encoder = self.coding.bucket(shard, bucket).encoder
        number = self._numbers.get(shard, 0)
        who = replica if self._sender is None else self._sender
        if not self._remembers:
            return encoder.encode(values, Turn(number, who, self._seed, present))
        held = self._held.setdefault((replica, shard), _Held(number))
        memory = dict(held.memories.get(bucket, {}))
        data = encoder.encode(values, Turn(number, who, self._seed, present, memory=memory))
        held.pending[bucket] = memory
        return data

    def settle(self, *, skipped: bool = False) -> None:
        """The open push counts at every shard; the next one follows. skipped: its step changed nothing."""
        for (_, shard), held in self._held.items():
            again = held.next > self._numbers.get(shard, held.next)
            if skipped or again:
                held.pending = {}
            if again:
                # It was already counted there, and was resent only for the other shards.
                continue
            held.count()
            self._keep(held)

    def _keep(self, held: _Held) -> None:
        if self._keep_every and held.next % self._keep_every == 0:
            held.kept[held.next] = held.memories
            for number in sorted(held.kept)[:-HELD_CHECKPOINTS]:
                del held.kept[number]

    def locate(self, standing: Mapping[tuple[int, int], int]) -> None:
        """Adjust after a (re)start.

        standing: number of the next push by (replica, shard), for all replicas of this worker.

        This settles a push that counts but whose answer was lost. In other cases of a mismatch the codec's rule
        decides: the memory is that of a checkpoint, or zero.
        """
        for key, held in list(self._held.items()):
            number = standing.get(key)
            if number is None:
                del self._held[key]
                continue
            if number == held.next + 1:
                held.count()
            elif number != held.next:
                held.memories, held.next = held.kept.get(number, {}), number
            held.pending = {}
            held.kept = {kept: memories for kept, memories in held.kept.items() if kept <= number}

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
        return len(pieces) == 1 and self.coding.codec.scope is not Scope.QUANTUM

    def load_state_dict(self, replica: int, state: Mapping[str, Mapping[str, torch.Tensor]], number: int) -> None:
        """Load a replica's memory for the push `number`, from the same plan or one with other cuts."""
        scope = self.coding.codec.scope
        for shard, spec in enumerate(self.coding.plan.shards):
            memories: Memories = {}
            for bucket in range(len(spec.buckets)):
                memory = memories.setdefault(bucket, {})
                for part in self.coding.bucket(shard, bucket).layout.parts(scope):
                    for what, values in state.get(part.tensor.name, {}).items():
                        start = part.first_row * part.tensor.row_elements
                        mine = values if part.is_whole else values[start : start + part.elements]
                        memory[part.tensor.name, part.first_row, what] = mine.clone()
            self._held[replica, shard] = _Held(number, memories)

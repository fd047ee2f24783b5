"""A job's codec applied to its plan: the actual codec, coders and size bound for each bucket and direction."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardline.codecs.auto import undecided
from shardline.codecs.base import Codec, Coder, Direction, Layout, Memory, MemoryKey, Scope, Turn, zeros
from shardline.codecs.parts import ERROR
from shardline.codecs.rows import PLAIN, PackedRows, codec_of_rows
from shardline.core.plan import Plan
from shardline.core.rows import MOST_BYTES
from shardline.core.spec import TensorKind, TensorSpec
from shardline.core.tensor_bytes import Buffer
from shardline.errors import JobError, ProtocolError

MEASURED_EVERY = 50
"""Steps between two measurements of what encoding changes: each decodes a whole contribution once more."""


@dataclass(frozen=True, slots=True)
class BucketCoding:
    codec: Codec
    """The actual codec: the job's, or PLAIN if that encodes none of the bucket's tensors."""
    name: str
    """The codec's name in messages."""
    layout: Layout
    coder: Coder
    usual_bytes: int
    least_bytes: int
    max_bytes: int

    def misfit(self, nbytes: int) -> str:
        """Why no payload of this bucket has this length; "" if one may. Checked before memory is allocated for it."""
        if self.least_bytes <= nbytes <= self.max_bytes:
            return ""
        least = "" if self.fixed_size else f"{self.least_bytes} to "
        return f"codec {self.name} makes {least}{self.max_bytes} bytes"

    @property
    def fixed_size(self) -> bool:
        """Whether all payloads have one length."""
        return self.least_bytes == self.max_bytes


class Coding:
    """One direction's codec applied to a plan, and those of single tensors. Any thread may use it.

    turned: what the codec of a single tensor is in this direction; None = `codec` is for all tensors. seed: the job's.
    Buckets' codings are cached.
    """

    def __init__(
        self, codec: Codec, plan: Plan, turned: Callable[[Codec], Codec] | None = None, *, seed: int = 0
    ) -> None:
        self.codec = codec
        self.seed = seed
        self._others: dict[str, Codec] = {}
        if turned is not None:
            self._others = {text: turned(parsed(text)) for text in {tensor.codec for tensor in plan.tensors} - {""}}
        self.plan = plan
        self.name = str(codec)
        self._buckets: dict[tuple[int, int], BucketCoding] = {}
        self._memories: dict[tuple[int, int, str], dict[MemoryKey, torch.Tensor]] = {}
        self._errors: dict[tuple[int, int], tuple[int, float, float]] = {}
        """By shard and bucket: the step last measured, and the squared norms of its error and of its values."""

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The job's own, and those of single tensors."""
        return (self.codec, *self._others.values())

    @functools.cached_property
    def exact(self) -> bool:
        return all(codec.exact for codec in self.codecs)

    @functools.cached_property
    def is_view(self) -> bool:
        return all(codec.is_view for codec in self.codecs)

    def codec_of(self, tensor: TensorSpec) -> Codec:
        return self._others.get(tensor.codec, self.codec)

    def bucket(self, shard: int, number: int) -> BucketCoding:
        """The coding of one bucket. Raises JobError if the plan cuts a tensor that the codec needs whole."""
        found = self._buckets.get((shard, number))
        if found is None:
            found = self._buckets[shard, number] = self._make(shard, number)
        return found

    def _make(self, shard: int, number: int) -> BucketCoding:
        spec = self.plan.shards[shard].buckets[number]
        layout = Layout(bucket=spec, tensors=self.plan.tensors)
        # A bucket has tensors of one codec.
        first = self.plan.tensors[spec.slices[0].tensor]
        own = self.codec_of(first)
        if spec.kind is TensorKind.TABLE:
            rows = PackedRows(codec_of_rows(own, first.row_elements), first)
            return BucketCoding(rows.codec, str(rows.codec), layout, rows, 0, 0, MOST_BYTES)
        taken = [part for part in layout.parts(Scope.TENSOR) if own.takes(part.tensor)]
        cut = next((part for part in taken if not part.is_whole and own.wants_whole(part.tensor.shape)), None)
        if cut is not None:
            raise JobError(f"codec {own} needs whole tensors, but the plan cuts {cut.tensor.name!r}")
        codec = own if taken else PLAIN
        usual = codec.usual_bytes(layout)
        # What is owed may be sent at any time, see Turn.whole.
        least, most = codec.sizes(layout)
        most = spec.nbytes if codec.memory is not Memory.NONE else most
        return BucketCoding(codec, str(codec), layout, codec.coder(layout), usual, least, most)

    def measure(self, shard: int, number: int, values: torch.Tensor, data: Buffer, turn: Turn) -> bool:
        """In every MEASURED_EVERYth step: note how far what was sent is from what was to be. Returns whether it did.

        That is the values, and what error memory owed. turn: as after encoding.
        """
        before = self._errors.get((shard, number))
        due = turn.step % MEASURED_EVERY == 0 and (before is None or before[0] != turn.step)
        table = self.plan.shards[shard].buckets[number].kind is TensorKind.TABLE
        if (
            not due
            or table
            or self.bucket(shard, number).codec.exact
            or not (values.is_floating_point() or values.is_complex())
        ):
            return False
        # A decoder may keep the bytes, and change its memory.
        found = self.bucket(shard, number).coder.decode(bytearray(data), replace(turn, memory=dict(turn.memory)))
        owed = self._owed(shard, number, turn)
        error = values - found if owed is None else owed
        self._errors[shard, number] = (turn.step, _square(error), _square(found + error))
        return True

    def _owed(self, shard: int, number: int, turn: Turn) -> torch.Tensor | None:
        """What error memory holds after a push, as a bucket: nothing after all was sent. None without such memory."""
        coding = self.bucket(shard, number)
        # Not by what the memory holds: a bucket of vectors has momentum alone, and nothing of it is left to be sent.
        if coding.codec.memory is Memory.NONE or coding.codec.direction is Direction.PULL:
            return None
        found = zeros(coding.layout)
        for part in coding.layout.parts(coding.codec.scope):
            error = turn.memory.get((part.tensor.name, part.first_row, ERROR))
            if error is not None:
                found[part.offset : part.end] = error
        return found

    @property
    def relative_error(self) -> float | None:
        """L2 norm of what was not sent, over that of what was to be, when it was last measured; None if it wasn't."""
        measured = list(self._errors.values())
        norm = sum(values for _, _, values in measured)
        return math.sqrt(sum(error for _, error, _ in measured) / norm) if norm > 0.0 else None

    def memory(self, shard: int, number: int, receiver: str) -> MutableMapping[MemoryKey, torch.Tensor]:
        """Memory of a bucket's pulls by one receiver: at a server what it sent, at a worker what it received."""
        codec = self.bucket(shard, number).codec
        if codec.memory is Memory.NONE:
            return {}
        return self._memories.setdefault((shard, number, "" if codec.memory.shared else receiver), {})


@dataclass(frozen=True)
class JobCodec:
    """A job's codecs: of each direction its own, and those of single tensors."""

    ups: tuple[Codec, ...]
    """Of gradients; the job's own is the first."""
    downs: tuple[Codec, ...]
    """Of parameters; the job's own is the first."""

    @classmethod
    def both(cls, codec: Codec) -> JobCodec:
        return cls((pushed(codec),), (pulled(codec),))

    def __str__(self) -> str:
        up, down = self.ups[0], self.downs[0]
        own = str(up) if up == down else f"{up} up, {down} down"
        return f"{own}, others for single tensors" if len(self.ups) > 1 else own

    @property
    def undecided(self) -> bool:
        return undecided(self.ups[0]) and undecided(self.downs[0])

    @property
    def remembers(self) -> bool:
        """Whether workers keep an error memory for their replicas."""
        return any(codec.memory is not Memory.NONE for codec in self.ups)

    def of(self, tensor: TensorSpec) -> tuple[Codec, Codec]:
        """The codecs of a tensor's gradient and of its values, if they take it."""
        own = JobCodec.both(parsed(tensor.codec)) if tensor.codec else self
        return own.ups[0], own.downs[0]

    def wants_whole(self, tensor: TensorSpec) -> bool:
        """Whether a codec of this tensor can't encode pieces of it."""
        return any(codec.takes(tensor) and codec.wants_whole(tensor.shape) for codec in self.of(tensor))


class JobCoding:
    """A job's codecs for its plan, or one codec for both directions. seed: the job's, for what is drawn on servers."""

    def __init__(self, codec: Codec | JobCodec, plan: Plan, *, seed: int = 0) -> None:
        both = codec if isinstance(codec, JobCodec) else JobCodec.both(codec)
        self.push = Coding(both.ups[0], plan, pushed, seed=seed)
        self.pull = Coding(both.downs[0], plan, pulled, seed=seed)
        self._plan = plan

    @functools.cached_property
    def plain(self) -> Coding:
        """Coding of initial values, and of what a sender leaves unencoded although the job has a codec."""
        return Coding(PLAIN, self._plan)

    def of_push(self, name: str) -> Coding:
        """The coding that a push names. Raises ProtocolError for another codec than the job's."""
        return self._named(name, self.push, "pushed")

    def of_pull(self, name: str) -> Coding:
        """The coding that a pulled bucket names. Raises ProtocolError for another codec than the job's."""
        return self._named(name, self.pull, "pulled")

    def _named(self, name: str, ours: Coding, what: str) -> Coding:
        if name == ours.name or name in map(str, ours.codecs):
            return ours
        if name in ("", PLAIN.name):
            return self.plain
        raise ProtocolError(f"{what} with codec {name[:100]!r}; the job uses {ours.name!r}")


def parsed(text: str) -> Codec:
    """The codec with this text. Raises JobError if it does not exist."""
    # The table imports the codecs, which import this module.
    from shardline.codecs import CODECS

    return CODECS.parse(text)


def _square(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def pushed(codec: Codec) -> Codec:
    return PLAIN if codec.direction is Direction.PULL else codec


def pulled(codec: Codec) -> Codec:
    return PLAIN if codec.direction is Direction.PUSH else codec


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
        if number == held.next:
            # Otherwise it has counted there, and is sent again for other shards.
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
            elif self._sender is not None:
                # Another batch may get this number. A step's gradient stays what it is, and what was sent of it may
                # still arrive, late or through an aggregator.
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

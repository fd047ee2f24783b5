"""Delta: parameters as encoded changes. The way down of double compression (Tang et al., "DoubleSqueeze", 2019)."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from shardline.codecs.base import Codec, Direction, Layout, Memory, MemoryKey, Turn
from shardline.core.reduce import is_finite
from shardline.core.spec import TensorSpec
from shardline.core.tensor_bytes import Buffer, digest, tensor_bytes, tensor_from_bytes
from shardline.errors import JobError, ProtocolError

BASE = struct.Struct("<Q")
"""The digest of what a change is relative to."""
KEPT = 2
"""Steps of which the sender keeps what it sent: a slow receiver may be one step behind the others."""
START = "start "
"""Begins the names of what a change leaves for the next one."""
VALUE = "value"
"""Name of v in the memory: at a sender of the last KEPT steps, at a receiver of the last step that it has received."""


@dataclass(frozen=True)
class Delta(Codec):
    """Parameters as encoded changes since the step that the receiver has; the next change makes up for rounding.

    What receivers have after step t is v_t = v_(t-1) + decode(encode(theta_t - v_(t-1))), so the error theta_t - v_t is
    a part of the next change and never adds up. All receivers have the same v_t, of which a server keeps one copy,
    and each worker one more. Who has not v_(t-1) gets all of v_t. In steps that are multiples of `refresh`, all get
    theta_t itself: a job that goes back to a checkpoint there ends in the same bits. A bucket that a step does not
    change keeps its v.

    Where the codec of the changes is exact, a change is the exclusive or of the bits, so v_t is theta_t in every step:
    with `sparse`, the entries that any worker's gradient has changed.
    """

    name: ClassVar[str] = "delta"
    direction = Direction.PULL
    by: str = "int8"
    refresh: int = 100

    def __post_init__(self) -> None:
        if self.refresh < 1:
            raise JobError(f"codec delta: refresh is {self.refresh}; give a number of steps, at least 1")
        # The table has this class too.
        from shardline.codecs import CODECS

        fitting = [kind.name for kind in CODECS if kind.direction is not Direction.PULL and _fits(kind)]
        if self.by not in fitting:
            raise JobError(
                f"codec delta: changes can't be encoded by {self.by!r}; give the name of a codec, without settings: "
                f"{', '.join(fitting)}"
            )

    @functools.cached_property
    def inner(self) -> Codec:
        """The codec of the changes. Raises JobError if it does not exist."""
        # The table has this class too.
        from shardline.codecs import CODECS

        return CODECS[self.by]()

    @property
    def memory(self) -> Memory:
        """With exact changes no pull depends on what was sent before."""
        # The values of two steps, and their changes, each at most half of them.
        return Memory(shared=True, copies=3, reset_every=0 if self.inner.exact else self.refresh)

    def takes(self, tensor: TensorSpec) -> bool:
        return self.inner.takes(tensor)

    def wants_whole(self, shape: Sequence[int]) -> bool:
        return self.inner.wants_whole(shape)

    def sizes(self, layout: Layout) -> tuple[int, int]:
        return 0, layout.bucket.nbytes

    def coder(self, layout: Layout) -> DeltaCoder:
        return DeltaCoder(self, layout)


class DeltaCoder:
    """Encoder and decoder of one bucket. The memory has v of the last steps, and the bytes of their changes."""

    def __init__(self, codec: Delta, layout: Layout) -> None:
        self._refresh = codec.memory.reset_every
        self._exact = codec.inner.exact
        self._layout = layout
        self._inner = codec.inner.coder(layout)

    def encode(self, values: torch.Tensor, turn: Turn) -> Buffer:
        """The change since turn.base, or all of the values."""
        if _value(turn.step) not in turn.memory:
            if not is_finite(values):
                # In the memory it would spoil all later steps.
                return tensor_bytes(values)
            # Make v of this step, whoever asks for it, and its change.
            memory, after = turn.memory, values.clone()
            last = _last(memory, turn.step)
            if last >= 0 and (not self._refresh or last // self._refresh == turn.step // self._refresh):
                before = memory[_value(last)]
                if turn.changed <= last:
                    # Receivers keep what they have.
                    after = before
                elif last == turn.step - 1:
                    after = self._changed(values, before, turn)
            memory[_value(turn.step)] = after
            _forget(memory, turn.step - KEPT)
        change = turn.memory.get(_change(turn.step))
        if change is not None and turn.base == turn.step - 1:
            return tensor_bytes(change)
        return tensor_bytes(turn.memory[_value(turn.step)])

    def _changed(self, values: torch.Tensor, before: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Values of this step by a change; the true ones where a change would not be shorter, or would overflow."""
        change = _exclusive(values, before) if self._exact else values - before
        inner = Turn(turn.step, seed=turn.seed, owes=False, memory=_started(turn))
        coded = bytes(self._inner.encode(change, inner))
        for (name, row, what), tensor in inner.memory.items():
            turn.memory[name, turn.step, f"{START}{row}/{what}"] = tensor
        after = values.clone() if self._exact else self._after(before, memoryview(bytearray(coded)), turn)
        if BASE.size + len(coded) >= self._layout.bucket.nbytes or not is_finite(after):
            return values.clone()
        turn.memory[_change(turn.step)] = _kept(BASE.pack(digest(tensor_bytes(before))) + coded)
        return after

    def _after(self, before: torch.Tensor, coded: memoryview, turn: Turn) -> torch.Tensor:
        change = self._inner.decode(coded, Turn(turn.step))
        return _exclusive(before, change) if self._exact else before + change

    def decode(self, payload: Buffer, turn: Turn) -> torch.Tensor:
        """The receiver's new values. Who relays gives others the same change, or the values."""
        bucket, whole = self._layout.bucket, len(payload) == self._layout.bucket.nbytes
        if whole:
            found = tensor_from_bytes(bytearray(payload), bucket.dtype)
        else:
            view, before = memoryview(payload), turn.memory.get(_value(_last(turn.memory, turn.step)))
            if len(view) < BASE.size:
                raise ProtocolError(f"codec delta: {len(view)} bytes are too few for a change")
            if before is None or BASE.unpack_from(view) != (digest(tensor_bytes(before)),):
                has = "nothing" if before is None else "other values"
                raise ProtocolError(f"codec delta: a change of step {turn.step - 1}, of which this task has {has}")
            found = self._after(before, view[BASE.size :], turn)
        if turn.relays:
            _forget(turn.memory, turn.step - KEPT)
        else:
            turn.memory.clear()
        if is_finite(found):
            turn.memory[_value(turn.step)] = found
            if turn.relays and not whole:
                turn.memory[_change(turn.step)] = _kept(payload)
        return found


def _fits(kind: type[Codec]) -> bool:
    """Whether a codec of gradients says something about changes of parameters."""
    codec = kind()
    return not (codec.is_view or codec.at_server.votes or codec.has_momentum)


def _exclusive(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The bits in which two tensors differ, as such a tensor."""
    found: torch.Tensor = one.view(torch.uint8) ^ other.view(torch.uint8)
    return found.view(one.dtype)


def _last(memory: Mapping[MemoryKey, torch.Tensor], step: int) -> int:
    """The last step before this one whose v is in the memory; -1 if there is none."""
    return max((held for _, held, what in memory if what == VALUE and held < step), default=-1)


def _started(turn: Turn) -> dict[MemoryKey, torch.Tensor]:
    """What the change of the step before left for this one; nothing after a refresh, which depends on no step."""
    found: dict[MemoryKey, torch.Tensor] = {}
    for (name, step, what), tensor in turn.memory.items():
        if step == turn.step - 1 and what.startswith(START):
            row, _, left = what.removeprefix(START).partition("/")
            found[name, int(row), left] = tensor
    return found


def _forget(memory: MutableMapping[MemoryKey, torch.Tensor], last: int) -> None:
    """Drop everything of the steps up to this one."""
    for key in [key for key in memory if key[1] <= last]:
        del memory[key]


def _kept(payload: Buffer) -> torch.Tensor:
    """A copy of these bytes for the memory."""
    return tensor_from_bytes(memoryview(bytearray(payload)), "uint8")


def _value(step: int) -> MemoryKey:
    return ("", step, VALUE)


def _change(step: int) -> MemoryKey:
    return ("", step, "change")

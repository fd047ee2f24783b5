"""Which replicas' contributions make each step, in modes that close a step before all of them have come. Pure.

A choice is a number whose bit r is set if replica r contributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardline.errors import ProtocolError


def choice_of(replicas: Iterable[int]) -> int:
    choice = 0
    for replica in replicas:
        choice |= 1 << replica
    return choice


def members(choice: int) -> tuple[int, ...]:
    return tuple(replica for replica in range(choice.bit_length()) if choice >> replica & 1)


def choice_to_bytes(choice: int) -> bytes:
    """A choice as a bitmap; empty for 0."""
    return choice.to_bytes((choice.bit_length() + 7) // 8, "little")


def choice_from_bytes(data: bytes) -> int:
    """The choice of a bitmap; 0 for an empty one."""
    return int.from_bytes(data, "little")


@dataclass(frozen=True)
class Choices:
    """The choices of consecutive steps, from step `first` on."""

    first: int = 0
    made: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.first + len(self.made)

    def at(self, step: int) -> int | None:
        """The choice of a step; None if it is not among these."""
        return self.made[step - self.first] if self.first <= step < self.end else None

    def since(self, step: int) -> Choices:
        first = min(max(step, self.first), self.end)
        return Choices(first, self.made[first - self.first :])

    def until(self, step: int) -> Choices:
        """Those before `step`; if there are none, the steps to follow begin there."""
        made = self.made[: max(0, step - self.first)]
        return Choices(self.first, made) if made else Choices(step)

    def followed_by(self, others: Choices) -> Choices:
        """These and then the others, or only the others if there is a gap."""
        if others.first > self.end or others.first < self.first:
            return others
        return Choices(self.first, self.made[: others.first - self.first] + others.made)

    def packed(self, width: int) -> bytes:
        """All of them as bitmaps of `width` bytes."""
        return b"".join(choice.to_bytes(width, "little") for choice in self.made)

    @property
    def width(self) -> int:
        return max((choice.bit_length() + 7) // 8 for choice in self.made) if self.made else 1

    @classmethod
    def unpacked(cls, first: int, width: int, data: bytes) -> Choices:
        """The inverse of packed(). Raises ProtocolError if the length is not a multiple of the width."""
        if width < 1 or len(data) % width:
            raise ProtocolError(f"choices of {len(data)} bytes; each has {width}")
        return cls(first, tuple(choice_from_bytes(data[start : start + width]) for start in range(0, len(data), width)))

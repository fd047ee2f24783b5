"""Auto: the codecs that a job's own figures speak for. The chief chooses them; until then nothing is encoded.

All here is pure. What is measured, and when: chief/shardline_chief/rules/codecs/choice.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardline.codecs.base import Codec
from shardline.codecs.raw import Raw

REFRESH = 100
"""Steps between two pulls of whole parameters, if checkpoint_every permits."""
GAIN = 0.8
"""Another codec is taken only if a step should take at most this share of the time without one."""


@dataclass(frozen=True)
class Auto(Raw):
    """The chief measures a few steps without a codec, chooses, and starts the job over with its choice."""

    name: ClassVar[str] = "auto"


def undecided(codec: Codec) -> bool:
    """Whether the chief is to choose another codec in its place."""
    return isinstance(codec, Auto)


@dataclass(frozen=True, kw_only=True)
class CodecSpeed:
    """What a codec makes of a large tensor on one core."""

    share: float
    """Bytes sent per byte in memory."""
    encode_s: float
    """Seconds per byte in memory."""
    decode_s: float


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A step as measured, without a codec, and what its exchange consists of."""

    step_s: float
    """Seconds from one step to the next."""
    compute_s: float
    exchange_s: float
    """Seconds of push and pull, without waiting for other workers."""
    nbytes: int
    """Bytes of the trained parameters, which travel both ways."""
    replicas: int
    """Of the job; each is encoded by itself."""
    workers: int
    servers: int

    @property
    def own(self) -> int:
        """Replicas of the worker that has most."""
        return -(-self.replicas // self.workers)


@dataclass(frozen=True, kw_only=True)
class Option:
    """Codecs to choose from. changes: the parameters travel as changes, encoded by `down_by`."""

    up: str
    down: str
    down_by: str
    refresh: int = 0
    """Every so many steps the parameters travel whole; 0 = never."""


def options(checkpoint_every: int) -> tuple[Option, ...]:
    """What may be chosen, the most exact first."""
    refresh = REFRESH if checkpoint_every % REFRESH == 0 else checkpoint_every
    found = [Option(up="raw", down="raw", down_by="raw"), Option(up="bf16", down="bf16", down_by="bf16")]
    # Changes in one bit lose much more than gradients in one bit: docs/reproductions.md, R9.
    for up, by in (("int8", "int8"), ("onebit", "int8"), ("topk", "topk")):
        found += [
            Option(up=up, down=f"delta:by={by},refresh={refresh}", down_by=by, refresh=refresh),
            # For jobs whose parameters can't travel as changes.
            Option(up=up, down="bf16", down_by="bf16"),
        ]
    return tuple(found)


NAMES = ("raw", "bf16", "int8", "onebit", "topk")
"""Codecs that the options consist of."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An option with what its step is expected to take, in seconds."""

    option: Option
    exchange_s: float
    step_s: float


def estimate(option: Option, cost: StepCost, speeds: Mapping[str, CodecSpeed]) -> Estimate:
    """What a step would take: its bytes at the measured rate, and the work of encoding and decoding."""
    up, down = speeds[option.up], speeds[option.down_by]
    pushes = 1 if option.up == "raw" else cost.own
    sent = up.share * pushes
    # Workers encode side by side, and so do servers.
    work_s = cost.nbytes * (up.encode_s * pushes + up.decode_s * cost.replicas / cost.servers)
    received = down.share
    if option.refresh:
        received += (1.0 - down.share) / option.refresh
        # A server decodes what it sends, to know what workers have.
        work_s += cost.nbytes * down.decode_s / cost.servers
    work_s += cost.nbytes * (down.encode_s / cost.servers + down.decode_s)
    if option.up == "raw":
        return Estimate(option=option, exchange_s=cost.exchange_s, step_s=cost.step_s)
    exchange_s = cost.exchange_s * (sent + received) / 2.0 + work_s
    # What is not the exchange stays: with overlap, less than compute_s.
    rest_s = max(cost.step_s - cost.exchange_s, 0.0)
    return Estimate(option=option, exchange_s=exchange_s, step_s=max(rest_s + exchange_s, cost.compute_s))


def choose(found: Sequence[Option], cost: StepCost, speeds: Mapping[str, CodecSpeed]) -> Estimate:
    """The first option whose exchange takes no longer than computing; if none does, the fastest.

    found: as from options(), without those that don't suit the job; the first is no codec at all. Others count only if
    they save at least 1 - GAIN of a step.
    """
    plain, *others = (estimate(option, cost, speeds) for option in found)
    better = [one for one in others if one.step_s <= GAIN * cost.step_s]
    if plain.exchange_s <= cost.compute_s or not better:
        return plain
    hidden = (one for one in better if one.exchange_s <= cost.compute_s)
    return next(hidden, None) or min(better, key=lambda one: one.step_s)

"""The cadence seam: when a worker talks to the servers, what it sends, and what it keeps between two exchanges.

A *step* of the job is one exchange with the servers. A *tick* is one pass of a worker's loop: forward, backward,
optimizer.step(). A cadence says how many ticks make a step. The worker calls, in this order:

    began(step)                                the servers' parameters of `step` are in Held.pulled
    for tick in range(ticks):
        for each replica of this worker:
            enter(replica, tick)               before its forward pass
            take(replica, tick, outgoing)      after its backward pass; at the last tick, what it returns is sent

began() comes again, with a step that may be lower than before, wherever a step starts over: a server was lost and the
job went back, replicas were moved, the process resumed. Whatever a cadence keeps of an unfinished step is void then.

How known methods fit: accumulation over H steps adds up in take() and returns the mean at the last tick; local SGD and
DiLoCo keep one copy of the parameters (and the state of an inner optimizer) per replica, train it in take(), and return
Held.pulled minus that copy at the last tick; Streaming DiLoCo returns only the tensors of the fragment that is due, and
merges what arrives in began(). See docs/cadences.md. Pure.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardline.core.spec import TensorSpec
from shardline.seams import Resident

Values = Mapping[str, torch.Tensor]
"""Tensors by the names that the job gives them."""
Hyper = Mapping[int, Mapping[str, float]]
"""Numbers of parameter groups, by group, that differ from what the job began with (a scheduler's learning rate)."""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """One replica's part of a step: what backward() left in .grad, or what a cadence made of it."""

    values: Values
    """By name; in the shape and dtype of the parameter. A tensor that is absent contributes nothing."""
    buffers: Values = field(default_factory=dict)
    """Buffers that the pass has changed (batch norm statistics), by name, where this replica's are sent."""
    samples: int = 0
    """Training samples behind it."""
    hyper: Hyper = field(default_factory=dict)
    loss: float | None = None
    keep: bool = False
    """Nobody writes to the values until the step is closed, so they need not be copied."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """The tensors that a worker's cadence works with."""

    model: Values
    """The model's own: the loop computes with them."""
    pulled: Values
    """What pulls write. The same objects as `model`, unless the cadence has copies(); see there."""
    specs: Sequence[TensorSpec]
    """Kind, shape and parameter group of each, in plan order."""


class LocalTraining(abc.ABC):
    """One worker's side of a cadence. Used by one thread; outlives exchanges, servers and histories."""

    @abc.abstractmethod
    def began(self, step: int) -> None:
        """A step starts, or starts over: Held.pulled has the servers' parameters of `step`, every replica is at tick 0.

        In asynchronous modes `step` counts this worker's own pushes.
        """

    @abc.abstractmethod
    def enter(self, replica: int, tick: int) -> None:
        """Before a replica's forward pass: the model has to hold what this replica computes with at this tick."""

    @abc.abstractmethod
    def take(self, replica: int, tick: int, outgoing: Outgoing) -> Outgoing:
        """After a replica's backward pass. What it returns at the last tick of a step is sent; other results are not.

        Before each pass the buffers in Held.pulled are those of the step again. A cadence with copies() fills
        Outgoing.buffers itself.
        """


class Cadence(Resident, abc.ABC):
    """When a worker talks to the servers, and what it then sends."""

    @property
    def ticks(self) -> int:
        """Passes of a worker's loop that make one step of the job; at least 1."""
        return 1

    @property
    def sends_deltas(self) -> bool:
        """Whether what is sent is old parameters minus new ones instead of a gradient; update rules are told."""
        return False

    @property
    def streams(self) -> bool:
        """Whether exactly what backward() computes is sent, at once: then it may leave while backward() runs, and may
        be computed in memory that the servers read.
        """
        return False

    @property
    def copies(self) -> bool:
        """Whether pulls write to tensors of their own instead of the model's, since the model moves by itself."""
        return False

    @abc.abstractmethod
    def local(self, held: Held) -> LocalTraining:
        """The working half, made once per worker process."""


class Ticks:
    """Where a worker is within the open step. Used by one thread."""

    def __init__(self, cadence: Cadence) -> None:
        self._each = cadence.ticks
        self.tick = 0
        """The one that is open."""

    @property
    def last(self) -> bool:
        """Whether the open tick ends the step."""
        return self.tick + 1 >= self._each

    def number(self, step: int) -> int:
        """The open tick among all ticks of a job whose open step (or leased batch) is this one."""
        return step * self._each + self.tick

    def advance(self) -> bool:
        """The open tick has ended; returns whether the step has ended with it."""
        ended = self.last
        self.tick = 0 if ended else self.tick + 1
        return ended

    def restart(self) -> None:
        """The step starts over."""
        self.tick = 0

"""The cadence seam: when a worker exchanges with the servers, what it sends, and what it keeps between exchanges.

A *step* of the job is one exchange with the servers. A *tick* is one pass of a worker's loop: forward, backward,
optimizer.step(). A cadence says how many ticks make a step. The worker calls, in this order:

    began(step)                                the servers' parameters of `step` are in Held.pulled
    for tick in range(ticks):
        for each replica of this worker:
            enter(replica, tick)               before its forward pass
            take(replica, tick, outgoing)      after its backward pass; the result of the last tick is sent

began() is called again, possibly with a lower step than before, whenever a step starts over: a server was lost and the
job went back, replicas were moved, the process resumed. A cadence then drops everything of the unfinished step.

How known methods fit: accumulation over H steps adds up in take() and returns the mean at the last tick; local SGD and
DiLoCo keep one copy of the parameters (and the state of an inner optimizer) per replica, train it in take(), and return
Held.pulled minus that copy at the last tick; Streaming DiLoCo returns only the tensors of the fragment that is due, and
merges the new values in began(). See docs/cadences.md. Pure.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardline.core.spec import TensorSpec
from shardline.seams import Resident

Values = Mapping[str, torch.Tensor]
"""Tensors by their names in the job."""
Hyper = Mapping[int, Mapping[str, float]]
"""Hyper-parameters that differ from the job's initial ones (a scheduler's learning rate), by group."""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """One replica's part of a step: the .grad of backward(), or what a cadence made of it."""

    values: Values
    """By name, with the shape and dtype of the parameter. A missing tensor contributes nothing."""
    buffers: Values = field(default_factory=dict)
    """Buffers changed by the pass (batch norm statistics), by name, if this replica's are sent."""
    samples: int = 0
    """Number of training samples."""
    hyper: Hyper = field(default_factory=dict)
    loss: float | None = None
    keep: bool = False
    """The values are not written to until the step is closed, so they need not be copied."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """The tensors of a worker's cadence."""

    model: Values
    """The model's tensors, used by the loop."""
    pulled: Values
    """Tensors written by pulls. The same objects as `model`, unless Cadence.copies."""
    specs: Sequence[TensorSpec]
    """Kind, shape and parameter group of each, in plan order."""


class LocalTraining(abc.ABC):
    """One worker's side of a cadence. Used by one thread; outlives exchanges, servers and timelines."""

    @abc.abstractmethod
    def began(self, step: int) -> None:
        """Start a step, maybe again: Held.pulled has the servers' parameters of `step`, every replica is at tick 0.

        In asynchronous modes `step` counts this worker's own pushes.
        """

    @abc.abstractmethod
    def enter(self, replica: int, tick: int) -> None:
        """Prepare a replica's forward pass: the model must contain what this replica computes with at this tick."""

    @abc.abstractmethod
    def take(self, replica: int, tick: int, outgoing: Outgoing) -> Outgoing:
        """Process a replica's backward pass. The result of a step's last tick is sent; other results are ignored.

        Before each pass the buffers in Held.pulled are reset to those of the step. A cadence with copies fills
        Outgoing.buffers itself.
        """


class Cadence(Resident, abc.ABC):
    """When a worker exchanges with the servers, and what it sends."""

    @property
    def ticks(self) -> int:
        """Number of passes of a worker's loop per step of the job; at least 1."""
        return 1

    @property
    def sends_deltas(self) -> bool:
        """Whether old parameters minus new ones are sent instead of a gradient; update rules have to accept that."""
        return False

    @property
    def streams(self) -> bool:
        """Whether exactly the gradients of backward() are sent, at once.

        Then they may leave while backward() runs, and may be computed in memory that the servers read.
        """
        return False

    @property
    def copies(self) -> bool:
        """Whether pulls write to separate tensors, because the cadence changes the model's own."""
        return False

    @abc.abstractmethod
    def local(self, held: Held) -> LocalTraining:
        """The cadence's state for a worker, made once per worker process."""


class Ticks:
    """A worker's position within the open step. Used by one thread."""

    def __init__(self, cadence: Cadence) -> None:
        self._each = cadence.ticks
        self.tick = 0
        """Number of the open tick within the step."""

    @property
    def last(self) -> bool:
        """Whether the open tick ends the step."""
        return self.tick + 1 >= self._each

    def number(self, step: int) -> int:
        """Number of the open tick among all ticks of the job, given the open step (or leased batch)."""
        return step * self._each + self.tick

    def advance(self) -> bool:
        """End the open tick; returns whether this ends the step."""
        ended = self.last
        self.tick = 0 if ended else self.tick + 1
        return ended

    def restart(self) -> None:
        """Start the step over."""
        self.tick = 0

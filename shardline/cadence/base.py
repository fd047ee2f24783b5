"""The cadence seam: when a worker exchanges with the servers, what it sends, and what it keeps between exchanges.

A *step* of the job is one exchange with the servers. A *tick* is one pass of a worker's loop: forward, backward,
optimizer.step(). A cadence says how many ticks make a step. The worker calls, in this order:

    began(step)                                every replica is at tick 0
    arrived(step)                              the servers' parameters of `step` are in Held.pulled
    for tick in range(ticks):
        for each replica of this worker:
            enter(replica, tick)               before its forward pass
            take(replica, tick, outgoing)      after its backward pass; the result of the last tick is sent

With an overlap, arrived() may come as late as right before the tick of that number.

began() is called again, possibly with a lower step than before, whenever a step starts over: a server was lost and the
job went back, replicas were moved, the process resumed. A cadence then drops everything of the unfinished step.

How a method that does not exist yet would use it: accumulation over H steps adds up in take() and returns the mean at
the last tick. See docs/cadences.md. Pure.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from shardline.core.fixed import fixed
from shardline.core.spec import Argument, TensorKind, TensorSpec, itemsize
from shardline.errors import JobError
from shardline.seams import Resident
from shardline.update.torch_optim.inner import InnerOptimizers

Values = Mapping[str, torch.Tensor]
"""Tensors by their names in the job."""
Hyper = Mapping[int, Mapping[str, float]]
"""Hyper-parameters that differ from the job's initial ones (a scheduler's learning rate), by group."""


@fixed(kw_only=True)
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
    drift: float = 0.0
    """L2 norm of how far the replica has moved, if it trained locally."""
    keep: bool = False
    """The values are not written to until the step is closed, so they need not be copied."""
    nonfinite: Sequence[str] = ()
    """Tensors whose gradients are not finite, among those that are not sent."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """The tensors of a worker's cadence."""

    model: Values
    """The model's tensors, used by the loop."""
    pulled: Values
    """Tensors written by pulls. The same objects as `model`, unless the cadence sends deltas."""
    specs: Sequence[TensorSpec]
    """Kind, shape and parameter group of each, in plan order."""
    inner: InnerOptimizers | None = None
    """The job's optimizer over `model`, if the cadence has an outer_rule."""
    replicas: int = 1
    """Of the job."""
    contributors: int = 1
    """Replicas whose mean makes one update; see Consistency.contributors()."""
    brings_buffers: Callable[[int], bool] = lambda replica: replica == 0
    """Whether a replica's buffers are sent."""


@fixed(kw_only=True)
class Told:
    """What is known of the pull that brought a step's parameters; the servers' part only where they sum for workers."""

    located: bool = False
    """The worker has looked for its step, which may be any."""
    wants_state: Collection[int] = ()
    """Shards that lack the worker's parameters and optimizer state for a cut."""
    hyper: Hyper = field(default_factory=dict)
    """Hyper-parameters of the step that was closed, from its replica 0."""


UNTOLD = Told()


class LocalTraining:
    """One worker's side of a cadence. Used by one thread; outlives exchanges, servers and timelines.

    This one changes nothing: the model contains the pulled values, and its gradients are sent.
    """

    def began(self, step: int) -> None:
        """Start a step, maybe again: every replica is at tick 0.

        Held.pulled has the servers' parameters of `step`; with an overlap it may be written to until arrived(). In
        asynchronous modes `step` counts this worker's own pushes.
        """

    def arrived(self, step: int, told: Told = UNTOLD) -> None:
        """Held.pulled has the servers' parameters of `step`. Called after began(), before tick Rounds.overlap.

        What a replica computes may not depend on how long before that tick this is.
        """

    def enter(self, replica: int, tick: int) -> None:
        """Prepare a replica's forward pass: the model must contain what this replica computes with at this tick."""

    def take(self, replica: int, tick: int, outgoing: Outgoing) -> Outgoing:
        """Process a replica's backward pass. The result of a step's last tick is sent; other results are ignored.

        Before each pass the buffers in Held.pulled are reset to those of the step. A cadence that sends deltas, whose
        passes don't change them, fills Outgoing.buffers itself.
        """
        return outgoing


class Sends(enum.Enum):
    """What a worker sends at the end of a step."""

    GRADIENTS = enum.auto()  # as backward() computes them: they may leave while it runs, from memory that servers read
    SUMS = enum.auto()  # made of gradients
    DELTAS = enum.auto()  # old parameters minus new ones: the model's own tensors change, so pulls write to others


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The passes of a worker's loop ("ticks") of each step of the job."""

    ticks: int = 1
    """At least 1."""
    start: int = 0
    """Steps before this one have one pass each."""
    overlap: int = 0
    """Passes of a step that run before the exchange that ended the previous one has to be complete.

    Below those of every step, and above 0 only with Cadence.keeps_copies: until then replicas go on with their own.
    """
    fragments: int = 1
    """Parts of the model, in turn: step t exchanges only parameters of the fragment t modulo their number."""
    together: bool = False
    """All workers have to take the same steps."""

    @property
    def uniform(self) -> bool:
        """Whether all steps have `ticks` passes."""
        return not self.start or self.ticks == 1

    def ticks_in(self, step: int) -> int:
        """Number of passes of this step."""
        return 1 if step < self.start else self.ticks

    def ticks_before(self, step: int) -> int:
        """Number of passes of all earlier steps."""
        return min(step, self.start) + max(0, step - self.start) * self.ticks


class Cadence(Resident, abc.ABC):
    """When a worker exchanges with the servers, and what it sends."""

    sends: ClassVar[Sends] = Sends.SUMS

    @property
    def rounds(self) -> Rounds:
        """How many passes make a step."""
        return Rounds()

    @property
    def outer_rule(self) -> Mapping[str, Argument] | None:
        """Arguments of the SGD that the servers run, if the workers run the job's optimizer (see Held.inner).

        A worker's optimizer state is lost when its process ends or the replica moves, so the final bits then depend on
        who died, unless it has none. None: the servers run the job's optimizer.
        """
        return None

    @property
    def keeps_copies(self) -> bool:
        """Whether replicas have parameters of their own from step to step, which are lost in the same way."""
        return False

    @abc.abstractmethod
    def local(self, held: Held) -> LocalTraining:
        """The cadence's state for a worker, made once per worker process."""


def fragmented(cadence: Cadence, tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The tensors with their fragments, a function of these alone. Raises JobError for a model with too few.

    From the largest to the smallest, in model order where they are equally large, each trained tensor goes to the
    fragment with the fewest bytes so far, the lowest of several. So equal layers are dealt out in turn, the strided
    pattern of Streaming DiLoCo, and fragments differ in bytes by no more than a tensor.
    """
    found, sizes = list(tensors), [0] * cadence.rounds.fragments
    if len(sizes) == 1:
        return tuple(found)
    trained = [number for number, tensor in enumerate(tensors) if tensor.kind is TensorKind.PARAM]
    if len(sizes) > len(trained):
        raise JobError(
            f"cadence {cadence}: fragments is {len(sizes)}, but the model has {len(trained)} trained tensors; "
            f"choose at most fragments={len(trained)}"
        )
    for number in sorted(trained, key=lambda number: -_nbytes(tensors[number])):
        fragment = sizes.index(min(sizes))
        sizes[fragment] += _nbytes(tensors[number])
        found[number] = replace(tensors[number], fragment=fragment)
    return tuple(found)


def _nbytes(tensor: TensorSpec) -> int:
    return tensor.elements * itemsize(tensor.dtype)


class Ticks:
    """A worker's position within the open step. Used by one thread."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._in_step = rounds.ticks_in(0)
        self.tick = 0
        """Number of the open tick within the step."""

    @property
    def last(self) -> bool:
        """Whether the open tick ends the step."""
        return self.tick + 1 >= self._in_step

    def number(self, step: int) -> int:
        """Number of the open tick among all ticks of the job, given the open step (or leased batch)."""
        return self._rounds.ticks_before(step) + self.tick

    def advance(self) -> bool:
        """End the open tick; returns whether this ends the step."""
        ended = self.last
        self.tick = 0 if ended else self.tick + 1
        return ended

    def begin(self, step: int) -> None:
        """Start this step, maybe again."""
        self._in_step = self._rounds.ticks_in(step)
        self.tick = 0

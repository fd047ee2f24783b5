"""Local training: every replica runs the job's optimizer on a copy of the parameters and sends how far it moved.

A round in the order of DiLoCo (Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models,
2023, Algorithm 1), with what does each line. The other cadences differ in the lines in parentheses.

    began(t), arrived(t)      theta_t is here                          (streaming-diloco: one fragment of it, later)
    enter(i, 0)               x_i = theta_t                            (easgd, streaming-diloco: what it has kept)
    enter(i, h), the pass     g = gradient of the loss at x_i
    take(i, h)                x_i = InnerOptimizer(x_i, g)             for h in range(every)
    take(i, every - 1)        delta_i = theta_t - x_i, which is sent   (finish(): slowmo divides it by the inner rate)
    the servers               theta_{t+1} = OuterSGD(theta_t, mean of all delta_i), with the arguments of outer_rule
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from shardline.cadence.base import (
    UNTOLD,
    Cadence,
    Held,
    LocalTraining,
    Outgoing,
    Rounds,
    Sends,
    Told,
    Values,
)
from shardline.core.spec import Argument, TensorKind
from shardline.errors import JobError
from shardline.update.torch_optim.inner import InnerOptimizers


class LocalCadence(Cadence):
    """Base of cadences whose `every` passes make one step, a round. A subclass is a dataclass with a field `every`."""

    sends: ClassVar[Sends] = Sends.DELTAS
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise JobError(f"cadence {self.name}: every is {self.every}; give a whole number of passes, at least 1")

    @property
    def rounds(self) -> Rounds:
        return Rounds(ticks=self.every)

    @property
    def outer_rule(self) -> Mapping[str, Argument]:
        """See Cadence.outer_rule: with the rate 1 the mean delta leads to the mean of the replicas."""
        return {"lr": 1.0}

    def local(self, held: Held) -> LocalTraining:
        assert held.inner is not None, "a cadence with an outer rule gets the job's optimizer"
        return LocalCopies(self, held, held.inner)


class LocalCopies(LocalTraining):
    """A copy of the trained parameters and buffers per replica, loaded into the model for a pass.

    Between two passes the model shows the values of the replica that ran last; between two rounds, the servers'.
    """

    def __init__(self, cadence: Cadence, held: Held, inner: InnerOptimizers) -> None:
        self._cadence = cadence
        self._rounds = cadence.rounds
        self._held = held
        self._inner = inner
        self._ticks = self._rounds.ticks
        self._params = [spec.name for spec in held.specs if spec.kind is TensorKind.PARAM]
        self._buffers = [spec.name for spec in held.specs if spec.kind is TensorKind.BUFFER]
        self._copies: dict[int, dict[str, torch.Tensor]] = {}
        self._moved: dict[int, set[str]] = {}
        """Parameters that had a gradient in this round, by replica."""
        self._samples: dict[int, int] = {}
        self._entered = False
        """A pass of this round has begun."""

    def began(self, step: int) -> None:
        self._copies.clear()
        self._moved.clear()
        self._samples.clear()
        self._entered = False
        self._ticks = self._rounds.ticks_in(step)
        self._inner.began(step)

    def arrived(self, step: int, told: Told = UNTOLD) -> None:
        self._inner.arrived(step)
        if not self._entered:
            self._load(self._held.pulled, [spec.name for spec in self._held.specs])

    def enter(self, replica: int, tick: int) -> None:
        self._entered = True
        self._load(self._copies.get(replica) or self.start(replica), [*self._params, *self._buffers])

    def start(self, replica: int) -> Values:
        """What a replica's first pass of a round computes with."""
        return self._held.pulled

    def take(self, replica: int, tick: int, outgoing: Outgoing) -> Outgoing:
        last = tick + 1 == self._ticks
        gradients = {name: outgoing.values[name] for name in self._params if name in outgoing.values}
        self._inner.update(replica, gradients, outgoing.hyper, last=last)
        self._moved.setdefault(replica, set()).update(gradients)
        self._samples[replica] = self._samples.get(replica, 0) + outgoing.samples
        now = self._save(replica)
        if not last:
            return outgoing
        deltas = {name: self._held.pulled[name].detach() - now[name] for name in self.due(replica)}
        sent = replace(
            outgoing,
            values=deltas,
            drift=math.hypot(*(float(torch.linalg.vector_norm(delta)) for delta in deltas.values())),
            # The rule of DistributedDataParallel, as in a step without local training: those of replica 0.
            buffers={name: now[name] for name in self._buffers} if self._held.brings_buffers(replica) else {},
            samples=self._samples[replica],
            # They were for the inner optimizer; the outer rule's numbers are fixed.
            hyper={},
            keep=True,
        )
        return self.finish(replica, sent, now)

    def due(self, replica: int) -> list[str]:
        """Parameters of which a replica sends, at the end of a round, how far they moved."""
        return [name for name in self._params if name in self._moved[replica]]

    def finish(self, replica: int, sent: Outgoing, now: Values) -> Outgoing:
        """What leaves at the end of a round. sent: how far what is due moved; now: parameters and buffers.

        The tensors of `now` stay as they are.
        """
        return sent

    @torch.no_grad()
    def _load(self, values: Values, names: list[str]) -> None:
        for name in names:
            self._held.model[name].copy_(values[name])

    @torch.no_grad()
    def _save(self, replica: int) -> Mapping[str, torch.Tensor]:
        kept = self._copies.get(replica)
        if kept is None:
            names = [*self._params, *self._buffers]
            kept = self._copies[replica] = {name: self._held.model[name].detach().clone() for name in names}
        else:
            for name, value in kept.items():
                value.copy_(self._held.model[name])
        return kept


@dataclass(frozen=True)
class Kept:
    """What a replica has at the beginning of a round. Its tensors are not changed, since the round may start over."""

    values: Values
    own: frozenset[str]
    """Names of the parameters among them that may differ from the servers'."""


class KeptCopies(LocalCopies):
    """Replicas that keep parameters of their own from round to round, where these differ from the servers'.

    A replica without any for the round that begins starts from the servers' parameters: it has just come from another
    process, or the job has rolled back.
    """

    def __init__(self, cadence: Cadence, held: Held, inner: InnerOptimizers) -> None:
        super().__init__(cadence, held, inner)
        self._step = 0
        self._kept: dict[int, dict[int, Kept]] = {}
        """By round, then by replica: of the open round, of the next, and of the one before while its exchange runs."""

    def began(self, step: int) -> None:
        self._kept = {at: kept for at, kept in self._kept.items() if step in self._kept and at <= step + 1}
        self._kept.setdefault(step, {})
        self._step = step
        super().began(step)

    def arrived(self, step: int, told: Told = UNTOLD) -> None:
        self._kept = {at: kept for at, kept in self._kept.items() if at >= step}
        super().arrived(step, told)

    def kept(self, replica: int) -> Kept:
        """What keep() was given in the round before; empty for a replica that starts from the servers' parameters."""
        return self._kept[self._step].get(replica, NONE_KEPT)

    def keep(self, replica: int, kept: Kept) -> None:
        """Set what a replica begins the next round with. Called by finish()."""
        self._kept.setdefault(self._step + 1, {})[replica] = kept

    def start(self, replica: int) -> Values:
        """See LocalCopies.start. Buffers are the servers'."""
        return {**self._held.pulled, **self.kept(replica).values}

    def due(self, replica: int) -> list[str]:
        """See LocalCopies.due. What a replica has of its own, too."""
        return [name for name in self._params if name in self._moved[replica] | self.kept(replica).own]


NONE_KEPT = Kept({}, frozenset())

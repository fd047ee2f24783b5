"""Local training: every replica runs the job's optimizer on a copy of the parameters and sends how far it moved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from shardline.cadence.base import Cadence, Held, InnerOptimizer, LocalTraining, Outgoing, Values
from shardline.core.spec import TensorKind
from shardline.errors import JobError


class LocalCadence(Cadence):
    """Base of cadences whose `every` passes make one step, a round. A subclass is a dataclass with a field `every`."""

    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise JobError(f"cadence {self.name}: every is {self.every}; give a whole number of passes, at least 1")

    @property
    def ticks(self) -> int:
        """See Cadence.ticks."""
        return self.every

    @property
    def sends_deltas(self) -> bool:
        """See Cadence.sends_deltas."""
        return True

    @property
    def copies(self) -> bool:
        """See Cadence.copies."""
        return True

    def local(self, held: Held) -> LocalTraining:
        """See Cadence.local."""
        assert held.inner is not None, "a cadence with an outer rule gets the job's optimizer"
        return LocalCopies(self, held, held.inner)


class LocalCopies(LocalTraining):
    """A copy of the trained parameters and buffers per replica, loaded into the model for a pass.

    Between two passes the model shows the values of the replica that ran last; between two rounds, the servers'.
    """

    def __init__(self, cadence: Cadence, held: Held, inner: InnerOptimizer) -> None:
        self._cadence = cadence
        self._held = held
        self._inner = inner
        self._ticks = cadence.ticks
        self._params = [spec.name for spec in held.specs if spec.kind is TensorKind.PARAM]
        self._buffers = [spec.name for spec in held.specs if spec.kind is TensorKind.BUFFER]
        self._copies: dict[int, dict[str, torch.Tensor]] = {}
        self._moved: dict[int, set[str]] = {}
        """Parameters that had a gradient in this round, by replica."""
        self._samples: dict[int, int] = {}

    def began(self, step: int) -> None:
        """See LocalTraining.began."""
        self._copies.clear()
        self._moved.clear()
        self._samples.clear()
        self._ticks = self._cadence.ticks_in(step)
        self._inner.began(step)
        self._load(self._held.pulled, [spec.name for spec in self._held.specs])

    def enter(self, replica: int, tick: int) -> None:
        """See LocalTraining.enter."""
        self._load(self._copies.get(replica) or self.start(replica), [*self._params, *self._buffers])

    def start(self, replica: int) -> Values:
        """What a replica's first pass of a round computes with."""
        return self._held.pulled

    def take(self, replica: int, tick: int, outgoing: Outgoing) -> Outgoing:
        """See LocalTraining.take."""
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
            buffers={name: now[name] for name in self._buffers} if replica == 0 else {},
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


class KeptCopies(LocalCopies):
    """Replicas that keep parameters of their own from round to round, where these differ from the servers'.

    A replica without any for the round that begins starts from the servers' parameters: it has just come from another
    process, or the job has rolled back.
    """

    def __init__(self, cadence: Cadence, held: Held, inner: InnerOptimizer) -> None:
        super().__init__(cadence, held, inner)
        self._step: int | None = None
        self._before: dict[int, Values] = {}
        """Own parameters at the beginning of the round, by replica; not changed, since the round may start over."""
        self._after: dict[int, Values] = {}
        """Those for the next round, set by finish()."""

    def began(self, step: int) -> None:
        """See LocalTraining.began."""
        if self._step is not None and step == self._step + 1:
            self._before = {replica: self.next(self._step, values) for replica, values in self._after.items()}
            self._after = {}
        elif step != self._step:
            self._before, self._after = {}, {}
        self._step = step
        super().began(step)

    def next(self, ended: int, values: Values) -> Values:
        """A replica's own parameters for the next round. values: as set by finish() in the round that has ended."""
        return values

    def start(self, replica: int) -> Values:
        """See LocalCopies.start. Buffers are the servers'."""
        return {**self._held.pulled, **self._before.get(replica, {})}

    def due(self, replica: int) -> list[str]:
        """See LocalCopies.due. What a replica has of its own, too."""
        return [name for name in self._params if name in self._moved[replica] or name in self._before.get(replica, {})]

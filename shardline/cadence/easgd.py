"""Elastic averaging: each replica keeps its own parameters, tied to the servers' by an elastic force."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from shardline.cadence.base import Cadence, Held, LocalTraining, Outgoing, Values
from shardline.cadence.local_training import Kept, KeptCopies, LocalCadence
from shardline.errors import JobError
from shardline.update.torch_optim.inner import InnerOptimizers


@dataclass(frozen=True)
class EASGD(LocalCadence):
    """Run the job's optimizer on each worker's own parameters; every `every` passes these and the servers' approach."""

    name: ClassVar[str] = "easgd"
    every: int = 10
    pull: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.pull <= 1.0:
            raise JobError(f"cadence easgd: pull is {self.pull}; give a number above 0 and at most 1, such as 0.9")

    @property
    def keeps_copies(self) -> bool:
        return True

    def local(self, held: Held) -> LocalTraining:
        assert held.inner is not None, "a cadence with an outer rule gets the job's optimizer"
        return ElasticCopies(self, held, held.inner, self.pull / held.replicas)


class ElasticCopies(KeptCopies):
    """Replicas that keep their parameters from round to round.

    At the end of a round, replica i and the center x, the servers' parameters, approach each other by
    d = alpha (x_i - x), of the x that the round began with: x_i <- x_i - d, x <- x + d, alpha = pull / replicas (Zhang
    et al.: Deep learning with Elastic Averaging SGD, NIPS 2015, Algorithm 1). Nobody else moves x within a synchronous
    round; in an asynchronous one x may have moved, but what one side gains the other loses.
    """

    def __init__(self, cadence: Cadence, held: Held, inner: InnerOptimizers, alpha: float) -> None:
        super().__init__(cadence, held, inner)
        self._alpha = alpha

    def finish(self, replica: int, sent: Outgoing, now: Values) -> Outgoing:
        """See LocalCopies.finish. The mean of the contributors is a part of the sum of the replicas."""
        center = self._held.pulled
        forces = {name: self._alpha * (now[name] - center[name].detach()) for name in sent.values}
        self.keep(replica, Kept({name: now[name] - force for name, force in forces.items()}, frozenset(forces)))
        return replace(sent, values={name: -self._held.contributors * force for name, force in forces.items()})

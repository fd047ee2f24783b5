"""Streaming DiLoCo: DiLoCo whose model is exchanged in fragments, in turn, so that no step needs the link for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from shardline.cadence.base import Held, LocalTraining, Outgoing, Values
from shardline.cadence.diloco import DiLoCo
from shardline.cadence.local_training import KeptCopies
from shardline.core.spec import TensorKind, TensorSpec, itemsize
from shardline.errors import JobError


@dataclass(frozen=True)
class StreamingDiLoCo(DiLoCo):
    """Run DiLoCo on one fragment of the model at a time: each is exchanged every `every` passes, one after another."""

    name: ClassVar[str] = "streaming-diloco"
    fragments: int = 5
    alpha: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fragments < 1:
            raise JobError(f"cadence {self.name}: fragments is {self.fragments}; give a whole number, at least 1")
        if self.every % self.fragments:
            more = self.every + self.fragments - self.every % self.fragments
            raise JobError(
                f"cadence {self.name}: every is {self.every}, which is not a multiple of fragments={self.fragments}; "
                f"choose one, such as every={more}"
            )
        if not 0.0 <= self.alpha < 1.0:
            raise JobError(f"cadence {self.name}: alpha is {self.alpha}; give a number from 0 to below 1, such as 0.5")

    @property
    def ticks(self) -> int:
        """See Cadence.ticks."""
        return self.every // self.fragments

    @property
    def common_steps(self) -> bool:
        """See Cadence.common_steps: a fragment is averaged over all replicas."""
        return True

    @property
    def keeps_copies(self) -> bool:
        """See Cadence.keeps_copies: a replica is ahead of the servers in all fragments but the one just exchanged."""
        return self.fragments > 1 or self.alpha > 0.0

    def fragmented(self, tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """See Cadence.fragmented.

        From the largest to the smallest, in model order where they are equally large, each trained tensor goes to the
        fragment with the fewest bytes so far, the lowest of several. So equal layers are dealt out in turn, the paper's
        strided pattern, and fragments differ in bytes by no more than a tensor.
        """
        trained = [number for number, tensor in enumerate(tensors) if tensor.kind is TensorKind.PARAM]
        if len(trained) < self.fragments:
            raise JobError(
                f"cadence {self}: fragments is {self.fragments}, but the model has {len(trained)} trained tensors; "
                f"choose at most fragments={len(trained)}"
            )
        found, sizes = list(tensors), [0] * self.fragments
        for number in sorted(trained, key=lambda number: -_nbytes(tensors[number])):
            fragment = sizes.index(min(sizes))
            sizes[fragment] += _nbytes(tensors[number])
            found[number] = replace(tensors[number], fragment=fragment)
        return tuple(found)

    def local(self, held: Held) -> LocalTraining:
        """See Cadence.local."""
        assert held.inner is not None, "a cadence with an outer rule gets the job's optimizer"
        return FragmentCopies(self, held, held.inner)


class FragmentCopies(KeptCopies):
    """Replicas that send one fragment per step, and go on with their own parameters in all others.

    The replica goes on with (1 - alpha) of the fragment's new values and alpha of its own (Douillard et al.: Streaming
    DiLoCo with overlapping communication, 2025, Algorithm 2, without overlap). The servers change a fragment in its own
    steps only, so a delta refers to the values that the fragment's last exchange returned.
    """

    _cadence: StreamingDiLoCo

    def _exchanged(self, step: int) -> set[str]:
        """Parameters that a step exchanges."""
        fragment = step % self._cadence.fragments
        return {spec.name for spec in self._held.specs if spec.fragment == fragment}

    def due(self, replica: int) -> list[str]:
        """See LocalCopies.due."""
        assert self._step is not None
        exchanged = self._exchanged(self._step)
        return [name for name in super().due(replica) if name in exchanged]

    def finish(self, replica: int, sent: Outgoing, now: Values) -> Outgoing:
        """See LocalCopies.finish."""
        self._after[replica] = {name: now[name] for name in super().due(replica)}
        return sent

    @torch.no_grad()
    def next(self, ended: int, values: Values) -> Values:
        """See KeptCopies.next."""
        alpha, exchanged = self._cadence.alpha, self._exchanged(ended)
        found = {name: value for name, value in values.items() if name not in exchanged}
        if alpha:
            merged = exchanged & values.keys()
            found.update({name: torch.lerp(self._held.pulled[name], values[name], alpha) for name in merged})
        return found


def _nbytes(tensor: TensorSpec) -> int:
    return tensor.elements * itemsize(tensor.dtype)

"""Streaming DiLoCo: the model is exchanged in fragments, in turn, and passes may go on while one is under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shardline.cadence.base import Held, LocalTraining, Outgoing, Rounds, Values
from shardline.cadence.diloco import DiLoCo
from shardline.cadence.local_training import Kept, KeptCopies
from shardline.errors import JobError
from shardline.update.torch_optim.inner import InnerOptimizers


@dataclass(frozen=True)
class StreamingDiLoCo(DiLoCo):
    """Run DiLoCo on one fragment of the model at a time: each is exchanged every `every` passes, one after another."""

    name: ClassVar[str] = "streaming-diloco"
    fragments: int = 5
    alpha: float = 0.0
    overlap: int = 0

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
        ticks = self.rounds.ticks
        if not 0 <= self.overlap < ticks:
            raise JobError(
                f"cadence {self.name}: overlap is {self.overlap}, but one fragment goes every {ticks} passes "
                f"(every / fragments); give a whole number of passes, from 0 to {ticks - 1}"
            )
        if self.overlap and not self.keeps_copies:
            raise JobError(
                f"cadence {self.name}: overlap is {self.overlap}, but with fragments=1 and alpha=0 the passes during "
                "an exchange would be lost; give alpha, such as alpha=0.5, or more fragments"
            )

    @property
    def rounds(self) -> Rounds:
        """See Cadence.rounds. A fragment is averaged over all replicas."""
        ticks = self.every // self.fragments
        return Rounds(ticks=ticks, overlap=self.overlap, fragments=self.fragments, together=True)

    @property
    def keeps_copies(self) -> bool:
        """See Cadence.keeps_copies: a replica is ahead of the servers in all fragments but the one just exchanged."""
        return self.fragments > 1 or self.alpha > 0.0

    def local(self, held: Held) -> LocalTraining:
        assert held.inner is not None, "a cadence with an outer rule gets the job's optimizer"
        return FragmentCopies(self, held, held.inner)


class FragmentCopies(KeptCopies):
    """Replicas that send one fragment per step, and go on with their own parameters in all others.

    After the `overlap` passes that follow, the replica goes on with (1 - alpha) of the fragment's new values and alpha
    of its own (Douillard et al.: Streaming DiLoCo with overlapping communication, 2025, Algorithm 2). The servers
    change a fragment in its own steps only, so a delta refers to the values that the fragment's last exchange returned.
    """

    def __init__(self, cadence: StreamingDiLoCo, held: Held, inner: InnerOptimizers) -> None:
        super().__init__(cadence, held, inner)
        self._fragments, self._alpha, self._overlap = cadence.fragments, cadence.alpha, cadence.overlap
        self._apart: set[int] = set()
        """Replicas that have not taken over yet what the last exchange returned."""

    def began(self, step: int) -> None:
        self._apart.clear()
        super().began(step)

    def _fragment(self, step: int) -> frozenset[str]:
        fragment, params = step % self._fragments, set(self._params)
        return frozenset(spec.name for spec in self._held.specs if spec.name in params and spec.fragment == fragment)

    def enter(self, replica: int, tick: int) -> None:
        """See LocalTraining.enter. Up to tick `overlap` nothing is read of what may still be arriving."""
        kept = self.kept(replica)
        if kept.values and replica not in self._copies:
            self._copies[replica] = {name: value.clone() for name, value in kept.values.items()}
            self._moved[replica] = set(kept.own)
            self._apart.add(replica)
        if tick == self._overlap and replica in self._apart:
            self._apart.discard(replica)
            self._merge(self._copies[replica], self._moved[replica])
        super().enter(replica, tick)

    @torch.no_grad()
    def _merge(self, now: Values, own: set[str]) -> None:
        """Take over what the last exchange returned. own: names of what differs from the servers', updated too."""
        pulled, exchanged = self._held.pulled, self._fragment(self._step - 1)
        if not self._alpha:
            own -= exchanged
        for name in exchanged:
            now[name].copy_(torch.lerp(pulled[name], now[name], self._alpha) if name in own else pulled[name])
        if not self._overlap:
            # Those of replica 0. With an overlap they are older than its own.
            for name in self._buffers:
                now[name].copy_(pulled[name])

    def due(self, replica: int) -> list[str]:
        due = self._moved[replica] & self._fragment(self._step)
        return [name for name in self._params if name in due]

    def finish(self, replica: int, sent: Outgoing, now: Values) -> Outgoing:
        self.keep(replica, Kept(now, frozenset(self._moved[replica])))
        return sent

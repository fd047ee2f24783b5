"""Voted steps: each shard votes, the lead decides, every shard applies the verdict. PROTOCOL 1.4, 4' and 5'."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardline.core.reduce import clip_scale, global_norm

log = logging.getLogger("shardline.ps")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One decision for all shards: the commit point of a voted step."""

    step: int
    scale: float
    skip: bool
    norm: float
    nonfinite: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ballot:
    sums: tuple[tuple[int, float], ...]
    nonfinite: tuple[str, ...]


def decide(step: int, ballots: Mapping[int, Ballot], *, clip_norm: float, skip_nonfinite: bool) -> Verdict:
    """The verdict on all shards' ballots; it does not depend on their order."""
    nonfinite = tuple(sorted({name for ballot in ballots.values() for name in ballot.nonfinite}))
    if nonfinite and skip_nonfinite:
        return Verdict(step=step, scale=1.0, skip=True, norm=float("nan"), nonfinite=nonfinite)
    norm = global_norm([item for ballot in ballots.values() for item in ballot.sums])
    return Verdict(step=step, scale=clip_scale(norm, clip_norm), skip=False, norm=norm, nonfinite=nonfinite)


@dataclass
class _Round:
    ballots: dict[int, Ballot] = field(default_factory=dict)
    verdict: Verdict | None = None
    decided: asyncio.Event = field(default_factory=asyncio.Event)


class VoteLead:
    """Collects ballots by (timeline, step), on the ps of shard 0. On the server's loop only."""

    KEPT_ROUNDS = 4

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, int], _Round] = {}

    async def vote(
        self,
        timeline: int,
        step: int,
        shard: int,
        ballot: Ballot,
        *,
        shards: Sequence[int],
        clip_norm: float,
        skip_nonfinite: bool,
        timeout_s: float,
    ) -> Verdict | None:
        """Add a ballot and wait for the verdict; None on timeout (then vote again). Repeated ballots do no harm."""
        round_ = self._rounds.setdefault((timeline, step), _Round())
        if round_.verdict is None:
            round_.ballots[shard] = ballot
            if all(number in round_.ballots for number in shards):
                round_.verdict = decide(step, round_.ballots, clip_norm=clip_norm, skip_nonfinite=skip_nonfinite)
                round_.decided.set()
                if round_.verdict.skip:
                    log.warning("skipping step %d: %s not finite", step, ", ".join(round_.verdict.nonfinite))
                self._forget(timeline, step)
        try:
            await asyncio.wait_for(round_.decided.wait(), timeout_s)
        except TimeoutError:
            return None
        return round_.verdict

    def adopt(self, timeline: int, verdict: Verdict) -> Verdict:
        """Record the verdict under which a shard has applied a step, decided by the previous lead; returns it.

        It answers all other votes on that step: the shard that has applied it won't vote again.
        """
        round_ = self._rounds.setdefault((timeline, verdict.step), _Round())
        if round_.verdict is None:
            round_.verdict = verdict
            round_.decided.set()
            self._forget(timeline, verdict.step)
        return round_.verdict

    def renew(self, timeline: int) -> None:
        """Cancel the rounds of other timelines: their voters get no verdict, and vote again."""
        for key in [key for key in self._rounds if key[0] != timeline]:
            self._rounds.pop(key).decided.set()

    def _forget(self, timeline: int, step: int) -> None:
        for key in [key for key in self._rounds if key[0] != timeline or key[1] <= step - self.KEPT_ROUNDS]:
            del self._rounds[key]

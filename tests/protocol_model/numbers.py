"""Toy training whose bits depend on everything that the protocol has to keep in order, and its undisturbed run.

A bucket is two floats. A gradient depends on every parameter of its step, a sum on its order, an update on the step; so
a mixed pull, a lost or repeated contribution and another order of additions all show in the final bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from shardline.consistency import replica_steps
from shardline.core.outcome import Decision, Outcome
from shardline.core.reduce import Block, clip_scale, global_norm, split, tree_sum

CLIP_NORM = 0.9


class Broken(AssertionError):
    """A promise of the protocol doesn't hold in this schedule."""


def require(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One schedule: what is trained and what may happen meanwhile."""

    seed: int
    shards: tuple[int, ...] = (2, 1, 2)
    """Buckets of each shard."""
    replicas: int = 3
    workers: int = 2
    steps: int = 4
    kills: int = 0
    """Workers that die, or are declared dead while they live."""
    ps_kills: int = 0
    cut_every: int = 0
    voted: bool = False
    fencing: bool = True
    """Whether the dead are fenced before their replicas move (F4)."""
    published: int = 2
    """Parameter buffers per bucket."""
    canonical: bool = True
    """False: contributions are added in order of arrival."""
    admit: Callable[..., Decision] = replica_steps.admit_push
    serve: Callable[..., Outcome] = replica_steps.serve_pull
    progress: Callable[[int, bool], int] = replica_steps.progress

    @property
    def buckets(self) -> int:
        return sum(self.shards)


class State(NamedTuple):
    """All a bucket has to keep: its parameter, the rule's momentum, applications so far."""

    theta: float
    momentum: float
    version: int


class Verdict(NamedTuple):
    scale: float
    skip: bool


APPLY = Verdict(1.0, False)


def initial(setup: Setup) -> tuple[State, ...]:
    return tuple(State(0.1 + 0.37 * b, 0.0, 0) for b in range(setup.buckets))


def gradient(setup: Setup, t: int, replica: int, thetas: Sequence[float]) -> list[float]:
    """A function of seed, step, replica and all parameters, as a model's gradient is; where steps are voted, now and
    then with a NaN in one bucket.
    """
    mix = 0.0
    for theta in thetas:
        mix = mix * 1.7 + theta
    result = [math.sin(mix * (3.1 + b) + 0.7 * t + 1.3 * replica + setup.seed % 97) for b in range(len(thetas))]
    if setup.voted and (setup.seed * 7 + t * 5 + replica * 3) % 11 == 0:
        result[(t + replica) % len(result)] = math.nan
    return result


def decide(means: Mapping[int, float]) -> Verdict:
    """What the lead makes of all buckets' mean gradients: skip at a NaN, else clip by the global norm."""
    if not all(math.isfinite(mean) for mean in means.values()):
        return Verdict(0.0, True)
    return Verdict(clip_scale(global_norm([(b, mean * mean) for b, mean in means.items()]), CLIP_NORM), False)


def advance(state: State, mean: float, t: int, verdict: Verdict) -> State:
    if verdict.skip:
        return state
    momentum = 0.9 * state.momentum + mean * verdict.scale
    return State(state.theta - 0.3 / (1 + 0.1 * t) * momentum, momentum, state.version + 1)


def reference(setup: Setup) -> list[tuple[State, ...]]:
    """States at each step of the same training, its replicas run one after another, undisturbed."""
    states = [initial(setup)]
    for t in range(setup.steps):
        thetas = [state.theta for state in states[-1]]
        gradients = [gradient(setup, t, replica, thetas) for replica in range(setup.replicas)]
        # tree_sum only adds, so floats do as well as tensors.
        means = [cast(Any, tree_sum)(column) / setup.replicas for column in zip(*gradients, strict=True)]
        verdict = decide(dict(enumerate(means))) if setup.voted else APPLY
        states.append(tuple(advance(s, m, t, verdict) for s, m in zip(states[-1], means, strict=True)))
    return states


def block_sum(parts: Mapping[Block, float], node: Block) -> float:
    """Canonical sum of a node from whatever blocks at or below it there are."""
    if node in parts:
        return parts[node]
    require(node.count > 1, f"replica {node} is missing in a sum")
    left, right = split(node)
    return block_sum(parts, left) + block_sum(parts, right)

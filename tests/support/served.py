"""One bucket under an update rule, as asynchronous workers meet it on a server."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardline.core.contributions import Contributions, Partial
from shardline.core.plan import make_plan
from shardline.core.push_context import PushContext
from shardline.core.spec import DTYPES, ScheduleSpec, TensorSpec
from shardline.storage.bucket import Bucket
from shardline.update import BucketRule, bucket_rule, rule, wants_whole

RATE, MOMENTUM = 0.05, 0.9
ROUNDING = 2e-15
"""Differences that come from the order of additions alone: a few units in the last place of numbers around 1."""


class Served:
    """A parameter of a few elements, equal at first, and workers that pull it and push gradients.

    arguments: of the optimizer. A push is stale by the pushes of others since its worker's last pull.
    """

    def __init__(
        self,
        method: str,
        *,
        optimizer: str = "SGD",
        shape: tuple[int, ...] = (5,),
        start: float = 0.0,
        dtype: str = "float64",
        **arguments: Any,
    ) -> None:
        chosen = rule(optimizer, [arguments], method=method)
        whole = wants_whole(chosen, shape)
        plan = make_plan([TensorSpec(name="w", shape=shape, dtype=dtype, whole=whole)], 1)
        (spec,) = plan.shards[0].buckets
        make = functools.partial(bucket_rule, chosen, ScheduleSpec(), spec, plan.tensors)
        memory = torch.zeros(spec.elements, dtype=DTYPES[dtype])
        self.bucket = Bucket(
            0, 0, spec, plan.tensors, make, contributions=Contributions(spec, 1), pub=(memory, memory.clone())
        )
        self.bucket.initialize(torch.full_like(memory, start))
        self.elements = math.prod(shape)
        self.pulled: dict[int, Tensor] = {}
        """What each worker was last sent."""
        self.staleness: list[int] = []
        """Of each push."""
        self._versions: dict[int, int] = {}

    @property
    def parameters(self) -> Tensor:
        """A copy of what the server holds."""
        return self.bucket.values[: self.elements].clone()

    @property
    def rule(self) -> BucketRule:
        """The bucket's rule."""
        assert self.bucket.rule is not None
        return self.bucket.rule

    def pull(self, worker: int = 0) -> Tensor:
        """What a worker gets."""
        self._versions[worker] = self.bucket.version
        answer = self.bucket.answer(self.bucket.step, f"worker/{worker}")[: self.elements].clone()
        self.pulled[worker] = answer
        return answer

    def push(self, gradient: Tensor, worker: int = 0, **hyper: float) -> None:
        """Push a gradient; hyper: numbers of the optimizer for this push."""
        flat = torch.zeros_like(self.bucket.values)
        flat[: self.elements] = gradient
        base = self._versions.get(worker, self.bucket.version)
        self.staleness.append(self.bucket.version - base)
        context = PushContext(task=f"worker/{worker}", staleness=self.staleness[-1], base_version=base)
        self.bucket.hyper = hyper or None
        self.bucket.apply(Partial(flat, (True,)), context=context)

    def members(self, *workers: int) -> None:
        """Admit only these workers from now on."""
        self.bucket.members_changed([f"worker/{worker}" for worker in workers])

    def state(self, name: str, worker: int | None = None) -> Tensor:
        """A state of the rule; a worker's own if one is given. Zeros if there is none."""
        key = name if worker is None else f"{name}@worker.{worker}"
        found = self.rule.export().tensors.get(key)
        return torch.zeros(self.elements, dtype=torch.float64) if found is None else found[: self.elements]


def served(method: str, *, momentum: float = MOMENTUM, lr: float = RATE, **more: Any) -> Served:
    """With momentum."""
    return Served(method, lr=lr, momentum=momentum, **more)


def noise(seed: int, elements: int = 5) -> Iterator[Tensor]:
    """Normally distributed, float64."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(elements, generator=generator, dtype=torch.float64)


def anyhow(workers: int, pushes: int, seed: int = 0) -> list[int]:
    """Who pushes, in no order; everybody does."""
    chance = random.Random(seed)
    order = [*range(workers), *(chance.randrange(workers) for _ in range(pushes - workers))]
    chance.shuffle(order)
    return order


def bowl(point: Tensor) -> Tensor:
    """A gradient: steep and flat directions, and not linear."""
    return torch.linspace(0.2, 2.0, len(point), dtype=point.dtype) * point + 0.1 * torch.sin(3 * point)


def train(server: Served, order: list[int], seed: int = 0, gradient: Callable[[Tensor], Tensor] = bowl) -> None:
    """Each push is of a gradient at what its worker was last sent, and followed by a pull."""
    noises = noise(seed, server.elements)
    for worker in set(order):
        server.pull(worker)
    for worker in order:
        server.push(gradient(server.pulled[worker]) + 0.3 * next(noises), worker)
        server.pull(worker)


def difference(left: Tensor, right: Tensor) -> float:
    """The largest of any element."""
    return float((left - right).abs().max())

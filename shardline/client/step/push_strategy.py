"""How the gradients of a step are sent: all at its end, or each as it is computed (overlap/as_computed.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardline.client.exchange.streaming_payloads import LivePayloads, bucket_ranks
from shardline.core.plan import Plan
from shardline.core.reduce import Block


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Facts about a replica's part of a step that are known before its last backward pass."""

    replica: int
    owned: Sequence[int]
    """Replicas for which this worker contributes to the step."""
    samples: int = 0
    loss: float | None = None
    hyper: Callable[[], Mapping[int, Mapping[str, float]]] = dict
    """Hyper-parameters sent with the push, by group; called when the first bucket leaves."""


Values = Mapping[int, torch.Tensor]
"""By tensor number."""
Begin = Callable[[Block, Mapping[int, LivePayloads]], None]
"""(block, payloads by shard): called when the first bucket is ready, to start their exchange."""


class PushAtEnd:
    """Sends everything when the step ends. Used by the computing thread."""

    uses: dict[int, None] | None = None
    """Tensors in the order of their first use, filled in the first step by the gate; None if unused."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ranks = bucket_ranks(plan, range(len(plan.tensors)))

    @property
    def early(self) -> bool:
        """Whether gradients of the open step are expected to leave, or have left, during the backward pass."""
        return False

    @property
    def begun(self) -> bool:
        """Whether gradients of the open step may have left during the backward pass."""
        return False

    def ranks(self, shard: int) -> Sequence[int]:
        """Rank of each bucket of a shard, 0 = most urgent."""
        return self._ranks[shard]

    def pull_order(self, shard: int, *, hold: bool) -> list[int]:
        """Buckets in the order in which to request them; [] = the plan's. hold: the backward pass is still running."""
        return []

    def expect(self, expected: Expected, *, first: bool, begin: Begin) -> None:
        """Expect a replica's last backward pass. first: in the first step after a start. Raises NonFiniteError."""

    def close(self, gradients: Values, buffers: Values, hyper: Mapping[int, Mapping[str, float]]) -> None:
        """End the backward pass of an early push: the rest may leave. Raises any error of the pass."""
        raise AssertionError("nothing is sent early")

    def not_stepped(self, step: int) -> Exception:
        """End an early push that no step() followed; returns the error to raise."""
        raise AssertionError("nothing is sent early")

    def disarm(self) -> None:
        """Stop expecting a backward pass."""

    def end_step(self) -> None:
        """Free what the open step used; it is acknowledged or given up."""

    def learn(self) -> None:
        """Learn from a finished step: order of use and of sending."""

    def detach(self) -> None:
        """Remove all hooks from the model."""

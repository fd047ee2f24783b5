"""The payloads of a push whose gradients were all computed before any of them leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardline.client.exchange.device import HostPath
from shardline.client.exchange.live import LivePayloads
from shardline.client.exchange.priority import SendQueue, default_credit
from shardline.client.step.staging import Staging
from shardline.core.plan import Plan
from shardline.core.reduce import Block


@dataclass(frozen=True, kw_only=True)
class PushTools:
    """What every push of a worker is made with."""

    plan: Plan
    staging: Staging
    interrupted: Callable[[], Exception | None]
    """See LivePayloads."""
    credit_bytes: int = 0
    """See SendQueue; 0 = derived from the buckets."""
    gpu: HostPath | None = None
    """Where the gradients are on a GPU."""


def filled_payloads(tools: PushTools, shard: int, block: Block, ranks: Sequence[int]) -> LivePayloads:
    """A block's push to one shard, all of whose buckets are in staging; each is encoded when it is sent.

    ranks: see SendQueue.
    """
    spec, staging = tools.plan.shards[shard], tools.staging
    # Nothing more can overtake, so a few large batches do: the shard begins with the first while others are encoded.
    # Where all bytes are in their place one is enough. Of many workers' pushes the shard then takes one after another,
    # where with small batches its threads met at the same buckets again and again.
    in_place = staging.in_place(shard)
    window = tools.credit_bytes or (spec.nbytes if in_place else max(default_credit(spec), spec.nbytes // 4))
    payloads = LivePayloads(
        SendQueue(ranks, [bucket.nbytes for bucket in spec.buckets], window),
        functools.partial(staging.payload, block, shard),
        nbytes=spec.nbytes,
        in_place=in_place,
        interrupted=tools.interrupted,
    )
    empty = [bucket for bucket in range(len(spec.buckets)) if staging.is_empty((shard, bucket), block)]
    for bucket in range(len(spec.buckets)):
        if bucket not in empty:
            payloads.offer(bucket)
    payloads.close(empty)
    return payloads

"""Opens the best lane that two tasks can use."""

from __future__ import annotations

import socket
from collections.abc import Collection
from typing import TYPE_CHECKING

from shardline.cluster import parse_address
from shardline.core.plan import ShardSpec
from shardline.core.spec import TensorKind
from shardline.lanes import candidates
from shardline.lanes.base import Lane
from shardline.lanes.negotiated import Fallback, NegotiatedLane
from shardline.rpc.channel import Peer

if TYPE_CHECKING:
    import torch

    from shardline.config import RoleConfig


def open_lane(
    config: RoleConfig,
    peer: Peer,
    shard: int,
    spec: ShardSpec,
    *,
    tensors: Collection[torch.Tensor] = (),
    on_fallback: Fallback = lambda lane, reason: None,
) -> Lane:
    """The lane from this task to one shard, as --lane says; connects only with the first exchange.

    tensors: the model's. on_fallback: called with (lane, reason) for a requested lane that
    can't be used.
    """
    devices = {tensor.device for tensor in tensors}
    device = devices.pop() if len(devices) == 1 else None
    local = on_this_host(peer.address) or config.run_dir is not None
    kinds = candidates(config.lane, local=local, device=device)
    if any(bucket.kind is TensorKind.TABLE for bucket in spec.buckets):
        kinds = tuple(kind for kind in kinds if not kind.fixed_places)
    lanes = [kind.connect(config, peer, shard, spec, device=device) for kind in kinds]
    return NegotiatedLane(lanes, peer=str(peer), expected=[kind.name for kind in kinds], on_fallback=on_fallback)


def on_this_host(address: str) -> bool:
    """Whether an address belongs to this host (or to this network namespace), so that it can be bound."""
    host, _ = parse_address(address)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((where[0], 0, *where[2:]))
        except OSError:
            continue
        return True
    return False

"""Which lanes a pair of tasks may use, best first."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from shardline.cluster import parse_address
from shardline.config import RoleConfig
from shardline.core.plan import ShardSpec
from shardline.lanes.base import Lane
from shardline.lanes.grpc.client import GrpcLane
from shardline.lanes.negotiated import Fallback, NegotiatedLane
from shardline.lanes.shm.client import ShmLane
from shardline.lanes.tcp.client import TcpLane
from shardline.rpc.channel import Peer


def open_lane(
    config: RoleConfig,
    peer: Peer,
    shard: int,
    spec: ShardSpec,
    *,
    on_fallback: Fallback = lambda lane, reason: None,
) -> Lane:
    """The lane from this task to one shard, as --lane says; nothing is connected before the first exchange.

    on_fallback: told (lane, reason) of a lane that was to be used and can't be.
    """
    elements = [bucket.elements for bucket in spec.buckets]
    names = candidates(config.lane, local=on_this_host(peer.address), shared_dir=config.run_dir is not None)
    lanes: list[Lane] = []
    for name in names:
        if name == "tcp":
            tls = config.security.client_context()
            lanes.append(TcpLane(peer, shard, elements, timeouts=config.timeouts, tls=tls))
        elif name == "shm":
            lanes.append(ShmLane(peer, shard, spec, timeout_s=config.timeouts.rpc_s))
        elif name == "grpc":
            lanes.append(GrpcLane(peer, shard, elements))
    return NegotiatedLane(lanes, peer=str(peer), expected=names, on_fallback=on_fallback)


def candidates(choice: str, *, local: bool, shared_dir: bool) -> Sequence[str]:
    """Lanes to try for --lane, in order. local: both tasks are on this host; shared_dir: they share a --run-dir."""
    if choice == "grpc":
        return ("grpc",)
    if choice == "tcp":
        return ("tcp", "grpc")
    if choice == "shm" or local or shared_dir:
        return ("shm", "tcp", "grpc")
    return ("tcp", "grpc")


def on_this_host(address: str) -> bool:
    """Whether an address belongs to this host (or to this network namespace): then it can be bound here."""
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

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardline.lanes.kind import LaneKind, ServerSide

if TYPE_CHECKING:
    import torch

    from shardline.config import RoleConfig
    from shardline.core.plan import ShardSpec
    from shardline.lanes.attachments import LaneOffer
    from shardline.lanes.base import Lane
    from shardline.lanes.tcp.server import Listening
    from shardline.rpc.channel import Peer
    from shardline.rpc.v1 import worker_pb2


@dataclass(frozen=True)
class Tcp(LaneKind):
    """Bulk sockets, one per direction, received straight into the memory they are for; a third socket carries calls."""

    name: ClassVar[str] = "tcp"

    def connect(
        self, config: RoleConfig, peer: Peer, shard: int, spec: ShardSpec, *, device: torch.device | None = None
    ) -> Lane:
        from shardline.lanes.tcp.client import TcpLane

        elements = [bucket.elements for bucket in spec.buckets]
        return TcpLane(peer, shard, elements, timeouts=config.timeouts, tls=config.security.client_context)

    def offer(self, side: ServerSide) -> LaneOffer | None:
        """The server's half, on an additional port of the same interface; None where there is no native engine."""
        from shardline.cluster import parse_address
        from shardline.lanes.tcp.server import TcpOffer
        from shardline.native import engine
        from shardline.native import tls as native_tls

        config = side.config
        host, _ = parse_address(config.cluster.address(config.task))
        tls, timeout_s = config.security.server_context(), config.timeouts.rpc_s
        if not engine.available() or (tls is not None and not native_tls.available()):
            return None
        return TcpOffer(config.bind or host, tls, timeout_s=timeout_s, take=side.take, on_refused=side.on_refused)

    def listen(self, config: RoleConfig) -> Listening:
        from shardline.lanes.tcp.parcels import listening

        return listening(config)

    def dial(
        self, config: RoleConfig, address: str, opened: worker_pb2.OpenParcelLaneReply, *, timeout_s: float
    ) -> socket.socket:
        from shardline.lanes.tcp.parcels import dial

        return dial(config, address, opened, timeout_s=timeout_s)

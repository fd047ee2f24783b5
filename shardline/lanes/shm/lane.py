from __future__ import annotations

import socket
import sys
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
class Shm(LaneKind):
    """Both map the same sealed memory; calls over a unix socket say where the bytes lie. Linux, one host, one user."""

    name: ClassVar[str] = "shm"

    def suits(self, *, local: bool, device: torch.device | None = None) -> bool:
        return local

    def connect(
        self, config: RoleConfig, peer: Peer, shard: int, spec: ShardSpec, *, device: torch.device | None = None
    ) -> Lane:
        from shardline.lanes.shm.client import ShmLane

        private = device is None or device.type == "cpu"
        return ShmLane(peer, shard, spec, timeout_s=config.timeouts.rpc_s, private=private)

    def offer(self, side: ServerSide) -> LaneOffer | None:
        """The server's half; None on other systems, and if the values are on a GPU."""
        from shardline.lanes.shm.server import ShmOffer

        if sys.platform != "linux" or side.device.type != "cpu":
            return None
        return ShmOffer(run_dir=side.config.run_dir, timeout_s=side.config.timeouts.rpc_s, on_refused=side.on_refused)

    def listen(self, config: RoleConfig) -> Listening:
        from shardline.lanes.shm.parcels import listening

        return listening(config)

    def dial(
        self, config: RoleConfig, address: str, opened: worker_pb2.OpenParcelLaneReply, *, timeout_s: float
    ) -> socket.socket:
        from shardline.lanes.shm.parcels import dial

        return dial(config, address, opened, timeout_s=timeout_s)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardline.lanes.kind import LaneKind

if TYPE_CHECKING:
    import torch

    from shardline.config import RoleConfig
    from shardline.core.plan import ShardSpec
    from shardline.lanes.base import Lane
    from shardline.rpc.channel import Peer


@dataclass(frozen=True)
class Grpc(LaneKind):
    """A gRPC call with chunks of at most 4 MB; always works."""

    name: ClassVar[str] = "grpc"

    def connect(
        self, config: RoleConfig, peer: Peer, shard: int, spec: ShardSpec, *, device: torch.device | None = None
    ) -> Lane:
        from shardline.lanes.grpc.client import GrpcLane

        return GrpcLane(peer, shard, [bucket.elements for bucket in spec.buckets])

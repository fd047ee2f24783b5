from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardline.lanes.kind import LaneKind, ServerSide

if TYPE_CHECKING:
    import torch

    from shardline.config import RoleConfig
    from shardline.core.plan import ShardSpec
    from shardline.lanes.attachments import LaneOffer
    from shardline.lanes.base import Lane
    from shardline.rpc.channel import Peer


@dataclass(frozen=True)
class Cuda(LaneKind):
    """Both map memory of one GPU; calls over a unix socket say where gradients and parameters lie in it."""

    name: ClassVar[str] = "cuda"

    def suits(self, *, local: bool, device: torch.device | None = None) -> bool:
        from shardline.host.device_memory import KINDS

        return local and device is not None and device.type in KINDS

    def connect(
        self, config: RoleConfig, peer: Peer, shard: int, spec: ShardSpec, *, device: torch.device | None = None
    ) -> Lane:
        from shardline.lanes.cuda.client import CudaLane

        return CudaLane(peer, shard, spec, device=device, timeout_s=config.timeouts.rpc_s)

    def offer(self, side: ServerSide) -> LaneOffer | None:
        """The server's half; None if the values are not on a GPU."""
        from shardline.host.device_memory import KINDS
        from shardline.lanes.cuda.server import CudaOffer

        if side.device.type not in KINDS:
            return None
        return CudaOffer(
            side.device,
            run_dir=side.config.run_dir,
            timeout_s=side.config.timeouts.rpc_s,
            on_refused=side.on_refused,
        )

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardline.lanes.kind import LaneKind

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
        from shardline.host.device_memory import CREATE

        return local and device is not None and device.type in CREATE

    def connect(
        self, config: RoleConfig, peer: Peer, shard: int, spec: ShardSpec, *, device: torch.device | None = None
    ) -> Lane:
        from shardline.host.device_memory import CREATE
        from shardline.lanes.cuda.client import CudaLane

        fits = device is not None and device.type in CREATE
        return CudaLane(peer, shard, spec, device=device if fits else None, timeout_s=config.timeouts.rpc_s)

    def offer(
        self,
        config: RoleConfig,
        *,
        device: torch.device,
        take: Callable[[int], memoryview],
        on_refused: Callable[[str, Exception], None],
    ) -> LaneOffer | None:
        """The server's half; None if the values are not on a GPU."""
        from shardline.host.device_memory import CREATE
        from shardline.lanes.cuda.server import CudaOffer

        if device.type not in CREATE:
            return None
        offer = CudaOffer(run_dir=config.run_dir, timeout_s=config.timeouts.rpc_s, on_refused=on_refused)
        offer.device = device
        return offer

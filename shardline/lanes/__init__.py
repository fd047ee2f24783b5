"""Lanes: how the bytes of pushes and pulls travel; the table of what exists. See docs/lanes.md."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardline.errors import UsageError, nearest
from shardline.lanes.kind import LaneKind, ServerSide
from shardline.seams import Table

if TYPE_CHECKING:
    import torch

    from shardline.config import RoleConfig
    from shardline.core.plan import ShardSpec
    from shardline.lanes.attachments import LaneOffer
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


@dataclass(frozen=True)
class Tcp(LaneKind):
    """Bulk sockets, one per direction, received straight into the memory they are for; a third socket carries calls."""

    name: ClassVar[str] = "tcp"
    parcels: ClassVar[str] = "shardline.lanes.tcp.parcels"

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
        from shardline.native import engine, tls as native_tls

        config = side.config
        host, _ = parse_address(config.cluster.address(config.task))
        tls, timeout_s = config.security.server_context(), config.timeouts.rpc_s
        if not engine.available() or (tls is not None and not native_tls.available()):
            return None
        return TcpOffer(config.bind or host, tls, timeout_s=timeout_s, take=side.take, on_refused=side.on_refused)


@dataclass(frozen=True)
class Shm(LaneKind):
    """Both map the same sealed memory; calls over a unix socket say where the bytes lie. Linux, one host, one user."""

    name: ClassVar[str] = "shm"
    fixed_places: ClassVar[bool] = True
    parcels: ClassVar[str] = "shardline.lanes.shm.parcels"

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


@dataclass(frozen=True)
class Cuda(LaneKind):
    """Both map memory of one GPU; calls over a unix socket say where gradients and parameters lie in it."""

    name: ClassVar[str] = "cuda"
    fixed_places: ClassVar[bool] = True

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


LANES: Table[LaneKind] = Table("lane", Grpc, Tcp, Shm, Cuda)
"""From the lane that always works to the fastest: a lane that can't be used falls back to those before it."""
AUTO = "auto"
CHOICES = (AUTO, *(kind.name for kind in LANES.declared))
"""Values of --lane, without lanes of plugins."""
OPENED = tuple(sorted(kind.name for kind in LANES.declared if kind is not Grpc))
"""Lanes that a worker has to open, and that may fall back to another; gRPC is always there, in the call."""


def choices() -> tuple[str, ...]:
    """Values of --lane. Raises UsageError for a plugin that fails."""
    return (AUTO, *LANES.names)


def check_choice(name: str) -> str:
    """The value of --lane. Raises UsageError if there is no such lane."""
    if name not in CHOICES and name not in choices():
        raise UsageError(f"--lane is {name!r}; it must be one of {', '.join(choices())}{nearest(name, choices())}")
    return name


def candidates(choice: str, *, local: bool, device: torch.device | None = None) -> tuple[LaneKind, ...]:
    """Lanes to try for --lane, in order. local, device: see LaneKind.suits()."""
    kinds = [LANES.parse(name) for name in LANES.names]
    if choice == AUTO:
        kinds = [kind for kind in kinds if kind.suits(local=local, device=device)]
    else:
        kinds = kinds[: LANES.names.index(choice) + 1]
    return tuple(reversed(kinds))


def offered(choice: str) -> tuple[LaneKind, ...]:
    """Lanes that a server with this --lane lets workers open."""
    kinds = [LANES.parse(name) for name in LANES.names]
    return tuple(kind for kind in kinds if kind.name != Grpc.name and choice in (AUTO, kind.name))

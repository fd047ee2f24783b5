"""The description of a lane for its choice: its name, where it can be used, and how to make either half.

The halves are imported when they are made: choosing needs neither sockets nor tensors.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardline.seams import Resident

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
class ServerSide:
    """Arguments of a lane's server half."""

    config: RoleConfig
    device: torch.device
    """Of the shards' values."""
    take: Callable[[int], memoryview]
    """Memory for incoming data, in bytes."""
    on_refused: Callable[[str, Exception], None]
    """(label, error): called for connections that were turned away."""


@dataclass(frozen=True)
class LaneKind(Resident):
    """One way to transfer the bytes of pushes and pulls. Residents of `shardline.lanes.LANES`."""

    parcels: ClassVar[str] = ""
    """Module with the two halves of a socket for parcels, listening() and dial(); "" = the lane has none."""
    fixed_places: ClassVar[bool] = False
    """Each bucket has its place in shared memory; rows of tables, which may be any number, then have none."""

    def suits(self, *, local: bool, device: torch.device | None = None) -> bool:
        """Whether `--lane auto` tries it. local: both tasks may be on one host. device: of the model, if it has one."""
        return True

    def connect(
        self, config: RoleConfig, peer: Peer, shard: int, spec: ShardSpec, *, device: torch.device | None = None
    ) -> Lane:
        """The worker's half, to one shard of one server. Connects only with the first exchange. device: as in suits."""
        raise NotImplementedError

    def offer(self, side: ServerSide) -> LaneOffer | None:
        """The server's half; None if this machine has no such lane.

        Raises UsageError if it can't listen.
        """
        return None

    def listen(self, config: RoleConfig) -> Listening:
        """The receiving half for parcels, which workers open. Raises LaneUnavailable."""
        from shardline.lanes.base import LaneUnavailable

        if not self.parcels:
            raise LaneUnavailable(f"lane {self.name} has no parcels")
        found: Listening = importlib.import_module(self.parcels).listening(config)
        return found

    def dial(
        self, config: RoleConfig, address: str, opened: worker_pb2.OpenParcelLaneReply, *, timeout_s: float
    ) -> socket.socket:
        """A socket for parcels to the worker at an address, which has accepted it. Raises OSError, SegmentError."""
        module = importlib.import_module(self.parcels)
        found: socket.socket = module.dial(config, address, opened, timeout_s=timeout_s)
        return found

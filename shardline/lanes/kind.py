"""The description of a lane for its choice: its name, where it can be used, and how to make either half.

The halves are imported when they are made: choosing needs neither sockets nor tensors.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardline.seams import Resident

if TYPE_CHECKING:
    from shardline.config import RoleConfig
    from shardline.core.plan import ShardSpec
    from shardline.lanes.attachments import LaneOffer
    from shardline.lanes.base import Lane
    from shardline.lanes.parcel_port import Listening
    from shardline.rpc.channel import Peer
    from shardline.rpc.v1 import worker_pb2


@dataclass(frozen=True)
class LaneKind(Resident):
    """One way to transfer the bytes of pushes and pulls. Residents of `shardline.lanes.LANES`."""

    same_host: ClassVar[bool] = False
    """It connects tasks of one host only: `--lane auto` tries it if both may be on one host."""
    opened: ClassVar[bool] = True
    """Whether a worker has to open it, which may fail; otherwise it is always there, inside the call's own stream."""

    def connect(self, config: RoleConfig, peer: Peer, shard: int, spec: ShardSpec) -> Lane:
        """The worker's half, to one shard of one server. Connects only with the first exchange."""
        raise NotImplementedError

    def offer(
        self,
        config: RoleConfig,
        *,
        on_host: bool,
        take: Callable[[int], memoryview],
        on_refused: Callable[[str, Exception], None],
    ) -> LaneOffer | None:
        """The server's half; None if this machine has no such lane, or nothing has to be opened for it.

        on_host: the shards' values are in host memory. take: memory for incoming data, in bytes. on_refused(label,
        error): called for connections that were turned away. Raises UsageError if it can't listen.
        """
        return None

    def listen(self, config: RoleConfig) -> Listening:
        """The receiving half for parcels, of a lane that is opened. Raises LaneUnavailable."""
        raise NotImplementedError

    def dial(
        self, config: RoleConfig, address: str, opened: worker_pb2.OpenParcelLaneReply, *, timeout_s: float
    ) -> socket.socket:
        """A socket for parcels to the worker at an address, which has accepted it. Raises OSError, SegmentError."""
        raise NotImplementedError

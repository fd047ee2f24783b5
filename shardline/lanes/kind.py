"""What a lane is, to whoever has to choose one: its name, where it can be used, and how to make either half.

The halves are imported when they are made: choosing needs neither sockets nor tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardline.seams import Resident

if TYPE_CHECKING:
    from shardline.config import RoleConfig
    from shardline.core.plan import ShardSpec
    from shardline.lanes.attachments import LaneOffer
    from shardline.lanes.base import Lane
    from shardline.rpc.channel import Peer


@dataclass(frozen=True)
class LaneKind(Resident):
    """One way for the bytes of pushes and pulls. Residents of `shardline.lanes.LANES`."""

    same_host: ClassVar[bool] = False
    """It joins tasks of one host only: `--lane auto` tries it where both may be on one."""
    opened: ClassVar[bool] = True
    """A worker has to open it, which may fail; otherwise it is always there, inside the call's own stream."""

    def connect(self, config: RoleConfig, peer: Peer, shard: int, spec: ShardSpec) -> Lane:
        """The worker's half, to one shard of one server. Nothing is connected before the first exchange."""
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

        on_host: the shards' values are in the machine's own memory. take: memory for what comes in, in bytes.
        on_refused(label, error): told of connections that were turned away. Raises UsageError if it can't listen.
        """
        return None

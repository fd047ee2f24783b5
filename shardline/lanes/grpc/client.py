"""The grpc lane: chunk frames inside the RPC's own stream. Always works."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.lanes.calls import ShardCalls
from shardline.rpc.messages.data import exchange_requests
from shardline.waist import Exchanged, Push, Sender, Sink, Want


class GrpcLane(ShardCalls):
    """One shard over its ps's channel."""

    name = "grpc"

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        self._arm()
        requests = exchange_requests(sender, self._shard, contributions, want)
        return self.converse(requests, contributions, want, sink, timeout_s=timeout_s)

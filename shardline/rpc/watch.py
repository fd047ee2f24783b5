"""Client for watching a job. Needs no torch, so that such commands start at once."""

from __future__ import annotations

from shardline.core.status import ChiefStatus
from shardline.core.timeouts import Timeouts
from shardline.errors import UsageError
from shardline.rpc.channel import Peer
from shardline.rpc.messages.status import chief_status_from_proto
from shardline.rpc.v1 import chief_pb2, chief_pb2_grpc
from shardline.security import PLAIN, Security


class ChiefWatch:
    """Status of the job, its end, and moves of its shards; every call has a deadline and is safe to repeat."""

    def __init__(self, address: str, timeouts: Timeouts | None = None, security: Security = PLAIN) -> None:
        self.timeouts = timeouts or Timeouts()
        self.peer = Peer("chief", address, self.timeouts, security)
        self.stub = chief_pb2_grpc.ChiefStub(self.peer.channel)

    def status(self, timeout_s: float | None = None) -> ChiefStatus:
        """Current status: phase, tasks, rates. timeout_s: deadline in seconds, None = the cluster's default."""
        request = chief_pb2.ChiefStatusRequest()
        reply = self.peer.call(self.stub.Status, request, what="Status", timeout_s=timeout_s)
        return chief_status_from_proto(reply)

    def stop(self, reason: str) -> int:
        """Ask the chief to end the job with a checkpoint; returns the stop step, 0 if it is not known yet."""
        reply = self.peer.call(self.stub.Stop, chief_pb2.StopJobRequest(reason=reason), what="Stop")
        return int(reply.stop_step)

    def move(self, drain: str = "", *, number: int = 0) -> chief_pb2.MoveReply:
        """Ask for moves of shards, or how those asked for last go; arguments and answer as in MoveRequest, MoveReply.

        Raises UsageError if the chief refuses.
        """
        request = chief_pb2.MoveRequest(drain=drain, number=number)
        reply: chief_pb2.MoveReply = self.peer.call(self.stub.Move, request, what="Move")
        if not reply.number:
            raise UsageError(reply.failure)
        return reply

    def close(self) -> None:
        self.peer.close()

"""The gRPC service of an aggregator: that of a ps, as far as workers call it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shardline.core.outcome import Outcome
from shardline.errors import ProtocolError
from shardline.lanes.attachments import Attachments
from shardline.rpc import errors as rpc_errors
from shardline.rpc.v1 import data_pb2
from shardline.rpc.v1.parameter_server_pb2_grpc import add_ParameterServerServicer_to_server
from shardline.server.admission import admit_data, outcome_to_proto
from shardline.server.backend import Backend
from shardline.server.data_plane import DataPlane
from shardline.waist import Standing

NOT_YET = (Outcome.FENCED, Outcome.NOT_CONFIGURED)


class Relay(Backend, Protocol):
    async def ready_for(self, timeline: int, admits: Callable[[], bool]) -> None: ...

    async def standing(self, shard: int, replicas: Sequence[int]) -> Standing: ...


class Plane(DataPlane):
    """Push and pull as at the servers; the progress of replicas is known to these alone."""

    def __init__(self, relay: Relay, attachments: Attachments) -> None:
        super().__init__(relay, attachments)
        self._relay = relay

    @rpc_errors.unary
    async def Progress(self, request: data_pb2.ProgressRequest, context: Any) -> data_pb2.ProgressReply:
        """What the servers say of some replicas: the first call of every member."""
        relay, sent = self._relay, request.data
        await relay.ready_for(sent.timeline, lambda: admit_data(relay, sent, init=False).outcome not in NOT_YET)
        decision = admit_data(relay, sent, init=False)
        if decision.outcome is not Outcome.SERVED:
            return data_pb2.ProgressReply(
                outcome=outcome_to_proto(decision.outcome), reason=decision.reason, timeline=relay.timeline
            )
        known = relay.shard(sent.shard).replicas
        if len(request.replicas) > known or any(replica >= known for replica in request.replicas):
            raise ProtocolError(f"Progress asks for replicas {list(request.replicas)[:8]}; the job has {known}")
        found = await relay.standing(sent.shard, tuple(request.replicas))
        return data_pb2.ProgressReply(
            outcome=outcome_to_proto(found.outcome),
            reason=found.reason,
            timeline=found.timeline,
            replicas=[data_pb2.ReplicaProgress(replica=r, step=step) for r, step in found.replicas.items()],
            step_min=min(found.replicas.values(), default=found.step_max),
            step_max=found.step_max,
            version=found.version,
            last_seq=found.last_seq,
            wants_state=found.wants_state,
        )


def registered(relay: Relay, attachments: Attachments) -> Callable[[Any], None]:
    """What adds the service to a server."""
    # The generated base answers all other calls: they are not implemented.
    plane = Plane(relay, attachments)  # type: ignore[abstract]
    return functools.partial(add_ParameterServerServicer_to_server, plane)

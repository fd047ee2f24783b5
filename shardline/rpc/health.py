"""Queries the standard gRPC health service of a task without importing torch: containers ask every few seconds."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shardline.core.timeouts import LEAST_S, Timeouts
from shardline.errors import UnreachableError
from shardline.rpc.channel import open_channel
from shardline.security import PLAIN, Security

OFF_DUTY = "NOT_SERVING"


def check(address: str, *, timeout_s: float, security: Security = PLAIN) -> str:
    """SERVING or NOT_SERVING, as reported by the task at host:port. Raises UnreachableError without an answer."""
    channel = open_channel(address, Timeouts(total_s=max(LEAST_S, timeout_s)), security)
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        code = error.code().name.lower() if isinstance(error, grpc.Call) else "unknown"
        details = error.details() if isinstance(error, grpc.Call) else str(error)
        raise UnreachableError(
            f"no task at {address} reported healthy within {timeout_s:g} s ({code}: {details})"
        ) from None
    finally:
        channel.close()
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return "SERVING" if name == "SERVING" else OFF_DUTY

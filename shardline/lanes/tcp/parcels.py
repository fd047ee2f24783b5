"""Lane tcp for parcels: a bulk socket, with TLS where the cluster has it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from shardline.cluster import parse_address
from shardline.errors import UsageError
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.tcp import frames
from shardline.lanes.tcp.client import DIAL_S
from shardline.lanes.tcp.server import BulkHandshake, Listening, listen
from shardline.native.tls import available

if TYPE_CHECKING:
    from shardline.config import RoleConfig
    from shardline.rpc.v1 import worker_pb2


def listening(config: RoleConfig) -> Listening:
    """An additional port of the interface of the worker's address. Raises LaneUnavailable."""
    tls = config.security.server_context()
    if tls is not None and not available():
        raise LaneUnavailable("it moves TLS by the native library and ssl's OpenSSL, which are not to be had here")
    try:
        listener = listen(config.listens_at)
    except UsageError as error:
        raise LaneUnavailable(str(error)) from error
    return Listening(
        listener, lambda sock, address: BulkHandshake(sock, address, tls), port=int(listener.getsockname()[1])
    )


def dial(
    config: RoleConfig, address: str, opened: worker_pb2.OpenParcelLaneReply, *, timeout_s: float
) -> socket.socket:
    """Connect to the port on the host that was called; see LaneKind.dial."""
    host, _ = parse_address(address)
    sock = frames.dial(
        host,
        opened.port,
        opened.token,
        timeout_s=min(timeout_s, DIAL_S),
        stall_s=config.timeouts.rpc_s,
        tls=config.security.client_context,
    )
    frames.keep_alive(sock, config.timeouts.suspect_s)
    return sock

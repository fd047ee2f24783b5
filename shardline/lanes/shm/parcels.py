"""Lane shm for parcels: a unix socket between processes of one user on one host.

Parcels go through the socket, not through a segment: each is written once and read once, by two processes that both
need it in memory of their own, so a segment would save one copy of some hundred kilobytes.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from shardline.errors import ProtocolError, UsageError
from shardline.host import segments
from shardline.host.process import kept_from_children
from shardline.host.segments import SegmentError
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.shm.client import KNOCK_S
from shardline.lanes.shm.server import listen
from shardline.lanes.tcp import frames
from shardline.lanes.tcp.server import BulkHandshake, Listening

if TYPE_CHECKING:
    from shardline.config import RoleConfig
    from shardline.rpc.v1 import worker_pb2


class UnixHandshake(BulkHandshake):
    """The same preamble on a unix socket, from a process of this user."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, "this host", None)

    def tune(self) -> None:
        """See BulkHandshake: there is nothing to set, but the kernel knows the caller."""
        try:
            segments.check_user(self.sock)
        except SegmentError as error:
            raise ProtocolError(str(error)) from error


def listening(config: RoleConfig) -> Listening:
    """A unix socket, in --run-dir or the abstract namespace. Raises LaneUnavailable."""
    address = segments.new_address(config.run_dir)
    path = None if config.run_dir is None else Path(address)
    try:
        listener = listen(address, path)
    except UsageError as error:
        raise LaneUnavailable(str(error)) from error

    def remove() -> None:
        if path is not None:
            path.unlink(missing_ok=True)

    return Listening(listener, lambda sock, _: UnixHandshake(sock), path=address, close=remove)


def dial(
    config: RoleConfig, address: str, opened: worker_pb2.OpenParcelLaneReply, *, timeout_s: float
) -> socket.socket:
    """Connect to the worker's socket; see LaneKind.dial."""
    wait_s = min(timeout_s, KNOCK_S)
    sock = kept_from_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        segments.connect(sock, opened.socket, timeout_s=wait_s)
        segments.check_user(sock)
        sock.settimeout(wait_s)
        frames.show_token(sock, opened.token)
    except BaseException:
        sock.close()
        raise
    return sock

"""Ports that are known before anything listens there, and stay free for those who are told of them."""

from __future__ import annotations

import socket
import sys

from shardline.errors import UsageError

CAN_HOLD = sys.platform == "linux"
"""Elsewhere nobody can listen where another socket is bound."""


def held_port(host: str = "127.0.0.1") -> socket.socket:
    """A socket bound to a free port of `host`, so that the system gives the port to nobody else until it is closed.

    A port that was only found free is anybody's: of the next connection that this machine opens, too. This one can be
    bound and listened at by whoever names it and sets SO_REUSEADDR, as gRPC and asyncio do, by one process at a time,
    and again after that has died; see CAN_HOLD. Raises UsageError where the host is not this machine's.
    """
    held: socket.socket | None = None
    try:
        held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
    except OSError as error:
        if held is not None:
            held.close()
        raise UsageError(
            f"no port of {host} can be taken: {error.strerror}; is that an address of this host?"
        ) from None
    return held

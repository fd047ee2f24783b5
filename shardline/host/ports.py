"""Addresses of this host, and ports that stay reserved until something listens on them."""

from __future__ import annotations

import socket
import sys

from shardline.errors import UsageError

CAN_HOLD = sys.platform == "linux"
"""On other systems nothing can listen on a port where another socket is bound."""


def check_free(host: str, port: int) -> None:
    """Raise OSError if nothing can listen on this port now; port 0 stands for any free one.

    Names that can't be looked up are left to whoever listens. For callers of gRPC, which would log the reason itself.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE) if port else []
    except OSError:
        return
    failed: list[OSError] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            failed.append(error)
    # A name may have addresses of several kinds, of which one is enough.
    if failed and len(failed) == len(found):
        raise failed[0]


def held_port(host: str = "127.0.0.1") -> socket.socket:
    """A socket bound to a free port of `host`, which reserves the port until the socket is closed.

    A port that was merely found free can be taken by anything, even by this machine's next outgoing connection. This
    one can be bound and listened on by a process that sets SO_REUSEADDR, as gRPC and asyncio do, one at a time, and
    again after its death; see CAN_HOLD. Raises UsageError if the host is not this machine's.
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
            f"no port of {host} can be bound: {error.strerror}; is that an address of this host?"
        ) from None
    return held


def on_this_host(host: str) -> bool:
    """Whether a name or address belongs to this host (or to this network namespace), so that it can be bound."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((where[0], 0, *where[2:]))
        except OSError:
            continue
        return True
    return False

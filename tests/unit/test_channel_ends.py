"""Calls end where their server goes before it has seen them. Played by a server of bare HTTP/2 frames.

A server that ends tells the last stream that it has taken; calls behind it were never seen. gRPC would make them again
by itself, and such a call never ends for whoever reads its replies when the server is gone by then: a worker stood
still in one, in the middle of a failover.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from shardline.core.timeouts import Timeouts
from shardline.rpc import errors
from shardline.rpc.channel import open_channel

CALLS = 12
"""With gRPC's own retries about half of them never end, by chance."""
DEADLINE_S = 2.0
PATIENCE_S = 15.0
HEADERS, SETTINGS, PING, GOAWAY = 1, 4, 6, 7
ACK = 1
PREFACE_BYTES = 24


class Unseeing:
    """A server that takes one connection, says at its first call that it has seen none, and is gone."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.calls = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Whoever connects may go at any time.
        with contextlib.suppress(OSError, EOFError), self._listener.accept()[0] as connection:
            connection.settimeout(PATIENCE_S)
            _read(connection, PREFACE_BYTES)
            _send(connection, SETTINGS)
            while not self.calls:
                kind, flags, payload = self._frame(connection)
                if kind == HEADERS:
                    self.calls += 1
                    # Nobody answers any more when the other side connects again.
                    self._listener.close()
                    _send(connection, GOAWAY, payload=struct.pack("!II", 0, 0))
                elif kind in (SETTINGS, PING) and not flags & ACK:
                    _send(connection, kind, ACK, payload if kind == PING else b"")

    @staticmethod
    def _frame(connection: socket.socket) -> tuple[int, int, bytes]:
        head = _read(connection, 9)
        return head[3], head[4], _read(connection, int.from_bytes(head[:3], "big"))

    def close(self) -> None:
        self._listener.close()
        self._thread.join(PATIENCE_S)


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def _send(connection: socket.socket, kind: int, flags: int = 0, payload: bytes = b"") -> None:
    """One frame of stream 0."""
    connection.sendall(struct.pack("!I", len(payload))[1:] + bytes((kind, flags)) + bytes(4) + payload)


def made(server: Unseeing, codes: list[Any]) -> threading.Thread:
    """A call in both directions at this server, on a thread of its own; its code when it has ended."""
    channel = open_channel(server.address, Timeouts(total_s=20.0))
    over = threading.Event()

    def requests() -> Iterator[bytes]:
        # Some follow when the server is gone.
        for _ in range(50):
            yield b"x" * 100
            over.wait(0.0005)
        over.wait(DEADLINE_S)

    def run() -> None:
        try:
            for _ in channel.stream_stream("/shardline.test/Both")(requests(), timeout=DEADLINE_S):
                raise AssertionError("a server without handlers answered")
        except grpc.RpcError as error:
            codes.append(error.code() if isinstance(error, grpc.Call) else error)
        finally:
            over.set()
            channel.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_call_ends_when_its_server_goes_before_it_has_seen_it() -> None:
    servers = [Unseeing() for _ in range(CALLS)]
    codes: list[Any] = []
    threads = [made(server, codes) for server in servers]
    for thread in threads:
        thread.join(PATIENCE_S)
    for server in servers:
        server.close()
    assert [thread for thread in threads if thread.is_alive()] == [], f"calls that never end, beside {codes}"
    assert [server.calls for server in servers] == [1] * CALLS
    assert codes == [grpc.StatusCode.UNAVAILABLE] * CALLS


def test_a_call_that_is_still_read_when_its_server_has_stopped_is_no_unexpected_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stopped(grpc.aio.BaseError):
        pass

    async def read(self: object, request: object, context: object) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        asyncio.run(errors.writer(read)(object(), None, None))
    assert not caplog.records

"""Handshakes that are not gRPC's: bulk sockets (tcp), the segments' unix socket (shm), and bytes at the gRPC port."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from hypothesis import strategies as st

from shardline.cluster import parse_address
from shardline.host import segments
from shardline.lanes.tcp import frames as bulk
from shardline.lanes.token_acceptor import TOKEN_BYTES
from shardline.rpc.v1 import common_pb2, parameter_server_pb2
from tests.fuzz.calls import Finding, LogWatch
from tests.fuzz.hosts import PsHost
from tests.fuzz.messages import Draw, damaged
from tests.fuzz.resources import Level, at_rest, settles
from tests.support.segments import knock_message

PATIENCE_S = 10.0
KINDS = ("bulk", "segments", "grpc")
TOKENS = ("none", "wrong", "up", "down", "token", "used")
FILES = ("none", "pipe", "null", "unsealed", "small", "right", "two", "four")
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GRADIENT_BYTES = 3 * 256
"""Of the shard: three buckets of 64 elements of float32, which begin at cache lines."""


@dataclass(frozen=True)
class Visit:
    """One connection: what it says, with which token and which descriptors in it, and whether it waits for more."""

    kind: str
    token: str
    data: bytes
    """What stands in place of a right handshake; empty = a right one with this token."""
    more: bytes
    """What follows it."""
    nbytes: int
    """segments: how long the segment is said to be."""
    file: str

    def to_json(self) -> str:
        """Text for --replay."""
        return json.dumps({**asdict(self), "data": self.data.hex(), "more": self.more.hex()})

    @classmethod
    def from_json(cls, text: str) -> Visit:
        """Back again."""
        fields = json.loads(text)
        return cls(**{**fields, "data": bytes.fromhex(fields["data"]), "more": bytes.fromhex(fields["more"])})


def draw_visit(draw: Draw) -> Visit:
    """A visit to one of the three doors."""
    kind = draw(st.sampled_from(KINDS))
    data = b""
    how = draw(st.sampled_from(("right", "damaged", "raw")))
    if kind == "grpc":
        data = HTTP2 + draw(st.binary(max_size=60)) if how == "right" else draw(st.binary(min_size=1, max_size=80))
        data = damaged(draw, data) if how == "damaged" else data
    elif how == "damaged":
        size = bulk.PREAMBLE_BYTES if kind == "bulk" else segments.KNOCK_BYTES
        right = bulk.preamble(bytes(TOKEN_BYTES)) if kind == "bulk" else b"shardln1" + bytes(size - 8)
        data = damaged(draw, right)
    elif how == "raw":
        data = draw(st.binary(min_size=1, max_size=90))
    return Visit(
        kind=kind,
        token=draw(st.sampled_from(TOKENS)),
        data=data,
        more=draw(st.sampled_from([b"", b".", b"\x00" * 5000]) | st.binary(max_size=20)),
        nbytes=draw(st.sampled_from([GRADIENT_BYTES, 0, 1, GRADIENT_BYTES - 1, 1 << 20, 1 << 40, (1 << 64) - 1])),
        file=draw(st.sampled_from(FILES)),
    )


@dataclass
class Visitor:
    """Visits the doors of one ps, and holds that nothing comes of it but what a token is good for."""

    answers: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._watch = LogWatch()
        self._watch.__enter__()
        self.host = PsHost()
        self._address = parse_address(self.host.address)
        self._state = self.host.state()
        self._rest: Level | None = None

    def close(self) -> None:
        """End the ps."""
        self.host.close()
        self._watch.__exit__()

    def make(self, visit: Visit) -> None:
        """Visit once. Raises Finding."""
        doors = {"bulk": self._bulk, "segments": self._segments, "grpc": self._grpc}
        try:
            answer = doors[visit.kind](visit)
        except TimeoutError:
            raise self._finding(visit, f"no answer and no end within {PATIENCE_S:.0f} s") from None
        self.answers[f"{visit.kind} {answer}"] += 1
        if self._watch.found:
            raise self._finding(visit, f"left a traceback in the log: {self._watch.found.pop()}")
        if self.host.state() != self._state:
            raise self._finding(visit, "changed the state")
        right = not visit.data and visit.token in ("up", "down", "token", "used")
        if answer == "taken" and not right:
            raise self._finding(visit, "was let in")

    @staticmethod
    def _finding(visit: Visit, problem: str) -> Finding:
        return Finding(f"a visit to {visit.kind}: {problem}\nrepeat: --replay '{visit.to_json()}'")

    def settle(self) -> None:
        """After a batch: nobody stands before a door, and nothing is held. Raises Finding."""
        self.host.check()
        if self._rest is None:
            self._rest = at_rest(self.host.tasks)
        problem = settles(self._rest, self.host.tasks)
        if problem:
            raise Finding(f"after a batch of visits: {problem}")

    def _opened(self, lane: Any) -> Any:
        data = self.host.client.data(lane=lane)
        return self.host.client.call("OpenLane", parameter_server_pb2.OpenLaneRequest(data=data))

    # Bulk sockets

    def _bulk(self, visit: Visit) -> str:
        reply = self._opened(common_pb2.LANE_TCP)
        tokens = {"up": reply.up_token, "down": reply.down_token, "used": reply.up_token, "wrong": bytes(32)}
        data = visit.data or bulk.preamble(tokens.get(visit.token, bytes(32)))
        if visit.token == "used" and not visit.data:
            self._talk(self._tcp(reply.port), data, b"")
            assert self._talk(self._tcp(reply.port), data, visit.more) != "taken", "a token was good twice"
            return "taken"
        return self._talk(self._tcp(reply.port), data, visit.more)

    def _tcp(self, port: int) -> socket.socket:
        return socket.create_connection((self._address[0], port), PATIENCE_S)

    @staticmethod
    def _talk(sock: socket.socket, data: bytes, more: bytes) -> str:
        """Say it all, and hear until the other side ends."""
        with sock:
            sock.settimeout(PATIENCE_S)
            heard = b""
            # Whoever is refused may find the door shut before all is said.
            with _may_be_shut():
                sock.sendall(data)
                sock.sendall(more)
                sock.shutdown(socket.SHUT_WR)
            with _may_be_shut():
                heard = sock.recv(1)
                if heard == bulk.ACCEPTED:
                    return "taken"
                while sock.recv(1 << 16):
                    pass
        return "refused" if heard == bulk.REFUSED else "shut"

    # Segments

    def _segments(self, visit: Visit) -> str:
        reply = self._opened(common_pb2.LANE_SHM)
        right = {"token": reply.token, "used": reply.token}.get(visit.token, bytes(32))
        data = visit.data or knock_message(right, visit.nbytes)
        if visit.token == "used" and not visit.data:
            self._knock(reply.socket, data, visit)
            assert self._knock(reply.socket, data, visit) != "taken", "a token was good twice"
            return "shut"
        return self._knock(reply.socket, data, visit)

    def _knock(self, address: str, data: bytes, visit: Visit) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, _descriptors(visit.file, visit.nbytes) as fds:
            sock.settimeout(PATIENCE_S)
            sock.connect(segments.to_kernel(address))
            with _may_be_shut():
                socket.send_fds(sock, [data], fds)
                sock.sendall(visit.more)
                sock.shutdown(socket.SHUT_WR)
            with _may_be_shut():
                heard, passed, _, _ = socket.recv_fds(sock, 64, 8)
                for fd in passed:
                    os.close(fd)
                return "taken" if heard[:1] == b"\x01" else "refused" if heard else "shut"
        return "shut"

    # gRPC's port

    def _grpc(self, visit: Visit) -> str:
        return self._talk(self._tcp(self._address[1]), visit.data or HTTP2, visit.more)


@contextlib.contextmanager
def _may_be_shut() -> Iterator[None]:
    """The other side may be gone at any moment; but it has to be, or to answer, in time."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
            raise


@contextlib.contextmanager
def _descriptors(kind: str, nbytes: int) -> Iterator[list[int]]:
    """Descriptors to pass with a knock."""
    fds: list[int] = []
    try:
        if kind == "pipe":
            fds += os.pipe()
        elif kind == "null":
            fds.append(os.open("/dev/null", os.O_RDWR))
        elif kind in ("unsealed", "small", "right", "two", "four"):
            for _ in range({"two": 2, "four": 4}.get(kind, 1)):
                fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                fds.append(fd)
                # Sparse: of whatever length, it takes no memory.
                with contextlib.suppress(OSError, OverflowError):
                    os.ftruncate(fd, 64 if kind == "small" else nbytes)
                if kind != "unsealed":
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, segments.FIXED)
        yield fds[:1] if kind == "pipe" else fds
    finally:
        for fd in fds:
            os.close(fd)

"""Shared by the tests of lanes: a lane to one ps, what is sent over it and received from it."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import trustme

from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.outcome import Outcome
from shardline.core.plan import ShardSpec
from shardline.core.reduce import Block
from shardline.core.tensor_bytes import Buffer, digest
from shardline.core.timeouts import Timeouts
from shardline.host import segments
from shardline.lanes import LANES, OPENED, token_acceptor
from shardline.lanes.attachments import LaneOffer
from shardline.lanes.base import Lane
from shardline.lanes.call_server import Answered, ReplyWriter
from shardline.lanes.kind import LaneKind, ServerSide
from shardline.lanes.shm.client import ShmLane
from shardline.lanes.shm.server import ShmOffer
from shardline.lanes.tcp import frames as bulk
from shardline.lanes.tcp.client import TcpLane
from shardline.lanes.tcp.server import TcpOffer
from shardline.native.engine import available
from shardline.rpc.channel import Peer
from shardline.rpc.messages.convert import plan_from_proto
from shardline.rpc.v1 import data_pb2
from shardline.waist import Arrival, Exchanged, Memory, Payload, Push, Sender, Want, Whole, octets
from tests.support.cluster import Ps
from tests.support.device_memory import played
from tests.support.plain_client import ELEMENTS, FIRST_W, FROZEN, STATS, TIMELINE, W, floats, plan, plan_id

TIMEOUTS = Timeouts(total_s=20.0)
DEADLINE_S = 20.0
CPU = torch.device("cpu")
SENDER = Sender(job="plain", timeline=TIMELINE, plan_id=plan_id(), who=Identity("worker/0", 1))
GRADIENTS = "shardline-gradients"
L = TypeVar("L", bound=Lane)


class Taken:
    """A sink that keeps what it receives."""

    def __init__(self) -> None:
        self.memory: dict[int, bytearray] = {}
        self.heads: list[Arrival] = []

    def buffer(self, arrival: Arrival) -> memoryview:
        self.memory[arrival.bucket] = bytearray(arrival.payload_bytes)
        return memoryview(self.memory[arrival.bucket])

    def done(self, arrival: Arrival) -> None:
        self.heads.append(arrival)

    def whole(self, arrival: Arrival, payload: Memory) -> None:
        self.buffer(arrival)[:] = octets(payload)
        self.done(arrival)

    def take(self, arrival: Arrival, memory: Memory) -> None:
        raise AssertionError("nothing is mapped on this lane")

    def weights(self) -> tuple[float, ...]:
        return struct.unpack(f"<{ELEMENTS}f", self.memory[W])[: len(FIRST_W)]


class Mapping(Taken):
    """A sink that copies what it is shown."""

    def take(self, arrival: Arrival, memory: Memory) -> None:
        assert isinstance(memory, torch.Tensor) or memoryview(memory).readonly
        self.memory[arrival.bucket] = bytearray(octets(memory))
        self.heads.append(arrival)


def on_loop(ps: Ps, act: Callable[[], Any]) -> Any:
    """Run on the server's loop, where attachments must be used."""

    async def now() -> Any:
        return act()

    return ps.server.run(now(), timeout_s=10.0)


def payload(data: Buffer, bucket: int = W) -> Payload:
    return Payload(
        bucket=bucket,
        dtype="float32",
        elements=ELEMENTS,
        present=b"",
        data=data,
        raw_bytes=len(data),
        digest=digest(data),
    )


def gradient(value: float = 1.0, *, step: int = 0, items: Sequence[Payload] | None = None) -> Push:
    """A push with one number for all elements of `w`."""
    items = [payload(floats([value] * 12))] if items is None else items
    return Push(payloads=Whole(items, (FROZEN, STATS)), step=step, block=Block(0, 1))


def spec() -> ShardSpec:
    return plan_from_proto(plan()).shards[0]


class Bench(Generic[L]):
    """One ps that offers a lane, and one lane to it."""

    sink: type[Taken] = Taken

    def __init__(self, ps: Ps, offer: Any, lane: Callable[[Peer], L]) -> None:
        self.ps = ps
        self.offer = offer
        if offer is not None:
            ps.attachments.offer(offer)
        self.peer = Peer(ps.task, ps.address, TIMEOUTS)
        self.lane = lane(self.peer)

    def exchange(
        self, push: Push | None = None, want: Want | None = None, *, sender: Sender = SENDER, sink: Any = None
    ) -> Exchanged:
        pushes = [push] if push is not None else []
        return self.lane.exchange(sender, pushes, want, sink or self.sink(), timeout_s=DEADLINE_S)

    def pull(self, step: int) -> Taken:
        sink = self.sink()
        done = self.exchange(want=Want(step=step, wait_s=5.0), sink=sink)
        assert done.end is not None and done.end.outcome is Outcome.SERVED
        return sink

    def drop(self) -> None:
        """Have the ps close its side of the lane."""
        on_loop(self.ps, lambda: self.ps.attachments.drop_all("a test"))

    @property
    def open(self) -> int:
        """Number of attachments on the ps."""
        return int(on_loop(self.ps, lambda: self.ps.attachments.count()[self.offer.lane]))

    def close(self) -> None:
        self.lane.close()
        self.peer.close()
        if not self.ps.server.loop.is_closed():
            on_loop(self.ps, self.ps.attachments.close)


def config(kind: LaneKind) -> RoleConfig:
    """Settings for either side."""
    cluster = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:0",)})
    return RoleConfig(role="ps", index=0, cluster=cluster, timeouts=TIMEOUTS, lane=kind.name)


def connected(kind: LaneKind, peer: Peer) -> Lane:
    """A worker's half, of a model in host memory."""
    return kind.connect(config(kind), peer, 0, spec(), device=CPU)


class KindBench(Bench[Lane]):
    """A lane from the table to one ps, whose shard is not configured yet."""

    sink = Mapping

    def __init__(self, name: str, ps: Ps) -> None:
        kind = LANES.parse(name)
        self.kind = kind
        self._played = contextlib.ExitStack()
        if name == "cuda":
            self._played.enter_context(played())
        self.said: list[Exception] = []
        side = ServerSide(config(kind), CPU, ps.store.buffers.take, lambda label, error: self.said.append(error))
        offer = kind.offer(side)
        assert (offer is not None) == (name in OPENED), f"lane {name} can't be offered on this machine"
        if offer is not None:
            otherwise = ps.store.make_publication
            ps.store.make_publication = lambda spec, two: publication(offer, otherwise, spec, two)
        super().__init__(ps, offer, lambda peer: connected(kind, peer))
        self.openings = 0
        """How many times a worker has opened the lane."""
        given = ps.attachments.open

        def count(*arguments: Any) -> Any:
            self.openings += 1
            return given(*arguments)

        ps.attachments.open = count  # type: ignore[method-assign]

    def close(self) -> None:
        super().close()
        self._played.close()
        # Errors that a test looked at refer to frames, and those to segments; other tests count the mapped ones.
        gc.collect()

    def another(self, peer: Peer | None = None) -> Lane:
        """Another worker's half."""
        return connected(self.kind, peer or self.peer)

    @property
    def open(self) -> int:
        """Number of attachments on the ps for this lane."""
        return int(on_loop(self.ps, lambda: sum(self.ps.attachments.count().values())))

    @property
    def acceptor(self) -> token_acceptor.TokenAcceptor[Any]:
        """The acceptor that admits workers, for a lane that is opened."""
        acceptor = self.offer.acceptor
        assert isinstance(acceptor, token_acceptor.TokenAcceptor)
        return acceptor

    def opening(self) -> Any:
        """The reply to OpenLane, with which a worker opens the lane."""
        return self.lane.open_attachment(SENDER, timeout_s=DEADLINE_S)  # type: ignore[attr-defined]

    def call(self, said: bytes = b"") -> socket.socket:
        """Connect to the lane's own socket as a stranger and send something."""
        opening = self.opening()
        if opening.port:
            sock = socket.create_connection(("127.0.0.1", opening.port), timeout=10.0)
        else:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(10.0)
            sock.connect(segments.to_kernel(opening.socket))
        if said:
            sock.sendall(said)
        return sock


def publication(offer: LaneOffer, otherwise: Callable[..., Any], spec: Any, two: bool) -> Any:
    """A shard's publication memory on this lane."""
    made = offer.publish(spec, keeps_previous=two)
    return otherwise(spec, two) if made is None else made


class TcpBench(Bench[TcpLane]):
    """tls: the server's context and the client's."""

    def __init__(self, ps: Ps, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None) -> None:
        self.server_tls, self._theirs = tls or (None, None)
        offer = TcpOffer("127.0.0.1", self.server_tls, timeout_s=TIMEOUTS.rpc_s, take=ps.store.buffers.take)
        super().__init__(
            ps, offer, lambda peer: TcpLane(peer, 0, [ELEMENTS] * 3, timeouts=TIMEOUTS, tls=lambda: self._theirs)
        )

    def dial(self, port: int, token: bytes) -> socket.socket:
        return bulk.dial("127.0.0.1", port, token, timeout_s=5.0, stall_s=5.0, tls=lambda: self._theirs)


def usable(names: Iterable[str]) -> list[str]:
    """Those of the lanes that can be opened here: tcp needs the native library."""
    return [name for name in names if name != "tcp" or available()]


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS for a server at 127.0.0.1, and for its clients."""
    ca = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca.issue_cert("127.0.0.1").configure_cert(server)
    ca.configure_trust(client)
    return server, client


class ShmBench(Bench[ShmLane]):
    sink = Mapping

    def __init__(self, ps: Ps, run_dir: Path | None = None) -> None:
        offer = ShmOffer(run_dir=run_dir, timeout_s=TIMEOUTS.rpc_s)
        super().__init__(ps, offer, lambda peer: ShmLane(peer, 0, spec(), timeout_s=TIMEOUTS.rpc_s))

    def knock(self, message: bytes, fds: Sequence[int]) -> int:
        """Send a message to the ps's socket; returns whether it was accepted."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(5.0)
            sock.connect(segments.to_kernel(self.offer.address))
            answer = b""
            # The server may close the connection before the message is sent.
            with contextlib.suppress(ConnectionError):
                socket.send_fds(sock, [message], list(fds))
                answer = sock.recv(64)
        for fd in fds:
            os.close(fd)
        return int(answer[0]) if answer else 0

    def token(self) -> bytes:
        return self.lane.open_attachment(SENDER, timeout_s=DEADLINE_S).token

    @property
    def length(self) -> int:
        return segments.layout([bucket.nbytes for bucket in spec().buckets])[-1]


def a_push_that_does_not_count_ends_the_exchange(bench: Bench[Any]) -> None:
    done = bench.exchange(gradient(step=7), Want(step=8, wait_s=5.0))
    assert [ack.outcome for ack in done.acks] == [Outcome.REFUSED] and done.end is None
    assert "step 7 is ahead" in done.acks[0].reason


Handler = Callable[[AsyncIterator[data_pb2.PushPullRequest], ReplyWriter], Coroutine[Any, Any, None]]


class Handled:
    """Answers calls over a lane's socket with these handlers."""

    def __init__(
        self, handler: Handler, at_once: Callable[[data_pb2.PushPullRequest], Answered | None] = lambda request: None
    ) -> None:
        self.answer_at_once = at_once
        self._handler = handler

    async def answer(self, request: AsyncIterator[data_pb2.PushPullRequest], writer: ReplyWriter) -> None:
        await self._handler(request, writer)


async def _no_call(requests: AsyncIterator[data_pb2.PushPullRequest], writer: ReplyWriter) -> None:
    raise AssertionError("a call came over a lane's socket")


no_calls = Handled(_no_call)
"""Where a test makes no calls."""

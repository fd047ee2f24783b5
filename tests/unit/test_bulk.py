"""Bulk sockets: tokens, strangers, transfers in both directions, and what breaks them. All over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from shardline.errors import ProtocolError, UnreachableError
from shardline.lanes import token_acceptor
from shardline.lanes.attachments import Holder, Opening
from shardline.lanes.tcp import frames as bulk, server as bulk_server
from shardline.lanes.tcp.server import TcpAttachment, TcpOffer
from shardline.lanes.tls_socket import TlsSocket, shut
from shardline.lanes.token_acceptor import TOKEN_BYTES, new_token
from shardline.native.engine import available
from shardline.server.buffers import Buffers
from shardline.storage.bucket import WriteCounts
from tests.support.lanes import no_calls

pytestmark = pytest.mark.skipif(not available(), reason="there is no native engine in this process")
T = TypeVar("T")
Contexts = tuple[ssl.SSLContext, ssl.SSLContext]
"""The server's and the client's."""
PATIENCE_S = 10.0
HOLDER = Holder(task="worker/0", incarnation=1, shard=0)


class Server:
    """The server's side: an offer, and a loop on which its attachments are used."""

    def __init__(self, *, timeout_s: float = PATIENCE_S, tls: Contexts | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.told: list[Exception] = []
        self.client_tls = tls[1] if tls is not None else None
        self.offer = TcpOffer(
            "127.0.0.1",
            tls[0] if tls is not None else None,
            timeout_s=timeout_s,
            take=Buffers(lambda: 1 << 20).take,
            on_refused=lambda method, error: self.told.append(error),
        )
        self.opened: list[TcpAttachment] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S * 3)

    def open(self, holder: Holder = HOLDER) -> Opening:
        async def now() -> Opening:
            return self.offer.open(holder, None, self.loop, no_calls)  # type: ignore[arg-type]  # this lane needs no shard

        opening = self.run(now())
        assert isinstance(opening.attachment, TcpAttachment)
        self.opened.append(opening.attachment)
        return opening

    def dial(self, token: bytes, *, stall_s: float = PATIENCE_S) -> socket.socket:
        return bulk.dial(
            "127.0.0.1", self.offer.port, token, timeout_s=PATIENCE_S, stall_s=stall_s, tls=lambda: self.client_tls
        )

    def pair(self) -> tuple[TcpAttachment, socket.socket, socket.socket]:
        """An attachment with both sockets: (server's side, up, down)."""
        opening = self.open()
        return self.opened[-1], self.dial(opening.up_token), self.dial(opening.down_token)

    def close(self) -> None:
        for attachment in self.opened:
            attachment.close()
        self.offer.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)
        self.loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def hasty() -> Iterator[Server]:
    """A server whose deadlines are short."""
    made = Server(timeout_s=0.5)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    """Contexts of both sides, the certificate made for this run."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with the command openssl, which isn't here")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    make_certificate(key, cert)
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(cert, key)
    here = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    here.load_verify_locations(cert)
    return there, here


def make_certificate(key: Path, cert: Path) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=shardline"
    names = "subjectAltName=IP:127.0.0.1"
    arguments = [*command.split(), "-addext", names, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(arguments, check=True, capture_output=True, timeout=60)


@pytest.fixture(params=["plain", "tls"])
def either(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(tls=request.getfixturevalue("tls") if request.param == "tls" else None)
    yield made
    made.close()


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that other threads bring about."""
    end_s = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end_s, f"waited {PATIENCE_S} s for {what}"
        pause.wait(0.005)


def payloads(sizes: Sequence[int], seed: int) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(size) for size in sizes]


# Tokens


def test_each_direction_has_a_token_of_its_own(server: Server) -> None:
    opening = server.open()
    assert opening.up_token != opening.down_token
    assert len(opening.up_token) == len(opening.down_token) == TOKEN_BYTES


# Transfers


async def take_all(attachment: TcpAttachment, sizes: Sequence[int]) -> list[bytes]:
    """Expect buckets a window at a time, as a push does."""
    coming: list[Any] = []
    taken: list[bytes] = []
    rest = list(sizes)
    while rest or coming:
        while rest and len(coming) < attachment.window:
            coming.append(attachment.expect(0, rest.pop(0), 0))
        ticket = coming.pop(0)
        await ticket.wait()
        taken.append(bytes(ticket.memory))
    return taken


async def send_all(attachment: TcpAttachment, data: Sequence[bytes]) -> None:
    for payload in data:
        await attachment.send(payload, None)


def send_in_pieces(sock: socket.socket, data: bytes, cuts: random.Random) -> None:
    position = 0
    while position < len(data):
        size = cuts.choice((1, 2, 1000, 16_384, 70_000, 1 << 20))
        bulk.send_all(sock, memoryview(data)[position : position + size])
        position += size


SIZES = st.lists(st.sampled_from((0, 1, 2, 255, 4096, 16_384, 16_385, 70_001, 600_000, 2 << 20)), max_size=12)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, seed=st.integers(0, 1000))
def test_payloads_of_any_size_arrive_in_order_and_intact(either: Server, sizes: list[int], seed: int) -> None:
    sent = payloads(sizes, seed)
    attachment, up, down = either.pair()
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(send_in_pieces, up, b"".join(sent), random.Random(seed))
        assert either.run(take_all(attachment, sizes)) == sent
        sending.result(PATIENCE_S)
        answering = pool.submit(either.run, send_all(attachment, sent))
        for payload in sent:
            if payload:
                memory = bytearray(len(payload))
                bulk.receive(down, memoryview(memory))
                assert memory == payload
        answering.result(PATIENCE_S)
    assert attachment.failure == ""
    attachment.close()
    up.close()
    down.close()


def test_both_directions_move_at_once(either: Server) -> None:
    sizes = [2 << 20] * 8
    there, back = payloads(sizes, 1), payloads(sizes, 2)
    attachment, up, down = either.pair()
    with ThreadPoolExecutor(3) as pool:
        pool.submit(send_in_pieces, up, b"".join(there), random.Random(3))
        answering = pool.submit(either.run, send_all(attachment, back))
        taking = pool.submit(either.run, take_all(attachment, sizes))
        for payload in back:
            memory = bytearray(len(payload))
            bulk.receive(down, memoryview(memory))
            assert memory == payload
        assert taking.result(PATIENCE_S) == there
        answering.result(PATIENCE_S)


def sent_until_full(sock: socket.socket, most: int) -> int:
    """Bytes that a socket took before it had room for no more."""
    sent = 0
    while sent < most:
        try:
            sent += sock.send(bytes(1 << 20))
        except TimeoutError:
            return sent
    raise AssertionError(f"{most} bytes were taken")


def test_nothing_is_read_that_is_not_expected(server: Server) -> None:
    attachment, up, _ = server.pair()
    up.settimeout(0.2)
    # What the two kernels hold is the bound; the task's own memory has none of it.
    sent = sent_until_full(up, 256 << 20)
    up.settimeout(PATIENCE_S)
    assert server.run(take_all(attachment, [sent])) == [bytes(sent)]


def test_what_lies_at_a_place_is_refused(server: Server) -> None:
    attachment, _, _ = server.pair()

    async def expect() -> None:
        attachment.expect(64, 10, 0)

    with pytest.raises(ProtocolError, match="has offset 64"):
        server.run(expect())


def test_bytes_that_were_overwritten_while_they_left_are_not_taken_as_whole(server: Server) -> None:
    attachment, _, down = server.pair()

    async def send() -> None:
        counts = WriteCounts()
        before = counts.intact(2)
        counts.begin(4)
        await attachment.send(bytes(1000), before)

    # The sending thread may find it out before send() returns.
    with contextlib.suppress(UnreachableError):
        server.run(send())
    with pytest.raises(ConnectionError, match="closed"):
        bulk.receive(down, memoryview(bytearray(1000)))
    until(lambda: "overwritten" in attachment.failure, "the word of it")
    with pytest.raises(UnreachableError, match="overwritten while they were being sent"):
        server.run(send())


# Strangers and tokens at the port


def refusal(sock: socket.socket) -> bytes:
    """What the server says before it closes."""
    sock.settimeout(PATIENCE_S)
    try:
        return sock.recv(10)
    except ConnectionError:
        return b""


def call(server: Server, *said: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.offer.port), timeout=PATIENCE_S)
    for data in said:
        sock.sendall(data)
    return sock


def test_a_wrong_token_is_refused_and_counted(server: Server) -> None:
    opening = server.open()
    with pytest.raises(bulk.RefusedError, match="token was refused"):
        server.dial(new_token())
    until(lambda: server.offer.acceptor.refused == len(server.told) == 1, "the count and the word of it")
    assert "wrong, was already used, or came too late" in str(server.told[0])
    assert server.opened[0].failure == ""
    server.dial(opening.up_token).close()


def test_a_token_used_before_is_refused_and_its_first_bearer_goes_on(server: Server) -> None:
    opening = server.open()
    up = server.dial(opening.up_token)
    with pytest.raises(bulk.RefusedError):
        server.dial(opening.up_token)
    bulk.send_all(up, memoryview(b"abc"))
    assert server.run(take_all(server.opened[0], [3])) == [b"abc"]


def test_a_late_token_is_refused() -> None:
    made = Server(timeout_s=0.05)
    try:
        opening = made.open()
        threading.Event().wait(0.1)
        with pytest.raises(bulk.RefusedError):
            made.dial(opening.up_token)
    finally:
        made.close()


def test_tokens_of_an_attachment_that_ended_are_refused(server: Server) -> None:
    opening = server.open()
    opening.attachment.abort("its worker is fenced")
    with pytest.raises(bulk.RefusedError):
        server.dial(opening.up_token)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3, bytes(37), b"SHLB\x02" + bytes(32)])
def test_a_stranger_that_says_something_else_is_refused(server: Server, said: bytes) -> None:
    with call(server, said) as sock:
        assert refusal(sock) in (bulk.REFUSED, b"")
    until(lambda: server.offer.acceptor.refused == 1, "the count")
    server.dial(server.open().up_token).close()


def test_a_stranger_that_leaves_is_forgotten(server: Server) -> None:
    call(server, b"SHLB").close()
    until(
        lambda: server.offer.acceptor.refused == 1 and server.offer.acceptor.guests == 0, "the stranger to be forgotten"
    )


def test_a_stranger_that_says_nothing_is_sent_away_in_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_acceptor.Guest, "limit_s", 0.3)
    with call(server, b"SHLB") as sock:
        # Its own time does not begin again with each byte.
        assert refusal(sock) == bulk.REFUSED
    until(lambda: bool(server.told), "the refusal to be told")
    assert "no token within" in str(server.told[0])


def test_strangers_hold_a_bounded_number_of_places_and_for_a_bounded_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_acceptor, "MAX_GUESTS", 3)
    monkeypatch.setattr(token_acceptor.Guest, "limit_s", 0.5)
    strangers = [call(server) for _ in range(8)]
    until(lambda: server.offer.acceptor.guests == 3, "all places to be taken")
    up = server.dial(server.open().up_token)
    bulk.send_all(up, memoryview(b"abc"))
    assert server.run(take_all(server.opened[0], [3])) == [b"abc"]
    assert server.offer.acceptor.refused >= 6
    for sock in strangers:
        sock.close()


def test_a_plain_stranger_at_a_tls_port_is_refused(tls: Contexts) -> None:
    made = Server(tls=tls)
    try:
        token = made.open().up_token
        with call(made, bulk.preamble(token)) as sock:
            assert bulk.ACCEPTED not in refusal(sock)
        until(lambda: made.offer.acceptor.refused == 1, "the count")
        made.dial(token).close()
    finally:
        made.close()


def test_a_client_with_tls_does_not_talk_to_a_server_without(server: Server, tls: Contexts) -> None:
    server.client_tls = tls[1]
    with pytest.raises(OSError):
        server.dial(server.open().up_token)


# What breaks


def test_a_socket_closed_in_mid_payload_fails_every_expected_bucket(server: Server) -> None:
    attachment, up, down = server.pair()

    async def expect() -> list[Any]:
        return [attachment.expect(0, 1000, 0) for _ in range(3)]

    tickets = server.run(expect())
    bulk.send_all(up, memoryview(bytes(1500)))
    up.close()
    server.run(tickets[0].wait())
    for ticket in tickets[1:]:
        with pytest.raises(UnreachableError, match="closed its socket in the middle of a transfer"):
            server.run(ticket.wait())
        assert ticket.done
    # The other direction goes too.
    assert down.recv(1) == b""


def test_bytes_and_a_said_end_that_come_at_once_end_the_transfer(tls: Contexts) -> None:
    server = Server(tls=tls)
    attachment, up, _ = server.pair()
    assert isinstance(up, TlsSocket)

    async def expect() -> Any:
        return attachment.expect(0, 1000, 0)

    ticket = server.run(expect())
    # The engine has looked, and waits for the socket.
    time.sleep(0.2)
    up.native.ssl.write(bytes(500))
    with contextlib.suppress(ssl.SSLWantReadError):
        up.native.ssl.unwrap()
    # Sends both; the connection stays open.
    up.do_handshake()
    with pytest.raises(UnreachableError, match="closed its socket in the middle of a transfer"):
        server.run(ticket.wait())
    server.close()


def test_a_peer_that_stops_reading_is_given_up_and_holds_bounded_memory(hasty: Server) -> None:
    attachment, _, _ = hasty.pair()
    most = 0

    async def flood() -> None:
        nonlocal most
        while True:
            await attachment.send(bytes(1 << 20), None)
            most = max(most, attachment.outgoing.queued_bytes)

    with pytest.raises(UnreachableError, match="nothing moved for"):
        hasty.run(flood())
    assert most <= bulk_server.QUEUED_BYTES
    assert attachment.outgoing.queued_bytes == 0


def test_a_peer_that_stops_sending_is_given_up(hasty: Server) -> None:
    attachment, up, _ = hasty.pair()
    bulk.send_all(up, memoryview(bytes(10)))
    with pytest.raises(UnreachableError, match="nothing moved for"):
        hasty.run(take_all(attachment, [11]))


def test_a_peer_that_never_comes_is_given_up(hasty: Server) -> None:
    hasty.open()
    with pytest.raises(UnreachableError, match="nothing came for"):
        hasty.run(take_all(hasty.opened[0], [1]))


def test_one_that_is_idle_is_not_given_up(hasty: Server) -> None:
    attachment, up, down = hasty.pair()
    bulk.send_all(up, memoryview(b"abc"))
    assert hasty.run(take_all(attachment, [3])) == [b"abc"]
    hasty.run(send_all(attachment, [b"def"]))
    threading.Event().wait(1.2)
    memory = bytearray(3)
    bulk.receive(down, memoryview(memory))
    bulk.send_all(up, memoryview(b"ghi"))
    assert hasty.run(take_all(attachment, [3])) == [b"ghi"] and memory == b"def"


def test_a_client_notices_a_server_that_does_not_take_or_send(server: Server) -> None:
    opening = server.open()
    up = server.dial(opening.up_token, stall_s=0.2)
    down = server.dial(opening.down_token, stall_s=0.2)
    with pytest.raises(TimeoutError, match="accepts no bytes"):
        bulk.send_all(up, memoryview(bytes(64 << 20)))
    with pytest.raises(TimeoutError, match="sends no bytes"):
        bulk.receive(down, memoryview(bytearray(10)))


def test_an_abort_ends_both_sides_at_once(server: Server) -> None:
    attachment, up, down = server.pair()
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(bulk.send_all, up, memoryview(bytes(64 << 20)))
        receiving = pool.submit(bulk.receive, down, memoryview(bytearray(100)))
        attachment.abort("the push ended early")
        attachment.abort("again")
        attachment.close()
        for future in (sending, receiving):
            with pytest.raises(ConnectionError):
                future.result(PATIENCE_S)

    async def expect() -> None:
        attachment.expect(0, 1, 0)

    with pytest.raises(UnreachableError, match="the push ended early"):
        server.run(expect())


def test_the_client_ends_its_own_blocked_calls(server: Server) -> None:
    _, up, down = server.pair()
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(bulk.send_all, up, memoryview(bytes(64 << 20)))
        receiving = pool.submit(bulk.receive, down, memoryview(bytearray(100)))
        until(lambda: sending.running() and receiving.running(), "both to block")
        shut(up)
        shut(down)
        for future in (sending, receiving):
            with pytest.raises(ConnectionError):
                future.result(PATIENCE_S)


def test_one_stuck_peer_holds_up_nobody_else(server: Server) -> None:
    stuck, _, _ = server.pair()
    flood = asyncio.run_coroutine_threadsafe(send_all(stuck, [bytes(1 << 20)] * 64), server.loop)
    attachment, up, down = server.pair()
    data = payloads([1 << 20] * 4, 5)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(bulk.send_all, up, memoryview(b"".join(data)))
        assert server.run(take_all(attachment, [1 << 20] * 4)) == data
    server.run(send_all(attachment, data))
    for payload in data:
        memory = bytearray(1 << 20)
        bulk.receive(down, memoryview(memory))
        assert memory == payload
    assert not flood.done()
    stuck.abort("enough")
    with pytest.raises(UnreachableError):
        flood.result(PATIENCE_S)


def test_a_hundred_workers_need_no_more_threads_than_one(server: Server) -> None:
    server.pair()
    before = set(threading.enumerate())
    pairs = [server.pair() for _ in range(99)]
    for number, (_, up, _) in enumerate(pairs):
        bulk.send_all(up, memoryview(number.to_bytes(2, "big")))
    for number, (attachment, _, down) in enumerate(pairs):
        assert server.run(take_all(attachment, [2])) == [number.to_bytes(2, "big")]
        server.run(send_all(attachment, [b"ok"]))
        memory = bytearray(2)
        bulk.receive(down, memoryview(memory))
        assert memory == b"ok"
    # A thread of an earlier test may end meanwhile.
    assert set(threading.enumerate()) <= before
    for _, up, down in pairs:
        up.close()
        down.close()


def test_both_threads_end_with_the_offer() -> None:
    before = set(threading.enumerate())
    made = Server()
    made.pair()
    mine = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("bulk")]
    assert len(mine) == 2
    made.close()
    made.offer.close()
    assert not any(thread.is_alive() for thread in mine)


def test_the_port_listens_where_it_is_told() -> None:
    for host in ("127.0.0.1", "0.0.0.0", "[::]", "localhost"):
        offer = TcpOffer(host, timeout_s=1.0, take=Buffers(lambda: 0).take)
        socket.create_connection(("localhost" if host == "localhost" else "127.0.0.1", offer.port), timeout=5.0).close()
        offer.close()

"""A lane's TLS sockets: bytes, refusals, waits and ends are those of ssl.SSLSocket."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme

from shardline.lanes.tls_socket import TlsSocket, shut
from shardline.native import library
from shardline.native.tls import NativeTls, available
from shardline.security import Security

pytestmark = pytest.mark.skipif(not available(), reason="there is no native library that finds ssl's OpenSSL")
HOST = "127.0.0.1"
PATIENCE_S = 10.0
RECORD_BYTES, OVERHEAD_BYTES, BATCH_BYTES = 16 << 10, 22, 128 << 10
"""Of native/tls.c."""
SIZES = (0, 1, 16_383, 16_384, 16_385, BATCH_BYTES - 1, BATCH_BYTES + 1, 5 << 20)


class Cluster:
    """Certificates of a CA, and what a stranger has."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ours, others = trustme.CA(), trustme.CA()
        self.ca, self.other_ca = folder / "ca.pem", folder / "other.pem"
        ours.cert_pem.write_to_path(str(self.ca))
        others.cert_pem.write_to_path(str(self.other_ca))
        self.own = self._security("own", ours.issue_cert(HOST), self.ca)
        self.elsewhere = self._security("elsewhere", ours.issue_cert("10.9.8.7"), self.ca)
        self.stranger = self._security("stranger", others.issue_cert(HOST), self.ca)
        self.mistrusting = self._security("own", ours.issue_cert(HOST), self.other_ca)
        self.anonymous = Security(tls_ca=self.ca)

    def _security(self, name: str, cert: trustme.LeafCert, ca: Path) -> Security:
        pem, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        pem.write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
        cert.private_key_pem.write_to_path(str(key))
        return Security(tls_cert=pem, tls_key=key, tls_ca=ca)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("tls"))


Secure = Callable[[socket.socket, Security], socket.socket]


def at_server(sock: socket.socket, security: Security) -> TlsSocket:
    context = security.server_context()
    assert context is not None
    return TlsSocket(sock, context, name=None)


def at_client(sock: socket.socket, security: Security) -> TlsSocket:
    context = security.client_context()
    assert context is not None
    return TlsSocket(sock, context, name=HOST)


def old_server(sock: socket.socket, security: Security) -> ssl.SSLSocket:
    context = security.server_context()
    assert context is not None
    return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


def old_client(sock: socket.socket, security: Security) -> ssl.SSLSocket:
    context = security.client_context()
    assert context is not None
    return context.wrap_socket(sock, server_hostname=HOST, do_handshake_on_connect=False)


def connected() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(PATIENCE_S)
    return ours, theirs


def greet(sock: socket.socket) -> bytes | Exception:
    """A handshake and a byte each way; what came of it."""
    try:
        sock.do_handshake()  # type: ignore[attr-defined]
        sock.sendall(b"?")
        return sock.recv(1)
    except OSError as error:
        # So that the other side need not wait for more.
        shut(sock)
        return error


def meet(one: socket.socket, other: socket.socket) -> tuple[bytes | Exception, bytes | Exception]:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(greet, one)
        met = greet(other)
        return answer.result(PATIENCE_S), met


@contextlib.contextmanager
def pair(
    cluster: Cluster, server: Secure = at_server, client: Secure = at_client
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends that have shaken hands."""
    ours, theirs = connected()
    one, other = server(ours, cluster.own), client(theirs, cluster.own)
    assert meet(one, other) == (b"?", b"?")
    with one, other:
        yield one, other


def take(sock: socket.socket, size: int) -> bytes:
    memory = bytearray(size)
    filled = 0
    while filled < size:
        count = sock.recv_into(memoryview(memory)[filled:])
        if not count:
            break
        filled += count
    return bytes(memory[:filled])


# Bytes


@pytest.mark.parametrize(
    ("server", "client"),
    [(at_server, at_client), (old_server, at_client), (at_server, old_client)],
    ids=["both", "one", "other"],
)
def test_payloads_of_every_size_pass_both_ways_at_once(cluster: Cluster, server: Secure, client: Secure) -> None:
    source = random.Random(1)
    there, back = ([source.randbytes(size) for size in SIZES] for _ in range(2))
    with (
        pair(cluster, server, client) as (one, other),
        pair(cluster, server, client) as (two, another),
        ThreadPoolExecutor(3) as pool,
    ):
        sent = [
            pool.submit(lambda sock=sock, data=data: [sock.sendall(payload) for payload in data])
            for sock, data in ((other, there), (two, back))
        ]
        taken = pool.submit(lambda: [take(one, size) for size in SIZES])
        assert [take(another, size) for size in SIZES] == back
        assert taken.result(PATIENCE_S) == there
        for end in sent:
            end.result(PATIENCE_S)


def test_without_the_native_library_there_is_no_such_socket(cluster: Cluster) -> None:
    level = library.level()
    assert level is not None
    library.use(None)
    try:
        ours, theirs = connected()
        with theirs, pytest.raises(OSError, match=r"native library.*SHARDLINE|native kernels"):
            at_client(ours, cluster.own)
    finally:
        library.use(level.name)


def test_two_connections_made_at_once_are_not_mistaken_for_each_other(cluster: Cluster) -> None:
    context = cluster.own.client_context()
    assert context is not None

    kept: list[ssl.SSLObject] = []

    def make() -> ssl.SSLObject:
        kept.append(context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=HOST))
        return context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=HOST)

    with pytest.raises(OSError, match="has not announced"):
        NativeTls(make)


def test_what_a_full_socket_did_not_take_follows_once_there_is_room(cluster: Cluster) -> None:
    data = random.Random(2).randbytes(5 << 20)
    with pair(cluster) as (one, other), ThreadPoolExecutor(1) as pool:
        one.setblocking(False)
        left = memoryview(data)
        with contextlib.suppress(ssl.SSLWantWriteError):
            while len(left):
                left = left[one.send(left) :]
        assert 0 < len(left) < len(data)
        with pytest.raises(ssl.SSLWantWriteError):
            one.send(left)
        taken = pool.submit(take, other, len(data))
        one.settimeout(PATIENCE_S)
        one.sendall(left)
        assert taken.result(PATIENCE_S) == data


def test_bytes_beyond_the_memory_are_pending(cluster: Cluster) -> None:
    with pair(cluster) as (one, other):
        one.setblocking(False)
        with pytest.raises(ssl.SSLWantReadError):
            one.recv_into(bytearray(1))
        other.sendall(b"abc")
        assert isinstance(one, TlsSocket)
        assert (one.recv(1), one.pending(), one.recv(10), one.pending()) == (b"a", 2, b"bc", 0)


# Refusals


def said(outcome: bytes | Exception) -> object:
    """What a refusal is known by."""
    if isinstance(outcome, ssl.SSLError):
        return type(outcome), outcome.reason, getattr(outcome, "verify_message", "")
    return outcome


@pytest.mark.parametrize("who", ["stranger", "mistrusting", "anonymous", "elsewhere"])
def test_whom_ssl_refuses_is_refused_for_the_same_reason(cluster: Cluster, who: str) -> None:
    server, client = cluster.own, getattr(cluster, who)
    if who == "elsewhere":
        server, client = client, server
    outcomes = []
    for accept, dial in ((old_server, old_client), (at_server, at_client)):
        ours, theirs = connected()
        one, other = accept(ours, server), dial(theirs, client)
        with one, other:
            outcomes.append(meet(one, other))
    (old_accepting, old_dialling), (accepting, dialling) = outcomes
    # Who refuses knows why; the other side may find the connection closed before it reads the reason.
    if isinstance(old_dialling, ssl.SSLCertVerificationError):
        assert said(dialling) == said(old_dialling) and isinstance(accepting, OSError)
    else:
        assert said(accepting) == said(old_accepting) and isinstance(dialling, OSError)


# Ends


def test_an_end_without_a_word_ends_the_bytes(cluster: Cluster) -> None:
    with pair(cluster) as (one, other):
        other.sendall(bytes(100))
        other.close()
        assert take(one, 200) == bytes(100)
        assert one.recv(1) == b""


def test_a_said_end_ends_the_bytes(cluster: Cluster) -> None:
    with pair(cluster, client=old_client) as (one, other), ThreadPoolExecutor(1) as pool:
        other.sendall(bytes(100))
        assert isinstance(other, ssl.SSLSocket)
        # It waits for the same word, and gets the end of the connection.
        ending = pool.submit(other.unwrap)
        assert take(one, 200) == bytes(100)
        one.close()
        with contextlib.suppress(OSError):
            ending.result(PATIENCE_S)


@contextlib.contextmanager
def altered(cluster: Cluster, payload: bytes, alter: Callable[[bytearray], bytes]) -> Iterator[socket.socket]:
    """The receiving end of a payload whose encrypted bytes were altered on their way; behind them the wire is cut."""
    with pair(cluster) as (one, other):
        other.sendall(payload)
        encrypted = bytearray()
        while len(encrypted) < len(payload) + OVERHEAD_BYTES * -(-len(payload) // RECORD_BYTES):
            encrypted += socket.socket.recv(one, 1 << 20)
        near, far = connected()
        os.dup2(near.fileno(), one.fileno())
        near.close()
        with far:
            far.sendall(alter(encrypted))
        yield one


@pytest.mark.parametrize("size", [1, 20_000])
def test_a_peer_that_closes_at_any_byte_leaves_whole_records_only(cluster: Cluster, size: int) -> None:
    payload = random.Random(4).randbytes(size)
    length = size + OVERHEAD_BYTES * -(-size // RECORD_BYTES)
    edge = min(RECORD_BYTES + OVERHEAD_BYTES, length)
    for end in sorted({0, 1, 4, 5, 6, edge - 1, edge, edge + 5, length - 1} & set(range(length))):
        with altered(cluster, payload, lambda raw, end=end: bytes(raw[:end])) as one:
            got = take(one, size)
            assert got == payload[: RECORD_BYTES if end >= edge else 0]


@pytest.mark.parametrize("place", [0, 5, 100, 16_405, 16_500, -1])
def test_a_changed_byte_is_refused(cluster: Cluster, place: int) -> None:
    def change(raw: bytearray) -> bytes:
        raw[place] ^= 1
        return bytes(raw)

    with altered(cluster, bytes(20_000), change) as one, pytest.raises(ssl.SSLError):
        take(one, 20_000)


def test_a_wait_ends_in_time(cluster: Cluster) -> None:
    with pair(cluster) as (one, other):
        one.settimeout(0.05)
        with pytest.raises(TimeoutError):
            one.recv(1)
        with pytest.raises(TimeoutError):
            one.sendall(bytes(64 << 20))
        assert other.recv(10) == bytes(10)


@pytest.mark.parametrize(
    "act", [lambda sock: sock.recv(1), lambda sock: sock.sendall(bytes(64 << 20))], ids=["receive", "send"]
)
def test_another_thread_ends_a_wait(cluster: Cluster, act: Callable[[socket.socket], object]) -> None:
    with pair(cluster) as (one, _), ThreadPoolExecutor(1) as pool:
        began = threading.Event()

        def wait() -> object:
            began.set()
            try:
                return act(one)
            except OSError as error:
                return error

        waiting = pool.submit(wait)
        assert began.wait(PATIENCE_S)
        shut(one)
        ended = waiting.result(PATIENCE_S / 2)
        assert ended == b"" or isinstance(ended, ConnectionError | ssl.SSLError)

"""Certificates replaced while a process runs: new connections use them, open ones go on, broken ones change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import re
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography import x509

from shardline import tls
from shardline.core.timeouts import Timeouts
from shardline.lanes.tcp import frames
from shardline.lanes.tcp.server import TcpOffer
from shardline.observability import metrics_page
from shardline.observability.metrics import Metrics
from shardline.rpc.channel import AioPeer, open_channel
from shardline.rpc.server import RpcServer
from shardline.security import Security
from shardline.tls import TlsFiles, TlsPaths, warnings_due
from shardline_chief.page.history import History
from shardline_chief.page.server import PageServer

HOST = "127.0.0.1"
TIMEOUTS = Timeouts(total_s=6.0)
DAY = datetime.timedelta(days=1)
KINDS = ("pem", "key")


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Holder:
    """The files of one process, and a CA that issues new ones."""

    def __init__(self, folder: Path, ca: trustme.CA) -> None:
        self.folder = folder
        self._authority = ca
        folder.mkdir()
        self.ca = folder / "ca.pem"
        self.trust(ca)
        self.pem, self.key = folder / "own.pem", folder / "own.key"
        self.renew()

    def trust(self, *cas: trustme.CA) -> None:
        replace(self.ca, b"".join(ca.cert_pem.bytes() for ca in cas))

    def issue(self, ca: trustme.CA | None = None, **dates: datetime.datetime) -> dict[str, bytes]:
        leaf = (ca or self._authority).issue_cert(HOST, **dates)
        return {"pem": leaf.cert_chain_pems[0].bytes(), "key": leaf.private_key_pem.bytes()}

    def renew(self, ca: trustme.CA | None = None, **dates: datetime.datetime) -> int:
        """Replace certificate and key; returns the new serial number."""
        made = self.issue(ca, **dates)
        replace(self.key, made["key"])
        replace(self.pem, made["pem"])
        return self.serial

    @property
    def serial(self) -> int:
        return serial_of(self.pem.read_bytes())

    @property
    def security(self) -> Security:
        return Security(tls_cert=self.pem, tls_key=self.key, tls_ca=self.ca)


def replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


def serial_of(pem: bytes) -> int:
    return x509.load_pem_x509_certificate(pem).serial_number


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def own(tmp_path: Path, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch) -> Holder:
    # Looked at each time.
    monkeypatch.setattr(tls, "LOOK_S", 0.0)
    return Holder(tmp_path / "own", ca)


@pytest.fixture
def other(tmp_path: Path, ca: trustme.CA) -> Holder:
    return Holder(tmp_path / "other", ca)


# Doors


def caller_serial(_request: bytes, context: Any) -> bytes:
    return str(serial_of(context.auth_context()["x509_pem_cert"][0])).encode()


def echo(server: grpc.aio.Server) -> None:
    async def one(request: bytes, context: Any) -> bytes:
        return caller_serial(request, context)

    async def each(requests: Any, context: Any) -> Any:
        async for request in requests:
            yield request + caller_serial(request, context)

    async def slowly(request: bytes, context: Any) -> Any:
        for _ in range(int(request)):
            yield caller_serial(request, context)
            await asyncio.sleep(0.1)

    handlers = {
        "one": grpc.unary_unary_rpc_method_handler(one),
        "each": grpc.stream_stream_rpc_method_handler(each),
        "slowly": grpc.unary_stream_rpc_method_handler(slowly),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))


@contextlib.contextmanager
def grpc_door(security: Security) -> Iterator[int]:
    server = RpcServer(f"{HOST}:0", register=[echo], security=security)
    try:
        yield int(server.start().rpartition(":")[2])
    finally:
        server.close(grace_s=0.0)


@contextlib.contextmanager
def bulk_door(security: Security) -> Iterator[int]:
    offer = TcpOffer(HOST, security.server_context(), timeout_s=5.0, take=lambda size: memoryview(bytearray(size)))
    try:
        yield offer.port
    finally:
        offer.close()


@contextlib.contextmanager
def metrics_door(security: Security) -> Iterator[int]:
    metrics = Metrics("ps", "ps/0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_page, "is_loopback", lambda host: False)
        address = metrics.serve(HOST, 0, security)
    try:
        yield int(address.rpartition(":")[2])
    finally:
        metrics.close()


@contextlib.contextmanager
def page_door(security: Security) -> Iterator[int]:
    token = security.tls_ca.with_name("token") if security.tls_ca is not None else Path()
    token.write_text("the-job-token-of-this-test")
    secured = Security(tls_cert=security.tls_cert, tls_key=security.tls_key, tls_ca=security.tls_ca, token_file=token)
    page = PageServer("0.0.0.0:0", secured, History())
    page.start()
    try:
        yield int(page.address.rpartition(":")[2])
    finally:
        page.close()


GET = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
# A ping, which is answered with the bytes that it carries.
PING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 8, 6, 0, 0, 0, 0, 0]) + b"hi-there"
DOORS: dict[str, tuple[Callable[[Security], contextlib.AbstractContextManager[int]], bytes, bytes]] = {
    "gRPC": (grpc_door, PING, b"hi-there"),
    "bulk sockets": (bulk_door, frames.preamble(bytes(16)), frames.REFUSED),
    "metrics": (metrics_door, GET, b"shardline_"),
    "the chief's page": (page_door, GET, b"HTTP/1.1 "),
}


def connect(port: int, as_who: Holder) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(as_who.ca))
    context.load_cert_chain(as_who.pem, as_who.key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context.wrap_socket(socket.create_connection((HOST, port), timeout=10.0), server_hostname=HOST)


def shown(connection: ssl.SSLSocket) -> int:
    found = connection.getpeercert(binary_form=True)
    assert found is not None
    return x509.load_der_x509_certificate(found).serial_number


def heard(connection: ssl.SSLSocket, asked: bytes, expected: bytes) -> bool:
    connection.sendall(asked)
    answer = b""
    while expected not in answer:
        data = connection.recv(4096)
        if not data:
            return False
        answer += data
    return True


def admitted(port: int, who: Holder, asked: bytes, expected: bytes) -> bool:
    try:
        with connect(port, who) as late:
            return heard(late, asked, expected)
    except OSError:
        return False


def by_rename(own: Holder) -> None:
    own.renew()


def in_place(own: Holder) -> None:
    for kind, data in own.issue().items():
        own.pem.with_suffix(f".{kind}").write_bytes(data)


def by_link(own: Holder) -> None:
    """As Kubernetes does: the paths are links to a folder's link, which is turned to another folder."""
    made = own.folder.with_name(f"version-{len(list(own.folder.parent.glob('version-*')))}")
    made.mkdir()
    for kind, data in own.issue().items():
        (made / f"own.{kind}").write_bytes(data)
    shutil.copy(own.ca, made / "ca.pem")
    link = own.folder.with_name("next")
    link.symlink_to(made)
    if not own.folder.is_symlink():
        shutil.rmtree(own.folder)
    link.replace(own.folder)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("how", [by_rename, in_place, by_link], ids=lambda how: how.__name__)
def test_new_connections_get_the_new_certificate_and_open_ones_go_on(
    own: Holder, other: Holder, door: str, how: Callable[[Holder], None]
) -> None:
    if how is by_link:
        by_link(own)
    opened, asked, expected = DOORS[door]
    before = own.serial
    with opened(own.security) as port, connect(port, other) as early:
        assert shown(early) == before
        how(own)
        assert own.serial != before
        with connect(port, other) as late:
            assert shown(late) == own.serial
            assert heard(early, asked, expected) and heard(late, asked, expected)


@pytest.mark.parametrize("door", ["gRPC", "bulk sockets", "metrics"])
def test_a_ca_that_was_replaced_is_the_one_that_callers_are_checked_by(own: Holder, other: Holder, door: str) -> None:
    new = trustme.CA()
    opened, asked, expected = DOORS[door]
    with opened(own.security) as port:
        with connect(port, other) as early:
            assert heard(early, asked, expected)
        own.trust(new)
        assert not admitted(port, other, asked, expected)
        other.renew(new)
        assert admitted(port, other, asked, expected)


# Callers


@contextlib.contextmanager
def called(other: Holder) -> Iterator[str]:
    with grpc_door(other.security) as port:
        yield f"{HOST}:{port}"


def connections(address: str) -> int:
    """Open connections to an address of this machine."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{name}").read_text().splitlines()]
    return sum(row[1].endswith(port) and row[3] == "01" for row in rows)


def settled(address: str, wanted: int) -> int:
    deadline_s = time.monotonic() + 5.0
    while connections(address) != wanted and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return connections(address)


def number(answer: bytes) -> int:
    return int(answer)


def test_calls_show_the_newest_certificate_and_running_ones_end_over_their_own_connection(
    own: Holder, other: Holder
) -> None:
    more = threading.Event()

    def requests() -> Iterator[bytes]:
        yield b""
        assert more.wait(10.0)
        yield b""

    with called(other) as address, open_channel(address, TIMEOUTS, own.security) as channel:
        one, each, slowly = channel.unary_unary("/test.Echo/one"), channel.stream_stream, channel.unary_stream
        first = own.serial
        running = each("/test.Echo/each")(requests(), timeout=20.0)
        assert number(next(running)) == number(one(b"", timeout=5.0)) == first
        slow = slowly("/test.Echo/slowly")(b"5", timeout=20.0)
        for _ in range(3):
            newest = own.renew()
            assert number(one(b"", timeout=5.0)) == newest
        assert settled(address, 2) == 2
        assert [number(answer) for answer in slow] == [first] * 5
        more.set()
        assert [number(answer) for answer in running] == [first]
        del running, slow
        assert settled(address, 1) == 1
        assert number(one(b"", timeout=5.0)) == own.serial
    assert settled(address, 0) == 0


def test_a_channel_that_is_closed_ends_calls_that_began_before_the_renewal(own: Holder, other: Holder) -> None:
    with called(other) as address:
        channel = open_channel(address, TIMEOUTS, own.security)
        running = channel.stream_stream("/test.Echo/each")(iter([b""]), timeout=20.0)
        slow = channel.unary_stream("/test.Echo/slowly")(b"1000", timeout=20.0)
        assert number(next(slow)) == own.serial
        own.renew()
        assert number(channel.unary_unary("/test.Echo/one")(b"", timeout=5.0)) == own.serial
        channel.close()
        with pytest.raises(grpc.RpcError, match="Channel closed"):
            list(slow)
        assert settled(address, 0) == 0
        del running


def test_calls_on_a_loop_show_the_newest_certificate_and_running_ones_go_on(own: Holder, other: Holder) -> None:
    async def calls(address: str) -> None:
        peer = AioPeer(address, TIMEOUTS, own.security)
        first = own.serial

        async def slow() -> list[int]:
            channel = peer.channel
            return [number(answer) async for answer in channel.unary_stream("/test.Echo/slowly")(b"5", timeout=20.0)]

        running = asyncio.create_task(slow())
        await asyncio.sleep(0.1)
        channel = peer.channel
        assert number(await channel.unary_unary("/test.Echo/one")(b"", timeout=5.0)) == first
        own.renew()
        channel = peer.channel
        assert number(await channel.unary_unary("/test.Echo/one")(b"", timeout=5.0)) == own.serial
        assert await running == [first] * 5
        await peer.close()

    with called(other) as address:
        asyncio.run(calls(address))
        assert settled(address, 0) == 0


def test_bulk_sockets_are_dialled_with_the_newest_certificate(own: Holder, other: Holder) -> None:
    security, seen = own.security, list[int]()
    context = other.security.server_context()
    assert context is not None

    def accept(listener: socket.socket) -> None:
        plain, _ = listener.accept()
        with context.wrap_socket(plain, server_side=True) as sock:
            seen.append(shown(sock))
            sock.recv(frames.PREAMBLE_BYTES)
            sock.sendall(frames.ACCEPTED)

    with socket.create_server((HOST, 0)) as listener:
        for _ in range(2):
            thread = threading.Thread(target=accept, args=(listener,))
            thread.start()
            port = listener.getsockname()[1]
            frames.dial(HOST, port, bytes(32), timeout_s=5.0, stall_s=5.0, tls=security.client_context).close()
            thread.join(10.0)
            assert seen.pop() == own.serial
            own.renew()


# Files that can't be used


def key_is_late(own: Holder) -> None:
    replace(own.pem, own.issue()["pem"])


def certificate_is_late(own: Holder) -> None:
    replace(own.key, own.issue()["key"])


def half(own: Holder) -> None:
    replace(own.pem, own.issue()["pem"][:200])


def gone(own: Holder) -> None:
    own.pem.unlink()


def no_ca(own: Holder) -> None:
    replace(own.ca, b"none")


def empty_ca(own: Holder) -> None:
    """As a file is for a moment that is written anew in place."""
    own.ca.write_bytes(b"")


def expired(own: Holder) -> None:
    own.renew(not_before=now() - 3 * DAY, not_after=now() - DAY)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (key_is_late, r"--tls-key \S+own.key is not the private key of --tls-cert \S+own.pem"),
        (certificate_is_late, r"--tls-key \S+own.key is not the private key of --tls-cert \S+own.pem"),
        (half, r"--tls-cert \S+own.pem contains no PEM certificate"),
        (gone, r"--tls-cert \S+own.pem can't be read: No such file or directory"),
        (no_ca, r"--tls-ca \S+ca.pem contains no PEM certificate"),
        (empty_ca, r"--tls-ca \S+ca.pem contains no PEM certificate"),
        (expired, r"--tls-cert \S+own.pem expired on .*, and by this machine's clock it is .*, or set the clock"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_files_that_can_not_be_used_are_told_once_and_change_nothing_until_they_can(
    own: Holder,
    other: Holder,
    ca: trustme.CA,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Holder], None],
    says: str,
) -> None:
    security, before = own.security, own.serial
    with grpc_door(security) as port, caplog.at_level("INFO", "shardline.security"):
        spoil(own)
        for _ in range(3):
            security.watch()
            with connect(port, other) as late:
                assert shown(late) == before
        (said,) = caplog.messages
        assert re.fullmatch(f"{says}; until that is set right, new connections use the files as they were before", said)
        caplog.clear()
        own.trust(ca)
        after = own.renew()
        with connect(port, other) as late:
            assert shown(late) == after
        security.watch()
        (said,) = caplog.messages
        assert re.fullmatch(r"new connections use \S+own.pem as read now, valid until \d{4}-.* UTC", said)


def test_a_certificate_of_later_is_used_once_it_is_valid(own: Holder, caplog: pytest.LogCaptureFixture) -> None:
    security, before = TlsFiles(TlsPaths(own.pem, own.key, own.ca)), own.serial
    with caplog.at_level("INFO", "shardline.security"):
        after = own.renew(not_before=now() + datetime.timedelta(seconds=2))
        assert security.now().chain[0].serial_number == before
        assert "own.pem is only valid from" in caplog.text
        deadline_s = time.monotonic() + 10.0
        while security.now().chain[0].serial_number != after and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert security.now().chain[0].serial_number == after


def test_files_are_looked_at_no_more_than_once_in_a_while(own: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    found = TlsFiles(TlsPaths(own.pem, own.key, own.ca))
    monkeypatch.setattr(tls, "LOOK_S", 60.0)
    monkeypatch.setattr(tls, "look", looked.append)
    assert found.now() is found.now()
    assert not looked


# The end of a certificate


@pytest.mark.parametrize(
    ("left", "due"),
    [(8 * DAY, 0), (7 * DAY, 1), (2 * DAY, 1), (DAY, 2), (DAY / 2, 2), (0 * DAY, 3), (-DAY, 3)],
)
def test_the_end_of_a_certificate_is_warned_of_a_week_and_a_day_before_and_when_it_has_come(
    left: datetime.timedelta, due: int
) -> None:
    at = now()
    assert warnings_due(at + left, at) == due


def test_each_warning_is_logged_once_until_the_certificate_is_replaced(
    own: Holder, caplog: pytest.LogCaptureFixture
) -> None:
    end = (now() + datetime.timedelta(seconds=3)).replace(microsecond=0)
    own.renew(not_after=end)
    (name,) = x509.load_pem_x509_certificate(own.pem.read_bytes()).subject.rdns[-1:]
    security = own.security
    for says in (f"expires on {end:%Y-%m-%d %H:%M:%S} UTC; after that,", f"expired on {end:%Y-%m-%d %H:%M:%S} UTC;"):
        security.watch()
        security.watch()
        (said,) = caplog.messages
        assert f"--tls-cert {own.pem}: certificate 1 in it (" in said and name.rfc4514_string() in said
        assert f") {says} others refuse new connections" in said
        assert "replace it and its --tls-key (shardline certs --renew makes them)" in said
        caplog.clear()
        time.sleep(max(0.0, (end - now()).total_seconds()))
    assert security.expires() == end.timestamp()
    own.renew()
    security.watch()
    # That the new one is read may be said, now or later.
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert security.expires() > end.timestamp() + 86400


def test_a_task_watches_its_certificate_and_shows_its_end_in_its_metrics(
    own: Holder, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics("worker", "worker/0")
    name = "shardline_certificate_expires_seconds"
    metrics.serve(HOST, 0, own.security)
    try:
        for end in (now() + 3 * DAY, now() + DAY / 2):
            own.renew(not_after=end)
            deadline_s = time.monotonic() + 10.0
            while f"expires on {end:%Y-%m-%d %H:%M:%S} UTC" not in caplog.text and time.monotonic() < deadline_s:
                time.sleep(0.05)
            assert f"expires on {end:%Y-%m-%d %H:%M:%S} UTC" in caplog.text
            assert metrics.registry.get_sample_value(name, {"task": "worker/0"}) == int(end.timestamp())
    finally:
        metrics.close()

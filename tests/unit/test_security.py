"""TLS and the job token: who gets in, who doesn't, and what those are told."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shardline.core.timeouts import Timeouts
from shardline.errors import ShardlineError, UnreachableError, UsageError
from shardline.rpc.channel import AioPeer, Peer, open_channel
from shardline.rpc.client import ChiefClient
from shardline.rpc.joining import Applicant
from shardline.rpc.link import ChiefLink
from shardline.rpc.server import RpcServer
from shardline.security import PLAIN, Security
from shardline_pipeline.tensor_parallel.meeting import Meeting

TIMEOUTS = Timeouts(total_s=3.0)
SERVICE = "shardline.test.Echo"
TOKEN = "correct-horse-battery-staple"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Files:
    """A CA of the cluster, one of strangers, and certificates of both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ca, stranger = trustme.CA(), trustme.CA()
        self.ca = self.write("ca.pem", ca.cert_pem.bytes())
        self.other_ca = self.write("other-ca.pem", stranger.cert_pem.bytes())
        self.own = self.pair("own", ca.issue_cert("127.0.0.1"))
        self.elsewhere = self.pair("elsewhere", ca.issue_cert("10.9.8.7"))
        self.stranger = self.pair("stranger", stranger.issue_cert("127.0.0.1"))
        self.token = self.write("token", f"{TOKEN}\n".encode())
        self.other_token = self.write("other-token", b"another-token-of-16-characters")

    def write(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(data)
        return path

    def pair(self, name: str, cert: trustme.LeafCert) -> tuple[Path, Path]:
        chain = b"".join(blob.bytes() for blob in cert.cert_chain_pems)
        return self.write(f"{name}.pem", chain), self.write(f"{name}.key", cert.private_key_pem.bytes())

    def mutual(self, pair: tuple[Path, Path] | None = None, ca: Path | None = None, **more: Any) -> Security:
        cert, key = pair or self.own
        return Security(tls_cert=cert, tls_key=key, tls_ca=ca or self.ca, **more)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


def echo(server: grpc.aio.Server) -> None:
    """Register a service with a method of each kind, that answers with what it was sent."""

    async def one(request: bytes, _context: Any) -> bytes:
        return request

    async def many(request: bytes, _context: Any) -> Any:
        yield request
        yield request

    async def joined(requests: Any, _context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def each(requests: Any, _context: Any) -> Any:
        async for request in requests:
            yield request

    handlers = {
        "unary_unary": grpc.unary_unary_rpc_method_handler(one),
        "unary_stream": grpc.unary_stream_rpc_method_handler(many),
        "stream_unary": grpc.stream_unary_rpc_method_handler(joined),
        "stream_stream": grpc.stream_stream_rpc_method_handler(each),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@contextlib.contextmanager
def serving(security: Security) -> Iterator[RpcServer]:
    server = RpcServer("127.0.0.1:0", register=[echo], service_names=(SERVICE,), security=security)
    server.start()
    try:
        yield server
    finally:
        server.close(grace_s=0.0)


@pytest.fixture(scope="module")
def mutual(files: Files) -> Iterator[RpcServer]:
    """A server with mutual TLS and a token."""
    with serving(files.mutual(token_file=files.token)) as server:
        yield server


@pytest.fixture(scope="module")
def plain_with_token(files: Files) -> Iterator[RpcServer]:
    with serving(Security(token_file=files.token)) as server:
        yield server


def call(channel: grpc.Channel, kind: str) -> bytes:
    """Call the echo method of this kind; all bytes of its answer."""
    requests = [b"a", b"b"]
    method: Callable[..., Any] = getattr(channel, kind)(f"/{SERVICE}/{kind}")
    answer = method(iter(requests) if kind.startswith("stream") else requests[0], timeout=5.0)
    return b"".join(answer) if kind.endswith("stream") else answer


def ask(address: str, security: Security, timeouts: Timeouts = TIMEOUTS) -> bytes:
    """One call by way of Peer, with its retries and its errors."""
    peer = Peer("ps/0", address, timeouts, security)
    try:
        answer: bytes = peer.call(peer.channel.unary_unary(f"/{SERVICE}/unary_unary"), b"x", what="Echo", timeout_s=0.3)
        return answer
    finally:
        peer.close()


def health(channel: grpc.Channel) -> int:
    reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5.0)
    return int(reply.status)


# Plain


def test_plain_is_the_default_and_makes_nothing() -> None:
    assert Security() == PLAIN
    assert not PLAIN.tls
    assert PLAIN.server_credentials() is PLAIN.channel_credentials() is None
    assert PLAIN.server_context() is PLAIN.client_context() is None
    assert PLAIN.metadata() == ()
    assert PLAIN.check(None) and PLAIN.check(b"anything")


def test_plain_settings_import_neither_ssl_nor_grpc() -> None:
    code = "import sys, shardline.security as s; s.Security(); print({'ssl', 'grpc'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_plain_channels_and_servers_have_no_interceptor() -> None:
    with serving(PLAIN) as server, open_channel(server.address, TIMEOUTS) as channel:
        assert type(channel) is type(grpc.insecure_channel("127.0.0.1:1"))
        assert call(channel, "stream_stream") == b"ab"


# TLS


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_every_kind_work_over_mutual_tls_with_the_token(mutual: RpcServer, files: Files, kind: str) -> None:
    with open_channel(mutual.address, TIMEOUTS, files.mutual(token_file=files.token)) as channel:
        expected = {"unary_unary": b"a", "unary_stream": b"aa"}.get(kind, b"ab")
        assert call(channel, kind) == expected


def test_calls_made_on_a_loop_work_over_mutual_tls_with_the_token(mutual: RpcServer, files: Files) -> None:
    async def vote() -> bytes:
        peer = AioPeer(mutual.address, TIMEOUTS, files.mutual(token_file=files.token))
        try:
            method = f"/{SERVICE}/unary_unary"
            call = peer.channel.unary_unary(method)
            answer: bytes = await call(b"vote", metadata=await peer.metadata(method), timeout=5.0)
            return answer
        finally:
            await peer.close()

    assert asyncio.run(vote()) == b"vote"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda files: PLAIN, "it uses TLS and this side does not; set the --tls-ca, --tls-cert and --tls-key"),
        (lambda files: Security(tls_ca=files.ca), "it refused this side's certificate, or that there is none"),
        (lambda files: files.mutual(files.stranger), "it refused this side's certificate.*is --tls-cert signed by"),
        (lambda files: files.mutual(ca=files.other_ca), "its certificate is not trusted .*is it signed by --tls-ca"),
    ],
    ids=["plain", "no certificate", "foreign certificate", "foreign CA"],
)
def test_stranger_to_a_tls_server_is_refused_and_told_why(
    mutual: RpcServer, files: Files, make: Callable[[Files], Security], says: str
) -> None:
    with pytest.raises(UnreachableError, match=rf"ps/0 at {mutual.address} can't be called \(Echo\): {says}"):
        ask(mutual.address, make(files))


def test_certificate_must_name_the_host_that_was_dialled(files: Files) -> None:
    with (
        serving(files.mutual(files.elsewhere)) as server,
        pytest.raises(UnreachableError, match=r"not trusted \(IP address mismatch.*does it name 127\.0\.0\.1\?"),
    ):
        ask(server.address, files.mutual())


def test_tls_client_of_a_plain_server_is_told_so(plain_with_token: RpcServer, files: Files) -> None:
    with pytest.raises(UnreachableError, match=r"TLS with it fails .*were both sides started with TLS"):
        # A busy machine takes a second for the handshake that shows it.
        ask(plain_with_token.address, files.mutual(), Timeouts(total_s=15.0))


def test_nobody_at_the_address_is_not_blamed_on_tls(files: Files) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    for security in (PLAIN, files.mutual()):
        with pytest.raises(UnreachableError, match="is it running, and is the address right"):
            ask(address, security)


def test_diagnosis_of_a_peer_that_says_nothing_ends_at_its_deadline(files: Files) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        assert files.mutual().diagnose(host, port, timeout_s=0.1) == ""
        assert PLAIN.diagnose(host, port, timeout_s=0.1) == ""


def test_diagnosis_of_a_healthy_pair_finds_nothing(mutual: RpcServer, files: Files) -> None:
    host, _, port = mutual.address.rpartition(":")
    assert files.mutual().diagnose(host, int(port)) == ""


def test_task_that_may_not_join_for_its_certificate_says_so(mutual: RpcServer, files: Files) -> None:
    link = ChiefLink(
        mutual.address,
        Timeouts(total_s=2.0, join_s=1.0),
        Applicant(role="worker", index=0),
        security=files.mutual(files.stranger),
    )
    try:
        with pytest.raises(UnreachableError, match=r"can't be called \(Join\): it refused this side's certificate"):
            link.join()
    finally:
        link.close()


def test_without_a_ca_only_the_server_shows_a_certificate(files: Files) -> None:
    cert, key = files.own
    with serving(Security(tls_cert=cert, tls_key=key)) as server:
        assert ask(server.address, Security(tls_ca=files.ca)) == b"x"


def test_ca_alone_serves_nobody(files: Files) -> None:
    security = Security(tls_ca=files.ca)
    for make in (security.server_credentials, security.server_context):
        with pytest.raises(UsageError, match="a task needs a certificate of its own"):
            make()
    with pytest.raises(UsageError, match="--tls-ca is set without"):
        RpcServer("127.0.0.1:0", security=security).start()


# Token


@pytest.mark.parametrize("kind", KINDS)
def test_call_of_any_kind_without_the_token_is_refused(plain_with_token: RpcServer, files: Files, kind: str) -> None:
    for security in (PLAIN, Security(token_file=files.other_token)):
        with open_channel(plain_with_token.address, TIMEOUTS, security) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                call(channel, kind)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "set --token-file (or SHARDLINE_TOKEN_FILE)" in caught.value.details()
    with open_channel(plain_with_token.address, TIMEOUTS, Security(token_file=files.token)) as channel:
        assert call(channel, kind).startswith(b"a")


def test_refused_token_is_the_persons_to_set_right_and_is_not_retried(
    plain_with_token: RpcServer, files: Files
) -> None:
    peer = Peer("ps/0", plain_with_token.address, TIMEOUTS, Security(token_file=files.other_token))
    retries: list[None] = []
    peer.on_retry = lambda: retries.append(None)
    with pytest.raises(
        UsageError, match=r"ps/0 at .* refused Echo: the call does not carry the token of this job"
    ) as caught:
        peer.call(peer.channel.unary_unary(f"/{SERVICE}/x"), b"", what="Echo")
    peer.close()
    assert not retries
    assert TOKEN not in str(caught.value) and "another-token" not in str(caught.value)


def test_message_of_a_stranger_is_never_read(plain_with_token: RpcServer) -> None:
    sent: list[int] = []

    def requests() -> Iterator[bytes]:
        yield b"first"
        # Only a server that takes messages lets this end.
        while len(sent) < 1000:
            sent.append(1)
            yield b"x" * (1 << 20)

    with open_channel(plain_with_token.address, TIMEOUTS) as channel:
        method = channel.stream_unary(f"/{SERVICE}/stream_unary")
        with pytest.raises(grpc.RpcError) as caught:
            method(requests(), timeout=20.0)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert len(sent) < 100


def test_health_is_open_and_reflection_is_not(plain_with_token: RpcServer, files: Files) -> None:
    def reflect(security: Security) -> list[str]:
        with open_channel(plain_with_token.address, TIMEOUTS, security) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            replies = stub.ServerReflectionInfo(iter([request]), timeout=5.0)
            return [service.name for service in next(replies).list_services_response.service]

    with open_channel(plain_with_token.address, TIMEOUTS) as channel:
        assert health(channel) == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        reflect(PLAIN)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert SERVICE in reflect(Security(token_file=files.token))


def test_commands_and_heartbeats_bring_the_token(plain_with_token: RpcServer, files: Files) -> None:
    """The server has no Chief service: who gets past the gate is told that."""
    client = ChiefClient(plain_with_token.address, TIMEOUTS)
    with pytest.raises(UsageError, match="refused Status: the call does not carry"):
        client.status()
    client.close()
    client = ChiefClient(plain_with_token.address, TIMEOUTS, Security(token_file=files.token))
    with pytest.raises(ShardlineError, match="unimplemented"):
        client.status()
    beats = client.stub.Heartbeat(iter(()), timeout=5.0)
    with pytest.raises(grpc.RpcError) as caught:
        next(beats)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    client.close()


def test_no_class_shows_its_tokens_and_secrets() -> None:
    root = Path(__file__).parents[2]
    found = [
        f"{path}: {line.strip()}"
        for folder in ("shardline", "chief", "services", "worker", "evaluator")
        for path in (root / folder).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"    \w*(token|secret): bytes\b", line) and not line.endswith(",") and "repr=False" not in line
    ]
    assert not found
    meeting = Meeting(key=b"known to one team", rank=0, ranks=2, about="", still_wanted=lambda missing: True)
    assert "known" not in repr(meeting)


def test_token_is_compared_whole_and_never_shown(files: Files) -> None:
    security = Security(token_file=files.token)
    assert security.check(TOKEN) and security.check(TOKEN.encode())
    for wrong in (None, "", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\udcff\u2603", b"\xff"):
        assert not security.check(wrong)
    assert TOKEN not in repr(security)
    key, value = security.metadata()[0]
    assert security.check_metadata([("other", "x"), (key, value)])
    assert not security.check_metadata([(key, TOKEN)])
    assert not security.check_metadata([("other", value)])
    assert not security.check_metadata(None)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has 0 characters; a token has 16 to 4096"),
        (b"short\n", "has 5 characters"),
        (b"x" * 5000, "has 5000 characters"),
        (b"xyzzy plugh frotz", "one line of ASCII letters, digits and punctuation"),
        (b"first-line-of-16\nsecond-line", "one line of ASCII"),
        ("not-ascii-snowman-☃".encode(), "one line of ASCII"),
    ],
)
def test_unusable_token_is_refused_without_showing_it(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=says) as caught:
        Security(token_file=path)
    assert str(path) in str(caught.value)
    for word in re.findall(rb"[^ \n]{5,}", content):
        assert word.decode() not in str(caught.value)


# Files


def test_unusable_tls_files_are_named_with_their_flag(files: Files, tmp_path: Path) -> None:
    cert, key = files.own
    missing, junk = tmp_path / "missing.pem", tmp_path / "junk.pem"
    junk.write_bytes(b"\x00\xffnot a certificate")
    # As a file is for a moment that is written anew in place.
    empty = tmp_path / "empty.pem"
    empty.touch()
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    cases: list[tuple[dict[str, Path], str]] = [
        ({"tls_cert": cert}, "--tls-cert is set without --tls-key"),
        ({"tls_key": key}, "--tls-key is set without --tls-cert"),
        ({"tls_cert": missing, "tls_key": key}, f"--tls-cert {missing} can't be read: No such file"),
        ({"tls_cert": cert, "tls_key": missing}, f"--tls-key {missing} can't be read: No such file"),
        ({"tls_ca": missing}, f"--tls-ca {missing} can't be read: No such file"),
        ({"tls_ca": tmp_path}, f"--tls-ca {tmp_path} can't be read: it is a folder, not a regular file"),
        ({"tls_ca": junk}, f"--tls-ca {junk} contains no PEM certificate"),
        ({"tls_ca": broken}, f"--tls-ca {broken} contains no PEM certificate"),
        ({"tls_ca": empty}, f"--tls-ca {empty} contains no PEM certificate"),
        ({"tls_cert": empty, "tls_key": key}, f"--tls-cert {empty} contains no PEM certificate"),
        ({"tls_cert": cert, "tls_key": empty}, f"--tls-key {empty} contains no PEM private key"),
        ({"tls_cert": junk, "tls_key": key}, f"--tls-cert {junk} contains no PEM certificate"),
        ({"tls_cert": cert, "tls_key": junk}, f"--tls-key {junk} contains no PEM private key"),
        ({"tls_cert": cert, "tls_key": files.stranger[1]}, f"--tls-key {files.stranger[1]} is not the private key of"),
        ({"token_file": missing}, f"--token-file {missing} can't be read: No such file"),
        ({"tls_ca": Path("/dev/zero")}, "--tls-ca /dev/zero can't be read: it is a device, not a regular file"),
    ]
    for settings, says in cases:
        with pytest.raises(UsageError) as caught:
            Security(**settings)
        assert str(caught.value).startswith(says)


def test_encrypted_key_is_refused_instead_of_asking_at_the_terminal(files: Files, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    cert, key = files.own
    encrypted = tmp_path / "encrypted.key"
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    encrypted.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"passphrase"),
        )
    )
    with pytest.raises(UsageError, match="is encrypted; use a key without a passphrase"):
        Security(tls_cert=cert, tls_key=encrypted)


# Bulk sockets


def shake_hands(
    server: Security, client: Security, *, host: str = "127.0.0.1"
) -> tuple[bytes | Exception, bytes | Exception]:
    """A handshake over a socket pair, then a message each way: what server and client got, bytes or an error."""
    ours, theirs = socket.socketpair()
    got: list[bytes | Exception] = []

    def accept() -> None:
        context = server.server_context()
        assert context is not None
        try:
            with context.wrap_socket(ours, server_side=True) as connection:
                got.append(connection.recv(16))
                connection.sendall(b"from the server")
        except OSError as error:
            got.append(error)
        finally:
            ours.close()

    for end in (ours, theirs):
        end.settimeout(10.0)
    thread = threading.Thread(target=accept)
    thread.start()
    context = client.client_context()
    assert context is not None
    back: bytes | Exception
    try:
        with context.wrap_socket(theirs, server_hostname=host) as connection:
            assert connection.version() == "TLSv1.3"
            connection.sendall(b"from the client")
            back = connection.recv(16)
    except OSError as error:
        back = error
    finally:
        theirs.close()
    thread.join(timeout=20.0)
    assert not thread.is_alive()
    return got[0], back


def test_bulk_sockets_shake_hands_and_carry_bytes_both_ways(files: Files) -> None:
    assert shake_hands(files.mutual(), files.mutual()) == (b"from the client", b"from the server")


@pytest.mark.parametrize(
    "make",
    [
        lambda files: files.mutual(files.stranger),
        lambda files: files.mutual(ca=files.other_ca),
        lambda files: Security(tls_ca=files.ca),
    ],
    ids=["foreign certificate", "foreign CA", "no certificate"],
)
def test_bulk_socket_of_a_stranger_is_refused(files: Files, make: Callable[[Files], Security]) -> None:
    at_server, at_client = shake_hands(files.mutual(), make(files))
    assert isinstance(at_server, ssl.SSLError)
    # The server's refusal comes after the client's handshake, as an alert at its first read or a broken pipe.
    assert isinstance(at_client, OSError)


def test_bulk_client_checks_the_servers_name_against_the_host_it_dialled(files: Files) -> None:
    _, at_client = shake_hands(files.mutual(files.elsewhere), files.mutual())
    assert isinstance(at_client, ssl.SSLCertVerificationError)
    assert shake_hands(files.mutual(files.elsewhere), files.mutual(), host="10.9.8.7")[1] == b"from the server"


def test_client_that_only_sends_may_close_without_losing_its_last_bytes(files: Files) -> None:
    """Session tickets that nobody reads would reset the connection at close, over a socket that TCP carries."""
    server, client = files.mutual().server_context(), files.mutual().client_context()
    assert server is not None and client is not None
    got: list[int] = []

    def accept(listener: socket.socket) -> None:
        plain, _ = listener.accept()
        with server.wrap_socket(plain, server_side=True) as connection:
            connection.settimeout(10.0)
            count = 0
            while data := connection.recv(1 << 16):
                count += len(data)
            got.append(count)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10.0)
        thread = threading.Thread(target=accept, args=(listener,))
        thread.start()
        with socket.create_connection(listener.getsockname(), timeout=10.0) as plain:
            connection = client.wrap_socket(plain, server_hostname="127.0.0.1")
            connection.sendall(b"x" * (4 << 20))
            connection.close()
        thread.join(timeout=20.0)
    assert got == [4 << 20]

"""docs/security.md's table, walked: every credential at every call of every service, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from shardline.certs import make_certificates
from shardline.core.timeouts import Timeouts
from shardline.roles import ROLES
from shardline.rpc.auth.access import CHIEF_AUDIENCE, Access
from shardline.rpc.auth.rights import PACKAGE, RIGHTS, Token, joining, right_of
from shardline.rpc.channel import AioPeer, Peer, open_channel
from shardline.rpc.server import RpcServer
from shardline.rpc.v1 import chief_pb2, parameter_server_pb2, places_pb2, worker_pb2
from shardline.security import Security

TIMEOUTS = Timeouts(total_s=30.0)
MODULES = (chief_pb2, parameter_server_pb2, places_pb2, worker_pb2)
ANY = ""
"""A certificate that names no role."""
PASSED = grpc.StatusCode.UNIMPLEMENTED
"""Past the gates, each call is told that nobody serves it here."""
STRANGER, FORBIDDEN = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
WORKERS = {
    "Chief/Join",
    "Chief/Heartbeat",
    "Chief/GetJob",
    "Chief/Lease",
    "Chief/Loader",
    "Chief/FetchCut",
    "Chief/Status",
    "Places/Take",
    "ParameterServer/OpenLane",
    "ParameterServer/Push",
    "ParameterServer/Pull",
    "ParameterServer/PushPull",
    "ParameterServer/Progress",
    "ParameterServer/GetState",
    "ParameterServer/PutState",
    "ParameterServer/Status",
    "Worker/OpenParcelLane",
    "Worker/Deliver",
}
"""All that the job token and a worker's certificate get to. Adding a call here is giving a right away."""
EVALUATORS = {
    "Chief/Join",
    "Chief/Heartbeat",
    "Chief/GetJob",
    "Chief/FetchCut",
    "Chief/Status",
    "Chief/Report",
    "Places/Take",
    "ParameterServer/Status",
}


@dataclass(frozen=True)
class Credential:
    """Tokens and a certificate's role."""

    role: str
    job: bool = True
    admin: bool = False

    def __str__(self) -> str:
        tokens = [name for name, held in (("job", self.job), ("admin", self.admin)) if held]
        return f"{self.role or 'any'}-{'+'.join(tokens) or 'no token'}"


CREDENTIALS = [
    Credential(role, job, admin) for role in (ANY, *ROLES) for job in (True, False) for admin in (True, False)
]


class Everything:
    """All services of the contract in one server, which answer nothing but that they were reached."""

    def __init__(self) -> None:
        self.methods: dict[str, tuple[str, str]] = {}
        """Kind and call by full name."""

    def register(self, server: grpc.aio.Server) -> None:
        for module in MODULES:
            for name, service in module.DESCRIPTOR.services_by_name.items():
                handlers = {}
                for method in service.methods:
                    kind = f"{_word(method.client_streaming)}_{_word(method.server_streaming)}"
                    make = getattr(grpc, f"{kind}_rpc_method_handler")
                    handlers[method.name] = make(_unserved)
                    self.methods[f"/{PACKAGE}.{name}/{method.name}"] = (kind, f"{name}/{method.name}")
                server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"{PACKAGE}.{name}", handlers),))


def _word(streams: bool) -> str:
    return "stream" if streams else "unary"


async def _unserved(_request: Any, context: Any) -> None:
    await context.abort(PASSED, "reached")


class Place:
    """Tokens and a certificate of each role in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("job", "admin"):
            (folder / name).write_text(f"the-{name}-token-of-this-test\n")
        names = {role or "any": "127.0.0.1" for role in (ANY, *ROLES)}
        self._made = make_certificates(folder / "certs", names, days=2, roles={role: role for role in ROLES})

    def security(self, credential: Credential) -> Security:
        cert, key = self._made.pairs[credential.role or "any"]
        return Security(
            tls_ca=self._made.ca,
            tls_cert=cert,
            tls_key=key,
            token_file=self._folder / "job" if credential.job else None,
            admin_token_file=self._folder / "admin" if credential.admin else None,
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("rights"))


@contextlib.contextmanager
def serving(security: Security, audience: str = "") -> Iterator[tuple[str, Everything]]:
    everything = Everything()
    server = RpcServer(
        "127.0.0.1:0", register=[everything.register], security=security, access=Access(security, audience)
    )
    try:
        yield server.start(), everything
    finally:
        server.close(grace_s=0.0)


@pytest.fixture(scope="module")
def gate(place: Place) -> Iterator[tuple[str, Everything]]:
    with serving(place.security(Credential("ps", admin=True))) as served:
        yield served


def outcome(channel: grpc.Channel, method: str, kind: str, request: bytes = b"") -> grpc.StatusCode:
    """How a call with one request ends."""
    call = getattr(channel, kind)(method)
    try:
        answer = call(iter([request]) if kind.startswith("stream") else request, timeout=10.0)
        if kind.endswith("stream"):
            list(answer)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]  # every RpcError of a call is a Call
        return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize("credential", CREDENTIALS, ids=str)
def test_every_call_needs_what_its_row_says(place: Place, gate: tuple[str, Everything], credential: Credential) -> None:
    address, everything = gate
    assert {call for _, call in everything.methods.values()} == {
        f"{service}/{call}" for service, calls in RIGHTS.items() if service != "Access" for call in calls
    }
    passed = set()
    with open_channel(address, TIMEOUTS, place.security(credential)) as channel:
        for method, (kind, call) in everything.methods.items():
            right = right_of(method)
            allowed = credential.job and (credential.admin or right.token is not Token.ADMIN)
            expected = PASSED if allowed and credential.role in (ANY, *right.roles) else FORBIDDEN
            found = outcome(channel, method, kind)
            assert found is (expected if credential.job else STRANGER), (method, str(credential))
            if found is PASSED:
                passed.add(call)
        health = health_pb2.HealthCheckRequest().SerializeToString()
        assert outcome(channel, "/grpc.health.v1.Health/Check", "unary_unary", health) is grpc.StatusCode.OK
        listing = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        found = outcome(channel, reflection, "stream_stream", listing)
        assert found is (grpc.StatusCode.OK if credential.job else STRANGER)
    if credential == Credential("worker"):
        assert passed == WORKERS
    if credential == Credential("evaluator"):
        assert passed == EVALUATORS


def test_the_proof_is_for_the_server_that_was_dialled(place: Place) -> None:
    """A server that passes on what the chief sends it: the real one is another audience."""
    admin = place.security(Credential("chief", admin=True))
    lead = f"/{PACKAGE}.ParameterServer/Lead"
    with serving(place.security(Credential("ps", admin=True)), audience="10.0.0.2:2222") as (address, _):
        with open_channel(address, TIMEOUTS, admin) as channel:
            assert outcome(channel, lead, "unary_unary") is FORBIDDEN
        peer = Peer("chief", address, TIMEOUTS, admin)
        assert outcome(peer.channel, lead, "unary_unary") is FORBIDDEN
        peer.close()
    with serving(place.security(Credential("chief", admin=True)), audience=CHIEF_AUDIENCE) as (address, _):
        peer = Peer("chief", address, TIMEOUTS, admin)
        assert outcome(peer.channel, f"/{PACKAGE}.Chief/Stop", "unary_unary") is PASSED
        peer.close()


def test_a_server_that_was_started_anew_is_proven_to_again(place: Place) -> None:
    security = place.security(Credential("chief", admin=True))
    lead = f"/{PACKAGE}.ParameterServer/Lead"
    first = RpcServer("127.0.0.1:0", register=[Everything().register], security=security)
    address = first.start()
    peer = Peer("ps/0", address, TIMEOUTS, security)

    def ask() -> None:
        with pytest.raises(Exception, match="refused Lead: reached"):
            peer.call(peer.channel.unary_unary(lead), b"", what="Lead")

    try:
        ask()
        first.close(grace_s=0.0)
        second = RpcServer(address, register=[Everything().register], security=security)
        second.start()
        try:
            ask()
        finally:
            second.close(grace_s=0.0)
    finally:
        peer.close()


def test_servers_prove_themselves_to_each_other(place: Place, gate: tuple[str, Everything]) -> None:
    method = f"/{PACKAGE}.Coordinator/Vote"

    async def vote(credential: Credential) -> grpc.StatusCode:
        peer = AioPeer(gate[0], TIMEOUTS, place.security(credential))
        try:
            metadata = await peer.metadata(method)
            call = peer.channel.unary_unary(method)(b"", metadata=metadata, timeout=10.0)
            return await call.code()
        finally:
            await peer.close()

    assert asyncio.run(vote(Credential("ps", admin=True))) is PASSED
    assert asyncio.run(vote(Credential("ps"))) is FORBIDDEN
    assert asyncio.run(vote(Credential("chief", admin=True))) is FORBIDDEN


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    shown = {
        f"{service}/{call}": tuple(cell.strip() for cell in cells.split("|"))
        for service, calls, cells in re.findall(r"^\| `(\w+)/` ([^|]*) \|(.*)\|$", page, flags=re.M)
        for call in re.findall(r"\w+", calls)
    }
    expected = {}
    for service, calls in RIGHTS.items():
        for call, right in calls.items():
            roles = "any" if set(right.roles) == set(ROLES) else ", ".join(right.roles)
            token = {Token.JOB: "job", Token.ADMIN: "job + admin"}[right.token]
            expected[f"{service}/{call}"] = (token, roles, "yes" if right.life else "")
    for role in ROLES:
        expected[f"joining/{role}"] = ("job + admin" if joining(role) is Token.ADMIN else "job", role, "")
    assert shown == expected

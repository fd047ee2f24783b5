"""Commands of somebody who is not the chief: refused with a status before they are read, and nothing has changed."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from shardline.checkpoint import CheckpointStore
from shardline.core.timeouts import Timeouts
from shardline.rpc.auth.access import CHIEF_AUDIENCE, Access
from shardline.rpc.auth.rights import PACKAGE, RIGHTS, Token
from shardline.rpc.channel import open_channel
from shardline.rpc.client import ChiefClient
from shardline.rpc.server import RpcServer
from shardline.rpc.v1 import common_pb2, parameter_server_pb2
from shardline.security import PLAIN, Security
from shardline_chief.io.control import Control
from shardline_chief.io.servicer import ChiefServicer, register as register_chief
from shardline_ps.servicer import register
from tests.support.cluster import Ps
from tests.support.plain_client import DEADLINE_S, TIMELINE, PlainClient
from tests.support.refusals import unchanged

TIMEOUTS = Timeouts(total_s=20.0)


def token(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(f"the-{name}-token-of-this-test")
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Security:
    return Security(token_file=token(tmp_path, "job"), admin_token_file=token(tmp_path, "admin"))


@pytest.fixture
def guarded(ps: Ps, tokens: Security) -> Iterator[str]:
    """The same ps behind a second address that asks for tokens; tests see to its state at the first one."""
    server = RpcServer("127.0.0.1:0", register=[register(ps.servicer)], name="guarded", security=tokens)
    yield server.start()
    server.close(grace_s=0.0)


def commands(client: PlainClient) -> dict[str, tuple[str, list[Any]]]:
    """Kind and requests of every command; each would change something, were it taken."""
    later = parameter_server_pb2.Term(number=9, chief_uuid="another")
    configuration = client.configuration(timeline=TIMELINE + 1)
    head = parameter_server_pb2.RestoreHead(term=client.term, timeline=TIMELINE, shard=0)
    found = {
        "Lead": parameter_server_pb2.LeadRequest(term=later),
        "Configure": configuration,
        "SetMembership": parameter_server_pb2.SetMembershipRequest(term=client.term, members=[]),
        "Stop": parameter_server_pb2.StopRequest(term=client.term, reason="because"),
        "Cut": client.command("Cut", step=5, stop=True),
        "GetCut": client.command("GetCut", step=0),
        "Release": client.command("Release", step=5),
        "Promote": client.command("Promote", shard=0),
        "Activate": client.command("Activate"),
        "Restore": parameter_server_pb2.RestoreFrame(head=head),
    }
    kinds = {"GetCut": "unary_stream", "Restore": "stream_unary"}
    return {name: (kinds.get(name, "unary_unary"), [request]) for name, request in found.items()}


def send(channel: grpc.Channel, name: str, kind: str, requests: list[Any]) -> grpc.StatusCode:
    method = getattr(channel, kind)(
        f"/{PACKAGE}.ParameterServer/{name}", request_serializer=lambda request: request.SerializeToString()
    )
    try:
        answer = method(iter(requests) if kind.startswith("stream") else requests[0], timeout=DEADLINE_S)
        if kind.endswith("stream"):
            list(answer)
    except grpc.RpcError as error:
        code: grpc.StatusCode = cast(Any, error).code()
        return code
    return grpc.StatusCode.OK


def test_no_command_without_the_admin_token_changes_a_server(
    ready: PlainClient, ps: Ps, guarded: str, tokens: Security, tmp_path: Path
) -> None:
    assert commands(ready).keys() == {
        call for call, right in RIGHTS["ParameterServer"].items() if right.token is Token.ADMIN
    }
    before = ready.status()
    assert tokens.token_file is not None
    job = Security(token_file=tokens.token_file)
    wrong = Security(token_file=tokens.token_file, admin_token_file=token(tmp_path, "wrong"))
    cases = ((PLAIN, grpc.StatusCode.UNAUTHENTICATED), *((s, grpc.StatusCode.PERMISSION_DENIED) for s in (job, wrong)))
    for security, expected in cases:
        with open_channel(guarded, TIMEOUTS, security) as channel:
            for name, (kind, requests) in commands(ready).items():
                assert send(channel, name, kind, requests) is expected, (name, expected)
    after = ready.status()
    assert after == before
    assert ps.store.authority.members is None
    unchanged(ready)
    # The one with both tokens leads it.
    with open_channel(guarded, TIMEOUTS, tokens) as channel:
        assert send(channel, "Lead", *commands(ready)["Lead"]) is grpc.StatusCode.OK
    assert ready.status().term.number == 9


class Watched:
    """A chief's control that counts who asked it to stop."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def request_stop(self, reason: str) -> concurrent.futures.Future[int]:
        self.reasons.append(reason)
        future: concurrent.futures.Future[int] = concurrent.futures.Future()
        future.set_result(7)
        return future


def test_only_who_has_the_admin_token_stops_the_job(tokens: Security, tmp_path: Path) -> None:
    control = Watched()
    access = Access(tokens, CHIEF_AUDIENCE)
    servicer = ChiefServicer(
        cast(Control, control), CheckpointStore(tmp_path / "c", 1), access, term=1, timeouts=Timeouts()
    )
    server = RpcServer("127.0.0.1:0", register=[register_chief(servicer)], name="chief", security=tokens, access=access)
    address = server.start()
    try:
        for security in (PLAIN, Security(token_file=tokens.token_file)):
            client = ChiefClient(address, TIMEOUTS, security)
            with pytest.raises(Exception, match=r"refused Stop: the call does not (carry the token|prove)"):
                client.stop("from outside")
            client.close()
        assert control.reasons == []
        client = ChiefClient(address, TIMEOUTS, tokens)
        assert client.stop("enough") == 7
        client.close()
        assert control.reasons == ["enough"]
    finally:
        server.close(grace_s=0.0)


def test_commands_with_absurd_numbers_are_refused_and_change_nothing(ready: PlainClient) -> None:
    """Of somebody who may command: a chief gone wrong, or another version."""
    member = parameter_server_pb2.Member(task="worker/0", incarnation=1)
    value = [parameter_server_pb2.ImageTensor(name="value", dtype=common_pb2.DTYPE_FLOAT32, elements=0)]
    head = parameter_server_pb2.RestoreHead(term=ready.term, timeline=TIMELINE, shard=0)
    images = [parameter_server_pb2.RestoreFrame(header=parameter_server_pb2.ImageHeader(tensors=value))] * 9
    cases: dict[str, tuple[Any, str]] = {
        "Configure": (ready.configuration(replicas=1 << 31), "has 2147483648 replicas; the limit is 65536"),
        "SetMembership": (
            parameter_server_pb2.SetMembershipRequest(term=ready.term, members=[member] * 20_000),
            "members: 20000 entries; the limit is 16384",
        ),
        "Stop": (parameter_server_pb2.StopRequest(term=ready.term, reason="x" * 20_000), "reason has 20000 characters"),
        "Lead": (
            parameter_server_pb2.LeadRequest(term=parameter_server_pb2.Term(number=9, chief_uuid="x" * 5000)),
            "the limit of Lead is 4096",
        ),
    }
    for name, (request, sentence) in cases.items():
        with pytest.raises(grpc.RpcError) as caught:
            ready.call(name, request)
        error = cast(Any, caught.value)
        assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert sentence in error.details()
    with pytest.raises(grpc.RpcError, match="buckets: 4 entries; the limit is 3"):
        ready.stub.Restore(iter([parameter_server_pb2.RestoreFrame(head=head), *images]), timeout=DEADLINE_S)
    unchanged(ready)

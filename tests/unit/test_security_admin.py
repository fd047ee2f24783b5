"""The admin token: which calls need it, who brings it, and what those without it are told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from shardline.config import Timeouts
from shardline.errors import UsageError
from shardline.rpc.channel import open_aio_channel, open_channel
from shardline.rpc.client import ChiefClient, PsControl
from shardline.rpc.rights import ADMIN_CALLS, JOB_CALLS, PACKAGE, needs_admin
from shardline.rpc.server import RpcServer
from shardline.rpc.v1 import chief_pb2, parameter_server_pb2, places_pb2
from shardline.security import ADMIN_KEY, TOKEN_KEY, Security

TIMEOUTS = Timeouts(total_s=3.0)
PASSED = grpc.StatusCode.UNIMPLEMENTED
"""The server has none of these services: who gets past the gate is told that."""
STRANGER, COMMANDED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
METHODS = tuple(
    f"/{PACKAGE}.{service}/{call}"
    for table in (ADMIN_CALLS, JOB_CALLS)
    for service, calls in table.items()
    for call in calls
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for name in ("job", "admin", "other"):
        (folder / name).write_text(f"the-{name}-token-of-this-test\n")
    return folder


@pytest.fixture(scope="module")
def both(folder: Path) -> Security:
    return Security(token_file=folder / "job", admin_token_file=folder / "admin")


@contextlib.contextmanager
def serving(security: Security) -> Iterator[str]:
    server = RpcServer("127.0.0.1:0", security=security)
    try:
        yield server.start()
    finally:
        server.close(grace_s=0.0)


@pytest.fixture(scope="module")
def gate(both: Security) -> Iterator[str]:
    """Address of a server that has both tokens."""
    with serving(both) as address:
        yield address


def call(channel: Any, method: str) -> Any:
    return channel.unary_unary(method)


def status_of(channel: grpc.Channel, method: str, metadata: Any = None) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, method)(b"", metadata=metadata, timeout=5.0)
    error: Any = caught.value
    return error.code(), error.details()


def test_every_call_of_the_contract_is_either_the_jobs_or_the_admins() -> None:
    services: dict[str, list[str]] = {}
    for module in (chief_pb2, parameter_server_pb2, places_pb2):
        for name, service in module.DESCRIPTOR.services_by_name.items():
            services[name] = [method.name for method in service.methods]
    tables = {
        name: sorted((*ADMIN_CALLS.get(name, ()), *JOB_CALLS.get(name, ()))) for name in (*ADMIN_CALLS, *JOB_CALLS)
    }
    assert {name: sorted(calls) for name, calls in services.items()} == tables
    assert needs_admin(b"/shardline.rpc.v1.Chief/Stop") and not needs_admin("/shardline.rpc.v1.Chief/Status")


def test_the_jobs_token_opens_the_jobs_calls_and_the_admins_the_rest(gate: str, both: Security, folder: Path) -> None:
    job, admin = both.metadata(admin=True)
    wrong = (ADMIN_KEY, "Bearer the-other-token-of-this-test")
    with open_channel(gate, TIMEOUTS) as channel:
        for method in METHODS:
            command = needs_admin(method)
            for brought, expected in (
                ((), STRANGER),
                ((admin,), STRANGER),
                (((TOKEN_KEY, admin[1]), (ADMIN_KEY, job[1])), STRANGER),
                ((job,), COMMANDED if command else PASSED),
                ((job, wrong), COMMANDED if command else PASSED),
                ((job, (ADMIN_KEY, job[1])), COMMANDED if command else PASSED),
                ((job, admin), PASSED),
            ):
                assert status_of(channel, method, brought)[0] is expected, (method, brought)


def test_who_lacks_the_admin_token_is_told_its_flag_and_no_token(gate: str, folder: Path) -> None:
    control = PsControl("ps/0", gate, TIMEOUTS, term=1, chief_uuid="x", security=Security(token_file=folder / "job"))
    with pytest.raises(UsageError, match=r"ps/0 at .* refused Lead: .* admin token.* set --admin-token-file") as caught:
        control.lead()
    control.close()
    assert "-token-of-this-test" not in str(caught.value)
    client = ChiefClient(gate, TIMEOUTS, Security(token_file=folder / "job"))
    with pytest.raises(UsageError, match="refused Stop: the call does not bring this cluster's admin token"):
        client.stop("enough")
    client.close()


def test_commands_bring_both_tokens_and_other_calls_the_jobs_alone(both: Security) -> None:
    with serving(Security()) as address:
        seen: list[dict[str, str]] = []

        class Watch(grpc.UnaryUnaryClientInterceptor):
            def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
                seen.append(dict(details.metadata))
                return continuation(details, request)

        with open_channel(address, TIMEOUTS, both) as channel:
            watched = grpc.intercept_channel(channel._channel, channel._interceptor, Watch())  # type: ignore[attr-defined]
            status_of(watched, "/shardline.rpc.v1.ParameterServer/Lead")
            status_of(watched, "/shardline.rpc.v1.ParameterServer/Status")
    assert [set(metadata) for metadata in seen] == [{TOKEN_KEY, ADMIN_KEY}, {TOKEN_KEY}]


def test_calls_of_servers_on_a_loop_bring_the_admin_token(gate: str, both: Security, folder: Path) -> None:
    async def vote(security: Security) -> grpc.StatusCode:
        async with open_aio_channel(gate, TIMEOUTS, security) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, "/shardline.rpc.v1.Coordinator/Vote")(b"", timeout=5.0)
            return caught.value.code()

    assert asyncio.run(vote(both)) is PASSED
    assert asyncio.run(vote(Security(token_file=folder / "job"))) is COMMANDED


def test_without_an_admin_token_the_jobs_is_every_right(folder: Path) -> None:
    job = Security(token_file=folder / "job")
    assert job.check_admin(None)
    with serving(job) as address, open_channel(address, TIMEOUTS, job) as channel:
        assert {status_of(channel, method)[0] for method in METHODS} == {PASSED}


def test_admin_token_is_compared_whole_never_shown_and_not_the_jobs(folder: Path, both: Security) -> None:
    key, value = both.metadata(admin=True)[1]
    assert both.metadata() == both.metadata(admin=True)[:1] and key == ADMIN_KEY
    assert both.check_admin([(key, value)])
    for wrong in (value[:-1], value + "x", "", value.removeprefix("Bearer "), "Bearer \udcff", b"Bearer \xff"):
        assert not both.check_admin([(key, wrong)])
    assert "-token-of-this-test" not in repr(both)
    with pytest.raises(UsageError, match="hold the same token; whoever has the job's would have every right"):
        Security(token_file=folder / "job", admin_token_file=folder / "job")
    (folder / "short").write_text("short")
    with pytest.raises(UsageError, match=r"--admin-token-file .*short holds 5 characters; a token has 16 to 4096"):
        Security(admin_token_file=folder / "short")

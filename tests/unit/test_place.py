"""Tasks that get their index from the chief, listen on one interface and are found under another name."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, cast

import grpc
import pytest

import shardline
from shardline.cli import options
from shardline.cli.main import main
from shardline.config import RoleConfig
from shardline.core.timeouts import Timeouts
from shardline.errors import ClusterSpecError, MismatchError, ProtocolError, UnreachableError, UsageError
from shardline.host.process import Termination
from shardline.observability import log
from shardline.rpc.auth.access import Access
from shardline.rpc.index_request import take_place
from shardline.rpc.server import RpcServer
from shardline.rpc.v1 import places_pb2, places_pb2_grpc
from shardline.security import PLAIN, Security
from shardline_chief.io.control import Control
from shardline_chief.io.servicer import register_places
from shardline_chief.rules.messages import PlaceAnswer

T = Timeouts(total_s=2.0, join_s=2.0)
Answer = Callable[[Any], places_pb2.PlaceReply]


class Giver(places_pb2_grpc.PlacesServicer):
    """A chief that answers as it is told to."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str]] = []

    async def Take(self, request: places_pb2.PlaceRequest, context: Any) -> places_pb2.PlaceReply:
        self.asked.append((request.role, request.address))
        return self.answer(request)


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], tuple[str, Giver]]]:
    servers: list[RpcServer] = []

    def start(answer: Answer) -> tuple[str, Giver]:
        giver = Giver(answer)

        def register(server: grpc.aio.Server) -> None:
            places_pb2_grpc.add_PlacesServicer_to_server(giver, server)

        servers.append(RpcServer("127.0.0.1:0", register=[register], name="giver"))
        return servers[-1].start(), giver

    yield start
    for server in servers:
        server.close(grace_s=0.0)


def parse(role: str, *arguments: str) -> RoleConfig:
    found: list[RoleConfig] = []

    def keep(role: str, flags: dict[str, Any]) -> int:
        found.append(options.role_config(role, flags, environ={}))
        return 0

    from shardline.cli.roles import role_command

    role_command(role, keep).main(list(arguments), standalone_mode=False)
    return found[0]


def cluster(chief: str, **roles: int) -> str:
    return json.dumps({"chief": [chief], "ps": 1, **roles})


def test_role_with_any_becomes_the_task_that_the_chief_names(serve: Callable[[Answer], tuple[str, Giver]]) -> None:
    chief, giver = serve(lambda request: places_pb2.PlaceReply(task="worker/3"))
    config = parse(
        "worker",
        "--cluster",
        cluster(chief, worker=2),
        "--task",
        "worker/any",
        "--address",
        ":2222",
        "--bind",
        "0.0.0.0",
        "--insecure-bind",
    )
    here = f"{socket.gethostname()}:2222"
    assert giver.asked == [("worker", here)]
    assert config.task == "worker/3"
    assert config.cluster.address("worker/3") == here
    assert config.bind == "0.0.0.0"


def test_a_script_asks_for_its_index_too(
    serve: Callable[[Answer], tuple[str, Giver]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chief, giver = serve(lambda request: places_pb2.PlaceReply(task="worker/1"))
    monkeypatch.setenv("SHARDLINE_ADDRESS", "127.0.0.1:0")
    # Signals and logging belong to the process, which is pytest's.
    monkeypatch.setattr(Termination, "install", lambda self: None)
    monkeypatch.setattr(log, "setup", lambda *_, **__: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    session = shardline.connect(cluster=cluster(chief, worker=2), task="worker/any")
    session.shutdown()
    assert giver.asked == [("worker", "127.0.0.1:0")]
    assert session.config.task == "worker/1"


def test_the_chief_takes_no_address_from_a_variable_that_is_for_all_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLINE_ADDRESS", ":0")
    place = json.dumps({"chief": ["127.0.0.1:7000"], "ps": ["127.0.0.1:7001"], "worker": ["127.0.0.1:7002"]})
    assert parse("chief", "--cluster", place).cluster.chief == "127.0.0.1:7000"
    config = parse("worker", "--cluster", place, "--insecure-bind")
    assert config.cluster.address("worker/0") == f"{socket.gethostname()}:0"


def test_place_that_is_not_free_yet_is_waited_for(serve: Callable[[Answer], tuple[str, Giver]]) -> None:
    replies = [places_pb2.PlaceReply(reason="all 1 places are taken", retry=True), places_pb2.PlaceReply(task="ps/0")]
    chief, giver = serve(lambda request: replies.pop(0))
    assert take_place(chief, "ps", "a:1", T) == "ps/0"
    assert len(giver.asked) == 2


def test_place_that_stays_taken_is_given_up_with_the_chiefs_reason(
    serve: Callable[[Answer], tuple[str, Giver]],
) -> None:
    chief, _ = serve(lambda request: places_pb2.PlaceReply(reason="all 1 places are taken", retry=True))
    with pytest.raises(UnreachableError, match="an index within 1 s: all 1 places are taken"):
        take_place(chief, "ps", "a:1", Timeouts(join_s=1.0))


def test_chief_that_goes_away_is_followed_by_another(serve: Callable[[Answer], tuple[str, Giver]]) -> None:
    # Who restarts with the chief may first meet another container under its old address, and one that ends.
    codes = [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE]

    class Old(Giver):
        async def Take(self, request: places_pb2.PlaceRequest, context: Any) -> places_pb2.PlaceReply:
            if codes:
                await context.abort(codes.pop(0), "not here")
            return await super().Take(request, context)

    giver = Old(lambda request: places_pb2.PlaceReply(task="ps/1"))
    server = RpcServer(
        "127.0.0.1:0", register=[lambda server: places_pb2_grpc.add_PlacesServicer_to_server(giver, server)], name="old"
    )
    try:
        assert take_place(server.start(), "ps", "a:1", Timeouts(join_s=10.0)) == "ps/1"
    finally:
        server.close(grace_s=0.0)
    assert not codes


def test_role_that_gets_no_index_is_told_so_at_once(serve: Callable[[Answer], tuple[str, Giver]]) -> None:
    chief, _ = serve(lambda request: places_pb2.PlaceReply(reason="the chief assigns no index"))
    with pytest.raises(MismatchError, match="the chief assigns no index"):
        take_place(chief, "chief", "a:1", T)


@pytest.mark.parametrize("task", ["ps/0", "worker/4096", "worker/99999999999", "worker/-1", "worker/any", "worker"])
def test_what_is_no_task_of_the_role_is_refused_before_a_spec_is_made_of_it(
    task: str, serve: Callable[[Answer], tuple[str, Giver]]
) -> None:
    chief, _ = serve(lambda request: places_pb2.PlaceReply(task=task))
    with pytest.raises(
        ProtocolError, match=f"assigned this worker the name '{task}'; it must be worker/0 to worker/4095"
    ):
        take_place(chief, "worker", "a:1", T)


class Asked:
    """A chief's control that hands out indices in turn and notes for whom."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.program = self

    def place(self, role: str, address: str, now_s: float) -> PlaceAnswer:
        self.addresses.append(address)
        return PlaceAnswer(task=f"{role}/{len(self.addresses) - 1}")

    def call(self, question: Callable[[float], PlaceAnswer]) -> Future[PlaceAnswer]:
        found: Future[PlaceAnswer] = Future()
        found.set_result(question(0.0))
        return found


def test_the_chief_knows_addresses_in_one_form_and_takes_no_others() -> None:
    control = Asked()
    server = RpcServer("127.0.0.1:0", register=[register_places(cast(Control, control), Access(PLAIN))], name="chief")
    try:
        chief = server.start()
        for address in ("a:00", "a:0", "[::1]:022"):
            take_place(chief, "ps", address, T)
        assert control.addresses == ["a:0", "a:0", "[::1]:22"]
        for address, cause in (("a", "needs both a host and a port"), ("a" * 300 + ":1", "the limit is 256")):
            with pytest.raises(ProtocolError, match=cause):
                take_place(chief, "ps", address, T)
        with pytest.raises(ProtocolError, match="role has 257 characters; the limit is 256"):
            take_place(chief, "p" * 257, "a:1", T)
        assert len(control.addresses) == 3
    finally:
        server.close(grace_s=0.0)


def test_chief_whose_name_is_not_known_is_waited_for_and_named() -> None:
    with pytest.raises(UnreachableError, match=r"the name 'nowhere\.invalid' has no address"):
        take_place("nowhere.invalid:2222", "ps", "a:1", Timeouts(join_s=1.0))


def test_any_of_another_role_and_any_without_a_cluster_are_refused() -> None:
    with pytest.raises(ClusterSpecError, match="start it with: shardline ps"):
        parse("worker", "--cluster", cluster("127.0.0.1:1"), "--task", "ps/any")
    with pytest.raises(ClusterSpecError, match="needs --cluster"):
        parse("worker", "--task", "worker/any")


def test_task_with_an_index_in_a_numbered_role_answers_at_its_machines_name() -> None:
    config = parse("ps", "--cluster", cluster("127.0.0.1:1"), "--task", "ps/0", "--insecure-bind")
    assert config.cluster.address("ps/0") == f"{socket.gethostname()}:0"


# Listening, and health


def test_server_listens_on_the_interface_and_tells_the_name() -> None:
    server = RpcServer("somewhere.invalid:0", name="x", bind="127.0.0.1")
    try:
        address = server.start()
        assert address.startswith("somewhere.invalid:")
        assert main(["health", "--address", f"127.0.0.1:{address.rpartition(':')[2]}"]) == 0
    finally:
        server.close(grace_s=0.0)


def test_interface_that_is_not_there_is_named() -> None:
    server = RpcServer("somewhere:0", name="x", bind="192.0.2.1")
    with pytest.raises(UsageError, match=r"does 192\.0\.2\.1 belong to this machine"):
        server.start()


def test_health_of_nobody_is_a_sentence_and_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["health", "--address", address, "--within", "0.5"]) == 3
    assert f"no task at {address} reported healthy within 0.5 s" in capsys.readouterr().err


def test_health_of_a_task_that_ends_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    server = RpcServer("127.0.0.1:0", name="x", security=Security())
    try:
        address = server.start()
        server.run(server._set(False), timeout_s=5.0)
        assert main(["health", "--address", address]) == 3
        assert "is not serving" in capsys.readouterr().err
    finally:
        server.close(grace_s=0.0)

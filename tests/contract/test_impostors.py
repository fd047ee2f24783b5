"""Somebody who has the job token, and speaks for others: nobody hears of it, and nobody is harmed by it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from shardline.core.identity import Identity
from shardline.core.orders import Phase
from shardline.errors import ProtocolError, UsageError
from shardline.rpc.channel import open_channel
from shardline.rpc.client import ChiefClient
from shardline.rpc.index_request import take_place
from shardline.rpc.v1 import chief_pb2, chief_pb2_grpc, common_pb2, data_pb2, parameter_server_pb2
from shardline.security import PLAIN, Security, key_of
from tests.support.chief_process import TIMEOUTS, Chief
from tests.support.cluster import Ps
from tests.support.plain_client import DEADLINE_S, PlainClient, W, floats
from tests.support.refusals import says

FORBIDDEN = grpc.StatusCode.PERMISSION_DENIED
SECRET, OTHER = b"s" * 32, b"o" * 32


def token(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(f"the-{name}-token-of-this-test")
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Security:
    return Security(token_file=token(tmp_path, "job"), admin_token_file=token(tmp_path, "admin"))


@pytest.fixture
def stranger(tokens: Security) -> Security:
    """With the job token alone."""
    return Security(token_file=tokens.token_file)


@pytest.fixture
def chief(tmp_path: Path, tokens: Security) -> Iterator[Chief]:
    chief = Chief(tmp_path / "out", tokens)
    yield chief
    chief.close()


@pytest.fixture
def stub(chief: Chief, stranger: Security) -> Iterator[chief_pb2_grpc.ChiefStub]:
    with open_channel(chief.address, TIMEOUTS, stranger) as channel:
        yield chief_pb2_grpc.ChiefStub(channel)


@pytest.fixture
def lure() -> Iterator[tuple[str, list[Any]]]:
    """An address that a stranger names, and who called there."""
    visitors: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_note_visitors, args=(server, visitors), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", visitors
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5.0)


def _note_visitors(server: socket.socket, visitors: list[Any]) -> None:
    try:
        while True:
            connection, peer = server.accept()
            visitors.append(peer)
            connection.close()
    except OSError:
        return


def code_of(method: Any, request: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        method(request, timeout=DEADLINE_S)
    error: Any = caught.value
    code: grpc.StatusCode = error.code()
    return code


# Servers


@pytest.mark.parametrize("role", ["ps", "chief"])
def test_the_job_token_makes_nobody_a_server_or_a_chief(
    chief: Chief, stub: chief_pb2_grpc.ChiefStub, lure: tuple[str, list[Any]], role: str
) -> None:
    address, visitors = lure
    request = chief_pb2.JoinRequest(role=role, index=0, stable_id="mine", address=address)
    assert code_of(stub.Join, request) is FORBIDDEN
    # All that the chief would do for a new member is behind it when it has answered this.
    assert chief.client.status().tasks == ()
    assert visitors == []
    # The place is free for whoever has the right to it, and that one is dialled and commanded.
    with chief.link(role if role == "ps" else "evaluator", address=address) as link:
        link.join()


def test_the_job_token_takes_no_servers_place_beforehand(chief: Chief, stranger: Security, tokens: Security) -> None:
    with pytest.raises(UsageError, match="joining as ps needs the admin token in addition to the job token"):
        take_place(chief.address, "ps", "10.6.6.6:2222", TIMEOUTS, stranger)
    assert take_place(chief.address, "worker", "10.6.6.6:2222", TIMEOUTS, stranger) == "worker/0"
    assert take_place(chief.address, "ps", "10.0.0.2:2222", TIMEOUTS, tokens) == "ps/0"


def test_a_server_without_the_admin_token_is_told_its_flag(chief: Chief, stranger: Security) -> None:
    with (
        chief.link("ps", security=stranger) as link,
        pytest.raises(UsageError, match=r"refused Join: ps/0 at .* is not admitted: .* set --admin-token-file"),
    ):
        link.join()


# Lives


def beats(stub: chief_pb2_grpc.ChiefStub, beat: chief_pb2.Beat) -> grpc.StatusCode | None:
    """How a heartbeat stream with this beat ends; None where it is answered."""
    answered = threading.Event()

    def messages() -> Iterator[chief_pb2.Beat]:
        yield beat
        answered.wait(DEADLINE_S)

    try:
        for _ in stub.Heartbeat(messages(), timeout=DEADLINE_S):
            return None
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]  # every RpcError of a call is a Call
        return code
    finally:
        answered.set()
    raise AssertionError("the stream ended without a word")


FORGED: Sequence[dict[str, Any]] = (
    {},
    {"leaving": True},
    {"finished": True},
    {"failure": "it is on fire", "failure_code": 2},
)


def test_a_forged_beat_changes_nothing_for_the_task_that_it_names(chief: Chief, stub: chief_pb2_grpc.ChiefStub) -> None:
    with chief.link("ps") as link:
        link.join()
        assert link.wait(lambda orders: orders.version > 0, timeout_s=DEADLINE_S)
        row = chief.client.status().tasks[0]
        assert (row.task, row.incarnation) == ("ps/0", link.incarnation), "what a stranger can see"
        for secret in (b"", OTHER):
            for fields in FORGED:
                beat = chief_pb2.Beat(task="ps/0", incarnation=link.incarnation, step=99, secret=secret, **fields)
                assert beats(stub, beat) is FORBIDDEN
                after = chief.client.status().tasks[0]
                assert (after.state, after.step, after.incarnation) == ("alive", 0, link.incarnation)
        # A stream that breaks is what makes a task suspect; the true one still stands, and is still answered.
        link.beat_now()
        assert not link.wait(lambda orders: orders.fenced, timeout_s=2 * TIMEOUTS.heartbeat_s)
        assert link.orders.phase is not Phase.ENDED
        assert not any("suspect" in event.sentence for event in chief.client.status().said)


def test_a_second_stream_of_the_same_life_takes_nothing_from_the_first(
    chief: Chief, stub: chief_pb2_grpc.ChiefStub
) -> None:
    with chief.link("evaluator") as link:
        link.join()
        assert link.wait(lambda orders: orders.version > 0, timeout_s=DEADLINE_S)
        own = chief_pb2.Beat(task="evaluator/0", incarnation=link.incarnation, secret=link.secret)
        for _ in range(3):
            # Ends at once, which of a task's only stream would be a sign that it died.
            list(stub.Heartbeat(iter([own]), timeout=DEADLINE_S))
        wake = threading.Event()
        for _ in range(100):
            link.beat_now()
            if chief.client.status().tasks[0].state == "alive":
                break
            wake.wait(0.05)
        assert chief.client.status().tasks[0].state == "alive"
        chief.client.stop("enough")
        assert link.wait(lambda orders: orders.phase is Phase.ENDED, timeout_s=DEADLINE_S)


def test_what_a_task_says_of_things_that_are_not_its_roles_counts_for_nothing(
    chief: Chief, stub: chief_pb2_grpc.ChiefStub
) -> None:
    joined = stub.Join(chief_pb2.JoinRequest(role="evaluator", stable_id="mine"), timeout=DEADLINE_S)
    shard = parameter_server_pb2.ShardStatus(shard=0, step_min=10, step_max=10, initialized=True)
    beat = chief_pb2.Beat(
        task=joined.task,
        incarnation=joined.incarnation,
        secret=joined.secret,
        ps=parameter_server_pb2.PsStatusReply(task="ps/0", shards=[shard]),
        suspects=["ps/0"],
        steps=[chief_pb2.StepReport(step=7, replica=0, loss=12.5, samples=1)],
    )
    assert beats(stub, beat) is None
    state = chief.process.control.program.state
    assert (dict(state.progress.shards), dict(state.tasks.suspects)) == ({}, {})
    assert chief.client.status().loss != 12.5


def test_leases_and_reports_are_their_own_tasks(chief: Chief, tokens: Security) -> None:
    client = ChiefClient(chief.address, TIMEOUTS, Security(token_file=tokens.token_file))
    try:
        with chief.link("evaluator") as link:
            link.join()
            for secret in (b"", OTHER):
                impostor = Identity("evaluator/0", link.incarnation, secret)
                with pytest.raises(UsageError, match="the message is not from evaluator/0: it lacks the secret"):
                    client.report(impostor, 0, {"loss": 0.0}, 0.1)
                with pytest.raises(UsageError, match="the message is not from evaluator/0: it lacks the secret"):
                    client.lease(impostor, [1])
            with pytest.raises(Exception, match=r"evaluator/0 incarnation .* is not a live task that trains"):
                client.lease(link.identity, [])
            with pytest.raises(
                ProtocolError, match="score of step 0 by evaluator/0: there is no checkpoint of that step"
            ):
                client.report(link.identity, 0, {}, 0.1, failure="nothing to score")
    finally:
        client.close()


def test_the_journal_and_the_status_do_not_tell_the_secret(chief: Chief) -> None:
    with chief.link("ps") as link:
        link.join()
        assert len(link.secret) == 32
        link.beat_now()
        assert link.wait(lambda orders: orders.version > 0, timeout_s=DEADLINE_S)
        texts = [path.read_text() for path in chief.journal.folder.glob("journal-*.jsonl")]
        assert key_of(link.secret).hex() in "".join(texts)
        for text in (
            *texts,
            str(chief.client.status()),
            repr(link.identity),
            repr(chief.process.control.program.state.tasks.members.get("ps/0")),
        ):
            assert link.secret.hex() not in text and repr(link.secret) not in text


# Data


def forge(client: PlainClient, secret: bytes) -> dict[str, tuple[int, str]]:
    """Outcome and reason of each data call with this secret, by its name."""
    data = client.data(secret=secret)
    push = client.push(client.frames({W: floats([1.0] * 12)}, data={"secret": secret}))
    (fused,), _, _ = client.push_pull(
        client.frames({W: floats([1.0] * 12)}, data={"secret": secret}), client.pull_request(data=data)
    )
    lane = parameter_server_pb2.OpenLaneRequest(data=client.data(secret=secret, lane=common_pb2.LANE_TCP))
    progress = client.call("Progress", data_pb2.ProgressRequest(data=data, replicas=[0]))
    opened = client.call("OpenLane", lane)
    end = client.pull(data=data)[2]
    found: Sequence[Any] = (push, fused, progress, opened, end)
    names = ("Push", "PushPull", "Progress", "OpenLane", "Pull")
    return {name: (item.outcome, item.reason) for name, item in zip(names, found, strict=True)}


def test_nobody_pushes_pulls_or_opens_a_lane_for_another_task(ready: PlainClient, ps: Ps) -> None:
    member = parameter_server_pb2.Member(task="worker/0", incarnation=1, key=key_of(SECRET))
    ready.call(
        "SetMembership",
        parameter_server_pb2.SetMembershipRequest(term=ready.term, timeline=ready.timeline, members=[member]),
    )
    before = ready.status()
    for secret in (b"", OTHER, key_of(SECRET)):
        for call, (outcome, reason) in forge(ready, secret).items():
            assert outcome == common_pb2.OUTCOME_FENCED, (call, reason)
            assert says(reason, "the message is not from worker/0: it lacks the secret that the chief gave to incarn")
    assert ready.status().shards == before.shards
    assert ready.push(ready.frames({W: floats([1.0] * 12)}, data={"secret": SECRET})).outcome == (
        common_pb2.OUTCOME_COUNTED
    )


def test_a_key_of_another_length_is_refused(ready: PlainClient) -> None:
    member = parameter_server_pb2.Member(task="worker/0", incarnation=1, key=b"short")
    request = parameter_server_pb2.SetMembershipRequest(term=ready.term, timeline=ready.timeline, members=[member])
    with pytest.raises(grpc.RpcError, match="the key of worker/0 has 5 bytes; a SHA-256 has 32"):
        ready.call("SetMembership", request)


def test_without_tokens_a_life_is_still_only_its_own(tmp_path: Path) -> None:
    chief = Chief(tmp_path, PLAIN)
    try:
        with chief.link("evaluator") as link, open_channel(chief.address, TIMEOUTS) as channel:
            link.join()
            forged = chief_pb2.Beat(
                task="evaluator/0", incarnation=link.incarnation, failure="it is on fire", failure_code=2
            )
            assert beats(chief_pb2_grpc.ChiefStub(channel), forged) is FORBIDDEN
            assert chief.client.status().phase != "ended"
    finally:
        chief.close()

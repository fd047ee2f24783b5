"""Messages too long, not readable, or of absurd numbers: refused with a status before anything is made of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from shardline.certs import make_certificates
from shardline.cluster import MAX_TASKS
from shardline.core.orders import ACKNOWLEDGED, LOST, SINCE
from shardline.errors import ProtocolError
from shardline.rpc import limits
from shardline.rpc.auth.rights import PACKAGE, RIGHTS
from shardline.rpc.limits import DEFAULT_BYTES, MAX_MESSAGE_BYTES, MESSAGE_BYTES, OPEN_BYTES, message_limit
from shardline.rpc.messages.configuration import configuration_from_proto
from shardline.rpc.messages.convert import ImageAssembler, job_from_proto, sequences_from_proto
from shardline.rpc.server import RpcServer
from shardline.rpc.v1 import (
    chief_pb2,
    chief_pb2_grpc,
    common_pb2,
    parameter_server_pb2,
    parameter_server_pb2_grpc,
    plan_pb2,
)
from shardline_chief.io.servicer import beat_from_proto, join_from_proto

READ: list[str] = []


class Chief(chief_pb2_grpc.ChiefServicer):
    async def Status(self, request: Any, context: Any) -> chief_pb2.ChiefStatusReply:
        READ.append("Status")
        return chief_pb2.ChiefStatusReply(step=7)

    async def Heartbeat(self, request: AsyncIterator[Any], context: Any) -> AsyncIterator[chief_pb2.Orders]:
        async for beat in request:
            READ.append("Beat")
            yield chief_pb2.Orders(version=beat.step)

    async def FetchCut(self, request: Any, context: Any) -> None:  # type: ignore[override]
        READ.append("FetchCut")
        await context.write(chief_pb2.FetchCutFrame(step=request.step))


class Server(parameter_server_pb2_grpc.ParameterServerServicer):
    async def Restore(self, request: AsyncIterator[Any], context: Any) -> parameter_server_pb2.RestoreReply:
        shards = [frame.head.shard async for frame in request]
        READ.append("Restore")
        return parameter_server_pb2.RestoreReply(step=sum(shards))


class Standby(parameter_server_pb2_grpc.ReplicationServicer):
    async def Replicate(
        self, request: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[parameter_server_pb2.ReplicaReply]:
        """Sends while another task of its own reads, as the chief does."""

        async def read() -> int:
            return len([frame async for frame in request])

        reader = asyncio.create_task(read())
        while not reader.done():
            yield parameter_server_pb2.ReplicaReply()
        yield parameter_server_pb2.ReplicaReply(record=await reader)


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    server = RpcServer(
        "127.0.0.1:0",
        register=[
            lambda server: chief_pb2_grpc.add_ChiefServicer_to_server(Chief(), server),  # type: ignore[abstract]
            lambda server: parameter_server_pb2_grpc.add_ParameterServerServicer_to_server(Server(), server),  # type: ignore[abstract]
            lambda server: parameter_server_pb2_grpc.add_ReplicationServicer_to_server(Standby(), server),  # type: ignore[arg-type]
        ],
    )
    with grpc.insecure_channel(server.start(), options=[("grpc.max_send_message_length", -1)]) as channel:
        yield channel
    server.close(grace_s=0.0)


@pytest.fixture(autouse=True)
def nothing_read() -> None:
    READ.clear()


def status(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code(), error.details()


def raw(channel: grpc.Channel, name: str, kind: str, *messages: bytes) -> Any:
    method: Any = getattr(channel, kind)(f"/{PACKAGE}.{name}")
    answer = method(iter(messages) if kind.startswith("stream") else messages[0], timeout=10.0)
    return list(answer) if kind.endswith("stream") else answer


KINDS = {
    "Chief/Status": "unary_unary",
    "Chief/FetchCut": "unary_stream",
    "ParameterServer/Restore": "stream_unary",
    "Chief/Heartbeat": "stream_stream",
}


def test_calls_of_every_kind_go_through_as_before(channel: grpc.Channel) -> None:
    chief = chief_pb2_grpc.ChiefStub(channel)
    assert chief.Status(chief_pb2.ChiefStatusRequest(), timeout=10).step == 7
    assert [frame.step for frame in chief.FetchCut(chief_pb2.FetchCutRequest(step=5), timeout=10)] == [5]
    beats = (chief_pb2.Beat(step=step) for step in (3, 4))
    assert [orders.version for orders in chief.Heartbeat(beats, timeout=10)] == [3, 4]
    frames = (parameter_server_pb2.RestoreFrame(head=parameter_server_pb2.RestoreHead(shard=shard)) for shard in (1, 2))
    assert parameter_server_pb2_grpc.ParameterServerStub(channel).Restore(frames, timeout=10).step == 3


@pytest.mark.parametrize("name", KINDS)
def test_message_that_is_too_long_or_not_readable_never_reaches_its_handler(channel: grpc.Channel, name: str) -> None:
    limit = message_limit(f"/{PACKAGE}.{name}")
    call = name.partition("/")[2]
    long, junk = b"\x0a" * (limit + 1), b"\xff" * 8
    found = status(lambda: raw(channel, name, KINDS[name], long))
    assert found == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"a message of {limit + 1} bytes; the limit of {call} is {limit}",
    )
    found = status(lambda: raw(channel, name, KINDS[name], junk))
    assert found == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"a message of {call} can't be parsed; compressed ones are not taken",
    )
    assert READ == []


def test_message_that_is_not_readable_ends_a_call_whose_replies_are_on_their_way(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    found = status(lambda: raw(channel, "Replication/Replicate", "stream_stream", b"", b"\xff" * 8))
    assert found == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "a message of Replicate can't be parsed; compressed ones are not taken",
    )
    assert not caplog.records


def test_health_services_list_is_refused_without_a_traceback_in_the_log(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    method: Any = channel.unary_unary("/grpc.health.v1.Health/List")
    found = status(lambda: method(b"", timeout=10))
    assert found == (grpc.StatusCode.UNIMPLEMENTED, "this task does not list its services; use reflection")
    assert not caplog.records


def test_anybody_may_ask_the_health_service_but_not_at_length(channel: grpc.Channel) -> None:
    method: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
    assert method(b"", timeout=10)
    code, _ = status(lambda: method(b"\x0a" * (OPEN_BYTES + 1), timeout=10))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_limits_are_of_calls_that_there_are_and_below_the_servers() -> None:
    names = {f"{service}/{call}" for service, calls in RIGHTS.items() for call in calls}
    assert MESSAGE_BYTES.keys() <= names
    assert all(0 < limit <= MAX_MESSAGE_BYTES for limit in MESSAGE_BYTES.values())
    assert message_limit(f"/{PACKAGE}.Chief/Heartbeat") == DEFAULT_BYTES
    assert message_limit(f"/{PACKAGE}.ParameterServer/Push") == MESSAGE_BYTES["ParameterServer/Push"]
    assert message_limit("/nonsense") == DEFAULT_BYTES


# Numbers

FLOAT = common_pb2.DTYPE_FLOAT32
PARAM = plan_pb2.TENSOR_KIND_PARAM
LONG = "x" * (limits.MAX_NAME + 1)


def tensor(**changes: Any) -> plan_pb2.TensorSpec:
    return plan_pb2.TensorSpec(**{"name": "w", "shape": [4], "dtype": FLOAT, "kind": PARAM, **changes})


def job(**changes: Any) -> plan_pb2.JobSpec:
    return plan_pb2.JobSpec(**{"name": "job", "tensors": [tensor()], **changes})


def replicas(count: int) -> dict[str, plan_pb2.Argument]:
    return {"replicas": plan_pb2.Argument(integer=count)}


def rule(count: int = 1, **arguments: plan_pb2.Argument) -> plan_pb2.RuleSpec:
    return plan_pb2.RuleSpec(name="SGD", groups=[plan_pb2.ParamGroup(arguments=arguments)] * count)


def configure(**changes: Any) -> parameter_server_pb2.ConfigureRequest:
    plan = plan_pb2.PlanSpec(tensors=[tensor()], shards=[plan_pb2.ShardSpec()])
    return parameter_server_pb2.ConfigureRequest(**{"job": "job", "plan": plan, **changes})


def beat(**changes: Any) -> chief_pb2.Beat:
    return chief_pb2.Beat(**{"task": "worker/0", **changes})


def shard(**changes: Any) -> parameter_server_pb2.PsStatusReply:
    return parameter_server_pb2.PsStatusReply(shards=[parameter_server_pb2.ShardStatus(**changes)])


numbers = plan_pb2.Numbers(values=[0.0] * 1000)
image = parameter_server_pb2.ImageHeader
ABSURD: dict[str, tuple[Callable[[], Any], str]] = {
    "sizes": (
        lambda: job_from_proto(job(tensors=[tensor(shape=[1 << 62] * 50_000)])),
        "50000 entries; the limit is 64",
    ),
    "elements": (lambda: job_from_proto(job(tensors=[tensor(shape=[1 << 62])])), "elements; the limit is"),
    "bytes": (
        lambda: job_from_proto(job(tensors=[tensor(shape=[1 << 37]), tensor(name="v", shape=[1 << 38])])),
        "its tensors have 1649267441664 bytes; the limit is 1099511627776",
    ),
    "name": (lambda: job_from_proto(job(tensors=[tensor(name=LONG)])), "name of a tensor has 1025 characters"),
    "aliases": (lambda: job_from_proto(job(tensors=[tensor(aliases=["a"] * 2000)])), "aliases of tensor 'w': 2000"),
    "replicas": (
        lambda: job_from_proto(job(settings=replicas(1 << 31))),
        "job has 2147483648 replicas; the limit is 65536",
    ),
    "groups": (lambda: job_from_proto(job(rule=rule(70_000))), "parameter groups of a rule: 70000 entries"),
    "numbers": (lambda: job_from_proto(job(rule=rule(betas=plan_pb2.Argument(numbers=numbers)))), "numbers in an arg"),
    "text": (lambda: job_from_proto(job(rule=rule(lr=plan_pb2.Argument(text=LONG)))), "argument of a rule has 1025"),
    "machine": (
        lambda: join_from_proto(
            chief_pb2.JoinRequest(hello=common_pb2.Hello(machine={str(n): "x" for n in range(2000)}))
        ),
        "facts about the machine: 2000 entries",
    ),
    "fact": (
        lambda: join_from_proto(chief_pb2.JoinRequest(hello=common_pb2.Hello(machine={"cpu": LONG}))),
        "a fact about the machine or a required feature has 1025 characters",
    ),
    "configured replicas": (
        lambda: configuration_from_proto(configure(settings=replicas((1 << 32) - 1))),
        "has 4294967295 rep",
    ),
    "shards": (
        lambda: configuration_from_proto(configure(shards=range(5000))),
        "Configure: shards: 5000 entries; the limit is 64",
    ),
    "kept": (lambda: configuration_from_proto(configure(keep_standbys=[0] * 100)), "standbys to keep: 100 entries"),
    "steps": (
        lambda: beat_from_proto(beat(steps=[chief_pb2.StepReport()] * 5000)),
        "has 5000 steps; the limit is 4096",
    ),
    "suspects": (lambda: beat_from_proto(beat(suspects=["a"] * 20_000)), "suspects: 20000 entries"),
    "figures": (lambda: beat_from_proto(beat(figures={str(n): 0.0 for n in range(6000)})), "figures: 6000 entries"),
    "failure": (
        lambda: beat_from_proto(beat(failure="x" * 20_000)),
        "failure has 20000 characters; the limit is 16384",
    ),
    "task": (lambda: beat_from_proto(beat(task=LONG)), "name of the task has 1025 characters"),
    "cuts": (
        lambda: beat_from_proto(beat(ps=shard(shard=3, cuts=[parameter_server_pb2.HeldCut()] * 2000))),
        "cuts of shard 3: 2000 entries",
    ),
    "waiting": (lambda: beat_from_proto(beat(ps=shard(waiting_for=range(70_000)))), "is waiting for: 70000 entries"),
    "image": (
        lambda: ImageAssembler(max_bytes=1 << 20).feed(
            image(tensors=[parameter_server_pb2.ImageTensor(name="value", dtype=FLOAT, elements=1 << 60)]), None
        ),
        "image of bucket 0 has 4611686018427387904 bytes; the limit is 1048576",
    ),
    "empty tensors of an image": (
        lambda: ImageAssembler(max_bytes=1 << 20).feed(
            image(tensors=[parameter_server_pb2.ImageTensor(dtype=FLOAT)] * 5000), None
        ),
        "tensors in the image of bucket 0: 5000 entries",
    ),
    "sequences": (
        lambda: sequences_from_proto(parameter_server_pb2.WorkerSequence(task=str(n)) for n in range(20_000)),
        "tasks in the end of the images: 16385 entries",
    ),
}


def test_a_worker_may_tell_a_number_for_each_server_of_the_largest_cluster() -> None:
    told = {f"{ACKNOWLEDGED}{shard}": 1.0 for shard in range(MAX_TASKS)}
    assert beat_from_proto(beat(figures={LOST: 0.0, SINCE: 1.0, **told})).figures.keys() > told.keys()


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_numbers_are_refused_before_memory_and_time_go_into_them(case: str) -> None:
    make, sentence = ABSURD[case]
    began_s = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=sentence):
            make()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What Python holds of the message itself, and no more: the numbers in it ask for gigabytes.
    assert peak < 32 << 20, peak
    assert time.monotonic() - began_s < 5.0


def test_a_thousand_strangers_at_a_port_with_tls_leave_no_line(tmp_path: Path) -> None:
    make_certificates(tmp_path, {"ps-0": "127.0.0.1"}, days=1)
    cluster = tmp_path / "cluster.json"
    cluster.write_text('{"chief": ["127.0.0.1:9"], "ps": ["127.0.0.1:0"]}')
    files = {"ca": tmp_path / "ca.pem", "cert": tmp_path / "ps-0.pem", "key": tmp_path / "ps-0.key"}
    read, write = os.pipe()
    command = [sys.executable, "-m", "shardline", "ps", "--cluster", str(cluster), "--ready-fd", str(write)]
    for name, path in files.items():
        command += [f"--tls-{name}", str(path)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=[write])
    os.close(write)
    try:
        with os.fdopen(read) as ready:
            host, _, port = ready.readline().strip().rpartition(":")
        for number in range(1000):
            with socket.create_connection((host, int(port)), timeout=10) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" if number % 2 else b"x" * 64)
                with contextlib.suppress(ConnectionError):
                    assert stranger.recv(1) in (b"", b"\x15")
    finally:
        process.terminate()
        assert process.wait(60) == 0
    said = (tmp_path / "log").read_text()
    assert "serving at" in said and "andshake" not in said, said

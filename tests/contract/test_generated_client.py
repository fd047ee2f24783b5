"""A client of generated stubs alone can do everything a chief and a worker do with a ps."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shardline.rpc.messages.convert import plan_from_proto
from shardline.rpc.v1 import common_pb2, data_pb2, parameter_server_pb2, plan_pb2
from tests.support.cluster import Ps
from tests.support.plain_client import (
    DEADLINE_S,
    FIRST_W,
    FROZEN,
    RATE,
    STATS,
    TIMELINE,
    PlainClient,
    W,
    floats,
    plan,
    plan_id,
)


def test_the_plans_digest_is_the_one_this_client_computes() -> None:
    assert plan_from_proto(plan()).plan_id == plan_id()


def test_a_ps_without_a_configuration_says_so(client: PlainClient) -> None:
    assert client.push(client.gradient()).outcome == common_pb2.OUTCOME_NOT_CONFIGURED
    _, _, end = client.pull()
    assert (end.outcome, end.reason) == (common_pb2.OUTCOME_NOT_CONFIGURED, "this ps has no configuration yet")
    assert client.progress(0).outcome == common_pb2.OUTCOME_NOT_CONFIGURED
    assert not client.status().shards


def test_first_values_activation_push_and_pull(client: PlainClient) -> None:
    assert client.lead().held
    reply = client.call("Configure", client.configuration())
    assert reply.changed and reply.memory_bytes > 0
    assert "raw" in reply.hello.codecs and common_pb2.LANE_GRPC in reply.hello.lanes
    assert list(client.call("Activate", client.command("Activate")).empty_shards) == [0]
    before = client.push(client.gradient())
    assert (before.outcome, before.reason) == (
        common_pb2.OUTCOME_NOT_CONFIGURED,
        "this ps is still being prepared and doesn't accept pushes yet",
    )
    first = {W: floats(FIRST_W), FROZEN: floats((7.0, 8.0)), STATS: floats((0.5, 0.25))}
    init = client.frames(first, kind=data_pb2.PUSH_KIND_INIT)
    assert client.push(init).outcome == common_pb2.OUTCOME_COUNTED
    assert client.push(init).outcome == common_pb2.OUTCOME_DUPLICATE
    assert not client.call("Activate", client.command("Activate")).empty_shards
    values, states, end = client.pull(exact_step=0)
    assert values == {W: FIRST_W, FROZEN: (7.0, 8.0), STATS: (0.5, 0.25)}
    assert {(state.step, state.version, state.dtype) for state in states.values()} == {(0, 0, common_pb2.DTYPE_FLOAT32)}
    assert (end.outcome, end.step, end.timeline) == (common_pb2.OUTCOME_SERVED, 0, TIMELINE)

    ack = client.push(client.frames({W: floats([2.0] * 12), STATS: floats((0.75, 0.125))}))
    assert (ack.outcome, ack.step, ack.version) == (common_pb2.OUTCOME_COUNTED, 1, 1)
    values, _, _ = client.pull(exact_step=1)
    assert values == {
        W: tuple(value - RATE * 2.0 for value in FIRST_W),
        FROZEN: (7.0, 8.0),
        STATS: (0.75, 0.125),
    }
    # The step before stays published until everybody has gone beyond.
    assert client.pull(exact_step=0)[0][W] == FIRST_W
    assert client.pull(at_least_step=1)[2].outcome == common_pb2.OUTCOME_SERVED
    assert client.push(client.gradient()).outcome == common_pb2.OUTCOME_DUPLICATE
    client.push(client.gradient(step=1))
    assert client.pull(exact_step=0)[2].outcome == common_pb2.OUTCOME_OVERTAKEN


def test_configure_twice_changes_nothing_and_another_one_starts_anew(client: PlainClient) -> None:
    client.start()
    client.push(client.gradient())
    before = client.weights()
    assert not client.call("Configure", client.configuration()).changed
    assert client.weights() == before
    assert client.status().active
    assert client.call("Configure", client.configuration(replicas=2)).changed
    assert not client.status().active
    assert not client.status().shards[0].initialized


def test_only_the_held_term_is_obeyed(client: PlainClient) -> None:
    client.start()
    newer = parameter_server_pb2.Term(number=2, chief_uuid="another chief")
    same = parameter_server_pb2.Term(number=1, chief_uuid="a rival")
    assert not client.lead(same).held
    assert client.lead().held
    reply = client.lead(newer)
    assert reply.held and reply.current.number == 2 and reply.timeline == TIMELINE
    refused = client.lead()
    assert not refused.held and refused.current.chief_uuid == "another chief"
    commands = [
        ("Configure", client.configuration(replicas=3)),
        ("SetMembership", client.command("SetMembership")),
        ("Activate", client.command("Activate")),
        ("Cut", client.command("Cut", step=5)),
        ("Release", client.command("Release", step=5)),
        ("Stop", parameter_server_pb2.StopRequest(term=client.term)),
        ("Promote", client.command("Promote")),
    ]
    for name, request in commands:
        with pytest.raises(grpc.RpcError) as caught:
            client.call(name, request)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION, name  # type: ignore[attr-defined]
        assert "obeys the chief of term 2; the command is of term 1" in caught.value.details(), name  # type: ignore[attr-defined]
    assert client.status().shards[0].initialized


def test_a_process_that_no_chief_has_led_yet_is_no_answer_for_one(client: PlainClient) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.call("SetMembership", client.command("SetMembership"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    assert "no chief leads this process yet" in caught.value.details()  # type: ignore[attr-defined]
    assert client.lead().held


def test_push_and_pull_in_one_call(client: PlainClient) -> None:
    client.start()
    acks, values, end = client.push_pull(client.gradient(), client.pull_request(exact_step=1))
    assert [ack.outcome for ack in acks] == [common_pb2.OUTCOME_COUNTED]
    assert values[W] == tuple(value - RATE for value in FIRST_W)
    assert (end.outcome, end.step) == (common_pb2.OUTCOME_SERVED, 1)


def test_one_call_carries_several_pushes_one_after_another(client: PlainClient) -> None:
    client.start(replicas=3)
    frames = [frame for replica in (2, 0, 1) for frame in client.gradient(float(replica), block=(replica, 1))]
    acks, values, _ = client.push_pull(frames, client.pull_request(exact_step=1))
    assert [ack.outcome for ack in acks] == [common_pb2.OUTCOME_COUNTED] * 3
    assert values[W] == tuple(value - RATE for value in FIRST_W)


def test_unchanged_buckets_come_without_bytes(client: PlainClient) -> None:
    client.start()
    client.push(client.gradient())
    values, states, _ = client.pull(exact_step=1, have_step=0)
    assert values.keys() == {W}
    assert [states[number].unchanged for number in (W, FROZEN, STATS)] == [False, True, True]
    assert client.pull(exact_step=1, buckets=[STATS, W])[0].keys() == {STATS, W}


def test_absent_slices_are_left_alone(client: PlainClient) -> None:
    client.start()
    frames = client.gradient()
    frames[1].bucket.present = b"\x00"
    assert client.push(frames).outcome == common_pb2.OUTCOME_COUNTED
    values, _, end = client.pull(exact_step=1)
    assert values[W] == FIRST_W
    assert end.step == 1


def test_several_parts_may_share_a_frame(client: PlainClient) -> None:
    client.start()
    header, bucket, *chunks, end, commit = client.gradient(chunk_bytes=1 << 20)
    whole = data_pb2.PushFrame()
    for part in (header, bucket, *chunks, end, commit):
        whole.MergeFrom(part)
    assert client.push([whole]).outcome == common_pb2.OUTCOME_COUNTED
    assert client.weights() == tuple(value - RATE for value in FIRST_W)


def test_progress_says_what_a_restarted_worker_has_to_do(client: PlainClient) -> None:
    client.start(replicas=2)
    client.push(client.gradient(block=(1, 1)))
    reply = client.progress(0, 1)
    assert reply.outcome == common_pb2.OUTCOME_SERVED
    assert {item.replica: item.step for item in reply.replicas} == {0: 0, 1: 1}
    assert (reply.step_min, reply.step_max, reply.version) == (0, 0, 0)
    assert list(client.status().shards[0].waiting_for) == [0]


def test_hyper_parameters_of_replica_0_are_in_force_for_its_step(client: PlainClient) -> None:
    client.start()
    client.push(client.gradient(hyper=[data_pb2.GroupHyper(group=0, values={"lr": 2.0})]))
    assert client.weights() == tuple(value - 2.0 for value in FIRST_W)
    client.push(client.gradient(step=1))
    assert client.weights() == tuple(value - 2.0 - RATE for value in FIRST_W)


def get_cut(client: PlainClient, step: int) -> list[parameter_server_pb2.GetCutFrame]:
    request = client.command("GetCut", shard=0, step=step)
    return list(client.stub.GetCut(request, timeout=DEADLINE_S))


def test_cut_fetch_restore_and_release(client: PlainClient) -> None:
    client.start(cut_every=2)
    for step in range(3):
        client.push(client.gradient(step=step))
    assert client.call("Cut", client.command("Cut", step=1)).passed
    reply = client.call("Cut", client.command("Cut", step=5))
    assert (reply.passed, reply.step_max) == (False, 3)
    held = client.status().shards[0].cuts
    assert [(cut.step, cut.complete) for cut in held] == [(2, True)]
    frames = get_cut(client, 2)
    heads = [frame.header for frame in frames if frame.HasField("header")]
    assert [(head.bucket, head.step, head.tensors[0].name) for head in heads] == [(n, 2, "value") for n in range(3)]
    assert frames[-1].end.buckets == 3

    client.timeline += 1
    client.call("Configure", client.configuration(cut_every=2))
    assert client.pull()[2].outcome == common_pb2.OUTCOME_NOT_CONFIGURED
    head = parameter_server_pb2.RestoreHead(term=client.term, timeline=client.timeline, shard=0)
    requests = [parameter_server_pb2.RestoreFrame(head=head)]
    for frame in frames:
        part = parameter_server_pb2.RestoreFrame()
        for name in ("header", "chunk", "end"):
            if frame.HasField(name):
                getattr(part, name).CopyFrom(getattr(frame, name))
        requests.append(part)
    restored = client.stub.Restore(iter(requests), timeout=DEADLINE_S)
    assert (restored.step, restored.buckets) == (2, 3)
    client.call("Activate", client.command("Activate"))
    values, _, end = client.pull()
    assert values[W] == tuple(value - 2 * RATE for value in FIRST_W)
    assert (end.step, end.version, end.timeline) == (2, 2, client.timeline)
    assert client.pull(exact_step=1)[2].outcome == common_pb2.OUTCOME_OVERTAKEN

    for step in (2, 3):
        client.push(client.gradient(step=step))
    assert [cut.step for cut in client.status().shards[0].cuts] == [4]
    assert client.call("Release", client.command("Release", step=4)).released == 1
    assert not client.status().shards[0].cuts


def test_a_stop_step_is_the_last_one(client: PlainClient) -> None:
    client.start()
    assert not client.call("Cut", client.command("Cut", step=1, stop=True)).passed
    assert client.push(client.gradient()).outcome == common_pb2.OUTCOME_COUNTED
    ack = client.push(client.gradient(step=1))
    assert (ack.outcome, ack.reason) == (common_pb2.OUTCOME_STOPPED, "the job stops at step 1")
    assert client.pull(exact_step=2)[2].outcome == common_pb2.OUTCOME_STOPPED
    assert get_cut(client, 1)[-1].end.buckets == 3


def test_only_listed_incarnations_are_admitted(client: PlainClient) -> None:
    client.start()
    member = parameter_server_pb2.Member(task="worker/0", incarnation=1)
    client.call("SetMembership", client.command("SetMembership", members=[member]))
    member.incarnation = 2
    assert client.call("SetMembership", client.command("SetMembership", members=[member])).fenced == 1
    ack = client.push(client.gradient())
    assert (ack.outcome, ack.timeline) == (common_pb2.OUTCOME_FENCED, TIMELINE)
    assert ack.reason == "worker/0 incarnation 0x1 is not admitted, 0x2 is"
    assert client.pull()[2].outcome == client.progress(0).outcome == common_pb2.OUTCOME_FENCED
    client.incarnation = 2
    assert client.push(client.gradient()).outcome == common_pb2.OUTCOME_COUNTED
    client.task = "worker/7"
    assert client.push(client.gradient(step=1)).reason.endswith("the chief has not listed it, or no longer does")


def test_an_asynchronous_push_is_applied_once_and_told_its_staleness(client: PlainClient) -> None:
    client.start(consistency=plan_pb2.ConsistencySpec(mode="async"))
    acks, values, end = client.push_pull(client.gradient(seq=1), client.pull_request())
    assert [(ack.outcome, ack.version, ack.staleness, ack.next_seq) for ack in acks] == [
        (common_pb2.OUTCOME_APPLIED, 1, 0, 2)
    ]
    assert values[W] == tuple(value - RATE for value in FIRST_W)
    assert end.version == 1
    client.task = "worker/1"
    late = client.push(client.gradient(seq=1, base_min=0, base_max=1, commit={"scale": 0.5}))
    assert (late.outcome, late.staleness) == (common_pb2.OUTCOME_APPLIED, 1)
    assert client.weights() == tuple(value - 1.5 * RATE for value in FIRST_W)
    assert client.progress().last_seq == 1


def test_clipping_takes_a_vote_even_with_one_shard(client: PlainClient) -> None:
    client.start(consistency=plan_pb2.ConsistencySpec(mode="sync", clip_norm=1.0))
    assert client.push(client.gradient()).outcome == common_pb2.OUTCOME_STAGED
    norm = 12**0.5
    for value, first in zip(client.pull(exact_step=1)[0][W], FIRST_W, strict=True):
        assert value == pytest.approx(first - RATE / (norm + 1e-6), rel=1e-6)


def test_stop_ends_the_process_with_the_reason(client: PlainClient, ps: Ps) -> None:
    client.start()
    request = parameter_server_pb2.StopRequest(term=client.term, reason="done")
    assert client.call("Stop", request).task == "ps/0"
    assert ps.stopped == ["done"]


def test_health_answers_for_the_server_and_each_service(client: PlainClient) -> None:
    stub = health_pb2_grpc.HealthStub(client.channel)
    for service in ("", "shardline.rpc.v1.ParameterServer", "shardline.rpc.v1.Coordinator"):
        reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING, service
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=DEADLINE_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


def test_reflection_lists_the_services_and_describes_them(client: PlainClient) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    questions = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="shardline.rpc.v1.ParameterServer"),
    ]
    listed, described = stub.ServerReflectionInfo(iter(questions), timeout=DEADLINE_S)
    names = {service.name for service in listed.list_services_response.service}
    assert {"shardline.rpc.v1.ParameterServer", "shardline.rpc.v1.Coordinator", "grpc.health.v1.Health"} <= names
    assert any(b"parameter_server.proto" in file for file in described.file_descriptor_response.file_descriptor_proto)

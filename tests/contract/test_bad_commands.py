"""Pulls, configurations, restores and commands that can't be carried out: a status with a sentence, nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from shardline.rpc.v1 import common_pb2, data_pb2, parameter_server_pb2, plan_pb2
from tests.support.plain_client import DEADLINE_S, ELEMENTS, PlainClient, floats, plan
from tests.support.refusals import BAD, OUTCOMES, refused, says, unchanged

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("case", OUTCOMES)
def test_pulls_and_progress_that_do_not_belong_here_are_told_why(ready: PlainClient, case: str) -> None:
    settings, outcome, sentence = OUTCOMES[case]
    data = ready.data(**settings["data"])
    _, _, end = ready.pull(data=data)
    progress = ready.call("Progress", data_pb2.ProgressRequest(data=data, replicas=[0]))
    for reply in (end, progress):
        assert reply.outcome == common_pb2.Outcome.Value(f"OUTCOME_{outcome}")
        assert says(reply.reason, sentence)


PULLS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown bucket": ({"buckets": [0, 5]}, "shard 0 has 3 buckets; the pull asks for bucket 5"),
    "bucket twice": ({"buckets": [1, 1]}, "the pull asks for a bucket twice"),
    "reserved what": ({"what": data_pb2.PULL_WHAT_LOOKAHEAD}, "this ps does not support a pull with what = 2"),
    "unknown what": ({"what": 99}, "this ps does not support a pull with what = 99"),
    "reserved want": ({"min_valid_clock": 3}, "pull without a want that this version knows"),
}


@pytest.mark.parametrize("case", PULLS)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_malformed_pull_is_refused_with_a_sentence(client: PlainClient, case: str, mode: str) -> None:
    client.start(consistency=plan_pb2.ConsistencySpec(mode=mode))
    changes, sentence = PULLS[case]
    refused(BAD, sentence, lambda: client.pull(**changes))
    refused(BAD, sentence, lambda: client.push_pull(client.gradient(seq=1), client.pull_request(**changes)))


def test_a_pull_without_a_want_and_a_second_pull_in_a_call_are_refused(ready: PlainClient) -> None:
    request = data_pb2.PullRequest(data=ready.data())
    refused(BAD, "pull without a want", lambda: list(ready.stub.Pull(request, timeout=DEADLINE_S)))
    pulls = [data_pb2.PushPullRequest(pull=ready.pull_request())] * 2
    refused(
        BAD,
        "PushPull takes one pull; this call has already sent one",
        lambda: list(ready.stub.PushPull(iter(pulls), timeout=DEADLINE_S)),
    )


def corrupt(change: Callable[[plan_pb2.PlanSpec], Any]) -> plan_pb2.PlanSpec:
    message = plan()
    change(message)
    return message


def set_slice(**fields: int) -> Callable[[plan_pb2.PlanSpec], None]:
    def change(message: plan_pb2.PlanSpec) -> None:
        for name, value in fields.items():
            setattr(message.shards[0].buckets[0].slices[0], name, value)

    return change


CONFIGURATIONS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "empty plan": (lambda: {"plan": plan_pb2.PlanSpec()}, "places shard 0 here, but the plan has 0 shards"),
    "empty shard": (lambda: {"plan": corrupt(lambda p: p.shards.add())}, "shard 1 of 2 is empty"),
    "missing rows": (lambda: {"plan": corrupt(set_slice(rows=3, elements=9))}, "not at multiples of|plan covers 3"),
    "rows out of range": (lambda: {"plan": corrupt(set_slice(rows=5, elements=15))}, "rows 0 to 5 of 'w' are out of"),
    "wrong slice length": (lambda: {"plan": corrupt(set_slice(elements=11))}, "4 rows of 'w' don't have 11 elements"),
    "misaligned slice": (
        lambda: {"plan": corrupt(set_slice(offset=3))},
        "overlaps another, is not aligned, or exceeds",
    ),
    "slice beyond its bucket": (
        lambda: {"plan": corrupt(set_slice(offset=64))},
        "overlaps another, is not aligned, or exceeds",
    ),
    "unknown tensor": (lambda: {"plan": corrupt(set_slice(tensor=8))}, "refers to tensor 8, but there are 3"),
    "bucket of another size": (
        lambda: {"plan": corrupt(lambda p: setattr(p.shards[0].buckets[0], "elements", 1 << 40))},
        "has 1099511627776 elements; its slices take 64",
    ),
    "tensor held twice": (
        lambda: {"plan": corrupt(lambda p: p.shards[0].buckets.append(p.shards[0].buckets[0]))},
        "rows 4 to 0 of 'w' are missing or repeated",
    ),
    "two tensors of one name": (
        lambda: {"plan": corrupt(lambda p: setattr(p.tensors[1], "name", "w"))},
        "two tensors are named 'w'",
    ),
    "negative shape": (
        lambda: {"plan": corrupt(lambda p: p.tensors[0].shape.__setitem__(0, -4))},
        r"tensor 'w' has shape \(-4, 3\); sizes can't be negative",
    ),
    "absurd shape": (
        lambda: {"plan": corrupt(lambda p: p.tensors[0].shape.__setitem__(0, 1 << 62))},
        "the limit is 1099511627776",
    ),
    "unknown dtype": (
        lambda: {"plan": corrupt(lambda p: setattr(p.tensors[0], "dtype", 50))},
        "tensor 'w': dtype number 50 is unknown",
    ),
    "unknown kind": (
        lambda: {"plan": corrupt(lambda p: setattr(p.tensors[0], "kind", 50))},
        "tensor 'w' has kind number 50, which is unknown",
    ),
    "no kind": (
        lambda: {"plan": corrupt(lambda p: setattr(p.shards[0].buckets[0], "kind", 0))},
        "bucket 0 has kind number 0, which is unknown",
    ),
    "wrong digest": (
        lambda: {"plan": corrupt(lambda p: setattr(p, "plan_id", "feed"))},
        "its sender says feed. Are both of the same version",
    ),
    "group that the rule hasn't got": (
        lambda: {"plan": corrupt(lambda p: setattr(p.tensors[0], "group", 4))},
        "group",
    ),
    "shard that the plan hasn't got": (lambda: {"shards": [1]}, "places shard 1 here, but the plan has 1 shards"),
    "no replicas": (lambda: {"replicas": 0}, "0 replicas; a job has at least 1"),
    "unknown rule": (lambda: {"rule": plan_pb2.RuleSpec(name="Magic", groups=[{}])}, "Magic"),
    "rule with unknown argument": (
        lambda: {
            "rule": plan_pb2.RuleSpec(
                name="SGD", groups=[plan_pb2.ParamGroup(arguments={"magic": plan_pb2.Argument(number=1.0)})]
            )
        },
        "magic",
    ),
    "argument without a value": (
        lambda: {
            "rule": plan_pb2.RuleSpec(name="SGD", groups=[plan_pb2.ParamGroup(arguments={"lr": plan_pb2.Argument()})])
        },
        "argument of a rule has no value that this version knows",
    ),
    "unknown consistency": (
        lambda: {"consistency": plan_pb2.ConsistencySpec(mode="vibes")},
        "consistency 'vibes' does not exist",
    ),
    "negative clipping": (lambda: {"consistency": plan_pb2.ConsistencySpec(clip_norm=-1.0)}, "clip_norm is -1.0"),
    "clipping that is no number": (
        lambda: {"consistency": plan_pb2.ConsistencySpec(clip_norm=NAN)},
        "clip_norm is nan",
    ),
    "unknown schedule": (lambda: {"schedule": plan_pb2.ScheduleSpec(kind="spiral")}, "spiral"),
    "infinite schedule": (lambda: {"schedule": plan_pb2.ScheduleSpec(gamma=INFINITY)}, "both must be finite"),
    "unknown codec": (lambda: {"codec": "zip"}, "codec 'zip' does not exist; choose from raw, auto, bf16, fp16"),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_configuration_that_cannot_work_is_refused_and_the_old_one_stays(ready: PlainClient, case: str) -> None:
    changes, sentence = CONFIGURATIONS[case]
    refused(BAD, sentence, lambda: ready.call("Configure", ready.configuration(**changes())))
    unchanged(ready)
    assert not ready.call("Configure", ready.configuration()).changed


def test_commands_of_another_timeline_change_nothing(ready: PlainClient) -> None:
    ready.timeline += 9
    for name, more in (("Activate", {}), ("Cut", {"step": 5, "stop": True})):
        refused(
            BAD,
            f"{name} is for timeline 0x50000000a; this ps is at",
            lambda n=name, m=more: ready.call(n, ready.command(n, **m)),
        )  # type: ignore[misc]
    refused(
        BAD,
        "GetCut is for timeline",
        lambda: list(ready.stub.GetCut(ready.command("GetCut", shard=0, step=0), timeout=DEADLINE_S)),
    )
    ready.timeline -= 9
    unchanged(ready)
    ready.complete()


def restore(client: PlainClient, frames: list[parameter_server_pb2.RestoreFrame]) -> Any:
    return client.stub.Restore(iter(frames), timeout=DEADLINE_S)


def images(client: PlainClient) -> list[parameter_server_pb2.RestoreFrame]:
    """A whole Restore of step 4 with another `w`."""
    head = parameter_server_pb2.RestoreHead(term=client.term, timeline=client.timeline, shard=0)
    frames = [parameter_server_pb2.RestoreFrame(head=head)]
    for number in range(3):
        value = parameter_server_pb2.ImageTensor(name="value", dtype=common_pb2.DTYPE_FLOAT32, elements=ELEMENTS)
        header = parameter_server_pb2.ImageHeader(bucket=number, step=4, version=4, tensors=[value])
        frames.append(parameter_server_pb2.RestoreFrame(header=header))
        chunk = parameter_server_pb2.ImageChunk(payload=floats([9.0]))
        frames.append(parameter_server_pb2.RestoreFrame(chunk=chunk))
    frames.append(parameter_server_pb2.RestoreFrame(end=parameter_server_pb2.ImageEnd(buckets=3)))
    return frames


RestoreFrames = list[parameter_server_pb2.RestoreFrame]


def set_header(number: int, **fields: Any) -> Callable[[RestoreFrames], RestoreFrames]:
    def change(frames: RestoreFrames) -> RestoreFrames:
        for name, value in fields.items():
            setattr(frames[1 + 2 * number].header, name, value)
        return frames

    return change


def set_tensor(number: int = 0, **fields: Any) -> Callable[[RestoreFrames], RestoreFrames]:
    def change(frames: RestoreFrames) -> RestoreFrames:
        for name, value in fields.items():
            setattr(frames[1 + 2 * number].header.tensors[0], name, value)
        return frames

    return change


def with_state(number: int) -> Callable[[RestoreFrames], RestoreFrames]:
    def change(frames: RestoreFrames) -> RestoreFrames:
        at = 1 + 2 * number
        frames[at].header.tensors.add(name="exp_avg", dtype=common_pb2.DTYPE_FLOAT32, elements=ELEMENTS)
        frames[at].header.initialized = b"\1"
        extra = parameter_server_pb2.ImageChunk(tensor=1, payload=floats([1.0]))
        return [*frames[: at + 2], parameter_server_pb2.RestoreFrame(chunk=extra), *frames[at + 2 :]]

    return change


RESTORES: dict[str, tuple[Callable[[RestoreFrames], RestoreFrames], grpc.StatusCode, str]] = {
    "no head": (lambda f: f[1:], BAD, "Restore must start with its head"),
    "no end": (lambda f: f[:-1], BAD, "Restore ended early; the shard is unchanged"),
    "missing bucket": (lambda f: [*f[:5], f[-1]], BAD, r"has 3 buckets; the images are of \[0, 1\]"),
    "bucket twice": (set_header(2, bucket=1), BAD, r"has 3 buckets; the images are of \[0, 1, 1\]"),
    "two steps": (set_header(1, step=5), BAD, "images of different steps are not a consistent cut"),
    "cut within a bucket": (lambda f: [*f[:4], *f[5:]], BAD, "image of bucket 1 is interrupted by that of bucket 2"),
    "last bucket without bytes": (lambda f: [*f[:6], f[-1]], BAD, "Restore ended early"),
    "absurd size": (set_tensor(elements=1 << 40), BAD, "image of bucket 0 has 4398046511104 bytes; the limit is"),
    "too few elements": (
        set_tensor(elements=63),
        BAD,
        "chunk at 0 of 256 bytes; expected one at 0 of 252",
    ),
    "unknown dtype": (set_tensor(dtype=66), BAD, "dtype number 66 is unknown"),
    "another dtype in the last bucket": (
        set_tensor(2, dtype=common_pb2.DTYPE_INT32),
        BAD,
        "image of 64 torch.int32 elements; the plan says",
    ),
    "no values": (set_tensor(name="exp_avg"), BAD, "image of bucket 0 has no values"),
    "state of another rule": (with_state(0), grpc.StatusCode.DATA_LOSS, "unknown state 'exp_avg'"),
    "state of a buffer, in the last bucket": (
        with_state(2),
        grpc.StatusCode.DATA_LOSS,
        "bucket 2: image has optimizer state for a bucket without a rule",
    ),
}


@pytest.mark.parametrize("case", RESTORES)
def test_a_restore_that_cannot_work_leaves_the_shard_as_it_was(ready: PlainClient, case: str) -> None:
    change, code, sentence = RESTORES[case]
    refused(code, sentence, lambda: restore(ready, change(images(ready))))
    unchanged(ready)
    ready.complete()


def test_the_restore_that_those_are_made_from_works(client: PlainClient) -> None:
    client.start()
    assert restore(client, images(client)).step == 4
    assert client.weights()[0] == 9.0

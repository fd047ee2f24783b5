"""A ps client made of generated stubs and the .proto files alone: what another language would use.

The plan has three tensors in buckets of their own: `w` (4 x 3, trained), `frozen` (2) and `stats` (2, a buffer).
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
import xxhash

from shardline.rpc.v1 import common_pb2, data_pb2, parameter_server_pb2, parameter_server_pb2_grpc, plan_pb2

ELEMENTS = 64
"""Elements of every bucket, including padding."""
SIZES = {"w": 12, "frozen": 2, "stats": 2}
W, FROZEN, STATS = range(3)
TIMELINE = 5 << 32 | 1
DEADLINE_S = 20.0
RATE = 0.5
FIRST_W = tuple(float(number) for number in range(12))


def plan() -> plan_pb2.PlanSpec:
    """The plan, written out by hand."""
    kinds = (plan_pb2.TENSOR_KIND_PARAM, plan_pb2.TENSOR_KIND_FROZEN, plan_pb2.TENSOR_KIND_BUFFER)
    shapes = ((4, 3), (2,), (2,))
    message = plan_pb2.PlanSpec()
    shard = message.shards.add()
    for number, (name, shape, kind) in enumerate(zip(SIZES, shapes, kinds, strict=True)):
        message.tensors.add(name=name, shape=shape, dtype=common_pb2.DTYPE_FLOAT32, kind=kind)
        bucket = shard.buckets.add(dtype=common_pb2.DTYPE_FLOAT32, kind=kind, elements=ELEMENTS)
        bucket.slices.add(tensor=number, first_row=0, rows=shape[0], offset=0, elements=math.prod(shape))
    return message


def plan_id() -> str:
    """Digest of the plan as documented: SHA-256 of its compact JSON form, 32 hex digits."""
    kinds = ("param", "frozen", "buffer")
    rows = (4, 2, 2)
    tensors = [
        [name, shape, "float32", kind, 0, False, []]
        for name, shape, kind in zip(SIZES, ([4, 3], [2], [2]), kinds, strict=True)
    ]
    buckets = [["float32", kind, ELEMENTS, [[n, 0, rows[n], 0]]] for n, kind in enumerate(kinds)]
    return hashlib.sha256(json.dumps([tensors, [buckets]], separators=(",", ":")).encode()).hexdigest()[:32]


def floats(values: Sequence[float]) -> bytes:
    """A bucket's payload: little-endian float32, padded with zeros to the bucket's length."""
    return struct.pack(f"<{ELEMENTS}f", *values, *([0.0] * (ELEMENTS - len(values))))


class PlainClient:
    """Calls one ps; every call has a deadline."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
        self.stub = parameter_server_pb2_grpc.ParameterServerStub(self.channel)
        self.term = parameter_server_pb2.Term(number=1, chief_uuid="a chief")
        self.task, self.incarnation = "worker/0", 1
        self.timeline = TIMELINE
        self.plan_id = plan_id()

    def call(self, method: str, request: Any) -> Any:
        return getattr(self.stub, method)(request, timeout=DEADLINE_S)

    # Commands

    def lead(self, term: parameter_server_pb2.Term | None = None) -> parameter_server_pb2.LeadReply:
        return self.call("Lead", parameter_server_pb2.LeadRequest(term=term or self.term))

    def configuration(self, **changes: Any) -> parameter_server_pb2.ConfigureRequest:
        number = plan_pb2.Argument(number=RATE)
        settings: dict[str, Any] = {
            "term": self.term,
            "job": "plain",
            "timeline": self.timeline,
            "plan": plan(),
            "shards": [0],
            "rule": plan_pb2.RuleSpec(name="SGD", groups=[plan_pb2.ParamGroup(arguments={"lr": number})]),
            "consistency": plan_pb2.ConsistencySpec(mode="sync"),
        }
        if {"replicas", "codec"} & changes.keys():
            kinds = {"replicas": "integer", "codec": "text"}
            changes["settings"] = {
                name: plan_pb2.Argument(**{kind: changes.pop(name)}) for name, kind in kinds.items() if name in changes
            }
        return parameter_server_pb2.ConfigureRequest(**{**settings, **changes})

    def start(self, **changes: Any) -> None:
        """From nothing to training."""
        self.lead()
        self.call("Configure", self.configuration(**changes))
        first = {W: floats(FIRST_W), FROZEN: floats((7.0, 8.0)), STATS: floats((0.5, 0.25))}
        assert self.push(self.frames(first, kind=data_pb2.PUSH_KIND_INIT)).outcome == common_pb2.OUTCOME_COUNTED
        assert not self.call("Activate", self.command("Activate")).empty_shards

    def command(self, name: str, **fields: Any) -> Any:
        """A command's request with term and timeline."""
        return getattr(parameter_server_pb2, f"{name}Request")(term=self.term, timeline=self.timeline, **fields)

    # Data

    def data(self, **changes: Any) -> common_pb2.DataHeader:
        settings: dict[str, Any] = {
            "job": "plain",
            "timeline": self.timeline,
            "plan_id": self.plan_id,
            "task": self.task,
            "incarnation": self.incarnation,
            "protocol_minor": 1,
        }
        return common_pb2.DataHeader(**{**settings, **changes})

    def frames(
        self,
        payloads: dict[int, bytes],
        *,
        data: dict[str, Any] | None = None,
        block: tuple[int, int] = (0, 1),
        chunk_bytes: int = 100,
        commit: dict[str, Any] | None = None,
        **header: Any,
    ) -> list[data_pb2.PushFrame]:
        """One push, one part per frame. Buckets without a payload are named as empty."""
        empty = [number for number in range(len(SIZES)) if number not in payloads]
        settings: dict[str, Any] = {"kind": data_pb2.PUSH_KIND_GRADIENT, "empty_buckets": empty}
        frames = [
            data_pb2.PushFrame(
                header=data_pb2.PushHeader(
                    data=self.data(**(data or {})),
                    block=data_pb2.Block(first=block[0], count=block[1]),
                    **{**settings, **header},
                )
            )
        ]
        for number, payload in payloads.items():
            frames.append(
                data_pb2.PushFrame(
                    bucket=data_pb2.BucketHeader(
                        bucket=number,
                        dtype=common_pb2.DTYPE_FLOAT32,
                        elements=ELEMENTS,
                        payload_bytes=len(payload),
                    )
                )
            )
            offsets = range(0, len(payload), chunk_bytes)
            frames += [
                data_pb2.PushFrame(
                    chunk=data_pb2.Chunk(bucket=number, offset=offset, payload=payload[offset : offset + chunk_bytes])
                )
                for offset in offsets
            ]
            frames.append(
                data_pb2.PushFrame(
                    bucket_commit=data_pb2.BucketCommit(
                        bucket=number,
                        bytes=len(payload),
                        chunks=len(offsets),
                        digest=xxhash.xxh3_64_intdigest(payload),
                    )
                )
            )
        frames.append(data_pb2.PushFrame(commit=data_pb2.Commit(buckets=len(payloads), **(commit or {}))))
        return frames

    def gradient(self, value: float = 1.0, **header: Any) -> list[data_pb2.PushFrame]:
        """A push with one number for all elements of `w`."""
        return self.frames({W: floats([value] * 12)}, **header)

    def complete(self) -> None:
        """Complete step 0, whatever came before."""
        assert self.push(self.gradient()).outcome == common_pb2.OUTCOME_COUNTED
        assert self.weights() == tuple(value - RATE for value in FIRST_W)

    def push(self, frames: Iterable[data_pb2.PushFrame]) -> data_pb2.PushAck:
        requests = (parameter_server_pb2.PushRequest(frame=frame) for frame in frames)
        return self.stub.Push(requests, timeout=DEADLINE_S).ack

    def pull_request(self, **changes: Any) -> data_pb2.PullRequest:
        settings: dict[str, Any] = {"data": self.data(), "wait_s": 5.0}
        if not {"exact_step", "at_least_step", "min_valid_clock"} & changes.keys():
            settings["latest"] = True
        return data_pb2.PullRequest(**{**settings, **changes})

    def pull(self, **changes: Any) -> tuple[dict[int, tuple[float, ...]], dict[int, Any], data_pb2.PullEnd]:
        """Values and state by bucket, and the end."""
        replies = self.stub.Pull(self.pull_request(**changes), timeout=DEADLINE_S)
        return read_pull(reply.frame for reply in replies)

    def push_pull(
        self, frames: Iterable[data_pb2.PushFrame], pull: data_pb2.PullRequest
    ) -> tuple[list[data_pb2.PushAck], dict[int, tuple[float, ...]], data_pb2.PullEnd]:
        replies = self._push_pull(frames, pull)
        acks = [reply.ack for reply in replies if reply.HasField("ack")]
        values, _, end = read_pull(reply.pull for reply in replies if reply.HasField("pull"))
        return acks, values, end

    def acks(self, frames: Iterable[data_pb2.PushFrame], pull: data_pb2.PullRequest) -> list[data_pb2.PushAck]:
        """Acks of a call that ends before its pull does."""
        replies = self._push_pull(frames, pull)
        assert not any(reply.pull.HasField("end") for reply in replies)
        return [reply.ack for reply in replies if reply.HasField("ack")]

    def _push_pull(self, frames: Iterable[data_pb2.PushFrame], pull: data_pb2.PullRequest) -> list[Any]:
        requests = [data_pb2.PushPullRequest(pull=pull)]
        requests += [data_pb2.PushPullRequest(push=frame) for frame in frames]
        return list(self.stub.PushPull(iter(requests), timeout=DEADLINE_S))

    def weights(self) -> tuple[float, ...]:
        """`w` on the shard."""
        return self.pull()[0][W]

    def progress(self, *replicas: int) -> data_pb2.ProgressReply:
        return self.call("Progress", data_pb2.ProgressRequest(data=self.data(), replicas=replicas))

    def status(self) -> parameter_server_pb2.PsStatusReply:
        return self.call("Status", parameter_server_pb2.PsStatusRequest())

    def close(self) -> None:
        self.channel.close()


def read_pull(
    frames: Iterable[data_pb2.PullFrame],
) -> tuple[dict[int, tuple[float, ...]], dict[int, Any], data_pb2.PullEnd]:
    states: dict[int, Any] = {}
    payloads: dict[int, bytes] = {}
    end = None
    for frame in frames:
        assert end is None, "frames after the end"
        if frame.HasField("bucket"):
            states[frame.bucket.bucket] = frame.bucket
        if frame.HasField("chunk"):
            held = payloads.get(frame.chunk.bucket, b"")
            assert frame.chunk.offset == len(held)
            payloads[frame.chunk.bucket] = held + frame.chunk.payload
        if frame.HasField("end"):
            end = frame.end
    assert end is not None
    names = list(SIZES)
    values = {}
    for number, payload in payloads.items():
        assert len(payload) == states[number].payload_bytes
        values[number] = struct.unpack(f"<{ELEMENTS}f", payload)[: SIZES[names[number]]]
    return values, states, end

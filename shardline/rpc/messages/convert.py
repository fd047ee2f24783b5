"""Specs, plans and images to protobuf and back. Everything from the network is checked: values, ranges, sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardline.core.image import VALUE, BucketImage, WorkerSequence
from shardline.core.plan import BucketSpec, Plan, ShardSpec, check_plan
from shardline.core.settings import KINDS, Settings, known
from shardline.core.spec import (
    DTYPES,
    MAX_PRETRAINED,
    Argument,
    ConsistencySpec,
    JobSpec,
    RuleSpec,
    ScheduleSpec,
    TensorKind,
    TensorSpec,
)
from shardline.core.tensor_bytes import tensor_bytes, tensor_from_bytes
from shardline.errors import ProtocolError
from shardline.rpc.limits import (
    IMAGE_CHUNK_BYTES,
    MAX_ALIASES,
    MAX_ARGUMENTS,
    MAX_DIMENSIONS,
    MAX_GROUPS,
    MAX_JOB_BYTES,
    MAX_MEMBERS,
    MAX_REPLICAS,
    MAX_STATES,
    MAX_TENSORS,
    at_most,
    short,
)
from shardline.rpc.messages.fields import converts, from_message, to_message
from shardline.rpc.v1 import common_pb2, data_pb2, parameter_server_pb2, plan_pb2

DTYPE_TO_PROTO: Mapping[str, common_pb2.DType.ValueType] = {
    name: common_pb2.DType.Value(f"DTYPE_{name.upper()}") for name in DTYPES
}
DTYPE_FROM_PROTO: Mapping[int, str] = {value: name for name, value in DTYPE_TO_PROTO.items()}
_KIND_TO_PROTO = {kind: plan_pb2.TensorKind.Value(f"TENSOR_KIND_{kind.name}") for kind in TensorKind}
_KIND_FROM_PROTO: Mapping[int, TensorKind] = {value: kind for kind, value in _KIND_TO_PROTO.items()}

MAX_TENSOR_ELEMENTS = 1 << 40


def dtype_from_proto(value: int, where: str) -> str:
    """Name of a dtype on the wire. Raises ProtocolError if this version doesn't know it."""
    try:
        return DTYPE_FROM_PROTO[value]
    except KeyError:
        raise ProtocolError(f"{where}: dtype number {value} is unknown; use one of {', '.join(DTYPES)}") from None


def argument_to_proto(value: Argument) -> plan_pb2.Argument:
    if value is None:
        return plan_pb2.Argument(none=True)
    if isinstance(value, bool):
        return plan_pb2.Argument(flag=value)
    if isinstance(value, int):
        return plan_pb2.Argument(integer=value)
    if isinstance(value, float):
        return plan_pb2.Argument(number=value)
    if isinstance(value, str):
        return plan_pb2.Argument(text=value)
    return plan_pb2.Argument(numbers=plan_pb2.Numbers(values=[float(item) for item in value]))


def argument_from_proto(value: plan_pb2.Argument) -> Argument:
    match value.WhichOneof("value"):
        case "number":
            return value.number
        case "integer":
            return value.integer
        case "flag":
            return value.flag
        case "text":
            return short(value.text, "argument of a rule")
        case "numbers":
            at_most(len(value.numbers.values), MAX_ARGUMENTS, "numbers in an argument of a rule")
            return tuple(value.numbers.values)
        case "none":
            return None
        case other:
            raise ProtocolError(f"argument of a rule has no value that this version knows ({other})")


def rule_to_proto(rule: RuleSpec) -> plan_pb2.RuleSpec:
    groups = [
        plan_pb2.ParamGroup(arguments={key: argument_to_proto(value) for key, value in group.items()})
        for group in rule.groups
    ]
    return plan_pb2.RuleSpec(name=rule.name, groups=groups, method=rule.method)


def rule_from_proto(message: plan_pb2.RuleSpec) -> RuleSpec:
    """Inverse of rule_to_proto; shardline.update checks name and arguments."""
    at_most(len(message.groups), MAX_GROUPS, "parameter groups of a rule")
    for group in message.groups:
        at_most(len(group.arguments), MAX_ARGUMENTS, "arguments of a rule's group")
    groups = tuple(
        {key: argument_from_proto(group.arguments[key]) for key in sorted(group.arguments)} for group in message.groups
    )
    method = short(message.method, "rule") or "torch"
    return RuleSpec(name=short(message.name, "name of a rule"), groups=groups, method=method)


def schedule_from_proto(message: plan_pb2.ScheduleSpec) -> ScheduleSpec:
    if not (math.isfinite(message.gamma) and math.isfinite(message.final_factor)):
        raise ProtocolError(
            f"schedule has gamma {message.gamma}, final_factor {message.final_factor}; both must be finite"
        )
    return from_message(ScheduleSpec, message, kind=message.kind or "constant")


def consistency_from_proto(message: plan_pb2.ConsistencySpec) -> ConsistencySpec:
    return ConsistencySpec(
        mode=message.mode or "sync", clip_norm=message.clip_norm, nan_policy=message.nan_policy or "stop"
    )


def tensor_to_proto(tensor: TensorSpec) -> plan_pb2.TensorSpec:
    return to_message(plan_pb2.TensorSpec, tensor, dtype=DTYPE_TO_PROTO[tensor.dtype], kind=_KIND_TO_PROTO[tensor.kind])


def _bucket_to_proto(bucket: BucketSpec) -> plan_pb2.BucketSpec:
    return to_message(plan_pb2.BucketSpec, bucket, dtype=DTYPE_TO_PROTO[bucket.dtype], kind=_KIND_TO_PROTO[bucket.kind])


def tensor_from_proto(message: plan_pb2.TensorSpec) -> TensorSpec:
    """Inverse of tensor_to_proto. Raises ProtocolError on a negative or far too large shape."""
    short(message.name, "name of a tensor")
    short(message.codec, f"codec of tensor {message.name!r}")
    # Before any arithmetic: multiplying a million sizes would take minutes.
    at_most(len(message.shape), MAX_DIMENSIONS, f"dimensions of tensor {message.name!r}")
    at_most(len(message.aliases), MAX_ALIASES, f"aliases of tensor {message.name!r}")
    for alias in message.aliases:
        short(alias, f"alias of tensor {message.name!r}")
    short(message.part_of, f"the tensor that {message.name!r} is a part of")
    if message.parts and not (message.part < message.parts and message.part_dim < len(message.shape)):
        raise ProtocolError(
            f"tensor {message.name!r} is part {message.part} of {message.parts} along dimension {message.part_dim} of "
            f"shape {tuple(message.shape)}, which does not exist"
        )
    if any(size < 0 for size in message.shape):
        raise ProtocolError(f"tensor {message.name!r} has shape {tuple(message.shape)}; sizes can't be negative")
    if message.kind not in _KIND_FROM_PROTO:
        raise ProtocolError(f"tensor {message.name!r} has kind number {message.kind}, which is unknown")
    dtype = dtype_from_proto(message.dtype, f"tensor {message.name!r}")
    tensor = from_message(TensorSpec, message, dtype=dtype, kind=_KIND_FROM_PROTO[message.kind])
    if tensor.elements > MAX_TENSOR_ELEMENTS:
        raise ProtocolError(
            f"tensor {message.name!r} has {tensor.elements} elements; the limit is {MAX_TENSOR_ELEMENTS}"
        )
    return tensor


converts(RuleSpec, rule_to_proto, rule_from_proto)
converts(ScheduleSpec, functools.partial(to_message, plan_pb2.ScheduleSpec), schedule_from_proto)
converts(TensorSpec, tensor_to_proto, tensor_from_proto)
converts(BucketSpec, _bucket_to_proto, lambda message: from_message(BucketSpec, message))


def tensors_from_proto(messages: Sequence[plan_pb2.TensorSpec], where: str) -> tuple[TensorSpec, ...]:
    """All tensors of a job or plan. Raises ProtocolError if there are too many, or too many bytes."""
    at_most(len(messages), MAX_TENSORS, f"{where}: tensors")
    tensors = tuple(tensor_from_proto(message) for message in messages)
    size = sum(tensor.elements * DTYPES[tensor.dtype].itemsize for tensor in tensors)
    if size > MAX_JOB_BYTES:
        raise ProtocolError(f"{where}: its tensors have {size} bytes; the limit is {MAX_JOB_BYTES}")
    return tensors


def plan_to_proto(plan: Plan) -> plan_pb2.PlanSpec:
    return to_message(plan_pb2.PlanSpec, plan, plan_id=plan.plan_id)


def plan_from_proto(message: plan_pb2.PlanSpec) -> Plan:
    """Inverse of plan_to_proto; checks the whole plan and recomputes its digest."""
    tensors = tensors_from_proto(message.tensors, "plan")
    shards = []
    for s, shard in enumerate(message.shards):
        buckets = []
        for b, bucket in enumerate(shard.buckets):
            if bucket.kind not in _KIND_FROM_PROTO:
                raise ProtocolError(f"plan: shard {s}, bucket {b} has kind number {bucket.kind}, which is unknown")
            dtype = dtype_from_proto(bucket.dtype, f"plan: shard {s}, bucket {b}")
            buckets.append(from_message(BucketSpec, bucket, dtype=dtype, kind=_KIND_FROM_PROTO[bucket.kind]))
        shards.append(ShardSpec(buckets=tuple(buckets)))
    plan = Plan(tensors, tuple(shards))
    check_plan(plan)
    if message.plan_id and message.plan_id != plan.plan_id:
        raise ProtocolError(
            f"plan has digest {plan.plan_id}; its sender says {message.plan_id}. Are both of the same version?"
        )
    return plan


def settings_to_proto(holder: Settings) -> dict[str, plan_pb2.Argument]:
    return {name: argument_to_proto(value) for name, value in holder.settings().items()}


def settings_from_proto(messages: Mapping[str, plan_pb2.Argument], where: str) -> dict[str, Any]:
    """Inverse of settings_to_proto; a missing setting gets its default. Raises ProtocolError if one is invalid."""
    at_most(len(messages), MAX_ARGUMENTS, f"{where}: settings")
    found: dict[str, Any] = {}
    for name in sorted(messages):
        if name not in known():
            raise ProtocolError(f"{where}: this version has no setting {short(name, 'name of a setting')!r}")
        value = argument_from_proto(messages[name])
        if type(value) is not KINDS[name]:
            raise ProtocolError(f"{where}: {name} is {value!r}; it must be of type {KINDS[name].__name__}")
        found[name] = value
    if (replicas := found.get("replicas", 1)) > MAX_REPLICAS:
        raise ProtocolError(f"{where} has {replicas} replicas; the limit is {MAX_REPLICAS}")
    return found


def job_to_proto(job: JobSpec) -> plan_pb2.JobSpec:
    hosts = [plan_pb2.StageHosts(workers=numbers) for numbers in job.hosts]
    return to_message(plan_pb2.JobSpec, job, without=known(), settings=settings_to_proto(job), hosts=hosts)


def job_from_proto(message: plan_pb2.JobSpec) -> JobSpec:
    """Inverse of job_to_proto. Raises ProtocolError if it has more items than a job can have."""
    settings = settings_from_proto(message.settings, "job")
    return from_message(
        JobSpec,
        message,
        without=known(),
        **settings,
        name=short(message.name, "name of the job"),
        tensors=tensors_from_proto(message.tensors, "job"),
        schedule=schedule_from_proto(message.schedule),
        consistency=consistency_from_proto(message.consistency),
        best_metric=short(message.best_metric, "name of the best metric"),
        hosts=tuple(tuple(stage.workers) for stage in message.hosts),
        pretrained=short(message.pretrained, "configuration of the model", MAX_PRETRAINED),
    )


converts(Plan, plan_to_proto, plan_from_proto)
converts(JobSpec, job_to_proto, job_from_proto)


def hyper_to_proto(hyper: Mapping[int, Mapping[str, float]]) -> list[data_pb2.GroupHyper]:
    return [data_pb2.GroupHyper(group=group, values=dict(values)) for group, values in sorted(hyper.items())]


def hyper_from_proto(messages: Iterable[data_pb2.GroupHyper]) -> dict[int, dict[str, float]]:
    """Inverse of hyper_to_proto. Raises ProtocolError if a value isn't finite."""
    result: dict[int, dict[str, float]] = {}
    for message in messages:
        for name, value in message.values.items():
            if not math.isfinite(value):
                raise ProtocolError(f"hyper-parameter {name!r} of group {message.group} is {value}; it must be finite")
        result[message.group] = dict(message.values)
    return result


def pack_bits(flags: Sequence[bool]) -> bytes:
    """Bitmap of the flags, least significant bit first."""
    value = sum(1 << number for number, flag in enumerate(flags) if flag)
    return value.to_bytes(-(-len(flags) // 8), "little")


def unpack_bits(data: bytes, count: int, where: str) -> tuple[bool, ...]:
    """Inverse of pack_bits; empty data means all set. Raises ProtocolError if the length is wrong."""
    if not data:
        return (True,) * count
    if len(data) != -(-count // 8):
        raise ProtocolError(f"{where}: bitmap of {len(data)} bytes for {count} entries")
    value = int.from_bytes(data, "little")
    if value >> count:
        raise ProtocolError(f"{where}: bitmap has entries beyond the {count} that exist")
    return tuple(bool(value >> number & 1) for number in range(count))


ImagePart = tuple[parameter_server_pb2.ImageHeader | None, parameter_server_pb2.ImageChunk | None]


def image_parts(image: BucketImage) -> Iterator[ImagePart]:
    """A bucket's image as one header and its chunks, for RestoreFrame and GetCutFrame."""
    names = [VALUE, *sorted(name for name in image.tensors if name != VALUE)]
    yield (
        to_message(
            parameter_server_pb2.ImageHeader,
            image,
            without={"counted"},
            tensors=[
                parameter_server_pb2.ImageTensor(
                    name=name,
                    dtype=DTYPE_TO_PROTO[str(image.tensors[name].dtype).removeprefix("torch.")],
                    elements=image.tensors[name].numel(),
                )
                for name in names
            ],
            scalars=[
                parameter_server_pb2.ImageScalars(name=name, values=image.scalars[name])
                for name in sorted(image.scalars)
            ],
            initialized=pack_bits(image.initialized),
        ),
        None,
    )
    for number, name in enumerate(names):
        data = tensor_bytes(image.tensors[name])
        for offset in range(0, len(data), IMAGE_CHUNK_BYTES):
            payload = bytes(data[offset : offset + IMAGE_CHUNK_BYTES])
            yield None, parameter_server_pb2.ImageChunk(tensor=number, offset=offset, payload=payload)


class Chunks:
    """Memory for arrays of so many bytes, each of which arrives from its start to its end."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.buffers = [bytearray(size) for size in sizes]
        self._filled = [0] * len(self.buffers)

    def put(self, number: int, offset: int, payload: bytes, where: str) -> None:
        """Take the next bytes of an array. Raises ProtocolError, naming `where`, if they are not that."""
        there, end = number < len(self.buffers), offset + len(payload)
        size, expected = (len(self.buffers[number]), self._filled[number]) if there else (0, 0)
        if not there or offset != expected or end > size:
            raise ProtocolError(
                f"{where}: chunk at {offset} of {len(payload)} bytes; expected one at {expected} of {size}"
            )
        self.buffers[number][offset:end] = payload
        self._filled[number] = end

    @property
    def whole(self) -> bool:
        """Whether all bytes have arrived."""
        return self._filled == [*map(len, self.buffers)]


class ImageAssembler:
    """Reassembles image parts: feed() returns a BucketImage whenever one is complete.

    max_bytes limits what a header can make us allocate.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._header: parameter_server_pb2.ImageHeader | None = None
        self._chunks = Chunks(())

    def read(self, frame: Any) -> BucketImage | None:
        """Take the part that a message of a stream of images has, if it has one. Raises ProtocolError as feed()."""
        header = frame.header if frame.HasField("header") else None
        chunk = frame.chunk if frame.HasField("chunk") else None
        return self.feed(header, chunk) if header is not None or chunk is not None else None

    def feed(
        self, header: parameter_server_pb2.ImageHeader | None, chunk: parameter_server_pb2.ImageChunk | None
    ) -> BucketImage | None:
        """Take one part. Raises ProtocolError unless the parts follow each other without gap or overlap."""
        if header is not None:
            if self._header is not None:
                raise ProtocolError(
                    f"image of bucket {self._header.bucket} is interrupted by that of bucket {header.bucket}"
                )
            at_most(len(header.tensors), MAX_STATES, f"tensors in the image of bucket {header.bucket}")
            at_most(len(header.scalars), MAX_STATES, f"states in the image of bucket {header.bucket}")
            sizes = []
            for tensor in header.tensors:
                dtype = dtype_from_proto(tensor.dtype, f"image of bucket {header.bucket}")
                sizes.append(tensor.elements * DTYPES[dtype].itemsize)
            if sum(sizes) > self._max_bytes:
                raise ProtocolError(
                    f"image of bucket {header.bucket} has {sum(sizes)} bytes; the limit is {self._max_bytes}"
                )
            self._header, self._chunks = header, Chunks(sizes)
        if chunk is not None:
            if self._header is None:
                raise ProtocolError("image chunk without a header")
            where = f"image of bucket {self._header.bucket}, tensor {chunk.tensor}"
            self._chunks.put(chunk.tensor, chunk.offset, chunk.payload, where)
        return self._finish(self._header) if self._header is not None and self._chunks.whole else None

    def _finish(self, header: parameter_server_pb2.ImageHeader) -> BucketImage:
        tensors: dict[str, torch.Tensor] = {}
        for tensor, buffer in zip(header.tensors, self._chunks.buffers, strict=True):
            tensors[tensor.name] = tensor_from_bytes(buffer, dtype_from_proto(tensor.dtype, tensor.name))
        self._header, self._chunks = None, Chunks(())
        if VALUE not in tensors:
            raise ProtocolError(f"image of bucket {header.bucket} has no values")
        slices = max((len(s.values) for s in header.scalars), default=0)
        count = slices or len(header.initialized) * 8
        value = int.from_bytes(header.initialized, "little")
        scalars = {item.name: tuple(item.values) for item in header.scalars}
        initialized = tuple(bool(value >> number & 1) for number in range(count))
        differing = {"tensors": tensors, "scalars": scalars, "initialized": initialized}
        return from_message(BucketImage, header, without={"counted"}, **differing)

    @property
    def idle(self) -> bool:
        return self._header is None


def sequences_to_proto(sequences: Mapping[str, WorkerSequence]) -> list[parameter_server_pb2.WorkerSequence]:
    """Each worker's last push, by task, for the end of a stream of images."""
    return [
        parameter_server_pb2.WorkerSequence(task=task, incarnation=held.incarnation, last_seq=held.last_seq)
        for task, held in sorted(sequences.items())
    ]


def sequences_from_proto(messages: Iterable[parameter_server_pb2.WorkerSequence]) -> dict[str, WorkerSequence]:
    """Inverse of sequences_to_proto. Raises ProtocolError if a task is named twice."""
    sequences: dict[str, WorkerSequence] = {}
    for message in messages:
        short(message.task, "task in the end of the images")
        at_most(len(sequences) + 1, MAX_MEMBERS, "tasks in the end of the images")
        if message.task in sequences:
            raise ProtocolError(f"the end of the images lists the pushes of {message.task!r} twice")
        sequences[message.task] = WorkerSequence(message.incarnation, message.last_seq)
    return sequences

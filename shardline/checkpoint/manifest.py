"""manifest.json: which job and cut a checkpoint belongs to, its files and their hashes. Every field is checked."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from pydantic_core import from_json

from shardline.checkpoint.files import os_text
from shardline.core.image import WorkerSequence
from shardline.core.plan import BucketSpec, Plan, ShardSpec, Slice, check_plan
from shardline.core.spec import DTYPES, JobSpec, TensorKind
from shardline.core.spec_json import job_from_json, job_to_json
from shardline.errors import CheckpointError, ShardlineError
from shardline.host import files

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
"""Version of the folder's layout. Readers refuse any other."""
SEQUENCES = "sequences"
"""Field of `extra`: each worker's last push that a shard includes (asynchronous mode), one object per shard."""

MAX_BYTES = 256 << 20
"""Most bytes of a manifest: 1 KB for each tensor that a job may have (MAX_TENSORS in rpc/limits.py). One takes 300
bytes, with its slices and a name of 50 characters."""
MAX_PARSED_BYTES = 512 << 20
"""Most bytes of memory for its values, not counting texts: 2 KB per tensor, which takes 900 bytes. Without this limit
a file of empty lists would take 20 times its size."""
_VALUE_BYTES = {b"{": 240, b"[": 64, b",": 40}
"""Memory of an object, a list and any other value in bytes, by a character that each has once in the file."""

_Listed = Field(strict=False)
"""Accepts a JSON list for a tuple; its items are checked as strictly as everything else."""
Count = Annotated[int, Field(strict=True, ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Uint64 = Annotated[int, Field(strict=True, ge=0, lt=1 << 64)]
_SEQUENCES = TypeAdapter(list[dict[str, Annotated[tuple[Uint64, Uint64], Field(strict=False)]]])

_STEP_FOLDER = re.compile(r"^step-(\d{8,})$")


def step_folder(step: int) -> str:
    """Name of a step's folder, "step-00001200"."""
    return f"step-{step:08d}"


def parse_step_folder(name: str) -> int | None:
    """The step in a folder's name, or None if it is no such name."""
    match = _STEP_FOLDER.match(name)
    return int(match.group(1)) if match and step_folder(int(match.group(1))) == name else None


def shard_file(shard: int, num_shards: int) -> str:
    """Name of a shard's file, "shard-00000-of-00002.safetensors"."""
    return f"shard-{shard:05d}-of-{num_shards:05d}.safetensors"


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileEntry(_Model):
    name: str
    bytes: Count
    sha256: Sha256


class BucketModel(_Model):
    """One bucket of the plan; slices are [tensor, first_row, rows, offset, elements]."""

    dtype: str
    kind: Literal["param", "frozen", "buffer", "table"]
    elements: Count
    slices: Annotated[tuple[Annotated[tuple[Count, Count, Count, Count, Count], _Listed], ...], _Listed]


class ShardModel(_Model):
    buckets: Annotated[tuple[BucketModel, ...], _Listed]


class Manifest(_Model):
    """A checkpoint's manifest, without `job` and `shards`, which are in Described."""

    format: Literal["shardline-checkpoint"]
    format_version: int
    job_name: str
    plan_id: str
    step: Count
    timeline: Count
    term: Count
    consistent: bool
    """True: all shards at this step, one cut. False: shards were cut one by one (asynchronous mode)."""
    versions: Annotated[tuple[Count, ...], _Listed]
    """Number of applied updates, per shard."""
    steps: Annotated[tuple[Count, ...], _Listed]
    """Step of each shard's copy; all equal to `step` in a consistent cut."""
    files: Annotated[tuple[FileEntry, ...], _Listed]
    """One per shard, in order."""
    content_sha256: Sha256
    """Digest of all content by tensor name and quantum; the same for every plan."""
    cursor: dict[str, Count]
    """Position in the data order: {"step": n}, or {"batch": n} in asynchronous mode."""
    aliases: dict[str, str]
    """Other state_dict names of a stored tensor: alias -> name."""
    extra: dict[str, JsonValue]
    """Leases, worker sequences, and whatever else a mode needs."""
    created: str
    """UTC, ISO 8601."""
    torch_version: str
    manifest_sha256: Sha256
    """Digest of this file's other fields as JSON with sorted keys and no spaces."""


class _Written(Manifest):
    """All fields of the file. The two large ones are checked while they are decoded, piece by piece."""

    job: dict[str, Any]
    """The JobSpec in spec_json's form."""
    shards: list[Any] = Field(min_length=1)
    """Each is a ShardModel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """A manifest that has been read and checked, with its job and plan as values."""

    manifest: Manifest
    job: JobSpec
    plan: Plan


def sequences_to_json(sequences: Mapping[str, WorkerSequence]) -> dict[str, list[int]]:
    """Each worker's last push that one shard includes; `extra` keeps a list of these, one per shard."""
    return {task: [held.incarnation, held.last_seq] for task, held in sorted(sequences.items())}


def sequences_from_json(value: JsonValue, shard: int, num_shards: int) -> dict[str, WorkerSequence]:
    """One shard's entry from the list. Raises CheckpointError if sequences_to_json did not write the list."""
    try:
        shards = _SEQUENCES.validate_python(value)
    except ValidationError as error:
        raise CheckpointError(f"{SEQUENCES} in {MANIFEST}: {_first_problem(error)}") from None
    if len(shards) != num_shards:
        raise CheckpointError(f"{SEQUENCES} in {MANIFEST} has {len(shards)} shards; the plan has {num_shards}")
    return {task: WorkerSequence(incarnation, last_seq) for task, (incarnation, last_seq) in shards[shard].items()}


def self_digest(fields: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of all fields of a manifest but `manifest_sha256` itself."""
    # Piece by piece: the text of all fields would take as much memory as the file again.
    digest, comma = hashlib.sha256(b"{"), b""
    for key in sorted(fields.keys() - {"manifest_sha256"}):
        digest.update(comma + json.dumps(key).encode() + b":")
        value = fields[key]
        for piece in _pieces(value) if isinstance(value, list) else (_compact(value),):
            digest.update(piece)
        comma = b","
    digest.update(b"}")
    return digest.hexdigest()


def _pieces(values: list[Any]) -> Iterator[bytes]:
    yield b"["
    for number, value in enumerate(values):
        yield b"," * (number > 0) + _compact(value)
    yield b"]"


def _compact(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def plain_json(extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` as it will be read back from JSON. Raises CheckpointError if JSON can't represent it."""
    try:
        value = json.loads(json.dumps(dict(extra), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"extra can't be stored in {MANIFEST}: {error}") from error
    assert isinstance(value, dict)
    return value


def encode(
    job: JobSpec,
    plan: Plan,
    *,
    step: int,
    timeline: int,
    term: int,
    consistent: bool,
    versions: Sequence[int],
    steps: Sequence[int],
    files: Sequence[FileEntry],
    content_sha256: str,
    cursor: Mapping[str, int],
    extra: Mapping[str, Any],
) -> bytes:
    fields: dict[str, Any] = {
        "format": "shardline-checkpoint",
        "format_version": FORMAT_VERSION,
        "job_name": job.name,
        "job": job_to_json(job),
        "plan_id": plan.plan_id,
        "shards": [{"buckets": [_encode_bucket(bucket) for bucket in shard.buckets]} for shard in plan.shards],
        "step": step,
        "timeline": timeline,
        "term": term,
        "consistent": consistent,
        "versions": list(versions),
        "steps": list(steps),
        "files": [entry.model_dump() for entry in files],
        "content_sha256": content_sha256,
        "cursor": dict(cursor),
        "aliases": {alias: tensor.name for tensor in job.tensors for alias in tensor.aliases},
        "extra": dict(extra),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch_version": torch.__version__,
    }
    fields["manifest_sha256"] = self_digest(fields)
    return json.dumps(fields, indent=1, allow_nan=False).encode()


def _encode_bucket(bucket: BucketSpec) -> dict[str, Any]:
    slices = [[s.tensor, s.first_row, s.rows, s.offset, s.elements] for s in bucket.slices]
    return {"dtype": bucket.dtype, "kind": bucket.kind.value, "elements": bucket.elements, "slices": slices}


def read(folder: Path) -> Described:
    """Manifest in a step's folder, with every field checked.

    Raises CheckpointError, naming the file and the problem: missing, not a regular file, too large, not JSON, another
    format version, an unknown or wrong field, a checksum, a file name outside the folder, an invalid plan.
    """
    path = folder / MANIFEST
    try:
        fields = _parse(path, files.read_bytes(path, MAX_BYTES))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}, so it is not a checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {os_text(error)}") from error
    manifest, raw_job, raw_shards = _check_fields(path, fields)
    del fields
    try:
        job = job_from_json(raw_job)
        raw_job.clear()
        plan = _decode_plan(raw_shards, job)
        check_plan(plan)
    except ShardlineError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if plan.plan_id != manifest.plan_id:
        raise CheckpointError(
            f"{path} is damaged: the hash of its plan is {plan.plan_id}, but it says {manifest.plan_id}"
        )
    num_shards = len(plan.shards)
    for what, numbers in (("versions", manifest.versions), ("steps", manifest.steps)):
        if len(numbers) != num_shards:
            raise CheckpointError(f"{path} is damaged: {len(numbers)} {what} for {num_shards} shards")
    if manifest.consistent and set(manifest.steps) != {manifest.step}:
        raise CheckpointError(
            f"{path} is damaged: shards at steps {manifest.steps} are not a consistent cut of step {manifest.step}"
        )
    if len(manifest.files) != num_shards:
        raise CheckpointError(f"{path} is damaged: it lists {len(manifest.files)} files for {num_shards} shards")
    for shard, entry in enumerate(manifest.files):
        # This also keeps a manifest from naming files outside its folder.
        expected = shard_file(shard, num_shards)
        if entry.name != expected:
            raise CheckpointError(f"{path} lists the file {entry.name!r} for shard {shard}; it must be {expected!r}")
    named = parse_step_folder(folder.name)
    if named is not None and named != manifest.step:
        raise CheckpointError(f"{path} is for step {manifest.step}, but its folder is {folder.name}")
    return Described(manifest=manifest, job=job, plan=plan)


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    parsed = sum(data.count(sign) * nbytes for sign, nbytes in _VALUE_BYTES.items())
    if parsed > MAX_PARSED_BYTES:
        raise CheckpointError(
            f"{path} is not a manifest: parsing it would take {parsed:,} bytes of memory; the limit is "
            f"{MAX_PARSED_BYTES:,}"
        )
    try:
        fields = from_json(data)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} is damaged: it contains a {type(fields).__name__}, not an object")
    return fields


def _check_fields(path: Path, fields: dict[str, Any]) -> tuple[Manifest, dict[str, Any], list[Any]]:
    """The manifest, and its job and shards as they are in the file."""
    version = fields.get("format_version")
    if type(version) is int and version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this Shardline reads version {FORMAT_VERSION}. "
            "Read it with the Shardline that wrote it"
        )
    try:
        written = _Written.model_validate(fields)
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {_first_problem(error)}") from None
    found = self_digest(fields)
    if found != written.manifest_sha256:
        raise CheckpointError(
            f"{path} is damaged: the hash of its fields is {found[:16]}..., but it says "
            f"{written.manifest_sha256[:16]}..."
        )
    manifest = Manifest.model_construct(**{name: getattr(written, name) for name in Manifest.model_fields})
    return manifest, fields["job"], fields["shards"]


def _first_problem(error: ValidationError, within: str = "") -> str:
    problem = error.errors(include_url=False)[0]
    place = ".".join((*filter(None, [within]), *map(str, problem["loc"]))) or "the file"
    if problem["type"] == "extra_forbidden":
        return f"unknown field {place!r}"
    if problem["type"] == "missing":
        return f"the field {place!r} is missing"
    return f"{place}: {problem['msg']}, found {str(problem['input'])[:80]!r}"


def _decode_plan(raw_shards: list[Any], job: JobSpec) -> Plan:
    """The plan. Decoded parts are removed from raw_shards, to free their memory."""
    shards = []
    for number, raw in enumerate(raw_shards):
        try:
            shard = ShardModel.model_validate(raw)
        except ValidationError as error:
            raise CheckpointError(_first_problem(error, f"shards.{number}")) from None
        del raw
        raw_shards[number] = None
        shards.append(ShardSpec(buckets=tuple(map(_decode_bucket, shard.buckets))))
    return Plan(job.tensors, tuple(shards))


def _decode_bucket(bucket: BucketModel) -> BucketSpec:
    if bucket.dtype not in DTYPES:
        raise CheckpointError(f"a bucket has dtype {bucket.dtype!r}, which Shardline doesn't support")
    slices = tuple(
        Slice(tensor=tensor, first_row=first_row, rows=rows, offset=offset, elements=elements)
        for tensor, first_row, rows, offset, elements in bucket.slices
    )
    return BucketSpec(dtype=bucket.dtype, kind=TensorKind(bucket.kind), elements=bucket.elements, slices=slices)

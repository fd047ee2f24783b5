"""Files and texts that are read at start: damaged or made up, each ends in its documented error, with a sentence."""

from __future__ import annotations

import base64
import copy
import dataclasses
import functools
import hashlib
import json
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shardline.checkpoint import CheckpointStore
from shardline.checkpoint.manifest import MANIFEST, SEQUENCES, self_digest
from shardline.checkpoint.reader import Checkpoint
from shardline.checkpoint.store import BEST
from shardline.cluster import ClusterSpec, from_tf_config, locate
from shardline.core.plan import make_plan
from shardline.core.spec import JobSpec, RuleSpec, TensorKind
from shardline.core.spec_json import job_from_json, job_to_json
from shardline.errors import CheckpointError, ClusterSpecError, JobError, ShardlineError
from shardline.rpc.messages.convert import job_from_proto, job_to_proto
from shardline.schedule import check
from shardline.update import arguments, check_tensors
from tests.fuzz.calls import Finding
from tests.fuzz.messages import Draw, damaged, pick
from tests.support.checkpoints import cut_of, job_of, spec

TAKES_S = 5.0
"""Processor time that one load may take."""
ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    1,
    -1,
    4097,
    1 << 31,
    1 << 62,
    1 << 64,
    10**400,
    0.5,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x",
    "nan",
    "127.0.0.1:1",
    "h:" + "9" * 5000,
    "\ud800",
    "z" * 5000,
    [],
    [1],
    [[1, 2]],
    {},
    {"float": "inf"},
    {"x": [None]},
)
TEXTS = (
    "",
    "null",
    "{",
    "[" * 5000,
    '{"a":' * 5000,
    "1" * 5000,
    '{"ps": ' + "1" * 5000 + "}",
    '{"cluster": {"chief": ["a:1"], "ps": ["b:1"]}, "task": {"type": "ps", "index": "' + "1" * 5000 + '"}}',
    "NaN",
    '"\\ud800"',
    "\ufeff{}",
)


@dataclass(frozen=True)
class Load:
    """Something to load: its files, or one text named "text"."""

    kind: str
    files: tuple[tuple[str, bytes], ...]

    def to_json(self) -> str:
        """Text for --replay."""
        files = {name: base64.b85encode(data).decode() for name, data in self.files}
        return json.dumps({"kind": self.kind, "files": files})

    @classmethod
    def from_json(cls, text: str) -> Load:
        """Back again."""
        fields = json.loads(text)
        return cls(fields["kind"], tuple((name, base64.b85decode(data)) for name, data in fields["files"].items()))


# What is right


def _cluster() -> Any:
    return {
        "chief": ["10.0.0.1:2222"],
        "ps": {"0": "10.0.0.2:2222", "1": "[::1]:0"},
        "worker": 3,
        "evaluator": ["h:1"],
    }


def _tf_config() -> Any:
    cluster = {"master": ["10.0.0.1:2222"], "ps": ["10.0.0.2:2222"], "worker": ["w:1"]}
    return {"cluster": cluster, "task": {"type": "worker", "index": "0"}}


def _job() -> JobSpec:
    tensors = (
        spec("fc.weight", (6, 5)),
        spec("emb.weight", (7, 3), aliases=("head.weight",)),
        spec("scale", ()),
        spec("none", (0, 4)),
        spec("wave", (3, 2), "complex64"),
        spec("mean", (5,), "float16", TensorKind.BUFFER),
    )
    return job_of(tensors, seed=3)


@functools.cache
def _folder(asynchronous: bool) -> Mapping[str, bytes]:
    """Files of a checkpoint of two shards."""
    more: dict[str, Any] = {}
    if asynchronous:
        more = {
            "consistent": False,
            "versions": [7, 9],
            "extra": {SEQUENCES: [{"worker/0": [1, 5]}, {}]},
        }
    with tempfile.TemporaryDirectory(prefix="shardline-fuzz-") as name:
        path = CheckpointStore(Path(name), keep=1).commit(cut_of(_job(), step=3, **more))
        return {file.name: file.read_bytes() for file in path.iterdir()}


RIGHT: Mapping[str, Callable[[], Any]] = {
    "cluster": _cluster,
    "tf_config": _tf_config,
    "job": lambda: job_to_json(_job()),
    "rule": lambda: job_to_json(_job())["rule"],
}


# Loading


def _load_cluster(files: Mapping[str, bytes], folder: Path) -> None:
    path = folder / "cluster.json"
    path.write_bytes(files["text"])
    again = ClusterSpec.read(path)
    assert ClusterSpec.from_json(again.to_json()) == again
    locate(None, cluster=str(path), task="ps/0", tf_config=None)


def _load_tf_config(files: Mapping[str, bytes], folder: Path) -> None:
    # As the environment gives it, whatever bytes it has.
    text = files["text"].decode(errors="surrogateescape")
    from_tf_config(text)
    locate("worker", cluster=None, task=None, tf_config=text)
    locate("worker", cluster=json.dumps({"chief": 1, "ps": 1, "worker": 2}), task=None, tf_config=text)


def _json(files: Mapping[str, bytes]) -> Any:
    """What the manifest's own reader would hand on."""
    try:
        return json.loads(files["text"])
    except (ValueError, RecursionError):
        raise JobError("the text is no JSON at all") from None


def _load_job(files: Mapping[str, bytes], folder: Path) -> None:
    value = _json(files)
    job = job_from_json(value)
    again = job_from_json(json.loads(json.dumps(job_to_json(job))))
    assert repr(again) == repr(job)
    _use(job)


def _use(job: JobSpec) -> None:
    """What is done with a job that could be read."""
    # First, as everywhere: names and dtypes. Without the sizes, which anything may follow from.
    make_plan([dataclasses.replace(tensor, shape=()) for tensor in job.tensors], 2)
    arguments.rule(job.rule.name, job.rule.groups)
    check_tensors(job.rule, job.tensors)
    check(job.schedule)
    try:
        sent = job_to_proto(job)
    except (ValueError, TypeError, OverflowError):
        # Numbers that are too large for the wire: a job file's own, which are checked where it is read.
        return
    plan = make_plan(job_from_proto(sent).tensors, 2) if job.tensors else None
    assert plan is None or plan.shards


def _load_rule(files: Mapping[str, bytes], folder: Path) -> None:
    value = _json(files)
    fields = job_to_json(_job())
    fields["rule"] = value
    rule: RuleSpec = job_from_json(fields).rule
    made = arguments.rule(rule.name, rule.groups)
    for group in made.groups:
        arguments.torch_arguments(made.name, group)
        numbers = arguments.hyper_numbers(made.name, group)
        arguments.with_hyper(made.name, group, dict.fromkeys(numbers, 0.5))


def _load_checkpoint(files: Mapping[str, bytes], folder: Path) -> None:
    path = folder / "step-00000003"
    path.mkdir()
    for name, data in files.items():
        (folder / name if name == BEST else path / name).write_bytes(data)
    store = CheckpointStore(folder, keep=1)
    store.best()
    found = [_outcome(lambda: _read(Checkpoint(path))), _outcome(lambda: _read(store.open(3)))]
    found.append(_outcome(lambda: _read(store.newest_valid())))
    # All of them are made: one that gets further must not break either.
    for error in found:
        if error is not None:
            raise error


def _outcome(act: Callable[[], None]) -> CheckpointError | None:
    try:
        act()
    except CheckpointError as error:
        return error
    return None


def _read(checkpoint: Checkpoint) -> None:
    try:
        checkpoint.state_dict()
        for tensor in checkpoint.job.tensors:
            checkpoint.scalars(tensor.name)
            for state in checkpoint.states(tensor.name):
                checkpoint.read_slice(tensor.name, 0, tensor.rows, state)
        for plan in (checkpoint.plan, make_plan(checkpoint.job.tensors, 3)):
            for shard in range(len(plan.shards)):
                list(checkpoint.images(plan, shard))
                checkpoint.sequences(plan, shard)
        checkpoint.compatible(_job())
    finally:
        checkpoint.close()


LOADERS: Mapping[str, tuple[Callable[[Mapping[str, bytes], Path], None], type[ShardlineError]]] = {
    "cluster": (_load_cluster, ClusterSpecError),
    "tf_config": (_load_tf_config, ClusterSpecError),
    "job": (_load_job, ShardlineError),
    "rule": (_load_rule, ShardlineError),
    "checkpoint": (_load_checkpoint, CheckpointError),
}


def make(load: Load) -> bool:
    """Load it; returns whether that was possible. Raises Finding."""
    loader, expected = LOADERS[load.kind]
    began_s, problem, error = time.thread_time(), "", None
    with tempfile.TemporaryDirectory(prefix="shardline-fuzz-") as name:
        try:
            loader(dict(load.files), Path(name))
        except ShardlineError as caught:
            if not isinstance(caught, expected) or len(str(caught)) < 10:
                problem = f"ended with {caught!r} in place of a sentence of {expected.__name__}"
            error = caught
        except Exception as caught:
            problem, error = f"ended with {type(caught).__name__}: {caught}", caught  # type: ignore[assignment]
    took_s = time.thread_time() - began_s
    if took_s > TAKES_S:
        problem = f"took {took_s:.1f} s of processor time"
    if problem:
        raise Finding(f"loading {load.kind} {problem}\nrepeat: --replay '{load.to_json()}'") from error
    return error is None


# Making things up


def change_json(draw: Draw, value: Any) -> Any:
    """A JSON value with one thing in it changed, taken away, doubled or put in."""
    places = list(_places(value))
    if not places:
        return copy.deepcopy(draw(st.sampled_from(ODD)))
    holder, key = pick(draw, places)
    act = draw(st.sampled_from(("replace", "replace", "replace", "remove", "double", "move")))
    if act == "remove":
        del holder[key]
    elif act == "double" and isinstance(holder, list):
        holder.append(holder[key])
    elif act == "double":
        holder[draw(st.sampled_from(("x", "", "job", "0", "\ud800")))] = holder[key]
    elif act == "move":
        other, there = pick(draw, places)
        if isinstance(holder[key], int | float | str | bool | None):
            holder[key] = other[there] if not isinstance(other[there], dict | list) else 0
    else:
        holder[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
    return value


def _places(value: Any) -> Any:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def draw_load(draw: Draw, kind: str) -> Load:
    """Something to load of one kind."""
    if kind == "checkpoint":
        return _draw_checkpoint(draw)
    how = draw(st.sampled_from(("changed", "changed", "changed", "damaged", "text")))
    if how == "text":
        text = draw(st.sampled_from(TEXTS)).encode(errors="surrogatepass")
        return Load(kind, (("text", text),))
    value = RIGHT[kind]()
    if how == "changed":
        for _ in range(draw(st.integers(1, 3))):
            value = change_json(draw, value)
    data = _text(value)
    return Load(kind, (("text", damaged(draw, data) if how == "damaged" else data),))


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()


def _draw_checkpoint(draw: Draw) -> Load:
    files = dict(_folder(draw(st.booleans())))
    names = sorted(files)
    name = draw(st.sampled_from(names))
    how = draw(st.sampled_from(("bytes", "manifest", "manifest", "header", "header", "sealed", "missing", "best")))
    if how == "missing":
        del files[name]
    elif how == "best":
        best = {"step": 3, "metrics": {"accuracy": 0.5, "loss": None}}
        data = _text(change_json(draw, best))
        files[BEST] = damaged(draw, data) if draw(st.booleans()) else data
    elif how == "manifest":
        _seal(draw, files, True)
    else:
        if name == MANIFEST and how != "bytes":
            name = names[-1]
        files[name] = _header(draw, files[name]) if how == "header" else damaged(draw, files[name])
        if how != "bytes":
            # Checksums that fit: nothing but what the file says can tell.
            _seal(draw, files, False)
    return Load("checkpoint", tuple(sorted(files.items())))


def _seal(draw: Draw, files: dict[str, bytes], change: bool) -> None:
    """Write a manifest whose checksums fit its files and itself."""
    fields = json.loads(files[MANIFEST])
    for entry in fields["files"]:
        data = files[entry["name"]]
        entry["bytes"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    if change:
        extra = {SEQUENCES: [{"worker/0": [1, 2]}, {}], **fields["extra"]}
        fields["extra"] = extra
        for _ in range(draw(st.integers(1, 2))):
            change_json(draw, fields)
    fields["manifest_sha256"] = self_digest(fields)
    files[MANIFEST] = json.dumps(fields).encode()


def _header(draw: Draw, data: bytes) -> bytes:
    """A safetensors file whose header is changed, or whose length says something else."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + size], data[8 + size :]
    how = draw(st.sampled_from(("length", "changed", "changed", "changed", "damaged")))
    if how == "length":
        claimed = draw(st.sampled_from([0, 1, size - 1, size + 1, len(data), 1 << 32, 1 << 63, (1 << 64) - 1]))
        return struct.pack("<Q", claimed) + header + body
    if how == "damaged":
        header = damaged(draw, header)
    else:
        fields = json.loads(header)
        act = draw(st.sampled_from(("any", "dtype", "shape", "offsets", "name", "swap")))
        keys = [key for key in fields if key != "__metadata__"]
        key = draw(st.sampled_from(keys))
        if act == "dtype":
            fields[key]["dtype"] = draw(st.sampled_from(["F64", "F32", "F16", "I8", "BOOL", "U64", "F8_E5M2", "Q"]))
        elif act == "shape":
            fields[key]["shape"] = draw(
                st.sampled_from([[], [0], [1], [1 << 62], [1 << 62, 4], [5, 6], [2, 3, 5], [30], [-1], [1, 1, 1]])
            )
        elif act == "offsets":
            fields[key]["data_offsets"] = draw(
                st.sampled_from([[0, 0], [0, 1 << 62], [8, 0], [-1, 4], [0, len(body)], [1 << 64, 0]])
            )
        elif act == "name":
            text = draw(st.sampled_from(["value/fc.weight@99", "state/x/fc.weight@1", "scalar/step/scale@7", "@", "q"]))
            fields[draw(st.sampled_from([text, "value/none@0", "initialized/wave@1"]))] = fields.pop(key)
        elif act == "swap":
            other = draw(st.sampled_from(keys))
            fields[key], fields[other] = fields[other], fields[key]
        else:
            change_json(draw, fields)
        header = json.dumps(fields).encode()
    return struct.pack("<Q", len(header)) + header + body

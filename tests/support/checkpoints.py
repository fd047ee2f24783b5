"""Jobs, cuts, and file systems that die, for the tests of checkpoints."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardline.checkpoint import CheckpointContents, CheckpointStore, manifest as manifests
from shardline.checkpoint.files import Files
from shardline.core.image import VALUE, BucketImage
from shardline.core.plan import Plan, make_plan
from shardline.core.spec import DTYPES, Argument, JobSpec, RuleSpec, TensorKind, TensorSpec

SHARD_0 = "shard-00000-of-00002.safetensors"
PARAM, FROZEN, BUFFER = TensorKind.PARAM, TensorKind.FROZEN, TensorKind.BUFFER


def spec(
    name: str, shape: tuple[int, ...], dtype: str = "float32", kind: TensorKind = PARAM, **more: Any
) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, kind=kind, **more)


SMALL = (
    spec("fc1.weight", (6, 5)),
    spec("fc1.bias", (6,)),
    spec("emb.weight", (7, 3), aliases=("head.weight",)),
    spec("bn.num_batches_tracked", (), "int64", BUFFER),
)
EVERY_KIND = (
    spec("big", (400, 300)),
    spec("odd/name@7", (301, 257)),
    spec("scale", ()),
    spec("none", (0, 4)),
    spec("also_none", (3, 0)),
    *(
        spec(f"held.{dtype}", (5, 3), dtype, FROZEN)
        for dtype in DTYPES
        if dtype not in ("float32", "complex64", "complex128")
    ),
    spec("wave", (9, 2), "complex64"),
    spec("wave0", (), "complex128", FROZEN),
    spec("emb", (7, 3), aliases=("head",)),
    spec("mean", (5,), kind=BUFFER),
)


def job_of(tensors: tuple[TensorSpec, ...] = SMALL, *, rule: str = "Adam", **more: Any) -> JobSpec:
    groups: tuple[dict[str, Argument], ...] = (
        {"lr": 0.1, "betas": (0.9, 0.999), "amsgrad": False, "foreach": None, "maximize": False},
    )
    return JobSpec(name="digits", tensors=tensors, rule=RuleSpec(name=rule, groups=groups), **more)


@functools.lru_cache(maxsize=64)
def random_tensor(elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same tensor each time; don't write to it."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (elements,), generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(elements, generator=generator, dtype=torch.complex128).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, (elements,), generator=generator).to(dtype)


def padded_with_zeros(plan: Plan, shard: int, bucket: int, make: Callable[[TensorSpec], torch.Tensor]) -> torch.Tensor:
    """A flat tensor in the bucket's layout, each slice filled with its rows of make(tensor)."""
    layout = plan.shards[shard].buckets[bucket]
    flat: torch.Tensor | None = None
    for piece in layout.slices:
        whole = make(plan.tensors[piece.tensor])
        if flat is None:
            flat = torch.zeros(layout.elements, dtype=whole.dtype)
        start = piece.first_row * plan.tensors[piece.tensor].row_elements
        flat[piece.offset : piece.end] = whole[start : start + piece.elements]
    assert flat is not None
    return flat


def images_of(plan: Plan, step: int, seed: int = 0, version: int | None = None) -> dict[int, list[BucketImage]]:
    """Images whose content depends only on tensor names, step and seed, never on the plan."""

    def content(salt: int, dtype: torch.dtype | None = None) -> Callable[[TensorSpec], torch.Tensor]:
        def make(tensor: TensorSpec) -> torch.Tensor:
            number = plan.index[tensor.name]
            return random_tensor(
                tensor.elements, dtype or DTYPES[tensor.dtype], number + 1000 * (salt + 10 * step + seed)
            )

        return make

    out: dict[int, list[BucketImage]] = {}
    for s, shard in enumerate(plan.shards):
        out[s] = []
        for b, bucket in enumerate(shard.buckets):
            tensors = {VALUE: padded_with_zeros(plan, s, b, content(0))}
            trained = bucket.kind is PARAM
            if trained:
                tensors["exp_avg"] = padded_with_zeros(plan, s, b, content(1))
                tensors["exp_avg_sq"] = padded_with_zeros(plan, s, b, content(2, torch.float64))
            image = BucketImage(
                shard=s,
                bucket=b,
                step=step,
                version=step if version is None else version,
                tensors=tensors,
                scalars={"step": tuple(step + p.tensor / 3 for p in bucket.slices)} if trained else {},
                initialized=tuple(p.tensor % 2 == 0 for p in bucket.slices) if trained else (),
            )
            out[s].append(image)
    return out


def cut_of(
    job: JobSpec | None = None, *, step: int = 0, shards: int = 2, seed: int = 0, plan: Plan | None = None, **more: Any
) -> CheckpointContents:
    job = job or job_of()
    plan = plan or make_plan(job.tensors, shards)
    fields: dict[str, Any] = {
        "job": job,
        "plan": plan,
        "step": step,
        "timeline": (3 << 32) | 1,
        "term": 3,
        "consistent": True,
        "versions": [step] * len(plan.shards),
        "images": images_of(plan, step, seed),
    }
    return CheckpointContents(**{**fields, **more})


def assert_same_images(ours: list[BucketImage], theirs: list[BucketImage]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shard, a.bucket, a.step, a.version) == (b.shard, b.bucket, b.step, b.version)
        assert set(a.tensors) == set(b.tensors)
        for name in a.tensors:
            assert a.tensors[name].dtype is b.tensors[name].dtype
            assert torch.equal(a.tensors[name], b.tensors[name]), name
        assert a.scalars == b.scalars
        assert a.initialized == b.initialized


def state_of(tensors: tuple[TensorSpec, ...], step: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        t.name: random_tensor(t.elements, DTYPES[t.dtype], n + 1000 * (10 * step + seed)).reshape(t.shape)
        for n, t in enumerate(tensors)
    }


class Killed(BaseException):
    """The process is killed: nothing runs after this line, not even clean-up."""


class MortalFiles(Files):
    """Real files; the process is killed, or an OSError raised, at operation number `at`."""

    def __init__(self, at: int = -1, error: OSError | None = None) -> None:
        self.at, self.error, self.count = at, error, 0
        self.dead = False

    def _point(self) -> None:
        if self.dead:
            raise Killed
        number, self.count = self.count, self.count + 1
        if number == self.at:
            if self.error is not None:
                raise self.error
            self.dead = True
            raise Killed

    def make_folder(self, path: Path) -> None:
        self._point()
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._point()
        return super().create(path)

    def write_some(self, fd: int, view: memoryview) -> int:
        half = view[: max(1, len(view) // 2)]
        written = super().write_some(fd, half)
        self._point()
        return written

    def sync(self, fd: int) -> None:
        # No real fsync: only the process dies here, and hundreds of commits would wait for the disk.
        self._point()

    def rename(self, source: Path, target: Path) -> None:
        self._point()
        super().rename(source, target)

    def remove_tree(self, path: Path) -> None:
        self._point()
        if path.is_dir():
            # A kill in the middle of a deletion leaves a folder with some files gone.
            for part in sorted(path.iterdir())[:1]:
                part.unlink()
            self._point()
        super().remove_tree(path)


def operations(tmp_path: Path) -> int:
    """Number of operations of the commit under test."""
    files = MortalFiles()
    prepare(tmp_path / "count")
    CheckpointStore(tmp_path / "count", keep=2, files=files).commit(cut_of(step=30))
    return files.count


@functools.cache
def prepared() -> Mapping[Path, bytes]:
    """The files of a folder with checkpoints of steps 10 and 20."""
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder), keep=2, files=MortalFiles())
        for step in (10, 20):
            store.commit(cut_of(step=step))
        return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def prepare(folder: Path) -> None:
    for path, content in prepared().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def edit_manifest(path: Path, *, sign: bool = True, **changes: Any) -> None:
    """Change fields of a manifest as a foreign writer would: with a digest that fits."""
    file = path / "manifest.json"
    fields = {**json.loads(file.read_bytes()), **changes}
    if sign:
        fields["manifest_sha256"] = manifests.self_digest(fields)
    file.write_text(json.dumps(fields))


def files_with(path: Path, **changes: Any) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = json.loads((path / "manifest.json").read_bytes())["files"]
    return [{**files[0], **changes}, *files[1:]]


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a shard file's header as a foreign writer would: with checksums that fit."""
    file = path / "shard-00000-of-00001.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + size])
    change(fields)
    text = json.dumps(fields).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    entry = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    edit_manifest(path, files=files_with(path, **entry))

"""Checkpoints are whole or not there after a failure at any point, and refused by name when damaged."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.checkpoint import Checkpoint, CheckpointStore
from shardline.checkpoint.files import Files, try_lock
from shardline.core.image import VALUE, BucketImage
from shardline.core.plan import make_plan
from shardline.errors import CheckpointError
from tests.support.checkpoints import (
    SHARD_0,
    SMALL,
    Killed,
    MortalFiles,
    cut_of,
    edit_header,
    edit_manifest,
    files_with,
    flip_byte,
    images_of,
    job_of,
    operations,
    prepare,
    spec,
    state_of,
)

# Crashes.


def test_kill_at_every_operation_leaves_a_whole_checkpoint_and_the_commit_can_be_repeated(tmp_path: Path) -> None:
    total = operations(tmp_path)
    assert total > 30
    committed = 0
    for at in range(total):
        folder = tmp_path / f"at-{at}"
        prepare(folder)
        with pytest.raises(Killed):
            CheckpointStore(folder, keep=2, files=MortalFiles(at)).commit(cut_of(step=30))
        after = CheckpointStore(folder, keep=2, files=MortalFiles())
        assert not [p.name for p in folder.iterdir() if p.name.startswith(("tmp-", "trash-"))]
        found = after.newest_valid()
        assert found.warnings == ()
        assert found.step in (20, 30)
        committed += found.step == 30
        for name, expected in state_of(SMALL, found.step).items():
            assert torch.equal(found.tensor(name), expected)
        assert (folder / "latest").read_text() in ("step-00000020\n", "step-00000030\n")
        after.commit(cut_of(step=30))
        assert after.list() == [20, 30] and after.newest_valid().step == 30
        assert (folder / "latest").read_text() == "step-00000030\n"
    assert 0 < committed < total


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "No space left on device (ENOSPC)"),
        pytest.param(errno.EROFS, "Read-only file system (EROFS)", marks=pytest.mark.long),
    ],
)
def test_failing_disk_at_every_operation_is_one_sentence_and_loses_nothing(
    tmp_path: Path, number: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    total = operations(tmp_path)
    failures = 0
    for at in range(total):
        folder = tmp_path / f"at-{at}"
        prepare(folder)
        store = CheckpointStore(folder, keep=2, files=MortalFiles(at, OSError(number, os.strerror(number))))
        caplog.clear()
        try:
            store.commit(cut_of(step=30))
        except CheckpointError as error:
            failures += 1
            said = str(error)
            assert str(folder) in said and text in said
        else:
            # After the commit point only hints and deletions are left: said, but no failure.
            assert text in caplog.text and store.newest_valid().step == 30
        assert store.newest_valid().step in (20, 30)
        assert not list(folder.glob("tmp-*"))
        store.commit(cut_of(step=30))
        assert store.newest_valid().step == 30
    assert failures > 20


def test_real_write_limit_ends_in_a_sentence_naming_the_file(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.commit(cut_of(step=1))
    job = job_of((spec("big", (400, 300)),))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            store.commit(cut_of(job, step=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "tmp-3-2/shard-00000-of-00002.safetensors failed: File too large (EFBIG)" in str(caught.value)
    # Which one stays is said by the chief, who knows the newest.
    assert str(caught.value).endswith("; the checkpoint of step 2 was not written")
    assert store.list() == [1] and not list(tmp_path.glob("tmp-*"))


def test_bytes_that_read_back_wrong_are_not_committed(tmp_path: Path) -> None:
    class LyingFiles(Files):
        def write(self, path: Path, chunks: Any) -> tuple[int, str]:
            result = super().write(path, chunks)
            if path.suffix == ".safetensors":
                flip_byte(path, -3)
            return result

    store = CheckpointStore(tmp_path, keep=2, files=LyingFiles())
    with pytest.raises(CheckpointError, match="reads back different bytes than were written"):
        store.commit(cut_of(step=1))
    assert store.list() == [] and not list(tmp_path.iterdir())


def test_folder_of_a_living_writer_is_not_swept(tmp_path: Path) -> None:
    (tmp_path / "tmp-1-5").mkdir()
    (tmp_path / "tmp-1-6").mkdir()
    lock = try_lock(tmp_path / "tmp-1-5")
    assert lock is not None
    CheckpointStore(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["tmp-1-5"]
    os.close(lock)
    CheckpointStore(tmp_path, keep=1)
    assert not list(tmp_path.iterdir())


def test_images_that_stop_coming_leave_nothing_behind(tmp_path: Path) -> None:
    def fetch(shard: int) -> Iterator[BucketImage]:
        if shard:
            raise ConnectionResetError("ps/1 is gone")
        yield from images_of(make_plan(SMALL, 2), 3)[0]

    with pytest.raises(CheckpointError, match=r"shard 1 of the cut of step 3 can't be fetched.*ps/1 is gone"):
        CheckpointStore(tmp_path, keep=1).commit(cut_of(step=3, images=fetch))
    assert not list(tmp_path.iterdir())


# What a cut must hold.


def spoiled(change: Callable[[list[BucketImage]], list[BucketImage]]) -> dict[int, list[BucketImage]]:
    images = images_of(make_plan(SMALL, 2), 3)
    return {0: change(images[0]), 1: images[1]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda held: held[:-1], "are missing from shard"),
        (lambda held: [*held, held[0]], "each bucket must appear once"),
        (lambda held: [dataclasses.replace(held[0], shard=1), *held[1:]], "of shard 1"),
        (lambda held: [dataclasses.replace(held[0], step=2), *held[1:]], "is at step 2 in the cut of step 3"),
        (lambda held: [dataclasses.replace(held[0], tensors={}), *held[1:]], "the image has no 'value'"),
        (lambda held: [dataclasses.replace(held[0], tensors={VALUE: torch.zeros(3)}), *held[1:]], "has shape (3,)"),
        (
            lambda held: [dataclasses.replace(held[0], tensors={VALUE: torch.zeros(64, dtype=torch.int8)}), *held[1:]],
            "values are torch.int8; the plan says float32",
        ),
        (lambda held: [dataclasses.replace(held[0], scalars={"a/b": ()}), *held[1:]], "a state is named 'a/b'"),
        (lambda held: [dataclasses.replace(held[0], initialized=(True,) * 8), *held[1:]], "8 initialized flags for"),
        (lambda held: [dataclasses.replace(held[0], scalars={"step": ()}), *held[1:]], "0 values of 'step'"),
    ],
)
def test_cut_that_is_not_what_its_plan_says_is_refused(
    tmp_path: Path, change: Callable[[list[BucketImage]], list[BucketImage]], sentence: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(tmp_path, keep=1).commit(cut_of(step=3, images=spoiled(change)))
    assert sentence in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_same_step_with_the_same_content_is_done_already_even_on_another_plan(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    path = store.commit(cut_of(step=8, shards=2))
    before = (path / "manifest.json").read_bytes()
    assert store.commit(cut_of(step=8, shards=3, timeline=(3 << 32) | 2)) == path
    assert (path / "manifest.json").read_bytes() == before and not list(tmp_path.glob("tmp-*"))


def test_same_step_with_other_content_is_refused_loudly_and_the_old_one_stays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.commit(cut_of(step=8))
    with pytest.raises(CheckpointError, match="exists with different content"):
        store.commit(cut_of(step=8, seed=1))
    assert torch.equal(store.open(8).tensor("fc1.bias"), state_of(SMALL, 8)["fc1.bias"])
    assert not list(tmp_path.glob("tmp-*"))


def test_same_step_replaces_a_damaged_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    path = store.commit(cut_of(step=8))
    (path / "shard-00001-of-00002.safetensors").unlink()
    store.commit(cut_of(step=8, seed=1))
    assert torch.equal(store.open(8).tensor("fc1.bias"), state_of(SMALL, 8, 1)["fc1.bias"])
    assert not list(tmp_path.glob("trash-*"))


# Damage.


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: (p / SHARD_0).write_bytes((p / SHARD_0).read_bytes()[:-7]), f"{SHARD_0} is truncated"),
    (lambda p: (p / SHARD_0).write_bytes(b""), f"{SHARD_0} is truncated: it has 0 of"),
    (lambda p: (p / SHARD_0).write_bytes((p / SHARD_0).read_bytes() + b"x"), "bytes; the manifest says"),
    (lambda p: flip_byte(p / SHARD_0, -1), f"{SHARD_0} is corrupt: its sha256"),
    (lambda p: flip_byte(p / SHARD_0, 3), f"{SHARD_0} is corrupt: its sha256"),
    (lambda p: (p / SHARD_0).unlink(), f"{SHARD_0} is missing"),
    (lambda p: (p / "manifest.json").unlink(), "has no manifest.json"),
    (lambda p: (p / "manifest.json").write_bytes(b"\x80\x04pickle"), "manifest.json is not JSON"),
    (lambda p: (p / "manifest.json").write_bytes((p / "manifest.json").read_bytes()[:-9]), "manifest.json is not JSON"),
    (lambda p: (p / "manifest.json").write_text("[1]"), "it contains a list, not an object"),
    (lambda p: edit_manifest(p, format_version=2), "has format version 2; this Shardline reads version 1"),
    (lambda p: edit_manifest(p, format="zip"), "format: Input should be 'shardline-checkpoint'"),
    (lambda p: edit_manifest(p, colour="red"), "unknown field 'colour'"),
    (lambda p: edit_manifest(p, step="20"), "step: Input should be a valid integer"),
    (lambda p: edit_manifest(p, step=-1), "step: Input should be greater than or equal to 0"),
    (lambda p: edit_manifest(p, step=21, steps=[21, 21]), "is for step 21, but its folder is step-00000020"),
    (lambda p: edit_manifest(p, sign=False, term=4), "the hash of its fields is"),
    (lambda p: edit_manifest(p, versions=[1]), "1 versions for 2 shards"),
    (lambda p: edit_manifest(p, steps=[20, 19]), "are not a consistent cut of step 20"),
    (lambda p: edit_manifest(p, plan_id="0" * 32), "the hash of its plan is"),
    (lambda p: edit_manifest(p, shards=[{"buckets": []}]), "manifest.json is damaged: plan: shard 0"),
    (lambda p: edit_manifest(p, job={"name": "x"}), "has no field 'tensors'"),
    (lambda p: edit_manifest(p, files=files_with(p, name="../x")), "lists the file '../x' for shard 0"),
    (lambda p: edit_manifest(p, files=files_with(p, name="/etc/passwd")), "lists the file '/etc/passwd'"),
    (lambda p: edit_manifest(p, files=files_with(p, sha256="../x")), "files.0.sha256: String should match"),
    (lambda p: edit_manifest(p, files=[]), "lists 0 files for 2 shards"),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES, ids=[sentence for _, sentence in DAMAGES])
def test_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(
    tmp_path: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    prepare(tmp_path)
    store = CheckpointStore(tmp_path, keep=2)
    damage(tmp_path / "step-00000020")
    with pytest.raises(CheckpointError) as caught:
        store.open(20)
    assert sentence in str(caught.value) and "step-00000020" in str(caught.value)
    found = store.newest_valid()
    assert found.step == 10 and len(found.warnings) == 1 and sentence in found.warnings[0]
    assert store.list() == [10, 20]


def test_manifest_field_that_is_missing_is_named(tmp_path: Path) -> None:
    prepare(tmp_path)
    file = tmp_path / "step-00000020/manifest.json"
    for name in json.loads(file.read_bytes()):
        whole = file.read_bytes()
        fields = json.loads(whole)
        del fields[name]
        file.write_text(json.dumps(fields))
        with pytest.raises(CheckpointError, match=f"the field '{name}' is missing"):
            Checkpoint(file.parent)
        file.write_bytes(whole)


def test_content_that_lacks_rows_of_a_tensor_is_refused_even_with_fitting_checksums(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path, keep=1).commit(cut_of(step=0, shards=1))
    file = path / "shard-00000-of-00001.safetensors"
    file.write_bytes(b"\x08" + bytes(7) + b"{}      ")
    size, sha256 = 16, hashlib.sha256(file.read_bytes()).hexdigest()
    edit_manifest(path, files=files_with(path, bytes=size, sha256=sha256))
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    with pytest.raises(CheckpointError, match=r"has 0 of the 6 rows of 'fc1.weight'"):
        checkpoint.tensor("fc1.bias")


def rename(fields: dict[str, Any], old: str, new: str) -> None:
    fields[new] = fields.pop(old)


def claim_complex(fields: dict[str, Any], key: str) -> None:
    fields["__metadata__"]["complex"] = json.dumps([key])


FOREIGN: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda f: rename(f, "scalar/step/fc1.bias@0", "scalar/step/fc1.bias@1"), "'scalar/step/fc1.bias@1' has shape"),
    (lambda f: rename(f, "scalar/step/fc1.bias@0", f"scalar/step/fc1.bias@{'1' * 5000}"), "is not value/, state/"),
    (lambda f: f["scalar/step/fc1.bias@0"].update(dtype="F32", shape=[2]), "match neither the values of 'fc1.bias'"),
    (lambda f: rename(f, "state/exp_avg/fc1.weight@0", "state/exp_avg/fc1.weight@3"), "match neither the values of"),
    (lambda f: f["value/fc1.bias@0"].update(dtype="I32"), "is stored as I32; the tensor is float32"),
    (lambda f: claim_complex(f, "initialized/fc1.weight@0"), "'initialized/fc1.weight@0' can't be read"),
    (lambda f: f["__metadata__"].update(complex="[" * 100_000), "is truncated or corrupt: maximum recursion"),
]


@pytest.mark.parametrize(("change", "sentence"), FOREIGN, ids=[sentence for _, sentence in FOREIGN])
def test_entries_that_do_not_fit_are_refused_by_name_even_with_fitting_checksums(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], sentence: str
) -> None:
    path = CheckpointStore(tmp_path, keep=1).commit(cut_of(step=0, shards=1))
    edit_header(path, change)
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    with pytest.raises(CheckpointError) as caught:
        list(checkpoint.images(checkpoint.plan, 0))
    assert sentence in str(caught.value) and "shard-00000" in str(caught.value)


def test_best_that_can_not_be_read_is_none(tmp_path: Path) -> None:
    prepare(tmp_path)
    store = CheckpointStore(tmp_path, keep=2)
    store.mark_best(20, {"loss": 0.5})
    assert store.best() is not None
    file = tmp_path / "best"
    for text in ('{"step": 20, "metrics": {"loss": 1' + "0" * 400 + "}}", "[" * 100_000):
        file.write_text(text)
        assert store.best() is None


def test_store_without_a_whole_checkpoint_says_what_is_wrong_with_each(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        CheckpointStore(tmp_path / "absent", keep=1).newest_valid()
    prepare(tmp_path)
    for step in ("step-00000010", "step-00000020"):
        (tmp_path / step / SHARD_0).unlink()
    with pytest.raises(
        CheckpointError,
        match=r"skipping the checkpoint of step 20.*skipping the checkpoint of step "
        r"10",
    ):
        CheckpointStore(tmp_path, keep=1).newest_valid()


def test_latest_is_only_a_hint(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "latest").write_text("step-99999999\n")
    assert CheckpointStore(tmp_path, keep=1).newest_valid().step == 20
    (tmp_path / "latest").unlink()
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-00000030.old").mkdir()
    assert CheckpointStore(tmp_path, keep=1).list() == [10, 20]


def test_asking_for_what_is_not_there_names_what_is(tmp_path: Path) -> None:
    prepare(tmp_path)
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match="no checkpoint of step 15; it has steps 10, 20"):
        store.open(15)
    checkpoint = store.open(20)
    with pytest.raises(CheckpointError, match="no tensor 'fc9'"):
        checkpoint.tensor("fc9")
    with pytest.raises(CheckpointError, match=r"no state 'mu'; it has \['exp_avg', 'exp_avg_sq'\]"):
        checkpoint.read_slice("fc1.bias", 0, 6, "mu")
    with pytest.raises(CheckpointError, match="has 6 rows; rows 3 to 9"):
        checkpoint.read_slice("fc1.bias", 3, 6)
    other = make_plan((spec("fc1.weight", (6, 4)),), 1)
    with pytest.raises(CheckpointError, match=r"is float32 \(6, 5\) here, float32 \(6, 4\) in the plan"):
        list(checkpoint.images(other, 0))

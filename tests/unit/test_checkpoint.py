"""Checkpoints: exact on any plan, kept as told, refused by another job, exported to plain PyTorch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardline.checkpoint import Checkpoint, CheckpointContents, CheckpointStore, export, find_checkpoint
from shardline.checkpoint.content import ContentDigest, Key, shard_entries, slice_rows
from shardline.consistency import CONSISTENCIES
from shardline.core.image import VALUE, BucketImage
from shardline.core.plan import BucketSpec, Plan, ShardSpec, Slice, make_plan
from shardline.core.spec import Argument, ConsistencySpec, JobSpec, RuleSpec, TensorSpec, parts_of
from shardline.errors import CheckpointError, UsageError
from shardline.update import BucketRule, bucket_rule, chosen, rule, wants_whole
from shardline_chief.rules.state.checkpoints import Resume
from tests.support.checkpoints import (
    BUFFER,
    EVERY_KIND,
    FROZEN,
    PARAM,
    SHARD_0,
    SMALL,
    assert_same_images,
    cut_of,
    flip_byte,
    images_of,
    job_of,
    padded_with_zeros,
    prepare,
    random_tensor,
    spec,
    state_of,
)
from tests.support.covering import covering

# What is written comes back, on any plan.


@pytest.mark.parametrize(
    ("shards", "bucket_bytes"), [(1, 2 << 20), (2, 1 << 16), (3, 2 << 20), (5, 1 << 18), (40, 1 << 17)]
)
def test_images_are_exact_on_another_plan(tmp_path: Path, shards: int, bucket_bytes: int) -> None:
    job = job_of(EVERY_KIND)
    store = CheckpointStore(tmp_path, keep=2)
    store.commit(cut_of(job, step=7, plan=make_plan(job.tensors, 2, bucket_bytes=1 << 17)))
    other = make_plan(job.tensors, shards, bucket_bytes=bucket_bytes)
    checkpoint = store.open(7)
    for shard, expected in images_of(other, 7).items():
        assert_same_images(list(checkpoint.images(other, shard)), expected)


def cuts_of(tensors: tuple[TensorSpec, ...], dims: tuple[int, ...], count: int) -> tuple[TensorSpec, ...]:
    """The tensors, each in parts along the dimension given for it, if any."""
    found: list[TensorSpec] = []
    for tensor, dim in zip(tensors, dims, strict=True):
        found += [tensor] if dim < 0 or count == 1 else parts_of(tensor, dim, count)
    return tuple(found)


@pytest.mark.parametrize("first", [((0, 0, 1), 2), ((1, -1, 2), 4), ((-1, -1, -1), 1)], ids=str)
@pytest.mark.parametrize("second", [((0, 0, 1), 4), ((1, 0, 0), 2), ((-1, -1, -1), 1)], ids=str)
def test_tensors_in_parts_are_read_whole_and_in_other_parts(
    tmp_path: Path, first: tuple[tuple[int, ...], int], second: tuple[tuple[int, ...], int]
) -> None:
    tensors = (spec("up", (400, 300)), spec("bias", (8,)), spec("deep", (4, 8, 12)))
    jobs = [job_of(cuts_of(tensors, *cuts)) for cuts in (first, second)]
    store = CheckpointStore(tmp_path, keep=2)
    before = cut_of(jobs[0], step=3, plan=make_plan(jobs[0].tensors, 2, bucket_bytes=1 << 17))
    store.commit(before)
    checkpoint = store.open(3)
    parts = state_of(jobs[0].tensors, 3)
    whole = {}
    for tensor in tensors:
        own = [one for one in jobs[0].tensors if tensor.name in (one.name, one.part_of)]
        joint = [parts[one.name] for one in own]
        whole[tensor.name] = torch.cat(joint, own[0].part_dim) if len(joint) > 1 else joint[0]
        assert torch.equal(checkpoint.tensor(tensor.name), whole[tensor.name]), tensor.name
    assert list(checkpoint.state_dict()) == [tensor.name for tensor in tensors]
    assert torch.equal(checkpoint.read_slice("up", 37, 201), whole["up"][37:238])
    assert checkpoint.compatible(jobs[1]) == []
    # Through images of the other cuts, and back.
    plan = make_plan(jobs[1].tensors, 3, bucket_bytes=1 << 16)
    images = {shard: list(checkpoint.images(plan, shard)) for shard in range(len(plan.shards))}
    images = {shard: [dataclasses.replace(one, step=4) for one in held] for shard, held in images.items()}
    store.commit(dataclasses.replace(before, job=jobs[1], plan=plan, step=4, versions=[3] * len(images), images=images))
    after = store.open(4)
    for tensor in tensors:
        assert torch.equal(after.tensor(tensor.name), whole[tensor.name]), tensor.name
        for state in checkpoint.states(tensor.name):
            rows = (0, tensor.rows, state)
            assert torch.equal(after.read_slice(tensor.name, *rows), checkpoint.read_slice(tensor.name, *rows))


def test_every_dtype_and_shape_is_read_by_name_and_by_rows(tmp_path: Path) -> None:
    job = job_of(EVERY_KIND)
    store = CheckpointStore(tmp_path, keep=2)
    store.commit(cut_of(job, step=1, plan=make_plan(job.tensors, 3, bucket_bytes=1 << 16)))
    checkpoint = store.open(1)
    for name, expected in state_of(job.tensors, 1).items():
        found = checkpoint.tensor(name)
        assert found.dtype is expected.dtype and torch.equal(found, expected), name
    assert torch.equal(checkpoint.tensor("head"), checkpoint.tensor("emb"))
    big = state_of(job.tensors, 1)["big"]
    assert torch.equal(checkpoint.read_slice("big", 37, 301), big[37:338])
    assert checkpoint.read_slice("big", 400, 0).shape == (0, 300)
    assert checkpoint.read_slice("big", 10, 5, "exp_avg_sq").dtype is torch.float64
    assert checkpoint.states("wave") == ["exp_avg", "exp_avg_sq"] and checkpoint.states("mean") == []
    assert checkpoint.scalars("scale") == {"step": 1 + 2 / 3}


def test_a_cut_tensor_lies_in_several_files_and_no_key_names_an_offset(tmp_path: Path) -> None:
    job = job_of(EVERY_KIND)
    path = CheckpointStore(tmp_path, keep=1).commit(cut_of(job, step=0))
    keys = [set(load_file(path / f"shard-{s:05d}-of-00002.safetensors")) for s in (0, 1)]
    rows = [sorted(int(key.rsplit("@")[-1]) for key in held if key.startswith("value/big@")) for held in keys]
    assert all(rows) and min(map(min, rows)) == 0
    assert all(row % 55 == 0 for held in rows for row in held)


def test_keys_survive_names_with_slashes_and_at_signs() -> None:
    for key in (Key("value", "", "a/b@3", 12), Key("state", "exp_avg", "x/y", 0), Key("initialized", "", "@", 5)):
        assert Key.parse(str(key)) == key
    for text in ("weights/a@0", "value/a", "value/a@-1", "state/a@0", "value/a@²"):
        with pytest.raises(CheckpointError, match="entry"):
            Key.parse(text)


def test_states_of_other_shapes_follow_their_whole_tensors(tmp_path: Path) -> None:
    tensors = (*(spec(f"w{n}", (30 + n, 20), whole=True) for n in range(4)), spec("b", (9,), whole=True))
    job = job_of(tensors, rule="Adafactor")
    adafactor = job.rule
    names = ("row_var", "col_var", "variance")

    def images(plan: Plan) -> dict[int, list[BucketImage]]:
        out: dict[int, list[BucketImage]] = {}
        for s, shard in enumerate(plan.shards):
            out[s] = []
            for b, bucket in enumerate(shard.buckets):
                held = {
                    VALUE: padded_with_zeros(plan, s, b, lambda t: random_tensor(t.elements, torch.float32, t.rows))
                }
                for salt, state in enumerate(names):
                    parts = []
                    for piece in bucket.slices:
                        one = dataclasses.replace(bucket, slices=(piece,))
                        size = chosen(adafactor).flat_elements(adafactor, state, one, plan.tensors)
                        parts.append(random_tensor(size, torch.float32, 100 * piece.tensor + salt))
                    flat = torch.cat(parts)
                    if flat.numel():
                        held[state] = flat
                out[s].append(BucketImage(shard=s, bucket=b, step=2, version=2, tensors=held))
        return out

    store = CheckpointStore(tmp_path, keep=1)
    plan = make_plan(tensors, 1)
    store.commit(cut_of(job, step=2, plan=plan, images=images(plan)))
    checkpoint = store.open(2)
    assert checkpoint.read_slice("w1", 0, 31, "row_var").shape == (31,)
    with pytest.raises(CheckpointError, match="has no rows; read it whole"):
        checkpoint.read_slice("w1", 0, 3, "row_var")
    for shards in (1, 2, 5):
        other = make_plan(tensors, shards)
        for shard, expected in images(other).items():
            assert_same_images(list(checkpoint.images(other, shard)), expected)


def test_content_digest_is_the_same_for_every_plan_and_another_for_other_bits() -> None:
    job = job_of(EVERY_KIND)

    def digest(shards: int, seed: int, bucket_bytes: int) -> str:
        plan = make_plan(job.tensors, shards, bucket_bytes=bucket_bytes)
        out = ContentDigest(job.tensors)
        for shard, images in images_of(plan, 3, seed).items():
            out.add(shard_entries(images, plan, shard, job.rule), slice_rows(plan, shard))
        return out.hexdigest()

    assert digest(1, 0, 2 << 20) == digest(4, 0, 1 << 16) == digest(2, 0, 1 << 18)
    assert digest(1, 0, 2 << 20) != digest(1, 1, 2 << 20)


def test_digest_notices_one_bit_of_value_state_scalar_and_flag(tmp_path: Path) -> None:
    job = job_of()
    plan = make_plan(job.tensors, 1)

    def digest(change: Callable[[BucketImage], BucketImage]) -> str:
        images = [change(image) if image.scalars else image for image in images_of(plan, 1)[0]]
        out = ContentDigest(job.tensors)
        out.add(shard_entries(images, plan, 0, job.rule), slice_rows(plan, 0))
        return out.hexdigest()

    def flip(name: str) -> Callable[[BucketImage], BucketImage]:
        def change(image: BucketImage) -> BucketImage:
            flat = image.tensors[name].clone()
            flat.view(torch.uint8)[0] ^= 1
            return dataclasses.replace(image, tensors={**image.tensors, name: flat})

        return change

    digests = [
        digest(lambda image: image),
        digest(flip(VALUE)),
        digest(flip("exp_avg")),
        digest(
            lambda i: dataclasses.replace(i, scalars={"step": tuple(math.nextafter(v, 9) for v in i.scalars["step"])})
        ),
        digest(lambda i: dataclasses.replace(i, initialized=tuple(not flag for flag in i.initialized))),
    ]
    assert len(set(digests)) == len(digests)


def test_one_shard_is_fetched_at_a_time_and_only_when_the_one_before_is_written(tmp_path: Path) -> None:
    job = job_of()
    plan = make_plan(job.tensors, 3)
    images = images_of(plan, 0)
    seen: list[tuple[int, int]] = []

    def fetch(shard: int) -> Iterator[BucketImage]:
        seen.append((shard, len(list(tmp_path.glob("tmp-3-0/*.safetensors")))))
        yield from images[shard]

    CheckpointStore(tmp_path, keep=1).commit(cut_of(job, plan=plan, images=fetch))
    assert seen == [(0, 0), (1, 1), (2, 2)]


def test_states_missing_in_a_shard_that_never_saw_a_gradient_become_zeros(tmp_path: Path) -> None:
    """In asynchronous mode a cut isn't one instant: one slice of a tensor may have its state before another has."""
    job = job_of((spec("big", (400, 300)),), consistency=ConsistencySpec(mode="async"))
    plan = make_plan(job.tensors, 2)
    images = images_of(plan, 5)
    cold = [
        dataclasses.replace(i, tensors={VALUE: i.tensors[VALUE]}, scalars={}, initialized=(False,) * len(i.initialized))
        for i in images[1]
    ]
    store = CheckpointStore(tmp_path, keep=1)
    store.commit(cut_of(job, step=5, plan=plan, images={0: images[0], 1: cold}, consistent=False, versions=[5, 0]))
    checkpoint = store.open(5)
    uncut = Slice(tensor=0, first_row=0, rows=400, offset=0, elements=120_000)
    bucket = BucketSpec(dtype="float32", kind=PARAM, elements=120_000, slices=(uncut,))
    (image,) = checkpoint.images(Plan(job.tensors, (ShardSpec(buckets=(bucket,)),)), 0)
    assert image.initialized == (True,) and image.scalars == {"step": (5.0,)} and image.version == 5
    for shard, held in ((0, True), (1, False)):
        for bucket in plan.shards[shard].buckets:
            for piece in bucket.slices:
                start = piece.first_row * 300
                assert bool(image.tensors["exp_avg"][start : start + piece.elements].any()) is held
    with pytest.raises(CheckpointError, match="lack rows"):
        checkpoint.read_slice("big", 0, 400, "exp_avg")


class Shards:
    """All shards of a plan with real update rules, as parameter servers hold them."""

    def __init__(self, job: JobSpec, plan: Plan) -> None:
        self.plan, self.step = plan, 0
        self.values: dict[tuple[int, int], torch.Tensor] = {}
        self.rules: dict[tuple[int, int], BucketRule] = {}
        for s, shard in enumerate(plan.shards):
            for b, bucket in enumerate(shard.buckets):
                self.values[s, b] = padded_with_zeros(plan, s, b, self._content(0))
                self.rules[s, b] = bucket_rule(job.rule, job.schedule, bucket, plan.tensors, torch.device("cpu"))

    @staticmethod
    def _content(step: int) -> Callable[[TensorSpec], torch.Tensor]:
        return lambda tensor: random_tensor(tensor.elements, torch.float32, 1000 * step + tensor.rows)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            for (s, b), values in self.values.items():
                gradient = padded_with_zeros(self.plan, s, b, self._content(self.step))
                # One tensor never gets a gradient, another not in the first steps: their states begin late or never.
                names = [self.plan.tensors[p.tensor].name for p in self.plan.shards[s].buckets[b].slices]
                present = [name != "unused" and (name != "late" or self.step > 3) for name in names]
                self.rules[s, b].apply(values, gradient, clock=self.step, present=present)

    def images(self) -> dict[int, list[BucketImage]]:
        out: dict[int, list[BucketImage]] = {s: [] for s in range(len(self.plan.shards))}
        for (s, b), values in self.values.items():
            states, scalars, flags = self.rules[s, b].export()
            image = BucketImage(
                shard=s,
                bucket=b,
                step=self.step,
                version=self.step,
                tensors={VALUE: values.clone(), **states},
                scalars=scalars,
                initialized=flags,
            )
            out[s].append(image)
        return out

    def load(self, checkpoint: Checkpoint) -> None:
        self.step = checkpoint.step
        for s in range(len(self.plan.shards)):
            for image in checkpoint.images(self.plan, s):
                self.values[s, image.bucket] = image.tensors[VALUE]
                self.rules[s, image.bucket].load(image.tensors, image.scalars, image.initialized)


@pytest.mark.parametrize(
    ("name", "shards"),
    covering(["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Rprop", "Muon", "Adafactor"], [(1, 3), (3, 2)]),
)
def test_training_goes_on_bit_for_bit_on_another_plan(tmp_path: Path, name: str, shards: tuple[int, int]) -> None:
    before, after = shards
    group: dict[str, Argument] = {"lr": 0.01, "momentum": 0.9} if name in ("SGD", "RMSprop") else {"lr": 0.01}
    whole = wants_whole(rule(name), (2, 2))
    shapes: dict[str, tuple[int, ...]] = {"big": (400, 300), "late": (200, 310), "unused": (50, 30), "small": (9, 4)}
    if name == "Muon":
        # Its matrices are not cut, and it multiplies them many times.
        shapes |= {"big": (80, 60), "late": (40, 62)}
    else:
        shapes["bias"] = (301,)
    tensors = tuple(spec(tensor, shape, whole=whole) for tensor, shape in shapes.items())
    job = JobSpec(name="digits", tensors=tensors, rule=rule(name, (group,)))
    store = CheckpointStore(tmp_path, keep=5)

    straight = Shards(job, make_plan(tensors, before))
    straight.train(2)
    store.commit(cut_of(job, step=2, plan=straight.plan, images=straight.images()))
    resumed = Shards(job, make_plan(tensors, after, bucket_bytes=1 << 18))
    resumed.load(store.open(2))

    straight.train(3)
    resumed.train(3)
    path = store.commit(cut_of(job, step=5, plan=straight.plan, images=straight.images()))
    # Content other in a single bit would be refused here.
    assert store.commit(cut_of(job, step=5, plan=resumed.plan, images=resumed.images())) == path


def test_shards_of_an_asynchronous_cut_come_back_at_steps_of_their_own(tmp_path: Path) -> None:
    job = job_of(consistency=ConsistencySpec(mode="async"))
    plan = make_plan(job.tensors, 2)
    images = {0: images_of(plan, 41)[0], 1: images_of(plan, 43)[1]}
    store = CheckpointStore(tmp_path, keep=1)
    store.commit(cut_of(job, step=40, plan=plan, images=images, consistent=False, versions=[41, 43]))
    checkpoint = store.open(40)
    for shard in (0, 1):
        assert_same_images(list(checkpoint.images(plan, shard)), images[shard])
    assert {(i.step, i.version) for i in checkpoint.images(make_plan(job.tensors, 1), 0)} == {(43, 43)}


def test_flags_padded_to_whole_bytes_are_those_of_the_slices(tmp_path: Path) -> None:
    """Without scalars (SGD with momentum) the wire can't tell how many slices there were."""
    plan = make_plan(SMALL, 1)
    bare = [dataclasses.replace(image, scalars={}) for image in images_of(plan, 1)[0]]
    padded = [dataclasses.replace(image, initialized=(*image.initialized, False, False)) for image in bare]
    store = CheckpointStore(tmp_path, keep=1)
    store.commit(cut_of(step=1, plan=plan, images={0: padded}))
    flags = [image.initialized for image in store.open(1).images(plan, 0) if "exp_avg" in image.tensors]
    assert flags == [image.initialized for image in bare if "exp_avg" in image.tensors] != []


def test_manifest_carries_cursor_leases_timeline_and_versions(tmp_path: Path) -> None:
    extra = {"cursor": {"batch": 41}, "leases": [{"lease": 3, "done": True}], "sequences": {"worker/0": {"0": 12}}}
    store = CheckpointStore(tmp_path, keep=1)
    store.commit(cut_of(step=4, extra=extra, consistent=False, versions=[9, 8]))
    manifest = store.open(4).manifest
    assert manifest.cursor == {"batch": 41} and manifest.extra["sequences"] == {"worker/0": {"0": 12}}
    assert manifest.timeline == (3 << 32) | 1 and manifest.versions == (9, 8) and not manifest.consistent
    assert manifest.aliases == {"head.weight": "emb.weight"} and manifest.torch_version == torch.__version__
    store.commit(cut_of(step=5))
    assert store.open(5).manifest.cursor == {"step": 5}


# Retention.


def test_retention_keeps_the_newest_the_best_and_the_protected(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(0, 70, 10):
        store.commit(cut_of(step=step))
        if step == 10:
            store.mark_best(10, {"accuracy": 0.9, "loss": math.nan})
        if step == 20:
            store.protect(20)
    assert store.list() == [10, 20, 50, 60]
    best = store.best()
    assert best is not None and best.step == 10 and best.metrics["accuracy"] == 0.9 and math.isnan(best.metrics["loss"])
    store.unprotect(20)
    store.mark_best(60, {"accuracy": 0.95})
    store.commit(cut_of(step=70))
    assert store.list() == [60, 70]
    with pytest.raises(CheckpointError, match="no checkpoint of step 10 to mark"):
        store.mark_best(10, {})


def test_retention_never_deletes_the_only_whole_checkpoint(tmp_path: Path) -> None:
    """Back at 10 since 20 is damaged; the next cut is below 20 and must outlive it."""
    prepare(tmp_path)
    (tmp_path / "step-00000020" / SHARD_0).unlink()
    store = CheckpointStore(tmp_path, keep=1)
    store.commit(cut_of(step=15))
    assert store.newest_valid().step == 15


def test_open_checkpoint_outlives_its_deletion(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.commit(cut_of(step=1))
    reading = store.open(1)
    reading.tensor("fc1.bias")
    store.commit(cut_of(step=2))
    assert store.list() == [2]
    assert torch.equal(reading.tensor("fc1.weight"), state_of(SMALL, 1)["fc1.weight"])


def test_unreadable_best_hint_counts_as_none(tmp_path: Path) -> None:
    prepare(tmp_path)
    store = CheckpointStore(tmp_path, keep=2)
    for text in ("", "{}", "[1]", '{"step": 10}', '{"step": "10", "metrics": {}}', '{"step": 11, "metrics": {}}'):
        (tmp_path / "best").write_text(text)
        assert store.best() is None
    with pytest.raises(UsageError, match="at least 1"):
        CheckpointStore(tmp_path, keep=0)


# Resuming another job.


def changed(name: str, **changes: Any) -> tuple[TensorSpec, ...]:
    return tuple(dataclasses.replace(t, **changes) if t.name == name else t for t in SMALL)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (job_of(changed("fc1.weight", shape=(6, 8))), "'fc1.weight' has shape (6, 8) in the job, (6, 5) in the"),
        (job_of(changed("fc1.bias", dtype="float64")), "'fc1.bias' has dtype float64 in the job, float32"),
        (job_of(changed("fc1.bias", kind=FROZEN)), "'fc1.bias' has kind frozen in the job, param"),
        (job_of(SMALL[:-1]), "'bn.num_batches_tracked' is in the checkpoint but not in the job"),
        (job_of((*SMALL, spec("new", (1,)))), "'new' is in the job but not in the checkpoint"),
        (job_of(rule="SGD"), "the update rule is SGD in the job, Adam in the checkpoint"),
        (job_of(replicas=4), "replicas is 4 in the job, 1 in the checkpoint"),
        (job_of(batch_size=2), "batch_size is 2"),
        (job_of(seed=9), "seed is 9"),
        (job_of(accumulate=2), "accumulate is 2"),
        (job_of(consistency=ConsistencySpec(mode="async")), "consistency is async in the job, sync"),
        (job_of(consistency=ConsistencySpec(mode="async:in_stages=true")), "consistency is async in the job, sync"),
    ],
)
def test_foreign_checkpoint_is_refused_with_the_difference_named(tmp_path: Path, other: JobSpec, sentence: str) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.commit(cut_of())
    with pytest.raises(CheckpointError) as caught:
        store.open(0).compatible(other)
    assert sentence in str(caught.value) and "step-00000000 belongs to another job ('digits')" in str(caught.value)


def test_a_checkpoint_of_a_mode_that_does_not_exist_here_is_refused_by_its_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.commit(cut_of(job_of(consistency=ConsistencySpec(mode="bounded:by=2"))))
    with pytest.raises(CheckpointError, match="consistency is sync in the job, bounded:by=2 in the checkpoint"):
        store.open(0).compatible(job_of())


def test_longer_training_other_lr_and_other_policy_are_noted_and_allowed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    job = job_of(steps=100)
    store.commit(cut_of(job))
    checkpoint = store.open(0)
    assert checkpoint.compatible(job) == []
    groups = ({**job.rule.groups[0], "lr": 0.5},)
    later = dataclasses.replace(job, steps=200, checkpoint_keep=9, rule=RuleSpec(name="Adam", groups=groups))
    assert checkpoint.compatible(later) == [
        "steps: 200 in the job, 100 in the checkpoint",
        "checkpoint_keep: 9 in the job, 3 in the checkpoint",
        "rule.groups[0].lr: 0.5 in the job, 0.1 in the checkpoint",
    ]
    asynchronous = job_of(consistency=ConsistencySpec(mode="async"))
    store.commit(cut_of(asynchronous, step=1))
    assert store.open(1).compatible(dataclasses.replace(asynchronous, seed=3, batch_size=8)) != []


@pytest.mark.parametrize("mode", ["async", "ssp:slack=2"])
def test_stages_go_on_from_a_checkpoint_without_them_and_the_other_way(tmp_path: Path, mode: str) -> None:
    store, plain = CheckpointStore(tmp_path, keep=2), job_of(consistency=ConsistencySpec(mode=mode))
    inner = str(CONSISTENCIES.parse(mode).staged())
    staged = dataclasses.replace(plain, consistency=ConsistencySpec(mode=inner), pipeline="flush")
    for step, (before, after) in enumerate(((plain, staged), (staged, plain))):
        store.commit(cut_of(before, step=step))
        (note,) = store.open(step).compatible(after)
        assert note.startswith("pipeline: ")
    # Every update counts as a batch that is done.
    assert Resume(store.open(1)).cursor == {"done": [[0, 1]]} and Resume(store.open(0)).cursor == {}


# Export.


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(7, 3)
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.emb.weight
        self.bn = torch.nn.BatchNorm1d(3)


def tied_cut() -> tuple[Tied, CheckpointContents]:
    model = Tied()
    state = model.state_dict()
    kinds = {name: PARAM for name, _ in model.named_parameters()}
    tensors = tuple(
        TensorSpec(
            name=name,
            shape=tuple(value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            kind=kinds.get(name, BUFFER),
            aliases=("head.weight",) if name == "emb.weight" else (),
        )
        for name, value in state.items()
        if name != "head.weight"
    )
    plan = make_plan(tensors, 2)
    job = job_of(tensors)
    images = {
        s: [
            BucketImage(
                shard=s,
                bucket=b,
                step=3,
                version=3,
                tensors={VALUE: padded_with_zeros(plan, s, b, lambda t: state[t.name].reshape(-1))},
            )
            for b in range(len(shard.buckets))
        ]
        for s, shard in enumerate(plan.shards)
    }
    return model, cut_of(job, step=3, plan=plan, images=images)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("given", ["step", "checkpoints", "run"])
def test_export_loads_in_plain_torch_with_tied_weights_and_buffers(tmp_path: Path, suffix: str, given: str) -> None:
    model, cut = tied_cut()
    folder = tmp_path / "checkpoints"
    step = CheckpointStore(folder, keep=1).commit(cut)
    out = tmp_path / f"model{suffix}"
    export({"step": step, "checkpoints": folder, "run": tmp_path}[given], out)
    loaded = load_file(out) if suffix == ".safetensors" else torch.load(out, weights_only=True)
    fresh = Tied()
    fresh.load_state_dict(loaded, strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    assert fresh.head.weight is fresh.emb.weight
    if suffix == ".pt":
        assert loaded["head.weight"].data_ptr() == loaded["emb.weight"].data_ptr()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", out.name]


@pytest.mark.parametrize(("given", "step"), [("best", 10), ("latest", 20), ("", 20)])
def test_export_takes_the_best_or_the_newest_by_the_names_in_the_folder(tmp_path: Path, given: str, step: int) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for number in (0, 10, 20):
        store.commit(cut_of(step=number))
    with pytest.raises(CheckpointError, match="is marked as the best: none was scored; leave out --best"):
        find_checkpoint(tmp_path, best=True)
    store.mark_best(10, {"accuracy": 0.9})
    assert find_checkpoint(tmp_path / "checkpoints" / given).step == step
    assert find_checkpoint(tmp_path, best=True).step == 10


def test_export_refuses_what_it_cant_write_with_a_sentence(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "held", keep=1)
    path = store.commit(cut_of(job_of((*SMALL, spec("wave", (2,), "complex128", FROZEN)))))
    with pytest.raises(UsageError, match=r"ends in '.bin'; it must end in .safetensors or .pt"):
        export(path, tmp_path / "model.bin")
    with pytest.raises(UsageError, match="'wave' is complex128"):
        export(path, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="can't be written"):
        export(path, tmp_path / "absent" / "model.pt")
    with pytest.raises(CheckpointError, match="does not exist"):
        export(tmp_path / "nowhere", tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="is not a checkpoint and does not contain one"):
        find_checkpoint(tmp_path)
    flip_byte(path / SHARD_0, -1)
    with pytest.raises(CheckpointError, match="is corrupt"):
        export(path, tmp_path / "model.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["held"]

"""The state of the optimizer that workers run: what shards take of it, what they refuse, and whom they give it to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardline.core.gradients import Gradient
from shardline.core.image import VALUE, BucketImage
from shardline.core.outcome import Outcome
from shardline.core.plan import make_plan
from shardline.core.reduce import Block
from shardline.core.spec import TensorKind, TensorSpec
from shardline.errors import ProtocolError, ShardlineError
from shardline.lanes.calls import NotAdmittedError
from shardline.storage.bucket import Bucket
from tests.support.builders import make_shard
from tests.support.cluster import Cluster, Worker
from tests.support.jobs import Rich, make_job

STEPS = 3


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[Cluster, Worker]]:
    job = make_job("adam", model=Rich, steps=STEPS, replicas=1, apply="worker")
    with Cluster(job, ps=1, bucket_bytes=256) as cluster:
        yield cluster, cluster.train([[0]])[0]


def held(worker: Worker) -> list[BucketImage]:
    """The state that a worker would bring to shard 0."""
    applied = worker.trainer.methods.applied
    assert applied is not None
    return applied.images(0)


def bring(cluster: Cluster, worker: Worker, images: list[BucketImage], **sender: Any) -> Outcome:
    lane = worker.trainer.exchange.lanes[0]
    return lane.bring_state(replace(worker.trainer.sender, **sender), images, timeout_s=10.0)


def test_a_state_is_kept_for_a_cut_of_its_step_that_comes_later(trained: tuple[Cluster, Worker]) -> None:
    cluster, worker = trained
    shard, images = cluster.shards[0], held(worker)
    assert bring(cluster, worker, images) is Outcome.COUNTED
    assert shard.cuts.get(STEPS) is None
    assert shard.request_cut(STEPS, stop=False) == (False, STEPS)
    found = shard.cuts.get(STEPS)
    assert found is not None and len(found) == len(shard.buckets)
    by_bucket = {image.bucket: image for image in found}
    for image in images:
        assert by_bucket[image.bucket].version == STEPS
        for name, values in image.tensors.items():
            assert torch.equal(by_bucket[image.bucket].tensors[name], values)
    shard.cuts.release(STEPS)
    assert shard.cuts.offered(images[0].bucket, STEPS) is None


def test_a_state_of_another_step_changes_nothing(trained: tuple[Cluster, Worker]) -> None:
    cluster, worker = trained
    images = [replace(image, step=STEPS - 1) for image in held(worker)]
    assert bring(cluster, worker, images) is Outcome.DUPLICATE
    assert cluster.shards[0].cuts.offered(images[0].bucket, STEPS - 1) is None


def longer(image: BucketImage) -> BucketImage:
    return replace(image, tensors={**image.tensors, VALUE: torch.zeros(image.tensors[VALUE].numel() + 64)})


def in_another_dtype(image: BucketImage) -> BucketImage:
    return replace(image, tensors={**image.tensors, VALUE: image.tensors[VALUE].double()})


def without_a_state(image: BucketImage) -> BucketImage:
    return replace(image, tensors={VALUE: image.tensors[VALUE]})


def with_another_state(image: BucketImage) -> BucketImage:
    return replace(image, tensors={**image.tensors, "momentum_buffer": image.tensors[VALUE]})


def not_a_number(image: BucketImage) -> BucketImage:
    return replace(image, scalars={name: (float("nan"),) * len(numbers) for name, numbers in image.scalars.items()})


WRONG = [longer, in_another_dtype, without_a_state, with_another_state, not_a_number]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_state_that_does_not_fit_is_refused_whole(trained: tuple[Cluster, Worker], wrong: Any) -> None:
    cluster, worker = trained
    images = held(worker)
    before = cluster.shards[0].cuts.held_bytes
    with pytest.raises(ShardlineError):
        bring(cluster, worker, [*images[:-1], wrong(images[-1])])
    assert cluster.shards[0].cuts.held_bytes == before


@pytest.mark.parametrize("wrong", ["missing", "repeated", "foreign"])
def test_a_state_of_other_buckets_is_refused(trained: tuple[Cluster, Worker], wrong: str) -> None:
    cluster, worker = trained
    images = held(worker)
    found = {
        "missing": images[1:],
        "repeated": [*images, images[0]],
        "foreign": [*images[1:], replace(images[0], bucket=999)],
    }[wrong]
    with pytest.raises(ShardlineError, match="buckets of parameters; the state is of buckets"):
        bring(cluster, worker, found)


def test_strangers_and_zombies_neither_bring_nor_take_a_state(trained: tuple[Cluster, Worker]) -> None:
    cluster, worker = trained
    assert bring(cluster, worker, held(worker), timeline=99) is Outcome.WRONG_TIMELINE
    lane = worker.trainer.exchange.lanes[0]
    with pytest.raises(NotAdmittedError):
        lane.state(replace(worker.trainer.sender, timeline=99), STEPS, (), timeout_s=10.0)
    assert lane.state(worker.trainer.sender, STEPS, (), timeout_s=10.0) is None


def test_servers_that_run_the_optimizer_keep_its_state_to_themselves() -> None:
    with Cluster(make_job("adam", steps=STEPS, replicas=1), ps=1) as cluster:
        (worker,) = cluster.train([[0]])
        lane, sender = worker.trainer.exchange.lanes[0], worker.trainer.sender
        with pytest.raises(ShardlineError, match="runs the optimizer of this job itself"):
            lane.state(sender, STEPS, (), timeout_s=10.0)
        with pytest.raises(ShardlineError, match="runs the optimizer of this job itself"):
            lane.bring_state(sender, [], timeout_s=10.0)


def test_a_pull_that_ends_right_when_a_step_is_published_says_that_its_cut_lacks_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Cluster(make_job("adam", steps=STEPS, replicas=1, apply="worker"), ps=1, cut_every=STEPS) as cluster:
        shard, said = cluster.shards[0], []
        assert shard.summing is not None
        assert all(bucket.spec.kind is TensorKind.PARAM for bucket in shard.buckets)
        plain = Bucket.publish

        def publish(bucket: Bucket, changed: bool, *, skip: bool = False) -> None:
            plain(bucket, changed, skip=skip)
            # Pulls read the step without a lock.
            said.append((shard.step_min, shard.summing is not None and shard.summing.wants_state()))

        monkeypatch.setattr(Bucket, "publish", publish)
        cluster.train([[0]])
        assert said[-1] == (STEPS, True)
        assert not any(wants for step, wants in said if step < STEPS)
        found = shard.cuts.get(STEPS)
        assert found is not None and len(found) == len(shard.buckets)
        assert not shard.summing.wants_state()


def test_a_shard_that_was_just_restored_wants_nothing() -> None:
    with Cluster(make_job("adam", steps=STEPS, replicas=1, apply="worker"), ps=1, cut_every=STEPS) as cluster:
        (worker,) = cluster.train([[0]])
        (images,) = cluster.images()
        shard = cluster.shards[0]
        shard.restore(images)
        assert shard.summing is not None and not shard.summing.wants_state()
        bring(cluster, worker, held(worker))
        assert shard.cuts.status() == []


def test_stages_bring_and_take_their_parts_each_at_its_own_step() -> None:
    tensors = tuple(TensorSpec(name=f"w{stage}", shape=(4,), dtype="float32", fragment=stage) for stage in (0, 1))
    plan = make_plan(tensors, 1)
    shard = make_shard(plan, aggregates=True, cut_every=2)
    assert shard.summing is not None
    begun = shard.summing.state(0, [1])
    assert begun is not None and [image.bucket for image in begun] == [1]

    def close(number: int) -> None:
        absent = Gradient(None, (False,))
        assert shard.contribute(number, shard.buckets[number].step, Block(0, 1), absent).outcome is Outcome.COUNTED

    close(1)
    assert shard.summing.state(0, [0]) is not None and shard.summing.state(0, [1]) is None
    close(1)
    assert shard.summing.wants_state([1]) and not shard.summing.wants_state([0]) and shard.summing.wants_state()
    assert shard.buckets[1].changed_step == 1, "a bucket that still has no gradient has not changed"
    image = replace(begun[0], step=2)
    assert shard.summing.bring([image]).outcome is Outcome.COUNTED
    assert not shard.summing.wants_state() and shard.cuts.get(2) is None
    close(0)
    close(0)
    assert shard.summing.wants_state([0]) and not shard.summing.wants_state([1])
    assert shard.summing.bring([replace(image, bucket=0)]).outcome is Outcome.COUNTED
    found = shard.cuts.get(2)
    assert found is not None and [one.bucket for one in found] == [0, 1]
    with pytest.raises(ProtocolError, match="bucket 7 has no parameters"):
        shard.summing.state(2, [7])

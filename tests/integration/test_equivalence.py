"""Synchronous training ends in the bits of the one-process reference, whoever runs replicas and holds shards."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline import schedule
from shardline.errors import NonFiniteError
from shardline.job import Job
from shardline.testing import ReferenceResult, reference
from tests.support.cluster import Cluster, assert_same_end, split_evenly
from tests.support.covering import covering
from tests.support.jobs import OPTIMIZERS, Rich, Wide, data, make_job, mlp, mse

SMALL_BUCKETS = 256
"""Bytes; every tensor of a small model then has a bucket of its own."""


@functools.cache
def rich_end(optimizer: str) -> ReferenceResult:
    return reference(make_job(optimizer, model=Rich))


@pytest.mark.part(of=3)
@pytest.mark.parametrize(
    ("optimizer", "workers", "ps", "apply"), covering(OPTIMIZERS, [1, 2, 3], [1, 2, 3], ["server", "worker"])
)
def test_any_number_of_workers_and_ps_ends_in_the_bits_of_the_reference(
    optimizer: str, workers: int, ps: int, apply: str
) -> None:
    with Cluster(make_job(optimizer, model=Rich, apply=apply), ps=ps, bucket_bytes=SMALL_BUCKETS * ps) as cluster:
        assert len(cluster.plan.shards) == ps
        held = cluster.train(split_evenly(3, workers))
        assert_same_end(cluster.state(), rich_end(optimizer))
        for worker in held:
            for name, value in worker.values.items():
                everything = {**rich_end(optimizer).params, **rich_end(optimizer).buffers}
                assert torch.equal(value, everything[name]), f"worker/{worker.index} holds another {name}"


@pytest.mark.parametrize("apply", ["server", "worker"])
@pytest.mark.parametrize(("optimizer", "ps"), [("nesterov", 2), ("adamw", 3), ("adagrad", 1)])
def test_a_tensor_cut_over_shards_and_buckets_has_the_bits_of_the_uncut_one(
    optimizer: str, ps: int, apply: str
) -> None:
    job = make_job(optimizer, model=Wide, clip_norm=0.5, steps=3, apply=apply)
    with Cluster(job, ps=ps, bucket_bytes=96 << 10) as cluster:
        pieces = [
            piece
            for shard in cluster.plan.shards
            for bucket in shard.buckets
            for piece in bucket.slices
            if cluster.plan.tensors[piece.tensor].name == "rows.weight"
        ]
        assert len(pieces) >= 5
        cluster.train(split_evenly(3, 2))
        assert_same_end(cluster.state(), reference(job))


@pytest.mark.parametrize(("workers", "ps"), [(1, 1), (2, 3)])
def test_workers_run_an_optimizer_from_outside_torch_with_the_bits_of_one_process(workers: int, ps: int) -> None:
    job = make_job("lion", model=Rich, apply="worker", clip_norm=0.5, schedule=schedule.cosine(warmup_steps=2))
    expected = reference(job)
    with Cluster(job, ps=ps, bucket_bytes=SMALL_BUCKETS * ps) as cluster:
        cluster.train(split_evenly(3, workers))
        assert_same_end(cluster.state(), expected)


CASES: dict[str, dict[str, Any]] = {
    "microbatches": {"accumulate": 3, "batch_size": 2},
    "schedule": {"schedule": schedule.cosine(warmup_steps=2)},
    "clipping": {"clip_norm": 0.05, "optimizer": "adamw"},
    "clipping that never bites": {"clip_norm": 1e6},
    "clipping and schedule": {"clip_norm": 0.1, "schedule": schedule.step(2, 0.5), "optimizer": "nesterov"},
    "one replica": {"replicas": 1},
}


@pytest.mark.parametrize(("case", "apply"), covering(CASES, ["server", "worker"]))
def test_every_setting_ends_in_the_bits_of_the_reference(case: str, apply: str) -> None:
    settings = dict(CASES[case])
    job = make_job(settings.pop("optimizer", "momentum"), model=Rich, apply=apply, **settings)
    with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.train(split_evenly(job.replicas, min(2, job.replicas)))
        assert_same_end(cluster.state(), reference(job))


OWNERS = [
    [[0, 1]],
    [[0, 1], [2]],
    [[2, 0], [1]],
    [[0, 1, 2, 3], [4]],
    [[0, 2, 4], [1], [3]],
    [[0, 1, 2], [3, 4, 5]],
    [[4, 5], [0, 1, 2, 3]],
    [[0], [1, 2], [3, 4, 5]],
]


@pytest.mark.parametrize(("clip_norm", "ownership"), covering([0.0, 0.05], OWNERS))
def test_uneven_owners_of_replicas_sum_along_the_same_tree(
    ownership: Sequence[Sequence[int]], clip_norm: float
) -> None:
    replicas = sum(map(len, ownership))
    job = make_job("adam", model=Rich, replicas=replicas, batch_size=3, steps=3, clip_norm=clip_norm)
    with Cluster(job, ps=2) as cluster:
        cluster.train(ownership)
        assert_same_end(cluster.state(), reference(job))


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": parameters[:2], "lr": 0.02, "weight_decay": 0.1},
        {"params": parameters[2:4], "momentum": 0.5},
        {"params": parameters[4:5]},
    ]


@pytest.mark.parametrize("ps", [1, 2])
def test_parameter_groups_keep_their_own_arguments_and_ungrouped_parameters_stay(ps: int) -> None:
    job = make_job("momentum", param_groups=grouped, schedule=schedule.linear())
    with Cluster(job, ps=ps, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.train([[0], [1, 2]])
        assert_same_end(cluster.state(), reference(job))
        assert torch.equal(cluster.state().params["4.bias"], job.build_model().state_dict()["4.bias"])


@pytest.mark.parametrize(
    ("dtype", "optimizer", "apply"),
    covering([torch.float64, torch.bfloat16], ["nesterov", "adamw"], ["server", "worker"]),
)
def test_other_float_types_end_in_the_bits_of_the_reference(dtype: torch.dtype, optimizer: str, apply: str) -> None:
    def model() -> nn.Module:
        return mlp().to(dtype)

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return mse(model, [part.to(dtype) for part in batch])

    job = make_job(optimizer, model=model, loss=loss, replicas=2, apply=apply)
    with Cluster(job, ps=2) as cluster:
        cluster.train([[0], [1]])
        assert_same_end(cluster.state(), reference(job))


def data_with_a_nan() -> TensorDataset:
    x, y = (part[:48] for part in data().tensors)
    return TensorDataset(torch.where(torch.arange(48)[:, None] == 41, torch.nan, x), y)


@pytest.mark.parametrize(("cluster_size", "clip_norm"), covering([(1, 1), (2, 3), (3, 2)], [0.0, 0.2]))
def test_a_nan_in_one_replica_skips_the_step_on_every_shard(cluster_size: tuple[int, int], clip_norm: float) -> None:
    workers, ps = cluster_size
    # 48 samples make 4 steps of 3 x 4: the NaN is met exactly once.
    job = make_job("adam", model=Rich, dataset=data_with_a_nan, nan_policy="skip", clip_norm=clip_norm)
    expected = reference(job)
    assert len(expected.skipped) == 1
    with Cluster(job, ps=ps, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.train(split_evenly(3, workers))
        state = cluster.state()
        assert (state.step, state.version) == (4, 3)
        assert_same_end(state, expected)
        assert [shard.tally.skipped_steps for shard in cluster.shards] == [1] * ps


def test_a_nan_stops_the_job_before_anything_of_it_is_sent() -> None:
    job = make_job("adam", model=Rich, dataset=data_with_a_nan)
    with Cluster(job, ps=2) as cluster:
        with pytest.raises(NonFiniteError, match=r"replica .* loss, the gradient of '.*' has NaN or infinity"):
            cluster.train([[0, 1, 2]])
        before = cluster.state()
        assert before.step == before.version < 4
        assert_same_end(before, reference(job, before.step))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_replicas_equal_plain_training_on_the_joined_batch_within_rounding(optimizer: str) -> None:
    job = make_job(optimizer)
    joined = make_job(optimizer, replicas=1, batch_size=12)
    with Cluster(job, ps=2) as cluster:
        cluster.train([[0], [1], [2]])
        state = cluster.state()
    for name, value in reference(joined).params.items():
        torch.testing.assert_close(state.params[name], value.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", ["bf16", "fp16"])
def test_a_rounding_codec_halves_the_bytes_and_ends_near_the_exact_result(codec: str) -> None:
    job: Job = make_job("momentum", codec=codec, steps=10)
    with Cluster(job, ps=2) as cluster:
        workers = cluster.train([[0], [1, 2]])
        state = cluster.state()
    for worker in workers:
        push_raw, push_wire, pull_raw, pull_wire = worker.trainer.meter.total
        assert 2 * push_wire == push_raw > 0
        assert 2 * pull_wire == pull_raw > 0
    exact = reference(make_job("momentum", steps=10))
    first = reference(job, 0)
    for name, value in exact.params.items():
        moved = float((value - first.params[name]).abs().max())
        off = float((state.params[name] - value).abs().max())
        assert 0.0 < off < 0.25 * moved + 0.01, name


def test_a_rounding_codec_leaves_buffers_and_first_values_exact() -> None:
    job = make_job("sgd", model=Rich, codec="bf16", steps=1)
    with Cluster(job) as cluster:
        first = reference(job, 0)
        assert_same_end(cluster.state(), first)
        cluster.train([[0, 1, 2]])
        tracked = cluster.state().buffers["norm.num_batches_tracked"]
        assert tracked.dtype == torch.int64 and int(tracked) == 1
        expected = reference(make_job("sgd", model=Rich, steps=1)).buffers["norm.running_mean"]
        # The worker computed it from parameters that travelled in bfloat16; the statistics themselves were not rounded.
        mean = cluster.state().buffers["norm.running_mean"]
        torch.testing.assert_close(mean, expected, rtol=0.05, atol=0.01)
        assert not torch.equal(mean, mean.to(torch.bfloat16).float())

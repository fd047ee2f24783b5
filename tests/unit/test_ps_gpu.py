"""Shards on a CUDA device; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from shardline.core.gradients import Gradient
from shardline.core.image import VALUE
from shardline.core.reduce import Block
from shardline.core.spec import TensorSpec
from shardline.host.process import memory_limit, resolve_device
from shardline.update import rule
from shardline_ps.shard.shard import Shard
from tests.support.builders import make_settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def shard_on(device: str) -> Shard:
    tensors = (
        TensorSpec(name="weight", shape=(300, 70), dtype="float32"),
        TensorSpec(name="bias", shape=(70,), dtype="float32"),
    )
    adamw = rule("AdamW", groups=({"lr": 0.01},))
    return Shard(0, make_settings(tensors, rule=adamw, replicas=2, cut_every=2, device=torch.device(device)))


def train(shard: Shard, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    bucket = shard.buckets[0]
    present = (True,) * len(bucket.spec.slices)
    if not bucket.initialized:
        shard.initialize(0, torch.zeros(bucket.spec.elements))
    for step in range(bucket.step, bucket.step + steps):
        for replica in range(shard.settings.replicas):
            values = torch.randn(bucket.spec.elements, generator=generator)
            shard.contribute(0, step, Block(replica, 1), Gradient(values, present))
    return bucket.image().tensors[VALUE]


def test_a_shard_on_the_gpu_learns_what_one_on_the_cpu_learns() -> None:
    on_gpu, on_cpu = shard_on("cuda"), shard_on("cpu")
    torch.testing.assert_close(train(on_gpu, 5), train(on_cpu, 5), rtol=1e-5, atol=1e-6)
    assert on_gpu.buckets[0].values.is_cuda


def test_a_cut_from_the_gpu_restores_to_the_bit_on_the_gpu() -> None:
    first, second = shard_on("cuda"), shard_on("cuda")
    train(first, 2)
    images = first.cuts.get(2)
    assert images is not None
    second.restore(images)
    torch.testing.assert_close(train(second, 3), train(first, 3), rtol=0, atol=0)


def test_the_memory_limit_is_the_asked_fraction_of_the_device() -> None:
    device = resolve_device("cuda", 0.5)
    total = torch.cuda.get_device_properties(device).total_memory
    assert memory_limit(device, 0.5) == total // 2

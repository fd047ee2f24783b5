"""What it takes to make the rules of a shard's buckets: a server makes all of them before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardline.sharding import BucketSpec, Plan, make_plan
from shardline.spec import ScheduleSpec, TensorSpec
from shardline.update import BucketRule, rule
from shardline.update.elementwise import ElementwiseStates

CPU = torch.device("cpu")


class Made(TorchDispatchMode):
    """Bytes of the largest tensor that torch makes in the block."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.nbytes)
        return found


def one_bucket(**shapes: tuple[int, ...]) -> tuple[BucketSpec, Plan]:
    specs = [TensorSpec(name=name, shape=shape, dtype="float32") for name, shape in shapes.items()]
    plan = make_plan(specs, 1)
    (bucket,) = plan.shards[0].buckets
    return bucket, plan


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_making_a_rule_takes_no_memory_by_the_element(name: str):
    bucket, plan = one_bucket(a=(1 << 17,), b=(100,))
    with Made() as made:
        torch.ones(bucket.elements, dtype=torch.bool)
    assert made.largest == bucket.elements > 1 << 17
    with Made() as made:
        BucketRule(rule(name, [{"lr": 0.1}]), ScheduleSpec(), bucket, plan.tensors, CPU)
    assert 0 < made.largest < 4096


def test_the_padding_is_every_position_of_a_bucket_that_is_in_no_slice():
    bucket, _ = one_bucket(a=(65,), nothing=(0, 3), b=(64,), one=(1,), c=(3, 7))
    states = ElementwiseStates(torch.optim.SGD, {"lr": 0.1}, bucket, {}, CPU)
    held = {position for piece in bucket.slices for position in range(piece.offset, piece.end)}
    assert states.padding.tolist() == [position for position in range(bucket.elements) if position not in held]
    assert states.padding.dtype == torch.int64


def test_a_bucket_without_padding_has_no_positions_of_it():
    bucket, _ = one_bucket(a=(64,), b=(2, 64))
    states = ElementwiseStates(torch.optim.SGD, {"lr": 0.1}, bucket, {}, CPU)
    assert states.padding.numel() == 0

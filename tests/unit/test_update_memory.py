"""What it takes to make the rules of a shard's buckets: a server makes all of them before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardline.core.plan import BucketSpec, Plan, make_plan
from shardline.core.spec import ScheduleSpec, TensorSpec
from shardline.update import bucket_rule, rule
from shardline.update.base import padding_positions

CPU = torch.device("cpu")


class Made(TorchDispatchMode):
    """Bytes of the largest tensor that torch makes in the block, and the tensors that own memory, by its address."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.owned: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.nbytes)
                # Held, so that no other is put at its address.
                self.owned[tensor.untyped_storage().data_ptr()] = tensor
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
        bucket_rule(rule(name, [{"lr": 0.1}]), ScheduleSpec(), bucket, plan.tensors, CPU)
    assert 0 < made.largest < 4096


def test_the_padding_is_every_position_of_a_bucket_that_is_in_no_slice():
    bucket, _ = one_bucket(a=(65,), nothing=(0, 3), b=(64,), one=(1,), c=(3, 7))
    padding = padding_positions(bucket, CPU)
    held = {position for piece in bucket.slices for position in range(piece.offset, piece.end)}
    assert padding.tolist() == [position for position in range(bucket.elements) if position not in held]
    assert padding.dtype == torch.int64


def test_a_bucket_without_padding_has_no_positions_of_it():
    bucket, _ = one_bucket(a=(64,), b=(2, 64))
    assert padding_positions(bucket, CPU).numel() == 0


def test_state_that_torch_made_for_a_whole_bucket_is_kept_where_it_is():
    bucket, plan = one_bucket(a=(1 << 17,), b=(100,))
    held = bucket_rule(rule("SGD", [{"lr": 0.1, "momentum": 0.9}]), ScheduleSpec(), bucket, plan.tensors, CPU)
    values, gradient = torch.zeros(bucket.elements), torch.ones(bucket.elements)
    with Made() as made:
        held.apply(values, gradient, clock=0)
    given = {tensor.untyped_storage().data_ptr() for tensor in (values, gradient)}
    large = [tensor for at, tensor in made.owned.items() if at not in given and tensor.nbytes == bucket.nbytes]
    assert len(large) == 1
    assert held.nbytes == bucket.nbytes
    held.apply(values, gradient, clock=1)
    (state,) = held.export()[0].values()
    torch.testing.assert_close(state[: 1 << 17], torch.full((1 << 17,), 1.9))

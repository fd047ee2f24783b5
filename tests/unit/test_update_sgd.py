"""SGD beside the values has torch.optim.SGD's bits; fused rules run torch's fused kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardline.core.plan import BucketSpec, Plan, make_plan
from shardline.core.spec import DTYPES, ScheduleSpec, TensorSpec
from shardline.update import bucket_rule, rule
from shardline.update.torch_optim import sgd

CPU = torch.device("cpu")
NUMBERS = st.sampled_from([0.0, 1e-3, 0.1, 0.3, 0.9, 1.0])


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def unaligned(values: Tensor, shift: int) -> Tensor:
    """A copy that starts `shift` bytes past an allocation."""
    memory = bytearray(values.nbytes + shift)
    copy = torch.frombuffer(memory, dtype=values.dtype, offset=shift, count=values.numel())
    return copy.copy_(values)


@settings(deadline=None, max_examples=150)
@given(
    elements=st.integers(1, 3000),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "float16", "complex64"]),
    lr=NUMBERS,
    momentum=NUMBERS,
    dampening=NUMBERS,
    decay=NUMBERS,
    nesterov=st.booleans(),
    maximize=st.booleans(),
    beside=st.booleans(),
    shift=st.integers(0, 7),
    seed=st.integers(0, 1 << 30),
)
def test_sgd_has_the_bits_of_torch(
    elements: int,
    dtype: str,
    lr: float,
    momentum: float,
    dampening: float,
    decay: float,
    nesterov: bool,
    maximize: bool,
    beside: bool,
    shift: int,
    seed: int,
) -> None:
    arguments: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": decay, "maximize": maximize}
    arguments |= {"dampening": 0.0, "nesterov": True} if nesterov and momentum else {"dampening": dampening}
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(elements, generator=generator).to(DTYPES[dtype])
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([parameter], **arguments)
    assert sgd.is_plain(torch.optim.SGD, optimizer.param_groups[0])
    pub = [unaligned(start, shift), torch.full_like(start, float("nan"))]
    buffer: Tensor | None = None
    for step in range(3):
        gradient = unaligned(torch.randn(elements, generator=generator).to(DTYPES[dtype]), shift)
        parameter.grad = gradient.clone()
        optimizer.step()
        sent, before = gradient.clone(), pub[step & 1].clone()
        source, target = pub[step & 1], pub[(step + 1) & 1]
        if not beside:
            source = target.copy_(source)
        buffer = sgd.step(source, gradient, target, buffer, optimizer.param_groups[0])
        assert same(target, parameter.detach())
        assert same(gradient, sent) and same(pub[step & 1], before)
        theirs = optimizer.state[parameter].get("momentum_buffer")
        assert (buffer is None) == (theirs is None)
        assert buffer is None or theirs is None or same(buffer, theirs)


@pytest.mark.parametrize("arguments", [{"fused": True}, {"foreach": True}])
def test_an_implementation_that_the_user_chose_stays_torchs(arguments: Mapping[str, Any]) -> None:
    assert not sgd.is_plain(torch.optim.SGD, arguments)
    assert not sgd.is_plain(torch.optim.AdamW, {})


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types neither of the two
    """Names of the operations that were run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def bucket_of(slices: int, elements: int) -> tuple[Plan, BucketSpec]:
    plan = make_plan([TensorSpec(name=f"t{n}", shape=(elements,), dtype="float32") for n in range(slices)], 1)
    (bucket,) = plan.shards[0].buckets
    return plan, bucket


def steady_calls(
    name: str, arguments: Mapping[str, Any], slices: int, *, beside: bool = True, elements: int = 70
) -> list[str]:
    """Operations of one step in the steady state."""
    plan, bucket = bucket_of(slices, elements)
    updater = bucket_rule(rule(name, (arguments,)), ScheduleSpec(), bucket, plan.tensors, CPU)
    values, spare = torch.ones(bucket.elements), torch.ones(bucket.elements)
    gradient = torch.ones(bucket.elements)
    calls = Calls()
    for clock in range(3):
        calls.names = []
        with calls:
            updater.apply(spare, gradient, clock=clock, source=values if beside else None)
    return calls.names


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_rules_run_torchs_fused_kernel(name: str) -> None:
    for elements, expected in ((128, 1), (70, 3)):  # torch rounds the last elements of a tensor otherwise
        calls = steady_calls(name, {"lr": 0.1, "fused": True}, 3, elements=elements)
        assert calls.count(f"aten._fused_{name.lower()}_") == expected
    assert not [call for call in steady_calls(name, {"lr": 0.1}, 3) if "fused" in call]


@pytest.mark.parametrize(
    ("name", "arguments"), [("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {"lr": 0.1})]
)
def test_a_bucket_of_many_slices_takes_as_many_operations_as_one_of_two(name: str, arguments: dict[str, Any]) -> None:
    few, many = steady_calls(name, arguments, 2), steady_calls(name, arguments, 100)
    assert few == many


def test_plain_sgd_copies_no_values() -> None:
    assert steady_calls("SGD", {"lr": 0.1}, 1).count("aten.copy_") == 0
    assert steady_calls("SGD", {"lr": 0.1}, 1).count("aten.add") == 1
    assert steady_calls("AdamW", {"lr": 0.1}, 1).count("aten.copy_") == 0
    # What a rule changes in place is copied first, once.
    assert steady_calls("RMSprop", {"lr": 0.1}, 1).count("aten.copy_") == 1

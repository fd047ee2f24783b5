from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shardline import schedule as schedules
from shardline.core.plan import Plan, make_plan
from shardline.core.spec import ScheduleSpec, TensorKind, TensorSpec
from shardline.errors import CheckpointError, JobError, ProtocolError
from shardline.update import (
    ALLOWED,
    BucketRule,
    bucket_rule,
    check_tensors,
    rule,
    rule_from_optimizer,
    wants_whole,
)

CPU = torch.device("cpu")
CONSTANT = ScheduleSpec()
CUT = {"big": (301, 257), "small": (33,)}


def tensor_specs(name: str, shapes: dict[str, tuple[int, ...]]) -> list[TensorSpec]:
    return [TensorSpec(name=k, shape=s, dtype="float32", whole=wants_whole(rule(name), s)) for k, s in shapes.items()]


def test_rule_from_optimizer_reads_what_the_groups_hold():
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW(
        [{"params": [a], "name": "body"}, {"params": [b], "lr": 0.5, "weight_decay": 0}], lr=torch.tensor(0.25)
    )
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert rule_from_optimizer(optimizer) == rule("AdamW", ({"lr": 0.25}, {"lr": 0.5, "weight_decay": 0.0}))


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_every_optimizer_with_defaults_is_the_rule_with_defaults(name: str):
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2, 2))])
    assert rule_from_optimizer(optimizer) == rule(name) == rule(getattr(torch.optim, name))
    spec = rule(name)
    assert rule(name, spec.groups) == spec


def test_adagrad_takes_the_constructors_accumulator_as_torch_does():
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adagrad([{"params": [parameter], "initial_accumulator_value": 0.7}])
    assert rule_from_optimizer(optimizer).groups[0]["initial_accumulator_value"] == 0.0


class MyAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rule("LBFGS"), "LBFGS can't run on parameter servers: it calls a closure"),
        (lambda: rule("SparseAdam"), "SparseAdam can't .* sparse gradients"),
        (lambda: rule("Lion"), "'Lion' is not a torch.optim class .* use one of SGD, Adam"),
        (lambda: rule("Optimizer"), "'Optimizer' is not a"),
        (lambda: rule(MyAdam), "MyAdam is not a class of torch.optim"),
        (lambda: rule_from_optimizer(torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(1))])), "closure"),
        (lambda: rule("SGD", ()), "no parameter group"),
        (lambda: rule("SGD", ({}, {"lrr": 0.1})), "SGD, parameter group 1: unknown argument 'lrr'; SGD takes lr, "),
        (lambda: rule("SGD", ({"lr": "0.1"},)), "lr is '0.1'; it must be a number"),
        (lambda: rule("SGD", ({"lr": True},)), "lr is True; it must be a number"),
        (lambda: rule("SGD", ({"lr": None},)), "lr is None; it must be a number"),
        (lambda: rule("SGD", ({"lr": math.nan},)), "lr is NaN"),
        (lambda: rule("SGD", ({"lr": 10**400},)), "lr is a whole number too large"),
        (lambda: rule("SGD", ({"lr": -1},)), "parameter group 0: Invalid learning rate: -1.0"),
        (lambda: rule("SGD", ({"nesterov": 1},)), "nesterov is 1; it must be True or False"),
        (lambda: rule("SGD", ({"nesterov": True},)), "[Nn]esterov"),
        (lambda: rule("Adam", ({"betas": 0.9},)), "betas is 0.9; it must be 2 numbers"),
        (lambda: rule("Adam", ({"betas": (0.9, 0.9, 0.9)},)), "it must be 2 numbers"),
        (lambda: rule("Adam", ({"betas": (0.9, None)},)), "betas is None"),
        (lambda: rule("Adam", ({"capturable": True},)), "capturable must be False"),
        (lambda: rule("Adam", ({"differentiable": True},)), "differentiable must be False"),
        (lambda: rule("Adam", ({"fused": True, "foreach": True},)), "fused"),
        (lambda: rule("RMSprop", ({"fused": True},)), "unknown argument 'fused'"),
        (lambda: rule("Muon", ({"ns_steps": 5.0},)), "ns_steps is 5.0; it must be a whole number"),
        (lambda: rule("Muon", ({"adjust_lr_fn": "best"},)), "best"),
    ],
)
def test_rules_that_cannot_work_are_refused_by_name(make: Any, words: str):
    with pytest.raises(JobError, match=words):
        make()


@pytest.mark.parametrize(
    ("name", "arguments", "tensor", "words"),
    [
        ("Muon", {}, {"shape": (4,), "whole": True}, "Muon updates only matrices, but 'w' has shape \\(4,\\)"),
        ("Adafactor", {}, {"shape": (4, 4)}, "Adafactor needs whole tensors, but 'w'"),
        ("Adafactor", {}, {"shape": (4, 4), "whole": True, "dtype": "complex64"}, "complex parameters, and 'w'"),
        ("SGD", {}, {"shape": (4,), "dtype": "int64"}, "'w' has dtype int64"),
        ("SGD", {}, {"shape": (4,), "group": 1}, "'w' is in parameter group 1, but SGD has 1"),
        ("Adam", {"fused": True}, {"shape": (4,), "dtype": "complex64"}, "'w' is complex64"),
    ],
)
def test_tensors_that_a_rule_cannot_update_are_refused_by_name(name, arguments, tensor, words):
    spec = TensorSpec(**({"name": "w", "dtype": "float32"} | tensor))
    with pytest.raises(JobError, match=words):
        check_tensors(rule(name, [arguments]), [spec])


def test_frozen_tensors_and_buffers_are_no_business_of_the_rule():
    kinds = (TensorKind.FROZEN, TensorKind.BUFFER)
    check_tensors(rule("Muon"), [TensorSpec(name=k.value, shape=(3,), dtype="int64", kind=k) for k in kinds])


def one_bucket(name: str = "AdamW", **arguments: Any) -> tuple[BucketRule, Plan]:
    plan = make_plan(tensor_specs(name, {"a": (3, 2), "b": (70,)}), 1)
    (bucket,) = plan.shards[0].buckets
    return bucket_rule(rule(name, [arguments]), CONSTANT, bucket, plan.tensors, CPU), plan


@pytest.mark.parametrize(
    ("hyper", "words"),
    [
        ({"momentum": 0.9}, "'momentum' is not a setting of AdamW that can change; those are lr, betas.0"),
        ({"amsgrad": 1.0}, "'amsgrad' is not a setting"),
        ({"lr": math.inf}, "lr of AdamW is inf"),
    ],
)
def test_wrong_hyper_is_refused_and_changes_nothing(hyper: dict[str, float], words: str):
    updater, plan = one_bucket()
    values = torch.zeros(plan.shards[0].buckets[0].elements)
    with pytest.raises(ProtocolError, match=words):
        updater.apply(values, torch.ones_like(values), clock=0, hyper=hyper)
    assert not values.any() and updater.nbytes == 0


def test_momentum_of_rmsprop_cannot_appear_later():
    updater, plan = one_bucket("RMSprop")
    values = torch.zeros(plan.shards[0].buckets[0].elements)
    with pytest.raises(ProtocolError, match=r"momentum of RMSprop can't change from 0\.0 to 0\.9"):
        updater.apply(values, torch.ones_like(values), clock=0, hyper={"momentum": 0.9})


def test_wrong_lengths_and_dtypes_are_refused():
    updater, plan = one_bucket()
    values = torch.zeros(plan.shards[0].buckets[0].elements)
    with pytest.raises(ProtocolError, match="gradient of a bucket"):
        updater.apply(values, values[:-1], clock=0)
    with pytest.raises(ProtocolError, match="float64"):
        updater.apply(values, values.double(), clock=0)
    with pytest.raises(ProtocolError, match="present has 3 bits for a bucket of 2"):
        updater.apply(values, values, clock=0, present=[True] * 3)


def test_a_schedule_without_its_end_is_refused_before_the_first_step():
    plan = make_plan(tensor_specs("SGD", {"a": (3,)}), 1)
    with pytest.raises(JobError, match="cosine schedule"):
        bucket_rule(rule("SGD"), schedules.cosine(), plan.shards[0].buckets[0], plan.tensors, CPU)


def test_a_whole_tensor_rule_refuses_a_plan_that_cuts():
    plan = make_plan(tensor_specs("SGD", CUT), 2)
    bucket = next(b for shard in plan.shards for b in shard.buckets if any(p.first_row for p in b.slices))
    tensors = tensor_specs("Adafactor", CUT)
    with pytest.raises(ProtocolError, match="Adafactor needs whole tensors, but the plan cuts"):
        bucket_rule(rule("Adafactor"), CONSTANT, bucket, tensors, CPU)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, s, i: (t | {"sum": t["exp_avg"]}, s, i), "unknown state 'sum'; it keeps step, exp_avg"),
        (lambda t, s, i: (t, s | {"exp_avg": (0.0, 0.0)}, i), "unknown state 'exp_avg'"),
        (lambda t, s, i: (t | {"exp_avg": t["exp_avg"][:-1]}, s, i), "'exp_avg' is \\(191,\\) torch.float32"),
        (lambda t, s, i: (t | {"exp_avg": t["exp_avg"].double()}, s, i), "torch.float64; expected"),
        (lambda t, s, i: ({"exp_avg": t["exp_avg"]}, s, i), "'exp_avg_sq' is missing"),
        (lambda t, s, i: (t, {}, i), "'step' is missing"),
        (lambda t, s, i: (t, {"step": (1.0,)}, i), "'step' has 1 numbers for 2 slices"),
        (lambda t, s, i: (t, {"step": (1.0, math.nan)}, i), "NaN"),
        (lambda t, s, i: (t, s, (True,)), "1 initialized flags for 2 slices"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_the_old_one_stays(change: Any, words: str):
    updater, plan = one_bucket()
    values = torch.zeros(plan.shards[0].buckets[0].elements)
    updater.apply(values, torch.ones_like(values), clock=0)
    before = updater.export()
    with pytest.raises(CheckpointError, match=words):
        updater.load(*change(*before))
    after = updater.export()
    assert after[1:] == before[1:] and all(torch.equal(after[0][k], before[0][k]) for k in before[0])


def test_load_takes_an_images_tensors_and_copies_them():
    updater, plan = one_bucket()
    values = torch.zeros(plan.shards[0].buckets[0].elements)
    updater.apply(values, torch.ones_like(values), clock=0)
    tensors, scalars, initialized = updater.export()
    other, _ = one_bucket()
    other.load({"value": values, **tensors}, scalars, initialized)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    other.apply(values, torch.ones_like(values), clock=1)
    assert all(torch.equal(tensors[name], kept[name]) for name in kept)
    other.load({}, {}, ())
    assert other.export() == ({}, {}, (False, False))

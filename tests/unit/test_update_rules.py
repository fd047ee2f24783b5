from __future__ import annotations

import functools
import math
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardline import schedule as schedules
from shardline.core.plan import BucketSpec, Plan, Slice, make_plan, quantum_rows
from shardline.core.spec import DTYPES, RuleSpec, ScheduleSpec, TensorSpec
from shardline.host.process import torch_threads
from shardline.update import (
    ALLOWED,
    BucketRule,
    bucket_rule,
    check_tensors,
    chosen,
    hyper_numbers,
    rule,
    wants_whole,
)

CPU = torch.device("cpu")
CONSTANT = ScheduleSpec()
SHAPES = {
    "embed.weight": (301, 257),  # cut, with a last piece that is no multiple of anything
    "norm.weight": (33,),
    "scale": (),
    "fc.weight": (130, 517),  # cut
    "nothing": (0, 3),
    "fc.bias": (517,),
    "one": (1,),
    "conv.weight": (5, 3, 3, 3),
}
MATRICES = {"a": (40, 31), "b": (31, 40), "row": (1, 17), "c": (64, 64)}
STEPS = 7


def tensor_specs(name: str, shapes: Mapping[str, tuple[int, ...]], dtype: str, groups: int = 1) -> list[TensorSpec]:
    return [
        TensorSpec(name=key, shape=shape, dtype=dtype, group=number % groups, whole=wants_whole(rule(name), shape))
        for number, (key, shape) in enumerate(shapes.items())
    ]


@functools.cache
def draw(shape: tuple[int, ...], dtype: str, seed: object) -> Tensor:
    """Random values with a few zeros; shared between callers, so nobody may change them."""
    generator = torch.Generator().manual_seed(random.Random(str(seed)).getrandbits(60))
    values = torch.randn(shape, generator=generator, dtype=torch.complex64 if "complex" in dtype else torch.float32)
    values *= torch.rand(shape, generator=generator) ** 3 * 10
    values[torch.rand(shape, generator=generator) < 0.02] = 0.0
    return values.to(DTYPES[dtype])


def same(left: Tensor, right: Tensor) -> bool:
    """Equal to the bit, NaN and signed zero included."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


def absences(shapes: Mapping[str, tuple[int, ...]]) -> list[set[str]]:
    """Per step the tensors without a gradient: one joins late, others come and go, twice all are there."""
    rng = random.Random(7)
    steps = []
    for step in range(STEPS):
        absent = {name for name in shapes if rng.random() < 0.25} if step not in (0, 3, STEPS - 1) else set()
        if step < 3 and len(shapes) > 2:
            absent.add(list(shapes)[1])
        steps.append(absent)
    return steps


class Plain:
    """torch.optim on the uncut tensors."""

    def __init__(self, spec: RuleSpec, tensors: Sequence[TensorSpec], arguments: Sequence[Mapping[str, Any]]) -> None:
        self.tensors = tensors
        self.parameters = [torch.nn.Parameter(draw(t.shape, t.dtype, t.name).clone()) for t in tensors]
        groups = [
            {"params": [p for p, t in zip(self.parameters, tensors, strict=True) if t.group == number], **group}
            for number, group in enumerate(arguments)
        ]
        # Adagrad starts its accumulators from the constructor's argument, whatever the group says.
        start = {key: value for key, value in arguments[0].items() if key == "initial_accumulator_value"}
        cls = getattr(torch.optim, spec.name)
        self.optimizer = cls([group for group in groups if group["params"]], **start)

    def step(self, step: int, absent: set[str]) -> None:
        for parameter, tensor in zip(self.parameters, self.tensors, strict=True):
            gradient = draw(tensor.shape, tensor.dtype, (tensor.name, step)).clone()
            parameter.grad = None if tensor.name in absent else gradient
        # Each thread of torch's rounds the end of its own part otherwise.
        with torch_threads(1):
            self.optimizer.step()

    def values(self) -> dict[str, Tensor]:
        return {t.name: p.detach() for p, t in zip(self.parameters, self.tensors, strict=True)}


class Cut:
    """The same tensors in the buckets of a plan, each with two value buffers that take turns."""

    def __init__(self, spec: RuleSpec, tensors: Sequence[TensorSpec], shards: int, schedule: ScheduleSpec) -> None:
        self.spec, self.schedule = spec, schedule
        self.plan = make_plan(tensors, shards, bucket_bytes=150_000)
        self.buckets = [bucket for shard in self.plan.shards for bucket in shard.buckets]
        self.rules = [bucket_rule(spec, schedule, bucket, self.plan.tensors, CPU) for bucket in self.buckets]
        self.values = [self.flat(bucket, lambda t: draw(t.shape, t.dtype, t.name)) for bucket in self.buckets]
        self.spare = [torch.full_like(values, 7.0) for values in self.values]

    def flat(self, bucket: BucketSpec, make: Any) -> Tensor:
        flat = torch.zeros(bucket.elements, dtype=DTYPES[bucket.dtype])
        for piece in bucket.slices:
            tensor = self.plan.tensors[piece.tensor]
            if piece.elements:
                flat[piece.offset : piece.end] = make(tensor).reshape(tensor.rows, -1)[rows(piece)].reshape(-1)
        return flat

    def step(self, step: int, absent: set[str], hyper: Mapping[str, float] | None = None) -> None:
        for number, bucket in enumerate(self.buckets):
            gradient = self.flat(bucket, lambda t: draw(t.shape, t.dtype, (t.name, step)))
            before = gradient.clone()
            present = [self.plan.tensors[piece.tensor].name not in absent for piece in bucket.slices]
            source, target = self.values[number], self.spare[number]
            # In place and beside the values before, by turns.
            beside = (number + step) % 2 == 0
            target.copy_(torch.full_like(target, float("nan")) if beside else source)
            kept = source.clone()
            changed = self.rules[number].apply(
                target,
                gradient,
                clock=step,
                hyper=hyper,
                source=source if beside else None,
                present=None if all(present) else present,
            )
            assert changed == any(present)
            assert same(gradient, before) and same(source, kept)
            if changed or not beside:
                self.values[number], self.spare[number] = target, source
            else:
                assert bool(target.isnan().all())

    def tensor(self, flats: Sequence[Tensor], name: str) -> Tensor:
        number = self.plan.index[name]
        tensor = self.plan.tensors[number]
        joined = torch.empty(tensor.rows, tensor.row_elements, dtype=DTYPES[tensor.dtype])
        for flat, bucket in zip(flats, self.buckets, strict=True):
            for piece in bucket.slices:
                if piece.tensor == number and piece.elements:
                    joined[rows(piece)] = flat[piece.offset : piece.end].view(piece.rows, -1)
        return joined.reshape(tensor.shape)

    def restart(self) -> None:
        """Every rule anew from its own export."""
        for number, bucket in enumerate(self.buckets):
            exported = self.rules[number].export()
            fresh = bucket_rule(self.spec, self.schedule, bucket, self.plan.tensors, CPU)
            fresh.load(*exported)
            for ours, theirs in zip(fresh.export(), exported, strict=True):
                if isinstance(ours, dict):
                    assert ours.keys() == theirs.keys()
                    assert all(
                        same(ours[k], theirs[k]) if isinstance(ours[k], Tensor) else ours[k] == theirs[k] for k in ours
                    )
                else:
                    assert ours == theirs
            self.rules[number] = fresh


def rows(piece: Slice) -> slice:
    return slice(piece.first_row, piece.first_row + piece.rows)


def assert_same_values(cut: Cut, plain: Plain) -> None:
    for name, value in plain.values().items():
        assert same(cut.tensor(cut.values, name), value), name


def assert_same_state(cut: Cut, plain: Plain) -> None:
    """Every state torch keeps is in the exports, bit for bit, and no other."""
    exports = [cut_rule.export() for cut_rule in cut.rules]
    for parameter, tensor in zip(plain.parameters, plain.tensors, strict=True):
        theirs = {k: v for k, v in plain.optimizer.state.get(parameter, {}).items() if v is not None}
        if not tensor.elements:
            continue
        for bucket, (flats, scalars, initialized) in zip(cut.buckets, exports, strict=True):
            for number, piece in enumerate(bucket.slices):
                if cut.plan.tensors[piece.tensor] is not tensor:
                    continue
                began = bool(theirs) and (cut.spec.name != "Adagrad" or theirs["step"] > 0)
                assert initialized[number] == began, tensor.name
                for name, state in theirs.items() if began else ():
                    if state.dim() == 0 and name in scalars:
                        assert scalars[name][number] == float(state), (tensor.name, name)
                        continue
                    offset, elements = chosen(cut.spec).state_spans(cut.spec, name, bucket, cut.plan.tensors)[number]
                    wanted = state if elements == state.numel() else state.reshape(tensor.rows, -1)[rows(piece)]
                    assert same(flats[name][offset : offset + elements], wanted.reshape(-1)), (tensor.name, name)


def assert_padding_is_zero(cut: Cut) -> None:
    for values, bucket, updater in zip(cut.values, cut.buckets, cut.rules, strict=True):
        flats = [values]
        if ALLOWED[cut.spec.name]:
            flats += updater.export()[0].values()
        for flat in flats:
            rest = flat.clone()
            for piece in bucket.slices:
                rest[piece.offset : piece.end] = 0
            assert not rest.any()


def compare(
    name: str,
    arguments: Sequence[Mapping[str, Any]],
    *,
    shards: int = 2,
    dtype: str = "float32",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    schedule: ScheduleSpec = CONSTANT,
    absent: Sequence[set[str]] | None = None,
) -> None:
    shapes = shapes or (MATRICES if name == "Muon" else SHAPES)
    if name == "Adafactor":
        shapes = {key: shape for key, shape in shapes.items() if 0 not in shape}
    tensors = tensor_specs(name, shapes, dtype, len(arguments))
    spec = rule(name, arguments)
    check_tensors(spec, tensors)
    plain, cut = Plain(spec, tensors, arguments), Cut(spec, tensors, shards, schedule)
    scheduler = torch.optim.lr_scheduler.LambdaLR(plain.optimizer, lambda step: schedules.factor(schedule, step))
    for step, missing in enumerate(absences(shapes) if absent is None else absent):
        plain.step(step, missing)
        scheduler.step()
        cut.step(step, missing)
        if step == 3:
            cut.restart()
    assert_same_values(cut, plain)
    assert_same_state(cut, plain)
    assert_padding_is_zero(cut)


ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "foreach": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    ("Adam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True, "foreach": True}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "eps": 1e-3}),
    ("AdamW", {"lr": 0.01, "foreach": True, "weight_decay": 0.2}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.01}),
    ("Adamax", {"lr": 0.01, "maximize": True, "foreach": True}),
    ("Adagrad", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.3, "lr_decay": 0.1, "weight_decay": 0.01}),
    ("Adagrad", {"lr": 0.1, "maximize": True, "foreach": True}),
    ("Adadelta", {"rho": 0.8, "weight_decay": 0.01}),
    ("Adadelta", {"lr": 0.5, "maximize": True, "foreach": True}),
    ("ASGD", {"lr": 0.1, "t0": 2.0, "lambd": 0.01, "weight_decay": 0.01}),
    ("ASGD", {"lr": 0.1, "t0": 2.0, "maximize": True, "foreach": True}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("NAdam", {"lr": 0.01, "momentum_decay": 0.01, "maximize": True, "foreach": True}),
    ("RAdam", {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.01, "betas": (0.8, 0.9), "decoupled_weight_decay": True, "weight_decay": 0.1, "foreach": True}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.9, "weight_decay": 0.01}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5, "maximize": True, "foreach": True}),
    ("Rprop", {"lr": 0.01}),
    ("Rprop", {"lr": 0.01, "etas": (0.3, 1.5), "step_sizes": (1e-4, 0.1), "maximize": True, "foreach": True}),
    ("Muon", {"lr": 0.01}),
    ("Muon", {"lr": 0.01, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}),
    ("Adafactor", {"lr": 0.01}),
    ("Adafactor", {"lr": 0.01, "eps": (1e-6, 1e-2), "d": 1.5, "weight_decay": 0.1, "maximize": True}),
    ("Adafactor", {"lr": 0.01, "eps": (None, 1e-2), "foreach": True}),
]


def label(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return str(value)


@pytest.mark.part(of=3, first=2)
@pytest.mark.parametrize(("name", "arguments"), ARGUMENTS, ids=label)
def test_cut_tensors_get_the_bits_of_torch_on_whole_ones(name: str, arguments: dict[str, Any]):
    compare(name, [arguments], schedule=schedules.cosine(20, 0.1, warmup_steps=3))


def test_every_allowed_class_is_compared_with_torch():
    assert {name for name, _ in ARGUMENTS} == set(ALLOWED)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Rprop", "Adafactor"])
def test_the_number_of_shards_does_not_change_the_bits(name: str, shards: int):
    compare(name, [{"lr": 0.05}], shards=shards)


def test_the_plans_of_these_tests_really_cut_pad_and_mix():
    plan = make_plan(tensor_specs("SGD", SHAPES, "float32"), 2, bucket_bytes=150_000)
    buckets = [bucket for shard in plan.shards for bucket in shard.buckets]
    assert len(list(plan.pieces(0))) > 2 and len(list(plan.pieces(3))) > 1
    assert any(len(bucket.slices) > 3 for bucket in buckets)
    assert any(piece.elements % 64 for bucket in buckets for piece in bucket.slices)


OTHER_DTYPES = ("float64", "bfloat16", "float16", "complex64")
ODD = {
    "embed.weight": (561, 257),  # cut at quanta, which end at multiples of 64 elements
    "rows.weight": (6001, 25),  # cut only at every fourth quantum, since the others don't
    "norm.weight": (33,),
    "even.weight": (32, 64),
    "even.bias": (128,),
    "fc.bias": (517,),
    "one": (1,),
    "scale": (),
    "nothing": (0, 3),
    "conv.weight": (5, 3, 3, 3),
}
"""Sizes that are multiples of no vector's length, with others between them, so that runs are longer than a tensor."""


@pytest.mark.part(of=3)
@pytest.mark.parametrize("dtype", OTHER_DTYPES)
@pytest.mark.parametrize("name", [name for name in ALLOWED if ALLOWED[name]])
def test_other_dtypes_get_torchs_bits_too(name: str, dtype: str):
    compare(name, [{"lr": 0.02}], dtype=dtype, shapes=ODD)


@pytest.mark.part(of=3, first=1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "arguments"), [pair for pair in ARGUMENTS if ALLOWED[pair[0]] and len(pair[1]) > 1], ids=label
)
def test_halves_get_torchs_bits_with_all_arguments(name: str, arguments: dict[str, Any], dtype: str):
    # With foreach=True the bits of a half depend on the other tensors: on whether all have momentum, and on 0-d ones.
    alone = bool(arguments.get("foreach"))
    shapes = {key: shape for key, shape in ODD.items() if shape or not alone}
    compare(name, [arguments], dtype=dtype, shapes=shapes, absent=[set()] * STEPS if alone else None)


def test_the_bits_of_halves_do_not_depend_on_the_threads_of_who_applies_them():
    with torch_threads(3):
        compare("SGD", [{"lr": 0.02}], dtype="bfloat16", shapes=ODD, shards=1)
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_are_cut_where_vectors_end_if_their_own_end_is_elsewhere(dtype: str):
    tensors = tensor_specs("SGD", ODD, dtype)
    plan = make_plan(tensors, 3, bucket_bytes=150_000)
    for number, name in enumerate(("embed.weight", "rows.weight")):
        pieces = [piece for _, _, piece in plan.pieces(number)]
        assert len(pieces) > 1, name
        assert all(piece.first_row * tensors[number].row_elements % 64 == 0 for piece in pieces), name
    assert tensors[1].row_elements * quantum_rows(tensors[1]) % 64 != 0


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_whole_tensor_rules_work_in_bfloat16(name: str):
    compare(name, [{"lr": 0.02}], dtype="bfloat16", shapes=MATRICES)


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_groups_keep_their_own_arguments(name: str):
    compare(name, [{"lr": 0.1, "weight_decay": 0.1} if name != "Rprop" else {"lr": 0.1}, {"lr": 0.02}])


@pytest.mark.parametrize(
    "schedule",
    [schedules.constant(3), schedules.step(2, 0.5, 1), schedules.linear(5, 0.1), schedules.cosine(6)],
    ids=lambda spec: spec.kind,
)
def test_schedules_give_the_bits_of_lambda_lr(schedule: ScheduleSpec):
    compare("AdamW", [{"lr": 0.01}], schedule=schedule)


def test_a_tensor_without_gradient_keeps_values_and_state_and_its_count():
    tensors = tensor_specs("AdamW", {"a": (3,), "b": (3,)}, "float32")
    cut = Cut(rule("AdamW", [{"lr": 0.1}]), tensors, 1, CONSTANT)
    start = cut.tensor(cut.values, "b").clone()
    cut.step(0, {"b"})
    cut.step(1, {"b"})
    assert same(cut.tensor(cut.values, "b"), start)
    assert cut.rules[0].export()[1:] == ({"step": (2.0, 0.0)}, (True, False))
    cut.step(2, {"a"})
    assert cut.rules[0].export()[1]["step"] == (2.0, 1.0)
    cut.step(3, set())
    assert cut.rules[0].export()[1]["step"] == (3.0, 2.0)


def test_nothing_present_changes_nothing():
    cut = Cut(rule("AdamW"), tensor_specs("AdamW", SHAPES, "float32"), 1, CONSTANT)
    cut.step(0, set(SHAPES))
    assert all(updater.export()[0] == {} for updater in cut.rules)


def test_many_patterns_of_absence_stay_exact_beyond_the_cache_of_runs():
    shapes = {f"t{number}": (number + 1,) for number in range(24)}
    rng = random.Random(3)
    absent = [{name for name in shapes if rng.random() < 0.5} for _ in range(60)]
    for name in ("AdamW", "Adagrad", "SGD"):
        compare(name, [{"lr": 0.01}], shards=1, shapes=shapes, absent=absent)


def test_all_present_and_equal_is_one_call_on_the_same_optimizer(monkeypatch: pytest.MonkeyPatch):
    shapes = {f"t{number}": (5,) for number in range(10)}
    cut = Cut(rule("RMSprop"), tensor_specs("RMSprop", shapes, "float32"), 1, CONSTANT)
    calls: list[object] = []
    step = torch.optim.RMSprop.step
    monkeypatch.setattr(torch.optim.RMSprop, "step", lambda self: (calls.append(self), step(self))[1])
    cut.step(0, {"t3"})
    cut.step(1, set())
    assert len(calls) == 2 + 3
    for number in range(2, 6):
        cut.step(number, set())
    assert len(calls) == 2 + 3 * 5 and len(set(map(id, calls[-12:]))) == 3


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_gets_torchs_bits_for_any_cut(name: str, dtype: str, shards: int):
    arguments: dict[str, Any] = {"lr": 0.01, "fused": True, "weight_decay": 0.1}
    if name == "SGD" and dtype != "bfloat16":  # whose momentum torch 2.13 begins with what is in memory by chance
        arguments["momentum"] = 0.9
    # torch's fused SGD can't begin one tensor's momentum after another's.
    compare(name, [arguments], dtype=dtype, shards=shards, shapes=ODD, absent=[set()] * STEPS)


def recut(exported: Sequence[Any], old: Cut, new: Cut) -> None:
    """What a checkpoint does on another plan: states by tensor name and rows."""
    kinds = {name for flats, _, _ in exported for name in flats}
    counts = {name for _, scalars, _ in exported for name in scalars}
    whole = {name: {} for name in kinds}
    for bucket, (flats, _, _) in zip(old.buckets, exported, strict=True):
        for name, flat in flats.items():
            for piece, (offset, elements) in zip(
                bucket.slices, chosen(old.spec).state_spans(old.spec, name, bucket, old.plan.tensors), strict=True
            ):
                held = whole[name].setdefault(piece.tensor, {})
                held[piece.first_row] = flat[offset : offset + elements]
    for number, bucket in enumerate(new.buckets):
        flats = {}
        for name in kinds:
            flats[name] = torch.zeros(chosen(new.spec).flat_elements(new.spec, name, bucket, new.plan.tensors))
            for piece, (offset, elements) in zip(
                bucket.slices, chosen(new.spec).state_spans(new.spec, name, bucket, new.plan.tensors), strict=True
            ):
                if not elements:
                    continue
                tensor = new.plan.tensors[piece.tensor]
                joined = torch.cat([part for _, part in sorted(whole[name][piece.tensor].items())])
                assert joined.numel() == math.prod(chosen(new.spec).state_shape(new.spec, name, tensor))
                first = piece.first_row * tensor.row_elements if ALLOWED[new.spec.name] else 0
                flats[name][offset : offset + elements] = joined[first : first + elements]
        numbers = {name: [] for name in counts}
        initialized = []
        for piece in bucket.slices:
            began, held = next(
                (began[i], {name: scalars[name][i] for name in scalars})
                for other, (_, scalars, began) in zip(old.buckets, exported, strict=True)
                for i, candidate in enumerate(other.slices)
                if candidate.tensor == piece.tensor
            )
            initialized.append(began)
            for name in counts:
                numbers[name].append(held.get(name, 0.0))
        new.rules[number].load(flats, numbers, initialized)
        new.values[number] = new.flat(bucket, lambda t: old.tensor(old.values, t.name))


@pytest.mark.parametrize("name", ["Adam", "Rprop", "SGD", "Muon", "Adafactor"])
def test_state_cut_anew_by_tensor_and_row_goes_on_in_the_same_bits(name: str):
    shapes = MATRICES if name == "Muon" else SHAPES if ALLOWED[name] else {"v": (9,), **MATRICES}
    tensors = tensor_specs(name, shapes, "float32")
    spec = rule(name, [{"lr": 0.01} | ({"momentum": 0.9} if name == "SGD" else {})])
    plain, old, new = Plain(spec, tensors, spec_arguments(spec)), *(Cut(spec, tensors, s, CONSTANT) for s in (2, 3))
    for step in range(3):
        plain.step(step, {list(shapes)[1]} if step == 0 else set())
        old.step(step, {list(shapes)[1]} if step == 0 else set())
    recut([updater.export() for updater in old.rules], old, new)
    for step in range(3, 6):
        plain.step(step, set())
        new.step(step, set())
    assert_same_values(new, plain)
    assert_same_state(new, plain)


def spec_arguments(spec: RuleSpec) -> list[dict[str, Any]]:
    groups = [dict(group) for group in spec.groups]
    for group in groups:
        if spec.name == "Adafactor":
            group["eps"] = (None, 1e-3)
    return groups


def test_hyper_replaces_numbers_for_one_call_and_the_schedule_with_them():
    tensors = tensor_specs("AdamW", SHAPES, "float32")
    arguments = [{"lr": 0.01, "weight_decay": 0.1}]
    spec = rule("AdamW", arguments)
    plain, cut = Plain(spec, tensors, arguments), Cut(spec, tensors, 2, schedules.step(1, 0.5))
    for step in range(6):
        hyper = {"lr": 0.3 / (step + 1), "betas.0": 0.5 + step / 20, "weight_decay": 0.0} if step % 2 else None
        group = plain.optimizer.param_groups[0]
        group.update({"lr": 0.01 * 0.5**step, "betas": (0.9, 0.999), "weight_decay": 0.1})
        if hyper:
            group.update({"lr": hyper["lr"], "betas": (hyper["betas.0"], 0.999), "weight_decay": 0.0})
        plain.step(step, set())
        cut.step(step, set(), hyper)
    assert_same_values(cut, plain)


def test_one_cycle_lr_of_a_user_travels_as_hyper():
    tensors = tensor_specs("SGD", SHAPES, "float32")
    spec = rule("SGD", [{"lr": 0.1, "momentum": 0.9}])
    plain, cut = Plain(spec, tensors, [{"lr": 0.1, "momentum": 0.9}]), Cut(spec, tensors, 2, CONSTANT)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(plain.optimizer, max_lr=0.5, total_steps=6)
    for step in range(5):
        cut.step(step, set(), hyper_numbers("SGD", plain.optimizer.param_groups[0]))
        plain.step(step, set())
        scheduler.step()
    assert_same_values(cut, plain)


def test_momentum_switched_on_later_starts_its_buffer_then_as_in_torch():
    tensors = tensor_specs("SGD", SHAPES, "float32")
    spec = rule("SGD", [{"lr": 0.1}])
    plain, cut = Plain(spec, tensors, [{"lr": 0.1}]), Cut(spec, tensors, 2, CONSTANT)
    for step in range(6):
        momentum = 0.9 if step in (2, 3, 5) else 0.0
        plain.optimizer.param_groups[0]["momentum"] = momentum
        plain.step(step, set())
        cut.step(step, set(), {"momentum": momentum})
        if step == 3:
            cut.restart()
    assert_same_values(cut, plain)
    assert_same_state(cut, plain)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta"])
def test_eps_zero_leaves_no_nan_in_the_padding(name: str):
    cut = Cut(rule(name, [{"eps": 0.0, "weight_decay": 0.1}]), tensor_specs(name, SHAPES, "float32"), 1, CONSTANT)
    for step in range(3):
        cut.step(step, set())
    assert_padding_is_zero(cut)


def test_nbytes_counts_the_states_held_and_full_nbytes_those_to_come():
    cut = Cut(rule("AdamW"), tensor_specs("AdamW", SHAPES, "float32"), 1, CONSTANT)
    held = sum(bucket.nbytes for bucket in cut.buckets)
    assert sum(updater.nbytes for updater in cut.rules) == 0
    assert sum(updater.full_nbytes() for updater in cut.rules) == 2 * held
    cut.step(0, set())
    assert sum(updater.nbytes for updater in cut.rules) == 2 * held
    whole = Cut(rule("Adafactor"), tensor_specs("Adafactor", {"m": (8, 5), "v": (7,)}, "float32"), 1, CONSTANT)
    whole.step(0, set())
    assert whole.rules[0].nbytes == whole.rules[0].full_nbytes() == 4 * (8 + 5 + 7)


def one_bucket(name: str = "AdamW", **arguments: Any) -> tuple[BucketRule, Plan]:
    plan = make_plan(tensor_specs(name, {"a": (3, 2), "b": (70,)}, "float32"), 1)
    (bucket,) = plan.shards[0].buckets
    return bucket_rule(rule(name, [arguments]), CONSTANT, bucket, plan.tensors, CPU), plan


@pytest.mark.parametrize(
    ("name", "arguments"), [("AdamW", {}), ("SGD", {"momentum": 0.9}), ("Rprop", {}), ("Adafactor", {})], ids=label
)
def test_no_reference_to_the_callers_buffers_is_kept(name: str, arguments: dict[str, Any]):
    updater, plan = one_bucket(name, **arguments)
    for _ in range(2):
        memory = [bytearray(plan.shards[0].buckets[0].nbytes) for _ in range(2)]
        before = [sys.getrefcount(memory[0]), sys.getrefcount(memory[1])]
        values, gradient = (torch.frombuffer(piece, dtype=torch.float32) for piece in memory)
        updater.apply(values, gradient, clock=0)
        assert sys.getrefcount(memory[0]) > before[0]
        del values, gradient
        assert [sys.getrefcount(memory[0]), sys.getrefcount(memory[1])] == before

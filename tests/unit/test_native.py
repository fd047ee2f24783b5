"""The native kernels have torch's bits at every level of the processor, wherever tensors lie and however long they are.

Which NaN comes of two is left to the processor, in torch too: NaN is compared as NaN.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from shardline.core import reduce
from shardline.core.tensor_bytes import FINGERPRINT_BYTES, fingerprint
from shardline.native import kernels, library
from shardline.update.torch_optim import adam, eager
from tests.support.sources import ROOT

build_spec = importlib.util.spec_from_file_location("shardline_native_build", ROOT / "native" / "build.py")
assert build_spec is not None and build_spec.loader is not None
build = importlib.util.module_from_spec(build_spec)
build_spec.loader.exec_module(build)

NAMES = ("neon",) if platform.machine() in ("aarch64", "arm64") else ("sse2", "avx2", "avx512")
LEVELS = [
    pytest.param(name, marks=pytest.mark.skipif(name not in library.levels(), reason=f"{name}: not on this machine"))
    for name in NAMES
]
at_every_level = pytest.mark.parametrize("level", LEVELS)

REALS = st.sampled_from([torch.float32, torch.float64])
FLOATS = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
# Around the widths of vectors, of a loop's turn, and of the blocks that go through several loops.
SIZES = st.one_of(st.integers(2, 140), st.sampled_from([255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049, 3100]))
SHIFTS = st.integers(0, 17)
SEEDS = st.integers(0, 1 << 30)
FACTORS = st.sampled_from([0.0, 1e-3, 0.1, 0.3, 0.9, 1.0])
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextlib.contextmanager
def using(level: str | None) -> Iterator[None]:
    before = library.level()
    library.use(level)
    try:
        yield
    finally:
        library.use(before.name if before else None)


def room(dtype: torch.dtype, count: int, shift: int) -> tuple[Tensor, Tensor]:
    """`count` elements `shift` bytes past an allocation that ends with them, and all bytes of it."""
    if count == 0:
        return torch.empty(0, dtype=dtype), torch.empty(0, dtype=torch.uint8)
    memory = bytearray(count * dtype.itemsize + shift)
    octets = torch.frombuffer(memory, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=dtype, offset=shift, count=count), octets


def numbers(seed: int, dtype: torch.dtype, count: int, shift: int = 0, *, finite: bool = False) -> Tensor:
    """Ordinary numbers, any bits at all, and in between the ends of the range, denormals, zeros, halves of a step."""
    draw = np.random.default_rng(seed)
    values = torch.from_numpy(draw.standard_normal(count)).to(dtype)
    wild = torch.from_numpy(draw.integers(-(1 << 62), 1 << 62, count)).to(INTEGER[dtype.itemsize]).view(dtype)
    ends = torch.finfo(dtype)
    some = [0.0, -0.0, ends.tiny, -ends.smallest_normal, ends.tiny / 2, 1 + ends.eps / 2, 1 + 2**-8, 1 + 3 * 2**-8]
    some += [] if finite else [math.nan, math.inf, -math.inf, ends.max, ends.min]
    special = torch.tensor(some, dtype=torch.float64).to(dtype)[torch.from_numpy(draw.integers(0, len(some), count))]
    which = torch.from_numpy(draw.choice(3, count, p=[0.9, 0.1, 0.0] if finite else draw.dirichlet([4, 1, 1])))
    made = torch.where(which == 0, values, torch.where(which == 1, special, wild))
    return room(dtype, count, shift)[0].copy_(made)


def same(left: Tensor, right: Tensor) -> bool:
    """Equal bits, and any NaN like another."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    bits = INTEGER[left.element_size()]
    return bool(((left.view(bits) == right.view(bits)) | (left.isnan() & right.isnan())).all())


def test_the_library_is_there_where_there_is_a_compiler() -> None:
    assert library.levels() or build.compiler() is None, library.describe()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the kernel lists the processor's features there")
def test_the_best_level_is_what_the_kernel_says_of_the_processor() -> None:
    if not library.levels():
        pytest.skip(library.describe())
    text = Path("/proc/cpuinfo").read_text()
    flags = set(text[text.index("flags") :].splitlines()[0].split()) if NAMES != ("neon",) else set()
    needs = {
        "neon": set(),
        "sse2": set(),
        "avx2": {"avx2", "fma"},
        "avx512": {f"avx512{part}" for part in ["f", "dq", "bw", "vl"]},
    }
    assert library.levels() == tuple(name for name in NAMES if needs[name] <= flags)


# Magnitude and copy


def copied(target: Tensor, source: Tensor, *, away: bool = False) -> float | None:
    return kernels.Copies(target, [(0, 0, target.numel(), target.numel())], away=away).fill([source])


@at_every_level
@given(dtype=FLOATS, count=st.one_of(st.just(0), SIZES), shift=SHIFTS, seed=SEEDS)
def test_magnitude_is_torchs(level: str, dtype: torch.dtype, count: int, shift: int, seed: int) -> None:
    values = numbers(seed, dtype, count, shift)
    with using(None):
        expected = reduce.magnitude(values)
    with using(level):
        found = kernels.magnitude(values)
    assert found is not None
    assert found == expected or (math.isnan(found) and math.isnan(expected))


@at_every_level
@given(dtype=FLOATS, count=SIZES, seed=SEEDS, where=st.floats(0, 1, exclude_max=True), bad=st.sampled_from([1, -1, 0]))
def test_one_element_that_is_not_finite_is_found_anywhere(
    level: str, dtype: torch.dtype, count: int, seed: int, where: float, bad: int
) -> None:
    values = numbers(seed, dtype, count, finite=True)
    values[int(where * count)] = bad * math.inf
    with using(level):
        assert not math.isfinite(kernels.magnitude(values) or 0.0)
        assert reduce.is_finite(values) is False


@at_every_level
@given(dtype=REALS, count=SIZES, shift=SHIFTS, seed=SEEDS, away=st.booleans())
def test_a_copy_has_the_bits_and_the_magnitude(
    level: str, dtype: torch.dtype, count: int, shift: int, seed: int, away: bool
) -> None:
    source = numbers(seed, dtype, count, shift)
    target, octets = room(dtype, count + 4, 17 - shift)
    octets.fill_(0xA5)
    with using(level):
        found, expected = copied(target[2:-2], source, away=away), kernels.magnitude(source)
    assert found is not None and expected is not None
    assert found == expected or (math.isnan(found) and math.isnan(expected))
    assert torch.equal(target[2:-2].view(torch.uint8), source.view(torch.uint8))
    edge = 17 - shift + 2 * dtype.itemsize
    assert bool((octets[:edge] == 0xA5).all() and (octets[-2 * dtype.itemsize :] == 0xA5).all())


@pytest.mark.parametrize("level", [*LEVELS, None])
@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("away", [False, True])
def test_copies_of_several_tensors_find_what_is_not_finite_in_any(
    level: str | None, bad: float | None, where: int, away: bool
) -> None:
    sources = [torch.full((300,), float(number)) for number in (3, -5, 4)]
    if bad is not None:
        sources[where][107] = bad
    target = torch.zeros(1000)
    # Each a part of its source, and room between them.
    copies = kernels.Copies(target, [(310 * number, 100, 200, 300) for number in range(3)], away=away)
    with using(level):
        found = copies.fill(sources)
    assert (found is None) is (level is None)
    expected = torch.zeros(1000)
    if found is not None:
        assert found == 5.0 if bad is None else not math.isfinite(found)
        for number, source in enumerate(sources):
            expected[310 * number : 310 * number + 200] = source[100:]
    assert torch.equal(target.view(torch.int32), expected.view(torch.int32))


@at_every_level
@pytest.mark.parametrize("count", [1, 3])
def test_halves_of_conjugated_numbers_are_left_to_torch(level: str, count: int) -> None:
    source = torch.full((count,), 1 + 2j).conj().imag
    assert source.is_neg()
    with using(level):
        assert copied(torch.zeros(count), source) is None


@at_every_level
@pytest.mark.parametrize("away", [False, True])
def test_a_part_that_is_there_already_is_looked_at(level: str, away: bool) -> None:
    target = torch.arange(8.0)
    with using(level):
        assert kernels.Copies(target, [(0, 0, 8, 8)], away=away).fill([target]) == 7.0
    assert torch.equal(target, torch.arange(8.0))


# Fingerprint


@at_every_level
@given(size=st.one_of(st.integers(FINGERPRINT_BYTES, 140_000), st.integers(260_000, 270_000)), seed=SEEDS)
def test_a_fingerprint_is_that_of_xxhash(level: str, size: int, seed: int) -> None:
    data = np.random.default_rng(seed).bytes(size + 3)
    with using(level):
        found = kernels.fingerprint(memoryview(data)[3:])
    with using(None):
        assert found == fingerprint(memoryview(data)[3:])


# Sums


@at_every_level
@given(
    dtype=REALS,
    present=st.lists(st.booleans(), min_size=2, max_size=11).filter(lambda flags: sum(flags) > 1),
    count=SIZES,
    shift=SHIFTS,
    seed=SEEDS,
)
def test_sums_follow_the_canonical_tree(
    level: str, dtype: torch.dtype, present: list[bool], count: int, shift: int, seed: int
) -> None:
    values = [numbers(seed + n, dtype, count, shift) if there else None for n, there in enumerate(present)]
    with using(None):
        expected = reduce.tree_sum(values)
    with using(level):
        found = kernels.tree_sum(values)
    assert found is not None and expected is not None
    assert same(found, expected)


# SGD


ARGUMENTS = st.fixed_dictionaries(
    dict.fromkeys(("lr", "momentum", "dampening", "weight_decay"), FACTORS)
    | {name: st.booleans() for name in ("nesterov", "maximize")}
)


def steps_of_torch(values: Tensor, gradients: list[Tensor], given: Mapping[str, Any], *, fused: bool) -> list[Tensor]:
    """Values after each step of torch.optim.SGD's rule, in torch's operations, and the momentum at the end."""

    def add(a: Tensor, b: Tensor, factor: float) -> Tensor:
        return torch.add(a, b, alpha=factor) if fused else a + b * factor

    kept: Tensor | None = None
    found = []
    for gradient in gradients:
        change = -gradient if given["maximize"] else gradient
        if given["weight_decay"]:
            change = add(change, values, given["weight_decay"])
        if given["momentum"]:
            kept = change if kept is None else add(kept * given["momentum"], change, 1 - given["dampening"])
            change = add(change, kept, given["momentum"]) if given["nesterov"] else kept
        values = add(values, change, -given["lr"])
        found.append(values)
    return found if kept is None else [*found, kept]


def native_steps(values: Tensor, gradients: list[Tensor], given: Mapping[str, Any], *, beside: bool) -> list[Tensor]:
    """The same by the kernel; [] where it leaves that to torch."""
    kept = torch.full_like(values, math.nan) if given["momentum"] else None
    found = []
    for number, gradient in enumerate(gradients):
        target = torch.empty_like(values) if beside else values
        if not kernels.sgd_step(values, gradient, target, kept, given, first=number == 0):
            return []
        values = target
        found.append(values.clone())
    return found if kept is None else [*found, kept]


@at_every_level
@pytest.mark.parametrize("fused", [True, False])
@given(
    dtype=REALS,
    count=SIZES,
    shift=SHIFTS,
    seed=SEEDS,
    arguments=ARGUMENTS,
    beside=st.booleans(),
    away=st.booleans(),
)
def test_sgd_is_torchs(
    level: str,
    fused: bool,
    dtype: torch.dtype,
    count: int,
    shift: int,
    seed: int,
    arguments: Mapping[str, Any],
    beside: bool,
    away: bool,
) -> None:
    """Where torch rounds a product before it adds it, and where not. test_update_sgd.py has torch.optim itself."""
    if fused and not kernels._torch_fuses(dtype):
        return
    values, *gradients = (numbers(seed + n, dtype, count, shift, finite=n == 0) for n in range(4))
    expected = steps_of_torch(values, gradients, arguments, fused=fused)
    with pytest.MonkeyPatch.context() as patch, using(level):
        patch.setattr(kernels, "_torch_fuses", lambda dtype: fused)
        patch.setattr(kernels, "MOST_CACHED", -1 if away else math.inf)
        found = native_steps(values.clone(), gradients, arguments, beside=beside)
        table = library.level()
    several = arguments["momentum"] or arguments["weight_decay"] or arguments["maximize"]
    assert table is not None and bool(found) is bool((several or away) and (table.fma or not fused))
    assert not found or all(same(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "number"), [("lr", 1e39), ("lr", math.inf), ("weight_decay", math.nan), ("lr", torch.tensor(0.1))]
)
def test_numbers_that_torch_refuses_are_left_to_torch(name: str, number: Any) -> None:
    values, given_ = torch.ones(8), {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.1}
    flags = {"nesterov": False, "maximize": False}
    assert not kernels.sgd_step(values, values, values, None, {**given_, **flags, name: number}, first=False)


def test_sgd_is_torchs_where_torch_uses_no_vectors() -> None:
    """Another process: torch chooses its instructions when it is imported."""
    code = (
        "import torch; from tests.unit import test_native as t; from shardline.native import kernels as k\n"
        "from shardline.update.torch_optim import eager; eager.leave_compiler_out()  # which takes seconds to import\n"
        "given = dict(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, nesterov=False, maximize=True)\n"
        "values, *rest = (t.numbers(n, torch.float32, 3100, 1, finite=n == 0) for n in range(4))\n"
        "found = t.native_steps(values.clone(), rest, given, beside=True)\n"
        "parameter = torch.nn.Parameter(values.clone()); rule = torch.optim.SGD([parameter], **given)\n"
        "for gradient, mine in zip(rest, found[:-1], strict=True):\n"
        "    parameter.grad = gradient; eager.step(rule); assert t.same(parameter.detach(), mine)\n"
        "assert k._adam_agrees(torch.float32, k.level())\n"
        "print(torch.backends.cpu.get_cpu_capability(), k._torch_fuses(torch.float32), len(found))\n"
    )
    if not library.levels():
        pytest.skip(library.describe())
    command = [sys.executable, "-c", code]
    # With the level that such a processor has.
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", library.VARIABLE: library.levels()[0]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    if NAMES != ("neon",):
        assert done.stdout.split() == ["DEFAULT", "False", "4"]


# Adam


@at_every_level
@given(
    cls=st.sampled_from([torch.optim.Adam, torch.optim.AdamW]),
    dtype=REALS,
    count=st.one_of(SIZES, st.just(40_000)),
    shift=SHIFTS,
    seed=SEEDS,
    arguments=st.fixed_dictionaries(
        {
            "lr": FACTORS,
            "betas": st.sampled_from([(0.9, 0.999), (0.4, 0.3), (0.5, 0.5), (0.0, 0.0), (0.999, 0.9)]),
            "eps": st.sampled_from([1e-8, 0.0, 1e-3]),
            "weight_decay": FACTORS,
            "amsgrad": st.booleans(),
            "maximize": st.booleans(),
        }
    ),
    beside=st.booleans(),
    away=st.booleans(),
)
def test_adam_is_torchs(
    level: str,
    cls: type[torch.optim.Optimizer],
    dtype: torch.dtype,
    count: int,
    shift: int,
    seed: int,
    arguments: Mapping[str, Any],
    beside: bool,
    away: bool,
) -> None:
    values, *gradients = (numbers(seed + n, dtype, count, shift, finite=n == 0) for n in range(4))
    parameter = torch.nn.Parameter(values.clone())
    optimizer = cls([parameter], **arguments)
    state: dict[str, Tensor] = {}
    for gradient in gradients:
        parameter.grad = gradient.clone()
        eager.step(optimizer)
        target = torch.full_like(values, math.nan) if beside else values
        with pytest.MonkeyPatch.context() as patch, using(level):
            patch.setattr(kernels, "MOST_CACHED", -1 if away else math.inf)
            found = adam.step(values, gradient, target, state, optimizer.param_groups[0])
            table = library.level()
        fuses = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
        assert table is not None and (found is None) is ((fuses and not table.fma) or arguments["betas"][0] == 0.0)
        if found is None:
            return
        values, state = target, found
        theirs = optimizer.state[parameter]
        assert state.keys() == theirs.keys() and all(same(state[name], theirs[name]) for name in theirs)
        assert same(values, parameter.detach())


# Casts


@at_every_level
@given(count=SIZES, shift=SHIFTS, seed=SEEDS)
def test_casts_to_bfloat16_round_as_torch_does(level: str, count: int, shift: int, seed: int) -> None:
    values = numbers(seed, torch.float32, count, shift)
    with using(level):
        found = kernels.cast(values, torch.bfloat16)
    assert found is not None and same(found, values.to(torch.bfloat16))


@at_every_level
def test_ties_go_to_even_and_every_bfloat16_comes_back(level: str) -> None:
    halves = torch.arange(1 << 17, dtype=torch.int32) << 15
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    with using(level):
        rounded, widened = kernels.cast(halves.view(torch.float32), torch.bfloat16), kernels.cast(every, torch.float32)
    assert rounded is not None and same(rounded, halves.view(torch.float32).to(torch.bfloat16))
    assert widened is not None and same(widened, every.to(torch.float32))


# What is left to torch


class Marked(Tensor):
    pass


@pytest.mark.parametrize(
    "values",
    [
        torch.ones(8, 8).t(),
        torch.ones(16)[::2],
        torch.ones(8, dtype=torch.int64),
        torch.ones(8, dtype=torch.complex64),
        torch.ones(8, dtype=torch.complex64).conj().imag[:1],
        torch.ones(8, device="meta"),
        torch.ones(8).as_subclass(Marked),
    ],
)
def test_other_tensors_are_left_to_torch(values: Tensor) -> None:
    assert kernels.magnitude(values) is None
    assert copied(values, values) is None
    assert kernels.tree_sum([values, values]) is None
    assert kernels.cast(values, torch.bfloat16) is None
    given_ = dict.fromkeys(("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"), 1)
    assert not kernels.sgd_step(values, values, values, None, given_, first=False)
    given_ = {**given_, "lr": 0.1, "eps": 0.1, "betas": (0.9, 0.9), "amsgrad": False}
    held = dict.fromkeys(("exp_avg", "exp_avg_sq"), values)
    assert not kernels.adam_step(values, values, values, held, 1.0, given_)


def test_tensors_of_other_lengths_and_dtypes_are_left_to_torch() -> None:
    assert copied(torch.ones(8), torch.ones(9)) is None
    assert copied(torch.ones(8), torch.ones(8, dtype=torch.float64)) is None
    assert kernels.tree_sum([torch.ones(8), torch.ones(2, 4)]) is None
    assert kernels.tree_sum([torch.ones(8), None]) is None


def test_nothing_is_native_where_it_is_turned_off() -> None:
    values, data = torch.ones(100_000), bytes(100_000)
    with using(None):
        assert kernels.magnitude(values) is None
        assert copied(values, values) is None
        assert kernels.tree_sum([values, values]) is None
        assert kernels.cast(values, torch.bfloat16) is None
        assert kernels.fingerprint(data) is None


# Which library and which level


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("", "native kernels: fast"),
        ("1", "native kernels: fast"),
        ("slow", "native kernels: slow"),
        ("0", "native kernels: none (SHARDLINE_NATIVE=0)"),
        ("fats", "native kernels: none (SHARDLINE_NATIVE='fats' is not one of 0, 1, slow, fast)"),
    ],
)
def test_the_variable_chooses_the_level(wanted: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = library._State({name: library.Level(name, True, {}, 0) for name in ("slow", "fast")}, "")
    library._choose(state, wanted)
    monkeypatch.setattr(library, "_state", state)
    assert library.describe() == says


def test_without_a_compiler_there_is_a_sentence_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compiler", "zig"):
        monkeypatch.setattr(build, name, lambda *_: None)
    (tmp_path / "libshardline.so").write_bytes(b"of other sources")
    reason = build.build(tmp_path)
    state = library._load(tmp_path / "libshardline.so")
    assert state.levels == {} and state.reason == reason
    assert reason is not None and "no C compiler (cc) and no ziglang" in reason and "same bits" in reason
    assert not (tmp_path / "libshardline.so").exists()


@pytest.mark.parametrize("command", ["", "no-such-compiler", "false"])
def test_a_compiler_that_does_not_work_is_none(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", command)
    if not command:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert build.compiler() is None


@pytest.mark.parametrize("content", [b"", b"\x7fELF, but not quite"])
def test_a_library_that_cannot_be_loaded_is_not_used(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "libshardline.so").write_bytes(content)
    state = library._load(tmp_path / "libshardline.so")
    assert state.levels == {} and "python native/build.py" in state.reason

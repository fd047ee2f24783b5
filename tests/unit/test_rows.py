"""Rows of embedding tables: packed, stored, first values, and update rules, native and not."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from shardline.codecs import CODECS
from shardline.codecs.base import PLAIN_TURN
from shardline.codecs.rows import PackedRows
from shardline.core import rows
from shardline.core.spec import TensorKind, TensorSpec
from shardline.errors import JobError, ProtocolError, TensorError
from shardline.native import library
from shardline.storage.cold import ColdRows, RowFile
from shardline.storage.rows import RowStore
from shardline.update.rows import ROW_INITS, ROW_RULES
from tests.unit.test_native import using

LEVELS = (None, *library.levels())
ENDS = (-(1 << 63), (1 << 63) - 1, -1, 0)
IDS = st.one_of(st.integers(-3, 12), st.sampled_from(ENDS), st.integers(*ENDS[:2]))
SETS = st.lists(IDS, max_size=40, unique=True)
SEEDS = st.integers(0, 1 << 30)
DIMS = st.one_of(st.integers(1, 70), st.sampled_from([128, 131, 300]))
RULES = (
    "sgd:lr=0.1,weight_decay=0.01",
    "rowwise-adagrad:lr=0.05",
    "adagrad:lr=0.05",
    "adam:lr=0.01",
    "ftrl:lr=0.1,l1=0.3,l2=0.01",
)


at_every_level = pytest.mark.parametrize("level", LEVELS)


def tensor(ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


# On their way


@given(left=SETS, right=SETS, seed=SEEDS, dim=st.integers(1, 40))
@at_every_level
def test_a_merge_adds_rows_on_both_sides_and_keeps_the_bits_of_others(
    level: str | None, left: list[int], right: list[int], seed: int, dim: int
) -> None:
    left, right = sorted(left), sorted(right)
    a, b = numbers(seed, len(left), dim), numbers(seed + 1, len(right), dim)
    with using(level):
        merged = rows.merge(rows.pack(tensor(left), a), rows.pack(tensor(right), b), dim)
    ids, found = rows.ids_of(merged, dim).tolist(), rows.rows_of(merged, dim)
    assert ids == sorted({*left, *right})
    sides = dict(zip(left, a, strict=True)), dict(zip(right, b, strict=True))
    for key, row in zip(ids, found, strict=True):
        parts = [side[key] for side in sides if key in side]
        assert torch.equal(bits(row), bits(sum(parts[1:], parts[0])))


@given(st.lists(st.integers(-3, 3), max_size=30), SEEDS, st.integers(1, 5))
def test_rows_of_one_id_are_summed_in_the_order_given(ids: list[int], seed: int, dim: int) -> None:
    values = numbers(seed, len(ids), dim)
    unique, found = rows.summed(tensor(ids), values)
    assert unique.tolist() == sorted(set(ids))
    for key, row in zip(unique.tolist(), found, strict=True):
        expected = None
        for other, value in zip(ids, values, strict=True):
            if other == key:
                expected = value if expected is None else expected + value
        assert expected is not None and torch.equal(bits(row), bits(expected))


def test_minus_zero_of_one_row_stays() -> None:
    _, found = rows.summed(tensor([5, 5, 3]), torch.tensor([[1.0], [2.0], [-0.0]]))
    assert math.copysign(1.0, float(found[0])) == -1.0


def test_bytes_that_are_not_whole_rows_are_refused() -> None:
    with pytest.raises(ProtocolError, match="not whole rows of dim 3, 20 bytes each"):
        rows.count(torch.zeros(51), 3)


@given(ids=SETS, first=st.integers(0, 1023), parts=st.integers(1, 1024))
@at_every_level
def test_ids_are_ascending_and_of_the_buckets_parts(level: str | None, ids: list[int], first: int, parts: int) -> None:
    ids.sort()
    within = [key for key in ids if first <= int(rows.part_of(tensor([key]))) < first + parts]
    refused = [wrong for wrong in (within[::-1], within[:1] * 2) if len(wrong) > 1]
    with using(level):
        rows.check_packed(rows.pack(tensor(within), torch.ones(len(within), 3)), 3, first, parts, "users")
        for wrong in refused:
            with pytest.raises(ProtocolError, match="'users': the ids of a push are not ascending"):
                rows.check_packed(rows.pack(tensor(wrong), torch.ones(len(wrong), 3)), 3, first, parts, "users")
        if strays := [key for key in ids if key not in within]:
            with pytest.raises(ProtocolError, match=f"'users': id {strays[0]} belongs to another shard"):
                rows.check_packed(rows.pack(tensor(ids), torch.ones(len(ids), 3)), 3, first, parts, "users")


@pytest.mark.parametrize("codec", ["fp16", "lossless"])
def test_encoded_rows_that_say_they_are_many_are_refused_before_memory_is_taken(codec: str) -> None:
    dim, count = 1024, 1 << 17
    table = TensorSpec(name="users", shape=(rows.PARTS, dim), dtype="float32", kind=TensorKind.TABLE)
    coder = PackedRows(CODECS.parse(codec), table)
    few = coder.encode(rows.pack(tensor([1, 2]), torch.zeros(2, dim)), PLAIN_TURN)
    assert rows.count(coder.decode(bytearray(few), PLAIN_TURN), dim) == 2
    head = np.arange(-1, count)
    head[0] = count
    with pytest.raises(ProtocolError, match=r"'users': 9 bytes can't be 131072 rows"):
        coder.decode(bytearray(head.tobytes() + bytes(9)), PLAIN_TURN)


@given(SETS)
def test_parts_are_those_of_splitmix64(ids: list[int]) -> None:
    def part(key: int) -> int:
        x = (key + 0x9E3779B97F4A7C15) % (1 << 64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ x >> shift) * factor % (1 << 64)
        return (x ^ x >> 31) * rows.PARTS >> 64

    assert rows.part_of(tensor(ids)).tolist() == [part(key) for key in ids]


# Stored


CHANGES = st.lists(st.tuples(st.booleans(), SETS), max_size=8)


def empty(dim: int, widths: dict[str, int], memory: int) -> RowStore:
    """A store with so many rows in memory; 0 = all."""
    if not memory:
        return RowStore(dim, widths)
    return ColdRows(dim, widths, memory, RowFile(Path(tempfile.gettempdir()), "users", dim + sum(widths.values())))


@given(changes=CHANGES, dim=st.integers(1, 5))
@pytest.mark.parametrize("memory", [0, 1, 20])
@at_every_level
def test_a_store_is_a_dict(level: str | None, memory: int, changes: list[tuple[bool, list[int]]], dim: int) -> None:
    with using(level):
        store = empty(dim, {"sum": 1, "n": dim}, memory)
    expected, seen = dict[int, Tensor](), 0
    for number, (adding, chosen) in enumerate(changes):
        if adding:
            ids = [key for key in chosen if key not in expected]
            values = numbers(number, len(ids), dim)
            slots = store.insert(tensor(ids), values)
            assert all(not state[slots].any() for state in store.states.values())
            expected.update(zip(ids, values, strict=True))
            for state in store.states.values():
                state[slots] = 7.0
        else:
            store.remove(tensor(chosen))
            for key in chosen:
                expected.pop(key, None)
        seen = max(seen, len(expected))
        asked = [*expected, *(key for key in chosen if key not in expected)]
        assert store.look(tensor([*expected])).tolist() == [row.tolist() for row in expected.values()]
        found = store.find(tensor(asked))
        assert len(store) == len(expected)
        assert len(set(found[: len(expected)].tolist())) == len(expected)
        assert [slot >= 0 for slot in found.tolist()] == [key in expected for key in asked]
        gathered = torch.full((len(found), dim), 9.0)
        with using(level):
            store.gather(found, gathered)
        for slot, row, key in zip(found.tolist(), gathered, asked, strict=True):
            assert torch.equal(row, expected.get(key, torch.full((dim,), 9.0)))
            assert slot < 0 or bool((store.states["n"][slot] == 7).all())
        # Slots of removed rows are used again.
        assert len(store.values) <= 2 * max(seen, 8)
        ordered, columns = store.ordered()
        assert ordered.tolist() == sorted(expected, key=lambda key: (int(rows.part_of(tensor([key]))), key))
        assert columns["value"].tolist() == [expected[key].tolist() for key in ordered.tolist()]
        assert all(bool((columns[name] == 7).all()) for name in store.states)


def test_slots_are_alike_with_and_without_the_library() -> None:
    found = []
    for level in LEVELS:
        with using(level):
            store = RowStore(2, {})
            slots = [store.insert(torch.arange(0, 900, 3), torch.zeros(300, 2))]
            store.remove(torch.arange(0, 900, 2))
            slots.append(store.insert(torch.arange(1, 600, 3), torch.zeros(200, 2)))
            ids, _ = store.ordered()
            found.append(torch.cat([*slots, ids, store.find(ids)]))
    assert all(torch.equal(found[0], other) for other in found)


# First values


@pytest.mark.parametrize("text", ["uniform", "normal", "uniform:seed=3,scale=2.0"])
@given(ids=SETS, cut=st.integers(0, 40), dim=st.integers(1, 40), wider=st.integers(0, 4))
def test_first_values_do_not_depend_on_what_they_come_with_nor_on_the_library(
    text: str, ids: list[int], cut: int, dim: int, wider: int
) -> None:
    init = ROW_INITS.parse(text)
    with using(None):
        whole = init.rows("users", tensor(ids), dim + wider)
    assert whole.dtype is torch.float32
    for level in LEVELS:
        with using(level):
            parts = [init.rows("users", tensor(part), dim) for part in (ids[cut:], ids[:cut])]
        assert torch.equal(bits(whole[:, :dim]), bits(torch.cat(parts[::-1])))


def test_first_values_differ_by_seed_table_id_and_column() -> None:
    ids = torch.arange(-500, 500)
    made = [
        ROW_INITS.parse(text).rows(table, ids, 4)
        for text, table in itertools.product(["uniform", "uniform:seed=1", "uniform:seed=-1"], ["users", "items"])
    ]
    values = torch.cat(made).flatten()
    assert len(set(values.tolist())) > 0.99 * len(values)
    # The columns of neighbours, of tables and of seeds have nothing to do with each other.
    together = torch.corrcoef(torch.cat([*(one.T for one in made), made[0].roll(1, 0).T])).fill_diagonal_(0)
    assert together.abs().max() < 0.15


def test_first_values_have_known_bits() -> None:
    ids = tensor([0, -1, 1 << 40])
    uniform, normal = (ROW_INITS.parse(text).rows("users", ids, 2).flatten() for text in ("uniform", "normal"))
    assert bits(uniform).tolist() == [-1142641856, 991195290, 1012466279, -1169410560, -1129484832, -1120628963]
    assert bits(normal).tolist() == [993072594, -1140380639, -1141942942, -1196909867, -1159192072, -1144536001]


def test_first_values_have_their_distributions() -> None:
    ids, grid = torch.arange(20_000), torch.linspace(-4, 4, 161, dtype=torch.float64)
    uniform = ROW_INITS.parse("uniform:scale=4.0").rows("t", ids, 50).flatten().sort().values.double()
    normal = ROW_INITS.parse("normal:std=1.0").rows("t", ids, 50).flatten().sort().values.double()
    for values, expected in ((uniform, (grid + 4) / 8), (normal, torch.special.ndtr(grid))):
        share = torch.searchsorted(values, grid) / len(values)
        assert (share - expected).abs().max() < 0.002
    assert abs(float(normal.std()) - 1) < 0.003 and abs(float(normal.mean())) < 0.003
    assert not ROW_INITS.parse("zeros").rows("t", ids, 3).any()


# Rules


def stored(rule: Any, values: Tensor) -> RowStore:
    """A store with these rows under the ids 0, 1, ..."""
    store = RowStore(values.shape[1], rule.widths(values.shape[1]))
    store.insert(torch.arange(len(values)), values)
    return store


@at_every_level
@pytest.mark.parametrize("text", RULES)
@given(seed=SEEDS, count=st.integers(1, 30), dim=st.integers(1, 70))
def test_rows_without_a_gradient_keep_their_bits(level: str | None, text: str, seed: int, count: int, dim: int) -> None:
    rule = ROW_RULES.parse(text)
    store = stored(rule, numbers(seed, count, dim))
    for state in store.states.values():
        state[:count] = numbers(seed + 1, count, state.shape[1]).abs()
    arenas = {"values": store.values, **store.states}
    before = {name: arena[:count].clone() for name, arena in arenas.items()}
    slots = torch.from_numpy(np.random.default_rng(seed).permutation(count)[: count // 2])
    others = torch.ones(count, dtype=torch.bool)
    others[slots] = False
    with using(level):
        rule.apply(store, slots, numbers(seed + 2, len(slots), dim), factor=0.5)
    for name, arena in arenas.items():
        assert torch.equal(bits(arena[:count][others]), bits(before[name][others])), name
        changed = (arena[:count] != before[name]).any(1)
        assert changed[slots].all(), name


@pytest.mark.parametrize("text", RULES)
@given(seed=SEEDS, count=st.integers(1, 20), dim=DIMS, shift=st.integers(0, 3))
def test_rules_have_one_result_with_and_without_the_library(
    text: str, seed: int, count: int, dim: int, shift: int
) -> None:
    rule, found = ROW_RULES.parse(text), []
    for level in LEVELS:
        store = stored(rule, numbers(seed, count, dim))
        for step in range(4):
            slots = torch.from_numpy(np.random.default_rng(seed + step).permutation(count)[: step * count // 3])
            octets = np.zeros(4 * len(slots) * dim + shift, np.uint8)
            gradients = torch.from_numpy(octets[shift:].view(np.float32).reshape(-1, dim))
            gradients.copy_(numbers(seed + step, len(slots), dim))
            with using(level):
                rule.apply(store, slots, gradients, factor=1 / (1 + step))
        found.append(torch.cat([store.values[:count], *(state[:count] for state in store.states.values())], 1))
    assert found[0].isfinite().all()
    assert all(torch.equal(bits(found[0]), bits(other)) for other in found)


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("sgd:lr=0.1,weight_decay=0.01", lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01)),
        ("adagrad:lr=0.05", lambda p: torch.optim.Adagrad(p, lr=0.05)),
        ("adam:lr=0.01,beta1=0.8", lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.999))),
    ],
)
def test_rules_are_torchs_where_every_row_has_a_gradient(text: str, make: Any) -> None:
    values = numbers(1, 9, 11)
    rule, parameter = ROW_RULES.parse(text), torch.nn.Parameter(values.double())
    store, optimizer = stored(rule, values), make([parameter])
    for step in range(40):
        gradients = numbers(2 + step, 9, 11)
        parameter.grad = gradients.double()
        optimizer.step()
        rule.apply(store, store.find(torch.arange(9)), gradients, factor=1.0)
    assert torch.allclose(store.values[:9].double(), parameter.detach(), rtol=1e-5, atol=1e-6)


def test_adam_counts_the_steps_of_each_row() -> None:
    rule, values, gradients = ROW_RULES.parse("adam:lr=0.01"), numbers(1, 2, 5), numbers(2, 3, 2, 5)
    store, alone = stored(rule, values), stored(rule, values[:1])
    for step, slots in enumerate(([1], [0, 1], [1])):
        rule.apply(store, tensor(slots), gradients[step, -len(slots) :], factor=1.0)
    rule.apply(alone, tensor([0]), gradients[1, :1], factor=1.0)
    assert store.states["step"][:2].flatten().tolist() == [1.0, 3.0]
    assert torch.equal(store.values[0], alone.values[0])


def test_rowwise_adagrad_is_its_formula() -> None:
    for dim in (1, 3, 8, 64, 100):
        rule, values = ROW_RULES.parse("rowwise-adagrad:lr=0.05,eps=0.001"), numbers(dim, 6, dim)
        store, expected, total = stored(rule, values), values.double(), torch.zeros(6, 1, dtype=torch.float64)
        for step in range(20):
            gradients = numbers(step, 6, dim)
            total += gradients.double().square().mean(1, keepdim=True)
            expected = expected - 0.05 * 0.5 * gradients.double() / (total.sqrt() + 0.001)
            rule.apply(store, torch.arange(6), gradients, factor=0.5)
        assert torch.allclose(store.values[:6].double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.allclose(store.states["sum"][:6].double(), total, rtol=1e-6)


def test_ftrl_is_algorithm_1_of_the_paper() -> None:
    rule, alpha, (l1, l2, beta) = ROW_RULES.parse("ftrl:lr=0.1,l1=0.5,l2=0.2,beta=0.7"), 0.1, (0.5, 0.2, 0.7)
    w, z, n = np.zeros((3, 4, 6))
    store = stored(rule, torch.zeros(4, 6))
    for step in range(30):
        g = numbers(step, 4, 6)
        rule.apply(store, torch.arange(4), g, factor=1.0)
        sigma = (np.sqrt(n + g.double().numpy() ** 2) - np.sqrt(n)) / alpha
        z, n = z + g.double().numpy() - sigma * w, n + g.double().numpy() ** 2
        w = np.where(abs(z) <= l1, 0, -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2))
    assert np.allclose(store.values[:4], w, rtol=1e-4, atol=1e-5) and 0 < (w == 0).sum() < w.size
    before = store.values.clone()
    rule.apply(store, torch.arange(4), numbers(1, 4, 6), factor=0.0)
    assert torch.equal(store.values[:4], before[:4])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sgd:lr=0.0", "lr is 0.0; give a number from 1e-30"),
        ("sgd:weight_decay=-1", "weight_decay is -1.0; give a number from 0.0"),
        ("adagrad:eps=0", "eps is 0.0"),
        ("adam:beta2=1", "beta2 is 1.0; give a number at least 0 and below 1"),
        ("ftrl:beta=0", "beta is 0.0"),
        ("rowwise-adagrad:lr=1e31", "lr is 1e\\+31"),
    ],
)
def test_settings_of_rules_are_checked(text: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        ROW_RULES.parse(text)


@pytest.mark.parametrize("text", ["uniform:scale=-1", "normal:std=1e31"])
def test_settings_of_first_values_are_checked(text: str) -> None:
    with pytest.raises(JobError, match="give a number from 0"):
        ROW_INITS.parse(text)


@pytest.mark.parametrize("text", RULES)
def test_what_does_not_fit_a_store_is_refused(text: str) -> None:
    rule = ROW_RULES.parse(text)
    store = stored(rule, torch.zeros(3, 4))
    for slots, gradients in (
        ([0, -1], torch.zeros(2, 4)),
        ([len(store.values)], torch.zeros(1, 4)),
        ([0], torch.zeros(1, 5)),
        ([0, 1], torch.zeros(1, 4)),
        ([0], torch.zeros(1, 4, dtype=torch.float64)),
    ):
        with pytest.raises(TensorError, match="row rule"):
            rule.apply(store, tensor(slots), gradients, factor=1.0)
    with pytest.raises(TensorError, match="with states"):
        rule.apply(RowStore(4, {"other": 4}), tensor([0]), torch.zeros(1, 4), factor=1.0)

"""Sums, norms and clipping: the same bits whoever adds them, wherever the plan cuts, however many threads run."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st

from shardline.core.plan import Plan, Slice, make_plan, num_quanta, quantum_rows
from shardline.core.reduce import (
    Block,
    clip_scale,
    cover,
    global_norm,
    is_finite,
    is_node,
    mean_,
    nodes,
    quantum_key,
    sibling,
    slice_quanta,
    split,
    square_sums,
    tree_sum,
)
from shardline.core.spec import DTYPES, TensorSpec
from shardline.host.process import torch_threads

REPLICAS = st.integers(1, 40)


def draw(elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(elements, dtype=torch.float64, generator=generator).mul_(3.0).to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype is right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


# The tree.


@given(REPLICAS)
def test_a_node_splits_into_the_largest_power_of_two_below_it_and_the_rest(count: int) -> None:
    block = Block(3, count + 1)
    left, right = split(block)
    assert left.first == 3
    assert left.end == right.first
    assert right.end == block.end
    assert left.count & (left.count - 1) == 0
    assert left.count < block.count <= 2 * left.count


@settings(deadline=None)
@given(REPLICAS)
def test_the_tree_has_each_replica_as_one_leaf_and_knows_its_nodes(replicas: int) -> None:
    tree = list(nodes(Block(0, replicas)))
    assert sorted(node.first for node in tree if node.count == 1) == list(range(replicas))
    assert len(tree) == len(set(tree)) == 2 * replicas - 1
    everything = [Block(first, count) for first in range(replicas + 2) for count in range(replicas + 3)]
    assert {block for block in everything if is_node(block, replicas)} == set(tree)


@given(REPLICAS)
def test_siblings_are_the_halves_of_their_parent(replicas: int) -> None:
    for node in nodes(Block(0, replicas)):
        family = sibling(node, replicas)
        if node.count == replicas:
            assert family is None
        else:
            assert family is not None
            parent, left, right = family
            assert split(parent) == (left, right)
            assert node in (left, right)
            assert is_node(parent, replicas)


@given(REPLICAS, st.data())
def test_a_cover_holds_exactly_the_owned_replicas_in_the_fewest_nodes(replicas: int, data: st.DataObject) -> None:
    owned = data.draw(st.sets(st.integers(0, replicas - 1)))
    blocks = cover(owned, replicas)
    assert [r for block in blocks for r in range(block.first, block.end)] == sorted(owned)
    assert all(is_node(block, replicas) for block in blocks)
    for block in blocks:
        family = sibling(block, replicas)
        assert family is None or not {family[1], family[2]} <= set(blocks), "two siblings make one node"


def summed_by_owners(values: Sequence[torch.Tensor], owners: Sequence[int], seed: int) -> torch.Tensor:
    """Each owner sums the nodes it holds whole; the blocks meet in random order and climb as siblings do."""
    replicas = len(values)
    blocks: list[tuple[Block, torch.Tensor]] = []
    for owner in set(owners):
        for block in cover([r for r in range(replicas) if owners[r] == owner], replicas):
            total = tree_sum(values[block.first : block.end])
            assert total is not None
            blocks.append((block, total))
    random.Random(seed).shuffle(blocks)
    held: dict[Block, torch.Tensor] = {}
    for block, value in blocks:
        while (family := sibling(block, replicas)) is not None:
            parent, left, right = family
            other = right if block == left else left
            if other not in held:
                break
            value = value + held.pop(other) if block == left else held.pop(other) + value
            block = parent
        held[block] = value
    return held.pop(Block(0, replicas))


@settings(deadline=None)
@given(st.integers(1, 17), st.sampled_from(["float32", "float64", "bfloat16", "float16"]), st.data())
def test_a_sum_has_the_same_bits_whoever_adds_which_block_and_in_whatever_order_they_arrive(
    replicas: int, dtype: str, data: st.DataObject
) -> None:
    owners = data.draw(st.lists(st.integers(0, 5), min_size=replicas, max_size=replicas))
    seed = data.draw(st.integers(0, 999))
    values = [draw(50, DTYPES[dtype], 100 * seed + r) for r in range(replicas)]
    total = tree_sum(values)
    assert total is not None
    assert same_bits(total, summed_by_owners(values, owners, seed))


def test_the_tree_differs_from_adding_one_after_another_so_the_order_is_worth_fixing() -> None:
    values = [draw(10_000, torch.float32, r) for r in range(7)]
    total, sequential = tree_sum(values), values[0].clone()
    for value in values[1:]:
        sequential += value
    assert total is not None
    assert torch.allclose(total, sequential, rtol=1e-4, atol=1e-4)
    assert not torch.equal(total, sequential)


def test_a_missing_gradient_adds_nothing_not_even_zero() -> None:
    a, b = torch.tensor([1.5, -0.0]), torch.tensor([2.0, -0.0])
    total = tree_sum([a, None, b, None, None])
    assert total is not None
    assert same_bits(total, torch.tensor([3.5, -0.0]))
    assert tree_sum([None, a, None]) is a
    assert tree_sum([None, None]) is None
    assert same_bits(a, torch.tensor([1.5, -0.0]))


def test_the_mean_of_one_replica_is_the_value_itself() -> None:
    value = draw(100, torch.float32, 1)
    assert mean_(value, 1) is value
    assert same_bits(mean_(value.clone(), 3), value / 3)


# Norms.

SHAPES = [(), (0, 5), (5, 0), (1,), (100_001,), (40, 777), (3, 50_003), (65, 64, 33)]


def cuts(tensor: TensorSpec, rows_per_slice: int) -> Iterator[Slice]:
    for first in range(0, max(tensor.rows, 1), rows_per_slice):
        rows = min(rows_per_slice, tensor.rows - first)
        yield Slice(tensor=0, first_row=first, rows=rows, offset=0, elements=rows * tensor.row_elements)


@pytest.mark.part(of=3, first=1)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_square_sums_have_the_same_bits_wherever_a_tensor_is_cut_or_lies_and_on_any_number_of_threads(
    shape: tuple[int, ...], dtype: str
) -> None:
    tensor = TensorSpec(name="w", shape=shape, dtype=dtype)
    flat = draw(tensor.elements, DTYPES[dtype], 5)
    whole = Slice(tensor=0, first_row=0, rows=tensor.rows, offset=0, elements=tensor.elements)
    expected = list(square_sums(flat, tensor, whole))
    assert [number for number, _ in expected] == list(range(num_quanta(tensor)))
    exact = math.fsum(abs(value) ** 2 for value in flat.to(torch.complex128).tolist())
    assert math.isclose(sum(value for _, value in expected), exact, rel_tol=1e-12)

    for number_of_threads in (1, 2, 3):
        with torch_threads(number_of_threads):
            for quanta, shift in ((1, 0), (2, 1), (3, 5)):
                found: list[tuple[int, float]] = []
                for piece in cuts(tensor, quanta * quantum_rows(tensor)):
                    start = piece.first_row * tensor.row_elements
                    room = torch.empty(piece.elements + shift, dtype=flat.dtype)
                    there = room[shift:].copy_(flat[start : start + piece.elements])
                    found += square_sums(there, tensor, piece)
                assert found == expected


def test_square_sums_leave_the_gradient_as_it_is() -> None:
    tensor = TensorSpec(name="w", shape=(300,), dtype="float64")
    flat = draw(300, torch.float64, 3)
    before = flat.clone()
    list(square_sums(flat, tensor, next(cuts(tensor, 300))))
    assert torch.equal(flat, before)


def test_quanta_of_a_slice_are_whole_rows_numbered_from_the_start_of_the_tensor() -> None:
    tensor = TensorSpec(name="w", shape=(100, 1000), dtype="float32")  # a quantum is 17 rows
    piece = Slice(tensor=0, first_row=34, rows=66, offset=0, elements=66_000)
    assert list(slice_quanta(tensor, piece)) == [
        (2, 0, 17_000),
        (3, 17_000, 34_000),
        (4, 34_000, 51_000),
        (5, 51_000, 66_000),
    ]


def plan_norm(plan: Plan, values: Sequence[torch.Tensor], seed: int) -> float:
    """Global norm as the lead finds it: one vote per shard, in any order."""
    sums = []
    for shard in plan.shards:
        for bucket in shard.buckets:
            for piece in bucket.slices:
                tensor = plan.tensors[piece.tensor]
                start = piece.first_row * tensor.row_elements
                flat = values[piece.tensor][start : start + piece.elements]
                sums += [(quantum_key(plan, piece.tensor, q), v) for q, v in square_sums(flat, tensor, piece)]
    assert sorted(key for key, _ in sums) == list(range(sum(map(num_quanta, plan.tensors))))
    random.Random(seed).shuffle(sums)
    return global_norm(sums)


def test_the_global_norm_does_not_move_with_the_number_of_shards_the_bucket_size_or_the_order_of_votes() -> None:
    shapes = [(700, 300), (300,), (), (0, 4), (90_000,), (5, 40_000)]
    tensors = [TensorSpec(name=f"w{n}", shape=shape, dtype="float32") for n, shape in enumerate(shapes)]
    values = [draw(tensor.elements, torch.float32, n) for n, tensor in enumerate(tensors)]
    norms = {
        plan_norm(make_plan(tensors, shards, bucket_bytes=size), values, seed)
        for seed, (shards, size) in enumerate([(1, 2 << 20), (1, 64 << 10), (2, 256 << 10), (3, 100_000), (7, 2 << 20)])
    }
    assert len(norms) == 1
    assert math.isclose(norms.pop(), float(torch.cat(values).double().norm()), rel_tol=1e-12)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_the_global_norm_does_not_depend_on_the_order_in_which_sums_come(
    values: list[float], shuffle: random.Random
) -> None:
    sums = list(enumerate(values))
    norm = global_norm(sums)
    shuffle.shuffle(sums)
    assert global_norm(sums) == norm


@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 5.0, 1e6])
def test_clipping_scales_as_torch_does(clip_norm: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64))
    gradient = draw(1000, torch.float64, 9)
    parameter.grad = gradient.clone()
    norm = float(torch.nn.utils.clip_grad_norm_([parameter], clip_norm))
    assert torch.equal(parameter.grad, gradient * clip_scale(norm, clip_norm))


@pytest.mark.parametrize(
    ("norm", "clip_norm", "scale"),
    [
        (2.0, 0.0, 1.0),  # off
        (2.0, 4.0, 1.0),
        (0.0, 1.0, 1.0),
        (2.0, 2.0, 2.0 / (2.0 + 1e-6)),
        (4.0, 1.0, 1.0 / (4.0 + 1e-6)),
        (math.inf, 1.0, 0.0),
    ],
)
def test_clip_scale(norm: float, clip_norm: float, scale: float) -> None:
    assert clip_scale(norm, clip_norm) == scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_number_anywhere_is_found(dtype: torch.dtype, bad: float) -> None:
    for position in (0, 7, 64, 16_383):
        values = torch.ones(16_384, dtype=dtype)
        assert is_finite(values)
        values[position] = bad
        assert not is_finite(values)


def test_empty_and_integer_tensors_are_finite() -> None:
    assert is_finite(torch.empty(0))
    assert is_finite(torch.tensor([2**31 - 1]))
    assert is_finite(torch.tensor(3.0))

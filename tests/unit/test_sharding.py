"""Plans: every element once, cut only where bits don't care, balanced, and refused by name when they are corrupt."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardline.core.plan import (
    ALIGNMENT_ELEMENTS,
    BUCKET_BYTES,
    PIECE_FLOOR_BYTES,
    SPLIT_FLOOR_BYTES,
    BucketSpec,
    Plan,
    ShardSpec,
    Slice,
    balance,
    check_plan,
    cut_rows,
    make_plan,
    num_quanta,
    padded,
    quantum_rows,
)
from shardline.core.spec import DTYPES, TensorKind, TensorSpec, itemsize
from shardline.errors import JobError, ProtocolError

Shape = tuple[int, ...]


def specs(shapes: list[Shape], **options: object) -> list[TensorSpec]:
    return [TensorSpec(name=f"w{n}", shape=shape, dtype="float32", **options) for n, shape in enumerate(shapes)]  # type: ignore[arg-type]


shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 2_000_000)),
    st.tuples(st.integers(0, 3000), st.integers(0, 3000)),
    st.tuples(st.integers(1, 300), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 4), st.integers(1, 300_000)),
)


@st.composite
def models(draw: st.DrawFn) -> list[TensorSpec]:
    first = TensorSpec(name="first", shape=draw(shapes), dtype="float32")
    tensors = [first]
    for n in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from([TensorKind.PARAM, TensorKind.FROZEN, TensorKind.BUFFER]))
        tensors.append(
            TensorSpec(
                name=f"t{n}",
                shape=draw(shapes),
                dtype=draw(st.sampled_from(sorted(DTYPES))),
                kind=kind,
                group=draw(st.integers(0, 2)) if kind is TensorKind.PARAM else 0,
                fragment=draw(st.sampled_from([0, 0, 1, 7])) if kind is TensorKind.PARAM else 0,
                whole=draw(st.booleans()),
                aliases=(f"alias{n}",) if draw(st.booleans()) else (),
            )
        )
    return tensors


shard_counts = st.integers(1, 20)
bucket_sizes = st.sampled_from([64 << 10, 100_000, 1 << 20, BUCKET_BYTES, 4 << 20])


@settings(max_examples=150, deadline=None)
@given(models(), shard_counts, bucket_sizes)
def test_a_plan_holds_every_row_of_every_tensor_exactly_once(
    tensors: list[TensorSpec], shards: int, bucket_bytes: int
) -> None:
    plan = make_plan(tensors, shards, bucket_bytes=bucket_bytes)
    check_plan(plan)
    # Without check_plan's help: paint the rows.
    painted = [np.zeros(tensor.rows, np.uint8) for tensor in tensors]
    for shard in plan.shards:
        for bucket in shard.buckets:
            end = 0
            for piece in bucket.slices:
                painted[piece.tensor][piece.first_row : piece.first_row + piece.rows] += 1
                assert piece.elements == piece.rows * tensors[piece.tensor].row_elements
                assert end <= piece.offset
                assert piece.offset % ALIGNMENT_ELEMENTS == 0
                end = piece.end
            assert end <= bucket.elements < end + ALIGNMENT_ELEMENTS
    assert all((rows == 1).all() for rows in painted)
    assert {piece.tensor for s in plan.shards for b in s.buckets for piece in b.slices} == set(range(len(tensors)))


@settings(max_examples=100, deadline=None)
@given(models(), shard_counts, bucket_sizes)
def test_buckets_are_uniform_and_of_the_size_asked_for_and_cuts_are_at_quanta(
    tensors: list[TensorSpec], shards: int, bucket_bytes: int
) -> None:
    plan = make_plan(tensors, shards, bucket_bytes=bucket_bytes)
    cut = [0] * len(tensors)
    for bucket in (bucket for shard in plan.shards for bucket in shard.buckets):
        held = [tensors[piece.tensor] for piece in bucket.slices]
        assert {(t.dtype, t.kind, t.group) for t in held} == {(bucket.dtype, bucket.kind, held[0].group)}
        assert len(held) == 1 or bucket.nbytes <= bucket_bytes
        for piece, tensor in zip(bucket.slices, held, strict=True):
            cut[piece.tensor] += 1
            last = piece.first_row + piece.rows
            assert piece.first_row % quantum_rows(tensor) == 0
            assert last == tensor.rows or last % quantum_rows(tensor) == 0
    for tensor, slices in zip(tensors, cut, strict=True):
        assert slices <= max(1, num_quanta(tensor))
        if tensor.whole or tensor.elements * itemsize(tensor.dtype) < SPLIT_FLOOR_BYTES:
            assert slices == 1


@settings(max_examples=100, deadline=None)
@given(models(), shard_counts, bucket_sizes)
def test_rows_that_follow_one_another_in_a_bucket_are_one_slice(
    tensors: list[TensorSpec], shards: int, bucket_bytes: int
) -> None:
    plan = make_plan(tensors, shards, bucket_bytes=bucket_bytes)
    for bucket in (bucket for shard in plan.shards for bucket in shard.buckets):
        for last, piece in itertools.pairwise(bucket.slices):
            assert (last.tensor, last.first_row + last.rows) != (piece.tensor, piece.first_row)


def test_a_shard_has_neighbouring_rows_of_a_tensor() -> None:
    plan = make_plan(specs([(4096, 1024)]), 2)
    assert {len(bucket.slices) for shard in plan.shards for bucket in shard.buckets} == {1}
    upper, lower = ([piece for bucket in shard.buckets for piece in bucket.slices] for shard in plan.shards)
    assert max(piece.first_row + piece.rows for piece in upper) == min(piece.first_row for piece in lower)


@settings(max_examples=50, deadline=None)
@given(models(), shard_counts)
def test_equal_inputs_give_equal_plans(tensors: list[TensorSpec], shards: int) -> None:
    plan = make_plan(tensors, shards)
    again = make_plan([dataclasses.replace(tensor) for tensor in tensors], shards)
    assert plan == again
    assert plan.plan_id == again.plan_id


@settings(max_examples=100, deadline=None)
@given(models(), shard_counts)
def test_no_shard_is_empty_and_there_are_as_many_as_asked_where_pieces_suffice(
    tensors: list[TensorSpec], shards: int
) -> None:
    plan = make_plan(tensors, shards)
    assert 1 <= len(plan.shards) <= shards
    assert all(shard.buckets for shard in plan.shards)
    pieces = sum(piece.elements > 0 for s in plan.shards for b in s.buckets for piece in b.slices)
    assert len(plan.shards) == shards or pieces <= len(plan.shards)


def test_the_plan_id_differs_when_anything_differs() -> None:
    base = TensorSpec(name="w", shape=(600, 400), dtype="float32")
    bias = TensorSpec(name="b", shape=(400,), dtype="float32", kind=TensorKind.BUFFER)
    variants = [
        make_plan([base, bias], 2),
        make_plan([base, bias], 1),
        make_plan([base, bias], 3),
        make_plan([bias, base], 2),
        make_plan([base], 2),
        make_plan([base, bias], 2, bucket_bytes=64 << 10),
        make_plan([dataclasses.replace(base, name="v"), bias], 2),
        make_plan([dataclasses.replace(base, shape=(400, 600)), bias], 2),
        make_plan([dataclasses.replace(base, shape=(600, 20, 20)), bias], 2),
        make_plan([dataclasses.replace(base, dtype="int32"), bias], 2),
        make_plan([dataclasses.replace(base, group=1), bias], 2),
        make_plan([dataclasses.replace(base, whole=True), bias], 2),
        make_plan([dataclasses.replace(base, aliases=("tied",)), bias], 2),
        make_plan([base, dataclasses.replace(bias, kind=TensorKind.FROZEN)], 2),
    ]
    assert len({plan.plan_id for plan in variants}) == len(variants)


def test_a_tensor_is_found_by_its_name_and_by_its_aliases() -> None:
    tied = TensorSpec(name="embed", shape=(10, 4), dtype="float32", aliases=("head",))
    plan = make_plan([tied, *specs([(3,)])], 2)
    assert plan.index == {"embed": 0, "head": 0, "w0": 1}
    assert [piece.rows for _, _, piece in plan.pieces(0)] == [10]


# Balance.


def smallest_piece_bytes(tensor: TensorSpec) -> int:
    """What the planner can't make smaller, whatever the balance asks for."""
    size = itemsize(tensor.dtype)
    if tensor.whole or tensor.elements * size < SPLIT_FLOOR_BYTES:
        return padded(tensor.elements) * size
    return padded(min(cut_rows(tensor), tensor.rows) * tensor.row_elements) * size


def fragment_pieces(plan: Plan, fragment: int) -> list[list[int]]:
    """Bytes of each slice of a fragment, by shard."""
    return [
        [
            padded(piece.elements) * itemsize(bucket.dtype)
            for bucket in shard.buckets
            for piece in bucket.slices
            if plan.tensors[piece.tensor].fragment == fragment
        ]
        for shard in plan.shards
    ]


def planned_bytes(plan: Plan) -> int:
    return sum(shard.nbytes for shard in plan.shards)


@settings(max_examples=200, deadline=None)
@given(models(), shard_counts, bucket_sizes)
def test_no_plan_is_worse_balanced_than_its_largest_piece_explains(
    tensors: list[TensorSpec], shards: int, bucket_bytes: int
) -> None:
    plan = make_plan(tensors, shards, bucket_bytes=bucket_bytes)
    for fragment in {tensor.fragment for tensor in tensors}:
        placed = fragment_pieces(plan, fragment)
        mean = sum(map(sum, placed)) / shards
        largest = max(map(max, filter(None, placed)))
        assert max(map(sum, placed)) <= mean + (1 - 1 / shards) * largest + 1e-6


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), min_size=1, max_size=20),
    shard_counts,
    st.sampled_from(["float32", "bfloat16", "float64"]),
)
def test_shards_differ_by_a_tenth_at_most_whenever_tensors_can_be_cut_finely_enough(
    sizes: list[tuple[int, int]], shards: int, dtype: str
) -> None:
    tensors = [TensorSpec(name=f"w{n}", shape=size, dtype=dtype) for n, size in enumerate(sizes)]
    plan = make_plan(tensors, shards)
    mean = planned_bytes(plan) / shards
    if mean >= 10 * PIECE_FLOOR_BYTES and max(map(smallest_piece_bytes, tensors)) <= mean / 10:
        assert len(plan.shards) == shards
        assert balance(plan) <= 1.1


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8])
def test_every_fragment_of_a_model_is_shared_evenly(shards: int) -> None:
    plan = make_plan(
        [dataclasses.replace(one, fragment=n % 4) for n, one in enumerate(specs([(1024, 1024)] * 12))], shards
    )
    for fragment in range(4):
        sizes = list(map(sum, fragment_pieces(plan, fragment)))
        assert max(sizes) * shards <= 1.1 * sum(sizes) == 1.1 * (12 << 20)
    check_plan(plan)


@pytest.mark.parametrize("shards", range(1, 33))
def test_one_large_tensor_is_shared_evenly(shards: int) -> None:
    assert balance(make_plan(specs([(50_000, 1024)]), shards)) <= 1.1


def test_layers_of_a_transformer_are_shared_evenly() -> None:
    block = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,), (768,), (768,)]
    tensors = specs([(50_257, 768), (1024, 768), *(block * 12)])
    for shards in (1, 2, 3, 5, 8, 16):
        assert balance(make_plan(tensors, shards)) <= 1.1


@pytest.mark.parametrize("megabytes", [1, 4, 12, 64])
def test_one_server_has_a_large_tensor_in_buckets_of_one_piece(megabytes: int) -> None:
    plan = make_plan(specs([(megabytes * 256, 1024)]), 1)
    check_plan(plan)
    assert [len(bucket.slices) for bucket in plan.shards[0].buckets] == [1] * max(1, min(16, megabytes))


# Corners.


def test_more_shards_than_pieces_gives_fewer_shards() -> None:
    plan = make_plan(specs([(3,), (4,)]), 16)
    check_plan(plan)
    assert [len(shard.buckets) for shard in plan.shards] == [1, 1]


@pytest.mark.parametrize("shape", [(), (0,), (0, 7), (7, 0), (3, 0, 5), (1,), (1, 1, 1)], ids=str)
def test_scalars_and_tensors_without_elements_are_held_once(shape: Shape) -> None:
    for shards in (1, 2, 3):
        plan = make_plan(specs([shape, (5, 5)]), shards)
        check_plan(plan)
        assert [piece.elements for _, _, piece in plan.pieces(0)] == [plan.tensors[0].elements]


def test_a_model_of_nothing_but_empty_tensors_has_a_plan() -> None:
    plan = make_plan(specs([(0,), (4, 0)]), 3)
    check_plan(plan)
    assert balance(plan) == 1.0


def test_three_gigabytes_are_planned_in_buckets_of_the_size_asked_for() -> None:
    plan = make_plan(specs([(800_000, 1024)]), 16)
    check_plan(plan)
    assert planned_bytes(plan) == 800_000 * 1024 * 4
    assert max(bucket.nbytes for shard in plan.shards for bucket in shard.buckets) <= BUCKET_BYTES
    assert balance(plan) <= 1.1


def test_a_row_larger_than_a_bucket_stays_in_one_piece() -> None:
    plan = make_plan(specs([(6, 1_000_000)]), 3)
    check_plan(plan)
    assert sorted(piece.rows for _, _, piece in plan.pieces(0)) == [1] * 6
    assert balance(plan) == 1.0


def test_buckets_of_a_shard_follow_the_order_of_the_model() -> None:
    plan = make_plan(specs([(500, 500), (500,), (700, 700), (700,), (900, 900)]), 2)
    for shard in plan.shards:
        first = [bucket.slices[0].tensor for bucket in shard.buckets]
        assert first == sorted(first)


@pytest.mark.parametrize(
    ("tensors", "shards", "sentence"),
    [
        (specs([(3,)]), 0, "the cluster has 0 parameter servers; it needs at least 1"),
        ([], 1, "the model has no parameters that require a gradient, so there is nothing to train"),
        (specs([(3,)], kind=TensorKind.BUFFER), 1, "the model has no parameters that require a gradient"),
        (specs([(3,)]) + specs([(4,)]), 1, "two tensors are named 'w0'"),
        (
            [*specs([(3,)]), TensorSpec(name="x", shape=(), dtype="float32", aliases=("w0",))],
            1,
            "named 'w0' (w0 and x)",
        ),
        (
            [TensorSpec(name="x", shape=(), dtype="float8")],
            1,
            "tensor 'x' has dtype 'float8', which Shardline doesn't support",
        ),
    ],
)
def test_what_can_not_be_planned_is_said_in_a_sentence(tensors: list[TensorSpec], shards: int, sentence: str) -> None:
    with pytest.raises(JobError) as raised:
        make_plan(tensors, shards)
    assert sentence in str(raised.value)


# Plans from the network.


def sound_plan() -> Plan:
    """w0: 60 rows of 1024, cut into quanta of 16 rows over two shards; w1: whole; n: an integer buffer; e: no rows."""
    tensors = (
        *specs([(60, 1024)]),
        TensorSpec(name="w1", shape=(60, 1024), dtype="float32", whole=True),
        TensorSpec(name="n", shape=(), dtype="int64", kind=TensorKind.BUFFER),
        TensorSpec(name="e", shape=(0, 3), dtype="float32", group=1),
    )

    def piece(tensor: int, first: int, rows: int, offset: int) -> Slice:
        elements = rows * tensors[tensor].row_elements
        return Slice(tensor=tensor, first_row=first, rows=rows, offset=offset, elements=elements)

    param = TensorKind.PARAM
    left = ShardSpec(
        buckets=(
            BucketSpec(
                dtype="float32", kind=param, elements=32_768, slices=(piece(0, 0, 16, 0), piece(0, 32, 16, 16_384))
            ),
            BucketSpec(dtype="int64", kind=TensorKind.BUFFER, elements=64, slices=(piece(2, 0, 1, 0),)),
            BucketSpec(dtype="float32", kind=param, elements=0, slices=(piece(3, 0, 0, 0),)),
        )
    )
    right = ShardSpec(
        buckets=(
            BucketSpec(
                dtype="float32", kind=param, elements=28_672, slices=(piece(0, 16, 16, 0), piece(0, 48, 12, 16_384))
            ),
            BucketSpec(dtype="float32", kind=param, elements=61_440, slices=(piece(1, 0, 60, 0),)),
        )
    )
    return Plan(tensors, (left, right))


def with_bucket(plan: Plan, shard: int, bucket: int, **changes: object) -> Plan:
    buckets = list(plan.shards[shard].buckets)
    buckets[bucket] = dataclasses.replace(buckets[bucket], **changes)  # type: ignore[arg-type]
    return with_buckets(plan, shard, buckets)


def with_buckets(plan: Plan, shard: int, buckets: list[BucketSpec]) -> Plan:
    shards = list(plan.shards)
    shards[shard] = ShardSpec(buckets=tuple(buckets))
    return Plan(plan.tensors, tuple(shards))


def with_slice(plan: Plan, shard: int, bucket: int, number: int, **changes: int) -> Plan:
    slices = list(plan.shards[shard].buckets[bucket].slices)
    slices[number] = dataclasses.replace(slices[number], **changes)
    return with_bucket(plan, shard, bucket, slices=tuple(slices))


def with_tensor(plan: Plan, number: int, **changes: object) -> Plan:
    tensors = list(plan.tensors)
    tensors[number] = dataclasses.replace(tensors[number], **changes)  # type: ignore[arg-type]
    return Plan(tuple(tensors), plan.shards)


def test_a_sound_plan_passes() -> None:
    check_plan(sound_plan())


@pytest.mark.parametrize(
    ("corrupt", "sentence"),
    [
        (lambda p: with_slice(p, 0, 0, 0, tensor=4), "shard 0, bucket 0 refers to tensor 4, but there are 4"),
        (lambda p: with_slice(p, 0, 0, 0, tensor=-1), "shard 0, bucket 0 refers to tensor -1, but there are 4"),
        (lambda p: with_bucket(p, 0, 1, dtype="int32"), "mixes 'n' (int64, buffer) into a bucket of int32, buffer"),
        (lambda p: with_bucket(p, 0, 1, kind=TensorKind.PARAM), "mixes 'n' (int64, buffer) into a bucket of int64, pa"),
        (lambda p: with_tensor(p, 3, dtype="bfloat16"), "shard 0, bucket 2 mixes 'e' (bfloat16, param)"),
        (lambda p: with_tensor(p, 0, dtype="float8"), "tensor 'w0' has dtype 'float8', which Shardline doesn't "
                                                      "support"),
        (lambda p: with_tensor(p, 0, shape=(-60, 1024)), "tensor 'w0' has the negative shape (-60, 1024)"),
        (lambda p: with_tensor(p, 1, name="w0"), "two tensors are named 'w0'"),
        (lambda p: with_tensor(p, 1, aliases=("n",)), "two tensors are named 'n'"),
        (lambda p: with_slice(p, 0, 0, 1, offset=16_385), "'w0' at elements 16385 to 32769 of 32768 overlaps another, "
                                                          "is not"),
        (lambda p: with_slice(p, 0, 0, 1, offset=16_320), "'w0' at elements 16320 to 32704 of 32768 overlaps"),
        (lambda p: with_slice(p, 0, 0, 0, offset=-64), "'w0' at elements -64 to 16320 of 32768 overlaps"),
        (lambda p: with_bucket(p, 0, 0, elements=16_384), "of 16384 overlaps another, is not aligned, or exceeds the "
                                                          "bucket"),
        (lambda p: with_bucket(p, 0, 0, elements=1 << 50), "has 1125899906842624 elements; its slices take 32768"),
        (lambda p: with_slice(p, 0, 0, 1, elements=100), "shard 0, bucket 0: 16 rows of 'w0' don't have 100 elements"),
        (lambda p: with_slice(p, 1, 0, 1, first_row=64), "rows 64 to 76 of 'w0' are out of range"),
        (lambda p: with_slice(p, 0, 0, 0, first_row=-16), "rows -16 to 0 of 'w0' are out of range"),
        (lambda p: with_slice(p, 0, 0, 0, rows=0, elements=0), "rows 0 to 0 of 'w0' are out of range"),
        (lambda p: with_slice(p, 0, 0, 0, first_row=1), "'w0' is cut at rows 1 to 17, not at multiples of 16"),
        (
            lambda p: with_slice(p, 0, 0, 0, rows=15, elements=15_360),
            "'w0' is cut at rows 0 to 15, not at multiples of 16",
        ),
        (lambda p: with_slice(p, 0, 0, 1, first_row=0), "rows 16 to 0 of 'w0' are missing or repeated"),
        (lambda p: with_buckets(p, 1, [p.shards[1].buckets[1]]), "rows 16 to 32 of 'w0' are missing or repeated"),
        (lambda p: with_buckets(p, 1, [p.shards[1].buckets[0]]), "'w1' has 60 rows; the plan covers 0"),
        (lambda p: with_buckets(p, 0, list(p.shards[0].buckets[:2])), "'e' has 0 rows; the plan covers 0"),
        (
            lambda p: with_buckets(p, 1, [*p.shards[1].buckets, p.shards[0].buckets[2]]),
            "'e' has no rows, but is in the plan 2 times",
        ),
        (lambda p: with_tensor(p, 0, whole=True), "'w0' must not be cut, but the plan cuts it into 4 slices"),
        (lambda p: with_buckets(p, 1, []), "shard 1 of 2 is empty"),
        (lambda p: with_bucket(p, 0, 1, slices=(), elements=0), "shard 0, bucket 1 contains no tensor"),
        (
            lambda p: with_bucket(
                p, 1, 1, elements=61_440, slices=(*p.shards[1].buckets[1].slices, dataclasses.replace(
                    p.shards[0].buckets[2].slices[0], offset=61_440)),
            ),
            "shard 1, bucket 1 mixes 'e' of group 1 into group 0",
        ),
        (
            lambda p: with_bucket(
                with_tensor(p, 3, group=0, fragment=2), 1, 1, elements=61_440, slices=(
                    *p.shards[1].buckets[1].slices, dataclasses.replace(
                        p.shards[0].buckets[2].slices[0], offset=61_440)),
            ),
            "shard 1, bucket 1 mixes 'e' of fragment 2 into fragment 0",
        ),
    ],
)  # fmt: skip
def test_a_corrupt_plan_is_refused_with_a_sentence(corrupt: Callable[[Plan], Plan], sentence: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        check_plan(corrupt(sound_plan()))
    assert str(raised.value).startswith("plan: ")
    assert sentence in str(raised.value)


@given(st.integers(1, 10_000), st.integers(0, 5_000))
def test_quanta_are_whole_rows_of_about_16384_elements(rows: int, width: int) -> None:
    tensor = TensorSpec(name="w", shape=(rows, width), dtype="float32")
    step = quantum_rows(tensor)
    assert step * max(1, width) >= 16_384
    assert (step - 1) * max(1, width) < 16_384
    assert num_quanta(tensor) == (math.ceil(rows / step) if width else 0)

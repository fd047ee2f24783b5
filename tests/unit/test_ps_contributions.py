"""Contributions merge along the canonical tree, whoever summed what beforehand and in whatever order they come."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, strategies as st

from shardline.core.contributions import Contributions, Partial, merge, none_present
from shardline.core.plan import BucketSpec, Slice
from shardline.core.reduce import Block, cover, tree_sum
from shardline.core.spec import TensorKind


def bucket(slices: int = 2) -> BucketSpec:
    pieces = tuple(Slice(tensor=n, first_row=0, rows=5, offset=64 * n, elements=5) for n in range(slices))
    return BucketSpec(dtype="float32", kind=TensorKind.PARAM, elements=64 * slices, slices=pieces)


def values(seed: int) -> torch.Tensor:
    flat = torch.zeros(128)
    generator = torch.Generator().manual_seed(seed)
    for offset in (0, 64):
        flat[offset : offset + 5] = torch.randn(5, generator=generator)
    return flat


@given(st.integers(1, 9), st.randoms(use_true_random=False))
def test_any_owners_and_any_order_give_the_bits_of_the_tree(replicas: int, chance: random.Random) -> None:
    owners = [chance.randrange(3) for _ in range(replicas)]
    sums = Contributions(bucket(), replicas)
    arriving = []
    for owner in range(3):
        own = Contributions(bucket(), replicas)
        mine = [replica for replica in range(replicas) if owners[replica] == owner]
        chance.shuffle(mine)
        for replica in mine:
            own.add(Block(replica, 1), values(replica), (True, True), 0)
        assert sorted(own.partials()) == cover(mine, replicas)
        arriving += list(own.partials().items())
    chance.shuffle(arriving)
    for number, (block, partial) in enumerate(arriving):
        assert not sums.complete, number
        sums.add(block, partial.values, partial.present, 0)
    assert sums.complete and sums.missing() == []
    total = sums.take()
    expected = tree_sum([values(replica) for replica in range(replicas)])
    assert total.values is not None and expected is not None and torch.equal(total.values, expected)


def test_an_absent_slice_takes_the_others_bits_and_not_even_a_zero_is_added() -> None:
    minus_zero = torch.full((128,), -0.0)
    left = Partial(minus_zero.clone(), (True, False))
    right = Partial(minus_zero.clone(), (False, True))
    total = merge(left, right, bucket())
    assert total.present == (True, True)
    assert total.values is not None
    # 0.0 + -0.0 would be 0.0.
    assert bool(torch.signbit(total.values[0:5]).all()) and bool(torch.signbit(total.values[64:69]).all())


def test_nothing_and_something_is_something() -> None:
    nothing, something = Partial(None, (False, False)), Partial(values(1), (True, False))
    assert merge(nothing, something, bucket()) is something
    assert merge(something, nothing, bucket()) is something
    assert merge(nothing, nothing, bucket()).values is None


def test_a_replica_that_adds_nothing_counts_all_the_same() -> None:
    sums = Contributions(bucket(), 2)
    sums.add(Block(0, 1), None, none_present(bucket()), 0)
    assert sums.counted == {0} and sums.missing() == [1] and not sums.complete
    sums.add(Block(1, 1), values(1), (True,) * len(bucket().slices), 0)
    total = sums.take()
    assert total.values is not None and torch.equal(total.values, values(1))
    # They stay counted, so that repetitions are known, until the step is applied.
    assert sums.complete
    sums.clear()
    assert sums.counted == set() and sums.held_bytes == 0


@pytest.mark.parametrize(
    ("known", "sent", "differs"), [(5, 5, False), (5, 6, True), (0, 6, False), (5, 0, False), (0, 0, False)]
)
def test_a_repetition_with_another_digest_is_told_where_both_were_sent(known: int, sent: int, differs: bool) -> None:
    sums = Contributions(bucket(), 2)
    sums.add(Block(0, 1), values(0), (True, True), known)
    assert sums.bits_differ(Block(0, 1), sent) is differs
    assert sums.bits_differ(Block(1, 1), sent) is False


def test_held_bytes_are_those_of_the_partial_sums() -> None:
    sums = Contributions(bucket(), 4)
    for replica, expected in ((0, 512), (2, 1024), (1, 1024), (3, 512)):
        sums.add(Block(replica, 1), values(replica), (True, True), 0)
        assert sums.held_bytes == expected

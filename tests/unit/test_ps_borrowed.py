"""Gradients in memory of somebody else: the same bits as in one's own, nothing written there, nothing kept."""

from __future__ import annotations

import gc
import mmap
import os
import random
import warnings
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from shardline.consistency.server import NumberedPush
from shardline.core.contributions import Contributions, Partial, mean, scaled
from shardline.core.gradients import Gradient
from shardline.core.outcome import Outcome
from shardline.core.reduce import Block, cover, magnitude, stays_finite
from shardline.core.spec import DTYPES, ConsistencySpec, TensorSpec
from shardline.errors import NonFiniteError
from shardline.update import ALLOWED, rule, wants_whole
from shardline_ps.shard.shard import Shard
from tests.support.builders import make_shard, roll_back

NAMES = {"w": (37, 5), "v": (100,), "u": (3, 3)}


class Strange:
    """A stranger's memory: read-only pages (a write there ends the process), the values at any byte, and a way to see
    who still refers to it.
    """

    def __init__(self, values: torch.Tensor, shift: int) -> None:
        self._before = b"." * shift + values.view(torch.uint8).numpy().tobytes()
        self._file = os.memfd_create("strange")
        os.pwrite(self._file, self._before, 0)
        pages = mmap.mmap(self._file, len(self._before), prot=mmap.PROT_READ)
        array = np.frombuffer(pages, dtype=np.uint8)
        self.alive = weakref.ref(array)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self.values = torch.frombuffer(array, dtype=values.dtype, offset=shift, count=values.numel())

    def unchanged(self) -> bool:
        return os.pread(self._file, len(self._before), 0) == self._before

    def __del__(self) -> None:
        os.close(self._file)


def shard_of_three(
    replicas: int, *, name: str = "SGD", dtype: str = "float32", mode: str = "sync", clip: float = 0
) -> Shard:
    matrices = {key: shape for key, shape in NAMES.items() if len(shape) == 2}
    shapes = matrices if name == "Muon" else NAMES
    tensors = [
        TensorSpec(name=key, shape=s, dtype=dtype, whole=wants_whole(rule(name), s)) for key, s in shapes.items()
    ]
    arguments = {"lr": 0.1, "momentum": 0.5} if name == "SGD" else {"lr": 0.1}
    return make_shard(
        tensors,
        value=1.0,
        rule=rule(name, (arguments,)),
        consistency=ConsistencySpec(mode=mode, clip_norm=clip),
        replicas=replicas,
    )


def gradient_of(shard: Shard, seed: int) -> torch.Tensor:
    spec = shard.buckets[0].spec
    values = torch.zeros(spec.elements)
    generator = torch.Generator().manual_seed(seed)
    for piece in spec.slices:
        values[piece.offset : piece.end] = torch.randn(piece.elements, generator=generator)
    return values.to(DTYPES[spec.dtype])


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@settings(deadline=None, max_examples=40)
@given(
    replicas=st.integers(1, 9),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "float16", "complex64"]),
    name=st.sampled_from(["SGD", "AdamW"]),
    chance=st.randoms(use_true_random=False),
)
def test_borrowed_gradients_give_the_bits_of_owned_ones(
    replicas: int, dtype: str, name: str, chance: random.Random
) -> None:
    owned, borrowing = (
        shard_of_three(replicas, name=name, dtype=dtype),
        shard_of_three(replicas, name=name, dtype=dtype),
    )
    lent = []
    for step in range(3):
        owners = [chance.randrange(3) for _ in range(replicas)]
        blocks = [
            block for owner in range(3) for block in cover([r for r in range(replicas) if owners[r] == owner], replicas)
        ]
        chance.shuffle(blocks)
        for block in blocks:
            values = gradient_of(owned, 1000 * step + block.first)
            present = tuple(chance.random() < 0.8 for _ in owned.buckets[0].spec.slices)
            nothing = not any(present)
            strange = Strange(values, chance.randrange(8))
            borrowed = chance.random() < 0.8
            lent.append(strange)
            first = owned.contribute(0, step, block, Gradient(None if nothing else values.clone(), present))
            there = strange.values if borrowed else values
            second = borrowing.contribute(
                0, step, block, Gradient(None if nothing else there, present, borrowed=borrowed)
            )
            assert first == second and first.outcome is Outcome.COUNTED
            strange.values = there = values = torch.empty(0)
        assert owned.step_min == borrowing.step_min == step + 1
        assert same(owned.buckets[0].values, borrowing.buckets[0].values)
    assert all(strange.unchanged() for strange in lent)
    assert [strange.alive() for strange in lent] == [None] * len(lent)


@pytest.mark.parametrize("name", ALLOWED)
def test_no_rule_writes_to_the_gradient_or_keeps_it(name: str) -> None:
    shard = shard_of_three(1, name=name)
    for step in range(3):
        strange = Strange(gradient_of(shard, step), 4)
        present = (True,) * len(shard.buckets[0].spec.slices)
        shard.contribute(0, step, Block(0, 1), Gradient(strange.values, present, borrowed=True))
        del strange.values
        assert strange.unchanged() and strange.alive() is None, step


def test_clipping_scales_a_copy() -> None:
    results = []
    for borrowed in (False, True):
        shard = shard_of_three(1, clip=0.25)
        strange = Strange(gradient_of(shard, 1), 1)
        values = strange.values if borrowed else strange.values.clone()
        shard.contribute(0, 0, Block(0, 1), Gradient(values, (True,) * 3, borrowed=borrowed))
        voted = shard.mode.vote(0)
        assert voted is not None
        shard.mode.apply_verdict(voted[1], scale=0.25, skip=False)
        results.append(shard.buckets[0].values.clone())
        del values, strange.values
        assert strange.unchanged() and strange.alive() is None
    assert same(*results)


def test_an_asynchronous_push_scales_a_copy() -> None:
    results = []
    for borrowed in (False, True):
        shard = shard_of_three(1, mode="async")
        strange = Strange(gradient_of(shard, 1), 3)
        values = strange.values if borrowed else strange.values.clone()
        parts = {0: Gradient(values, (True,) * 3, borrowed=borrowed)}
        decision, _ = shard.push(NumberedPush(task="worker/0", incarnation=1, seq=1, base_version=0, scale=0.5), parts)
        assert decision.outcome is Outcome.APPLIED
        results.append(shard.buckets[0].values.clone())
        del parts, values, strange.values
        assert strange.unchanged() and strange.alive() is None
    assert same(*results)


def lend(shard: Shard, replica: int) -> Strange:
    strange = Strange(gradient_of(shard, replica), 0)
    shard.contribute(0, 0, Block(replica, 1), Gradient(strange.values, (True,) * 3, borrowed=True))
    del strange.values
    return strange


def test_dropped_contributions_let_go_of_what_they_borrowed() -> None:
    shard = shard_of_three(3)
    lent = [lend(shard, 0), lend(shard, 2)]
    assert all(strange.alive() is not None for strange in lent)
    roll_back(shard)
    assert all(strange.alive() is None for strange in lent)


def test_a_vote_that_a_new_timeline_overtakes_lets_go_of_what_it_borrowed() -> None:
    shard = shard_of_three(1, clip=1.0)
    strange = lend(shard, 0)
    voted = shard.mode.vote(0)
    assert voted is not None and strange.alive() is not None
    roll_back(shard)
    assert strange.alive() is None
    shard.mode.apply_verdict(voted[1], scale=1.0, skip=False)
    assert shard.step_max == 0


def test_a_refused_contribution_is_not_kept() -> None:
    shard = shard_of_three(2)
    values = gradient_of(shard, 0)
    values[0] = float("nan")
    strange = Strange(values, 2)
    with pytest.raises(NonFiniteError):
        shard.contribute(0, 0, Block(0, 1), Gradient(strange.values, (True,) * 3, borrowed=True))
    del strange.values
    gc.collect()
    assert strange.alive() is None


def test_sums_count_as_held_whoever_owns_their_memory() -> None:
    shard = shard_of_three(3)
    spec, sums = shard.buckets[0].spec, shard.buckets[0].contributions
    for replica, held, mask in ((0, spec.nbytes, 0b001), (1, spec.nbytes, 0b011), (2, 0, 0)):
        strange = lend(shard, replica)
        assert (sums.held_bytes, shard.partial_bytes, sums.mask) == (held, held, mask)
        # Two that are summed are let go of; only the first one is still in use.
        assert (strange.alive() is not None) == (replica == 0)


def test_a_sum_goes_where_it_may_be_written() -> None:
    spec = shard_of_three(1).buckets[0].spec
    a, b = torch.ones(spec.elements), torch.full((spec.elements,), 2.0)

    def total(left: bool, right: bool) -> torch.Tensor:
        sums = Contributions(spec, 2)
        sums.add(Block(1, 1), b.clone() if not right else b, (True,) * 3, 0, borrowed=right)
        sums.add(Block(0, 1), a.clone() if not left else a, (True,) * 3, 0, borrowed=left)
        taken = sums.take()
        assert taken.values is not None and not taken.borrowed
        return taken.values

    for left in (False, True):
        for right in (False, True):
            assert total(left, right).tolist() == [3.0] * spec.elements
    assert bool((a == 1).all() and (b == 2).all())


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_mean_of_one_borrowed_gradient_among_absent_ones_is_a_copy(replicas: int) -> None:
    values = torch.ones(4)
    total = mean(Partial(values, (True,), borrowed=True), replicas)
    assert total.values is not None and not total.borrowed
    assert torch.equal(total.values, torch.ones(4).div_(replicas)) and bool((values == 1).all())
    assert mean(Partial(values, (True,), borrowed=True), 1).values is values
    assert scaled(Partial(values, (True,), borrowed=True), 1.0).values is values


# When the sum of finite gradients has to be looked at again


def halves(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float16)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.tensor([1.0, -3.0]), 3.0),
        (torch.tensor([], dtype=torch.float32), 0.0),
        (torch.tensor([7, 9]), 0.0),
        (torch.tensor([1 + 2j, -4j]), 4.0),
        (halves(2.0, -1.0), 2.0),
    ],
)
def test_magnitude_is_the_largest_part(values: torch.Tensor, expected: float) -> None:
    assert magnitude(values) == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 5, 99])
def test_magnitude_of_what_is_not_finite_is_not_finite(bad: float, at: int) -> None:
    values = torch.zeros(100)
    values[at] = bad
    assert not np.isfinite(magnitude(values))


def overflowing(shard: Shard, numbers: Sequence[float]) -> None:
    for replica, number in enumerate(numbers):
        values = torch.full((shard.buckets[0].spec.elements,), number, dtype=torch.float16)
        shard.contribute(0, 0, Block(replica, 1), Gradient(values, (True,) * 3))


def test_a_sum_that_overflows_is_found_though_each_gradient_is_finite() -> None:
    with pytest.raises(NonFiniteError, match="over 2 replicas has NaN"):
        overflowing(shard_of_three(2, dtype="float16"), [60000.0, 60000.0])
    shard = shard_of_three(2, dtype="float16")
    overflowing(shard, [60000.0, -60000.0])
    assert shard.step_min == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_what_is_said_to_stay_finite_does(dtype: str) -> None:
    kind = DTYPES[dtype]
    largest = torch.finfo(kind).max
    for replicas in (2, 3, 64):
        each = torch.full((1,), largest / 2 / replicas, dtype=kind)
        bound = replicas * magnitude(each)
        total = each.clone()
        for _ in range(replicas - 1):
            total += each
        if stays_finite(bound, kind):
            assert bool(torch.isfinite(total))
    assert stays_finite(largest / 2, kind) and not stays_finite(largest, kind)
    assert stays_finite(1e300, torch.int64)

"""Which bucket leaves next, and what that gains: the timeline model of communication scheduling over the real queue."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from shardline.client.exchange.streaming_payloads import (
    CREDIT_FLOOR_BYTES,
    SendQueue,
    bucket_ranks,
    default_credit,
    pull_order,
)
from shardline.core.plan import make_plan
from shardline.core.spec import TensorKind, TensorSpec


def tensor(name: str, elements: int, kind: TensorKind = TensorKind.PARAM) -> TensorSpec:
    return TensorSpec(name=name, shape=(elements,), dtype="float32", kind=kind, group=0, whole=False, aliases=())


# The queue


def test_what_the_next_forward_pass_needs_first_leaves_first() -> None:
    queue = SendQueue(ranks=[0, 1, 2, 3], sizes=[4, 4, 4, 4], credit_bytes=4)
    for bucket in (3, 1, 2):
        queue.add(bucket)
    assert queue.take() == [1]
    queue.add(0)
    assert [queue.take() for _ in range(4)] == [[0], [2], [3], []]


def test_a_batch_holds_no_more_than_the_credit_but_always_one_bucket() -> None:
    queue = SendQueue(ranks=[0, 1, 2, 3], sizes=[3, 2, 9, 1], credit_bytes=6)
    for bucket in range(4):
        queue.add(bucket)
    assert len(queue) == 4
    assert [queue.take() for _ in range(3)] == [[0, 1], [2], [3]]


def test_every_bucket_leaves_however_many_urgent_ones_overtake_it() -> None:
    rng = random.Random(1)
    for _ in range(50):
        count = rng.randrange(1, 20)
        ranks = rng.sample(range(100), count)
        queue = SendQueue(ranks, [rng.randrange(1, 9) for _ in ranks], credit_bytes=rng.randrange(1, 12))
        waiting = rng.sample(range(count), count)
        sent: list[int] = []
        while waiting or len(queue):
            for _ in range(min(len(waiting), rng.randrange(3))):
                queue.add(waiting.pop())
            sent += queue.take()
        assert sorted(sent) == list(range(count))


def test_buckets_rank_by_the_first_use_of_their_earliest_tensor() -> None:
    tensors = (tensor("a", 60_000), tensor("b", 60_000), tensor("c", 100), tensor("d", 100))
    plan = make_plan(tensors, 2, bucket_bytes=128 << 10)
    ranks = bucket_ranks(plan, [3, 1, 0])
    flat = sorted((rank, s, b) for s, of_shard in enumerate(ranks) for b, rank in enumerate(of_shard))
    assert [rank for rank, _, _ in flat] == list(range(len(flat)))
    order = [{plan.tensors[p.tensor].name for p in plan.shards[s].buckets[b].slices} for _, s, b in flat]
    # "c" was never seen and comes last, unless it travels with another.
    firsts = [min({"d": 0, "b": 1, "a": 2, "c": 3}[name] for name in names) for names in order]
    assert firsts == sorted(firsts)
    assert len(order) >= 4
    assert len(set(firsts)) >= 3


def test_what_is_pushed_first_is_asked_for_first_unless_a_step_is_applied_at_once() -> None:
    ranks = [2, 0, 1, 3]
    assert pull_order(ranks, at_once=True, sent=[3, 0]) == [1, 2, 0, 3]
    assert pull_order(ranks, at_once=False, sent=[3, 0, 1]) == [3, 0, 1, 2]
    # Before it is known, the way a backward pass goes.
    assert pull_order(ranks, at_once=False) == [3, 0, 2, 1]


def test_the_window_is_two_buckets_of_the_shard_at_least() -> None:
    small = make_plan((tensor("a", 100),), 1).shards[0]
    assert default_credit(small) == CREDIT_FLOOR_BYTES
    large = make_plan((tensor("a", 8 << 20),), 1, bucket_bytes=16 << 20).shards[0]
    assert default_credit(large) == 2 * max(bucket.nbytes for bucket in large.buckets) > CREDIT_FLOOR_BYTES


# The timeline of steps in a row: backward, push and pull in full duplex, the next forward gated per layer


@dataclass(frozen=True)
class Layer:
    forward_s: float
    backward_s: float
    size: int
    """Bytes."""


def step_s(
    layers: Sequence[Layer],
    *,
    bytes_per_s: float,
    slice_bytes: int,
    by_priority: bool,
    per_layer: bool = True,
    credit_bytes: int = 1,
    overhead_s: float = 0.0,
) -> float:
    """Seconds from the start of a backward pass to the end of the next forward pass (ALGORITHMS section 8).

    A slice is pulled while the next one is pushed, so it has arrived one slice time after it was pushed.
    """
    owner = [number for number, layer in enumerate(layers) for _ in range(-(-layer.size // slice_bytes))]
    sizes = [min(slice_bytes, layers[n].size) for n in owner]
    ready_s, now_s = [0.0] * len(layers), 0.0
    for number in reversed(range(len(layers))):
        now_s += layers[number].backward_s
        ready_s[number] = now_s
    slices = list(range(len(owner)))
    ranks = slices if by_priority else [len(layers) - owner[i] for i in slices]
    queue = SendQueue(ranks, sizes, credit_bytes)
    arrived_s, sent_s, link_s = [0.0] * len(layers), 0, 0.0
    waiting = sorted(slices, key=lambda i: ready_s[owner[i]])
    while sent_s < len(slices):
        while waiting and ready_s[owner[waiting[0]]] <= link_s:
            queue.add(waiting.pop(0))
        batch = queue.take()
        if not batch:
            link_s = ready_s[owner[waiting[0]]]
        for i in batch:
            link_s += overhead_s + sizes[i] / bytes_per_s
            arrived_s[owner[i]] = max(arrived_s[owner[i]], link_s + sizes[i] / bytes_per_s)
            sent_s += 1
    for number, layer in enumerate(layers):
        now_s = max(now_s, arrived_s[number] if per_layer else max(arrived_s)) + layer.forward_s
    return now_s


def even(count: int, size: int) -> list[Layer]:
    return [Layer(1.0, 2.0, size)] * count


def test_where_computing_hides_everything_but_the_first_layer_only_that_one_is_exposed() -> None:
    layers = even(6, 100)
    found = step_s(layers, bytes_per_s=100.0, slice_bytes=1, by_priority=True)
    # The first layer's gradient is the last one ready; its own transfer is all that nothing hides.
    assert found == pytest.approx(6 * 3.0 + 100 / 100.0, abs=0.05)


def test_a_step_is_bounded_by_computing_and_by_the_link() -> None:
    rng = random.Random(2)
    for _ in range(40):
        layers = [Layer(rng.random(), rng.random(), rng.randrange(1, 400)) for _ in range(rng.randrange(1, 8))]
        compute_s = sum(layer.forward_s + layer.backward_s for layer in layers)
        link_s = sum(layer.size for layer in layers) / 100.0
        for by_priority in (False, True):
            found = step_s(layers, bytes_per_s=100.0, slice_bytes=10, by_priority=by_priority)
            assert found >= max(compute_s, link_s) - 1e-9


def test_priority_gains_where_the_last_layers_are_large() -> None:
    # Large layers at the end are ready first and stand in the way of the first layer's gradient.
    layers = [Layer(1.0, 1.0, 10), Layer(1.0, 1.0, 20), Layer(1.0, 1.0, 300)]
    fifo = step_s(layers, bytes_per_s=100.0, slice_bytes=10, by_priority=False)
    priority = step_s(layers, bytes_per_s=100.0, slice_bytes=10, by_priority=True)
    assert fifo / priority > 1.15
    barrier = step_s(layers, bytes_per_s=100.0, slice_bytes=10, by_priority=True, per_layer=False)
    # Without waiting per layer the order is of no use at all.
    assert barrier == pytest.approx(
        step_s(layers, bytes_per_s=100.0, slice_bytes=10, by_priority=False, per_layer=False)
    )
    assert barrier > priority


def test_a_large_first_layer_gains_nothing() -> None:
    layers = [Layer(1.0, 1.0, 600), Layer(1.0, 1.0, 10), Layer(1.0, 1.0, 10)]
    fifo = step_s(layers, bytes_per_s=100.0, slice_bytes=10, by_priority=False)
    priority = step_s(layers, bytes_per_s=100.0, slice_bytes=10, by_priority=True)
    assert priority == pytest.approx(fifo, rel=0.02)


def test_slices_let_push_and_pull_of_one_tensor_overlap() -> None:
    layers = [Layer(0.0, 0.0, 400)]
    whole = step_s(layers, bytes_per_s=100.0, slice_bytes=400, by_priority=True)
    sliced = step_s(layers, bytes_per_s=100.0, slice_bytes=20, by_priority=True)
    assert whole == pytest.approx(8.0)
    assert sliced == pytest.approx(4.0 + 0.2)


def test_slices_cost_their_overhead_and_a_wide_window_costs_order() -> None:
    layers = [Layer(1.0, 1.0, 20), Layer(1.0, 1.0, 200)]
    fine = step_s(layers, bytes_per_s=100.0, slice_bytes=2, by_priority=True, overhead_s=0.05)
    coarse = step_s(layers, bytes_per_s=100.0, slice_bytes=10, by_priority=True, overhead_s=0.05)
    assert coarse < fine
    narrow = step_s(layers, bytes_per_s=100.0, slice_bytes=10, by_priority=True, credit_bytes=10)
    wide = step_s(layers, bytes_per_s=100.0, slice_bytes=10, by_priority=True, credit_bytes=200)
    assert narrow < wide

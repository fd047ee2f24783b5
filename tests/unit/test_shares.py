"""Shares of servers by their machines' links, and plans that are cut by them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from shardline.cluster import ClusterSpec
from shardline.core.plan import check_plan, make_plan
from shardline.core.shares import loads, shares_of
from shardline.core.spec import TensorSpec
from shardline_chief.service import shares_in

TENSORS = [TensorSpec(name=f"t{number}", shape=(500, 256), dtype="float32") for number in range(24)]
MACHINES = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=8)


@pytest.mark.parametrize(("machines", "spares"), [(2, 0), (4, 0), (4, 1), (4, 2), (4, 4), (8, 4), (8, 8)])
def test_shares_are_those_of_byteps(machines: int, spares: int) -> None:
    workers = [f"worker{number}" for number in range(machines)]
    servers = [*workers, *(f"spare{number}" for number in range(spares))]
    found = shares_of(servers, workers)
    n, k = machines, spares
    whole = n * n + k * n - 2 * k
    assert found == pytest.approx([(n - k) / whole] * n + [2 * (n - 1) / whole] * k, abs=1e-6)
    assert max(loads(servers, workers, found).values()) == pytest.approx(2 * n * (n - 1) / whole)


@given(servers=MACHINES, workers=MACHINES, seed=st.integers(0, 1000))
def test_no_other_shares_make_the_busiest_link_less_busy(servers: list[str], workers: list[str], seed: int) -> None:
    found = shares_of(servers, workers)
    assert sum(found) == pytest.approx(1.0) and min(found) >= 0.0
    others = torch.rand(len(servers), generator=torch.Generator().manual_seed(seed)) + 1e-9
    for tried in ([1 / len(servers)] * len(servers), (others / others.sum()).tolist()):
        least = max(loads(servers, workers, tried).values())
        assert max(loads(servers, workers, found).values()) <= least * (1 + 1e-2) + 1e-6


@pytest.mark.parametrize("shares", [(0.1, 0.1, 0.1, 0.1, 0.3, 0.3), (0.05, 0.95), (0.5, 0.5)])
def test_a_plan_is_cut_by_shares(shares: tuple[float, ...]) -> None:
    plan = make_plan(TENSORS, len(shares), shares=shares)
    check_plan(plan)
    size = sum(shard.nbytes for shard in plan.shards)
    assert [shard.nbytes / size for shard in plan.shards] == pytest.approx(shares, rel=0.1)


def test_equal_shares_are_the_plan_without_shares_and_a_small_model_is_cut_equally() -> None:
    assert make_plan(TENSORS, 4, shares=[0.25] * 4) == make_plan(TENSORS, 4)
    small = TENSORS[:1]
    assert make_plan(small, 40, shares=[0.61, *[0.01] * 39]) == make_plan(small, 40)


def test_a_chief_takes_the_machines_from_the_addresses() -> None:
    def cluster(ps: list[str], worker: list[str]) -> ClusterSpec:
        return ClusterSpec({"chief": ("a:9",), "ps": tuple(ps), "worker": tuple(worker)})

    mixed = cluster(["a:1", "b:1", "c:1"], ["a:2", "b:2", "d:2"])
    assert shares_in(mixed, chief_trains=False) == shares_of(["a", "b", "c"], ["a", "b", "d"])
    assert shares_in(mixed, chief_trains=True) == shares_of(["a", "b", "c"], ["a", "b", "d", "a"])
    for even in (cluster(["a:1", "b:1"], ["c:1"]), cluster(["a:1", "a:2"], ["a:3"]), cluster(["*:0", "b:1"], ["b:2"])):
        assert shares_in(even, chief_trains=False) == ()

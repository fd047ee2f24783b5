"""The verdict over all shards' votes, and the lead that gathers them."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest
from hypothesis import given, strategies as st

from shardline_ps.control.voting import Ballot, VoteLead, decide


def ballot(*sums: tuple[int, float], bad: tuple[str, ...] = ()) -> Ballot:
    return Ballot(sums=sums, nonfinite=bad)


def test_a_norm_below_the_bound_scales_by_exactly_one() -> None:
    verdict = decide(3, {0: ballot((0, 9.0)), 1: ballot((1, 16.0))}, clip_norm=5.1, skip_nonfinite=False)
    assert (verdict.step, verdict.norm, verdict.scale, verdict.skip) == (3, 5.0, 1.0, False)


def test_a_norm_above_the_bound_scales_by_torchs_formula() -> None:
    verdict = decide(0, {0: ballot((0, 9.0)), 1: ballot((1, 16.0))}, clip_norm=1.0, skip_nonfinite=True)
    assert verdict.scale == 1.0 / (5.0 + 1e-6)
    assert not verdict.skip


def test_without_clipping_the_norm_is_told_and_nothing_is_scaled() -> None:
    verdict = decide(0, {0: ballot((0, 4.0))}, clip_norm=0.0, skip_nonfinite=True)
    assert (verdict.norm, verdict.scale) == (2.0, 1.0)


def test_one_shard_with_a_nan_skips_the_step_for_all_and_names_every_tensor_once() -> None:
    ballots = {0: ballot((0, 1.0), bad=("b", "a")), 1: ballot((1, math.nan), bad=("a",)), 2: ballot((2, 4.0))}
    verdict = decide(8, ballots, clip_norm=1.0, skip_nonfinite=True)
    assert (verdict.skip, verdict.scale, verdict.nonfinite) == (True, 1.0, ("a", "b"))
    assert not decide(8, ballots, clip_norm=1.0, skip_nonfinite=False).skip


@given(st.lists(st.floats(0.0, 1e12), min_size=2, max_size=6), st.integers(1, 4))
def test_the_verdict_does_not_depend_on_the_shards_or_their_order(sums: list[float], shards: int) -> None:
    numbered = list(enumerate(sums))
    one = decide(0, {0: ballot(*numbered)}, clip_norm=1.0, skip_nonfinite=True)
    parts = {shard: ballot(*numbered[shard::shards]) for shard in range(shards)}
    for order in itertools.permutations(parts):
        assert decide(0, {shard: parts[shard] for shard in order}, clip_norm=1.0, skip_nonfinite=True) == one


async def vote(
    lead: VoteLead, shard: int, *, step: int = 0, timeline: int = 1, value: float = 1.0, timeout_s: float = 5.0
):  # type: ignore[no-untyped-def]
    return await lead.vote(
        timeline,
        step,
        shard,
        ballot((shard, value)),
        shards=range(3),
        clip_norm=1.0,
        skip_nonfinite=True,
        timeout_s=timeout_s,
    )


def test_every_shard_gets_the_same_verdict_once_all_have_voted() -> None:
    async def run() -> None:
        lead = VoteLead()
        first, second = asyncio.create_task(vote(lead, 2)), asyncio.create_task(vote(lead, 0))
        await asyncio.sleep(0)
        assert not first.done() and not second.done()
        last = await vote(lead, 1)
        assert await first == await second == last
        assert last is not None and last.norm == math.sqrt(3.0)

    asyncio.run(run())


def test_a_late_repetition_gets_the_verdict_and_changes_nothing() -> None:
    async def run() -> None:
        lead = VoteLead()
        verdict, _, _ = await asyncio.gather(*(vote(lead, shard) for shard in range(3)))
        assert await vote(lead, 1, value=1e9) == verdict

    asyncio.run(run())


def test_a_vote_that_waits_too_long_is_to_be_asked_again() -> None:
    async def run() -> None:
        lead = VoteLead()
        assert await vote(lead, 0, timeout_s=0.01) is None
        assert await vote(lead, 0, timeout_s=0.01) is None
        verdict, _, _ = await asyncio.gather(*(vote(lead, shard) for shard in range(3)))
        assert verdict is not None

    asyncio.run(run())


def test_votes_of_another_timeline_or_step_are_not_mixed() -> None:
    async def run() -> None:
        lead = VoteLead()
        assert await vote(lead, 0, timeline=1, timeout_s=0.01) is None
        assert await vote(lead, 1, timeline=2, timeout_s=0.01) is None
        assert await vote(lead, 2, timeline=1, step=1, timeout_s=0.01) is None

    asyncio.run(run())


def test_old_rounds_are_forgotten() -> None:
    async def run() -> None:
        lead = VoteLead()
        for step in range(20):
            await asyncio.gather(*(vote(lead, shard, step=step) for shard in range(3)))
        # No other way: a round that is kept for nobody shows in nothing but memory.
        assert len(lead._rounds) <= VoteLead.KEPT_ROUNDS

    asyncio.run(run())


@pytest.mark.parametrize("shards", [1, 2])
def test_a_verdict_needs_every_shard(shards: int) -> None:
    async def run() -> None:
        lead = VoteLead()
        results = await asyncio.gather(*(vote(lead, shard, timeout_s=0.01) for shard in range(shards)))
        assert results == [None] * shards

    asyncio.run(run())

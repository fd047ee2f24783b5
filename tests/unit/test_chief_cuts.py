from __future__ import annotations

from shardline.core.status import HeldCut, ShardStatus
from shardline_chief.rules.state.checkpoints import CutLedger


def told(shard: int, step: int, *cuts: HeldCut) -> ShardStatus:
    return ShardStatus(shard=shard, step_min=step, step_max=step, cuts=cuts)


def whole(step: int) -> HeldCut:
    return HeldCut(step=step, complete=True)


def test_a_cut_is_fetched_only_when_all_shards_hold_it_whole() -> None:
    ledger = CutLedger(2)
    ledger.observe([told(0, 10, whole(10))])
    assert ledger.complete() == []
    ledger.observe([told(1, 10, HeldCut(step=10))])
    assert ledger.complete() == []
    ledger.observe([told(1, 11, whole(10))])
    assert ledger.complete() == [10]


def test_a_cut_dealt_with_is_not_fetched_again_by_a_late_report() -> None:
    ledger = CutLedger(1)
    ledger.observe([told(0, 10, whole(10))])
    ledger.close(10)
    ledger.observe([told(0, 10, whole(10))])
    assert ledger.complete() == []
    assert ledger.lost() == []


def test_a_cut_that_one_shard_skipped_is_given_up() -> None:
    ledger = CutLedger(2)
    ledger.observe([told(0, 10, whole(10)), told(1, 10, HeldCut(step=10, skipped=True))])
    assert ledger.complete() == []
    assert ledger.lost() == [10]


def test_a_cut_is_not_given_up_while_the_other_shard_may_still_make_it() -> None:
    ledger = CutLedger(2)
    ledger.observe([told(0, 11, whole(10)), told(1, 9)])
    assert ledger.lost() == []
    # One report is not taken at one instant: its cuts may be older than its step.
    ledger.observe([told(1, 11)])
    assert ledger.lost() == []
    ledger.observe([told(1, 11)])
    assert ledger.lost() == [10]


def test_a_cut_asked_for_again_counts_again() -> None:
    ledger = CutLedger(1)
    ledger.close(10)
    ledger.reopen(10)
    ledger.observe([told(0, 10, whole(10))])
    assert ledger.complete() == [10]


def test_a_cut_whose_release_drops_an_earlier_one_takes_that_along() -> None:
    ledger = CutLedger(2)
    ledger.observe([told(0, 16, whole(5), whole(15)), told(1, 16, HeldCut(step=5), HeldCut(step=15, skipped=True))])
    assert (ledger.complete(), ledger.lost()) == ([], [15])
    ledger.close(15)
    # A report from before the release arrived.
    ledger.observe([told(1, 16, whole(5), HeldCut(step=15, skipped=True))])
    assert (ledger.complete(), ledger.lost()) == ([], [])

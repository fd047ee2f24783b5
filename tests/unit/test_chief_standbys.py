"""Which server holds whose standby, and when one takes over."""

from __future__ import annotations

import pytest

from shardline.errors import UsageError
from shardline.rpc.configuration import Placement
from shardline.rpc.status import ShardStatus
from shardline_chief.standbys import Protection, after_loss, check_standbys, protected, without_standbys


def placed(*tasks: str) -> tuple[Placement, ...]:
    return tuple(Placement(shard=shard, task=task, address=f"h:{task}") for shard, task in enumerate(tasks))


def living(*numbers: int) -> dict[str, str]:
    return {f"ps/{number}": f"h:ps/{number}" for number in numbers}


def standbys(placement: tuple[Placement, ...]) -> list[str]:
    return [place.standby_task for place in placement]


def test_the_next_server_holds_the_standby_and_the_last_ones_is_on_the_first() -> None:
    found = protected(placed("ps/0", "ps/1", "ps/2"), living(0, 1, 2))
    assert standbys(found) == ["ps/1", "ps/2", "ps/0"]
    assert [place.standby_address for place in found] == ["h:ps/1", "h:ps/2", "h:ps/0"]


def test_the_order_of_servers_is_that_of_their_numbers() -> None:
    found = protected(placed("ps/2", "ps/10"), living(*range(11)))
    assert standbys(found) == ["ps/3", "ps/0"]


def test_a_server_that_is_gone_or_avoided_is_passed_over_and_nobody_is_its_own_standby() -> None:
    assert standbys(protected(placed("ps/0", "ps/2"), living(0, 2))) == ["ps/2", "ps/0"]
    assert standbys(protected(placed("ps/1"), living(1))) == [""]
    passed = protected(placed("ps/0"), living(0, 1, 2), avoid=lambda shard, task: task == "ps/1")
    assert standbys(passed) == ["ps/2"]


def test_a_standby_that_is_there_stays_where_it_is() -> None:
    first = protected(placed("ps/0", "ps/2"), living(0, 2))
    assert protected(first, living(0, 1, 2)) == first


@pytest.mark.parametrize(("standbys", "servers"), [(2, 4), (-1, 4), (1, 1)])
def test_standbys_that_can_not_be_are_refused_with_the_numbers(standbys: int, servers: int) -> None:
    with pytest.raises(UsageError, match=r"--standbys (is )?-?\d"):
        check_standbys(standbys, servers)
    check_standbys(0, 1)
    check_standbys(1, 2)


def test_a_lost_primary_is_followed_by_its_standby_and_others_lose_theirs() -> None:
    before = protected(placed("ps/0", "ps/1", "ps/2"), living(0, 1, 2))
    found = after_loss(before, living(0, 2), {0, 1, 2})
    assert found is not None
    assert found.promoted == {1: "ps/2"}
    assert [(place.task, place.standby_task) for place in found.placement] == [
        ("ps/0", ""),
        ("ps/2", ""),
        ("ps/2", "ps/0"),
    ]


def test_a_server_with_standbys_alone_is_missed_by_nobody_but_them() -> None:
    before = protected(placed("ps/0"), living(0, 1))
    found = after_loss(before, living(0), {0})
    assert found is not None
    assert not found.promoted
    assert standbys(found.placement) == [""]


def test_without_a_whole_standby_on_a_living_server_there_is_no_way_but_back() -> None:
    before = protected(placed("ps/0", "ps/1"), living(0, 1))
    assert after_loss(before, living(1), {1}) is None
    assert after_loss(before, [], {0, 1}) is None
    assert after_loss(placed("ps/0", "ps/1"), living(1), {0, 1}) is None


def told(shard: int, state: str, task: str = "ps/1") -> ShardStatus:
    return ShardStatus(shard=shard, standby=state, standby_task=task, standby_problem="why")


def test_what_primaries_tell_of_their_standbys_is_believed_where_they_are_to_be() -> None:
    protection, placement = Protection(), protected(placed("ps/0", "ps/1"), living(0, 1))
    assert protection.observe(placement, [told(0, "copying")], 0.0) == []
    assert protection.whole() == set()
    assert protection.observe(placement, [told(0, "synced")], 1.0) == [
        "shard 0 is protected: its standby on ps/1 is whole"
    ]
    assert protection.observe(placement, [told(1, "synced", "ps/7")], 1.0) == []
    assert protection.whole() == {0}
    assert "copied anew (why)" in protection.observe(placement, [told(0, "copying")], 2.0)[0]
    assert protection.whole() == set()


def test_a_standby_that_is_silent_for_too_long_is_given_up_but_may_be_promoted_until_then() -> None:
    protection, placement = Protection(), protected(placed("ps/0"), living(0, 1))
    protection.observe(placement, [told(0, "synced")], 0.0)
    assert "stands still" in protection.observe(placement, [told(0, "silent")], 5.0)[0]
    assert protection.whole() == {0}
    assert protection.too_silent(9.0, 5.0) == []
    assert protection.too_silent(10.0, 5.0) == [0]
    protection.observe(placement, [told(0, "synced")], 11.0)
    assert protection.too_silent(99.0, 5.0) == []
    protection.avoid(0, "ps/1", 20.0)
    assert protection.avoided(0, "ps/1", 19.0)
    assert not protection.avoided(0, "ps/1", 20.0)
    assert standbys(without_standbys(placement, {0})) == [""]

"""Which server holds whose standby, and when one takes over."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.config import check_standbys
from shardline.core.orders import Phase
from shardline.core.placement import Placement
from shardline.core.spec import TensorSpec
from shardline.core.status import ShardStatus
from shardline.errors import UsageError
from shardline_chief.rules.actions import AskStatus, Lead, Promote, Promotion
from shardline_chief.rules.state.standbys import Protection, StandbyChange, after_loss, protected, without_standbys
from tests.support.chief_cluster import Cluster, FakeResume, T, make_job, phase


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
    assert found.promoted == {1: Promotion("ps/2")}
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
    assert after_loss(before, {}, {0, 1}) is None
    assert after_loss(placed("ps/0", "ps/1"), living(1), {0, 1}) is None


def told(shard: int, state: str, task: str = "ps/1") -> ShardStatus:
    return ShardStatus(shard=shard, standby=state, standby_task=task, standby_problem="why")


def test_what_primaries_tell_of_their_standbys_is_believed_where_they_are_to_be() -> None:
    protection, placement = Protection(), protected(placed("ps/0", "ps/1"), living(0, 1))
    assert protection.observe(placement, [told(0, "copying")], 0.0) == []
    assert protection.whole() == set()
    assert protection.observe(placement, [told(0, "synced")], 1.0) == [
        StandbyChange("shard 0 is protected: its standby on ps/1 is complete", protected=True)
    ]
    assert protection.observe(placement, [told(1, "synced", "ps/7")], 1.0) == []
    assert protection.whole() == {0}
    assert "copied again (why)" in protection.observe(placement, [told(0, "copying")], 2.0)[0].sentence
    assert protection.whole() == set()


def test_a_standby_that_is_silent_for_too_long_is_given_up_but_may_be_promoted_until_then() -> None:
    protection, placement = Protection(), protected(placed("ps/0"), living(0, 1))
    protection.observe(placement, [told(0, "synced")], 0.0)
    assert "is blocked" in protection.observe(placement, [told(0, "silent")], 5.0)[0].sentence
    assert protection.whole() == {0}
    assert protection.too_silent(9.0, 5.0) == []
    assert protection.too_silent(10.0, 5.0) == [0]
    protection.observe(placement, [told(0, "synced")], 11.0)
    assert protection.too_silent(99.0, 5.0) == []
    protection.avoid(0, "ps/1", 20.0)
    assert protection.avoided(0, "ps/1", 19.0)
    assert not protection.avoided(0, "ps/1", 20.0)
    assert standbys(without_standbys(placement, {0})) == [""]


# The chief with them


def protected_cluster(ps: int = 3, **options: Any) -> Cluster:
    cluster = Cluster(job=make_job(tensors=LARGE, **options), ps=ps, standbys=1)
    cluster.start()
    cluster.advance(17)
    cluster.tick()
    return cluster


LARGE = tuple(TensorSpec(name=f"layer{number}", shape=(64, 64), dtype="float32") for number in range(6))


def holders(cluster: Cluster) -> list[tuple[str, str]]:
    return [(place.task, place.standby_task) for place in cluster.program.state.layout.placement]


def kinds(cluster: Cluster) -> list[str]:
    return [type(order).__name__ for order in cluster.commands if not isinstance(order, AskStatus)]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_lost_server_is_stood_in_for_and_nothing_goes_back(mode: str) -> None:
    cluster = protected_cluster(mode=mode)
    assert holders(cluster) == [("ps/0", "ps/1"), ("ps/1", "ps/2"), ("ps/2", "ps/0")]
    before = cluster.program.state.layout.timeline
    steps = [ps.step for ps in cluster.ps]
    cluster.commands.clear()
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2)
    assert phase(cluster) is Phase.RUNNING
    assert cluster.program.state.layout.timeline > before
    # Shard 0's standby died with shard 1's primary; both get new ones from whoever is left.
    assert holders(cluster) == [("ps/0", "ps/2"), ("ps/2", "ps/0"), ("ps/2", "ps/0")]
    assert [ps.step for ps in cluster.ps] == steps
    found = [kind for kind in kinds(cluster) if kind not in ("Release", "Cut")]
    # New standbys are placed once the job trains again.
    assert found == ["Lead", "Promote", *(after := ["Configure", "Members", "Activate"]), "Lead", *after]
    (recovered,) = cluster.program.state.losses.recoveries
    assert (recovered.task, recovered.lost) == ("ps/1", 0)
    assert "taken over: shard 1 by ps/2; no step is lost" in cluster.text()
    assert "its standbys have taken over. Training continues" in cluster.text()
    assert cluster.orders("worker/0").timeline == cluster.program.state.layout.timeline
    # Logs and pictures forget what is beyond the step where a history begins.
    assert cluster.orders("worker/0").first_step == 17
    cluster.advance(100)


def test_a_standby_that_refuses_leaves_the_way_back_to_a_checkpoint() -> None:
    cluster = protected_cluster()
    cluster.ps[2].refuses = "the standby of shard 1 is not whole"
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2)
    assert phase(cluster) is Phase.INIT
    assert "not whole; rolling back all shards to the newest checkpoint (step 0 or later)" in cluster.text()
    cluster.restart_ps(1)
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    assert [ps.step for ps in cluster.ps] == [0, 0, 0]


def test_a_shard_that_is_not_protected_yet_goes_back() -> None:
    cluster = protected_cluster()
    cluster.ps[1].standby_state = "copying"
    cluster.tick()
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2)
    assert phase(cluster) is Phase.INIT
    assert not [order for order in cluster.commands if isinstance(order, Promote)]


def test_two_servers_lost_one_after_another_are_both_stood_in_for() -> None:
    cluster = protected_cluster(ps=4)
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2)
    cluster.tick()
    cluster.kill_ps(3)
    cluster.tick(T / 3 + 2)
    assert phase(cluster) is Phase.RUNNING
    assert [task for task, _ in holders(cluster)] == ["ps/0", "ps/2", "ps/2", "ps/0"]
    assert [recovered.lost for recovered in cluster.program.state.losses.recoveries] == [0, 0]


def test_a_server_that_comes_back_holds_a_standby_again() -> None:
    cluster = protected_cluster(ps=2)
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2)
    assert holders(cluster) == [("ps/0", ""), ("ps/0", "")]
    timeline = cluster.program.state.layout.timeline
    cluster.restart_ps(1)
    cluster.tick()
    assert holders(cluster) == [("ps/0", "ps/1"), ("ps/0", "ps/1")]
    assert cluster.ps[1].held == (0, 1)
    assert cluster.ps[1].timeline == cluster.program.state.layout.timeline == timeline
    assert cluster.ps[0].active


def test_a_standby_that_holds_its_primary_up_is_given_up_after_a_third_of_the_timeout() -> None:
    cluster = protected_cluster(ps=2)
    cluster.ps[0].standby_state = "silent"
    cluster.tick()
    cluster.commands.clear()
    cluster.tick(T / 3 + 1)
    assert holders(cluster)[0] == ("ps/0", "")
    assert holders(cluster)[1] == ("ps/1", "ps/0")
    assert phase(cluster) is Phase.RUNNING
    assert "shards 0 continue without their standbys" in cluster.text()
    cluster.ps[0].standby_state = "synced"
    cluster.tick(T + 1)
    assert holders(cluster)[0] == ("ps/0", "ps/1")


def test_a_primary_goes_on_alone_at_once_where_the_next_server_has_no_room_for_its_standby() -> None:
    cluster = protected_cluster()
    cluster.ps[1].standby_state = "silent"
    cluster.tick()
    cluster.ps[0].room = 2
    cluster.commands.clear()
    cluster.tick(T / 3 + 1)
    assert "ps/0 can't hold standbys" in cluster.text()
    # Only with an activation does a primary do as its placement says.
    assert kinds(cluster) == ["Lead", "Configure", "Lead", "Configure", "Members", "Activate"]
    # What it held before it holds on.
    assert holders(cluster) == [("ps/0", "ps/1"), ("ps/1", ""), ("ps/2", "ps/0")]
    assert cluster.ps[1].standbys == {1: ""}
    cluster.tick(T)
    assert holders(cluster)[1] == ("ps/1", "ps/2")


def test_a_server_that_refuses_without_holding_a_standby_is_not_asked_again_and_again() -> None:
    cluster = protected_cluster(ps=2)
    cluster.ps[0].standby_state = "silent"
    cluster.tick()
    cluster.ps[0].room = 0
    cluster.commands.clear()
    cluster.tick(T / 3 + 1)
    assert kinds(cluster).count("Configure") == 2
    assert phase(cluster) is Phase.RUNNING


def test_a_server_that_has_no_room_even_for_the_standbys_it_held_holds_none() -> None:
    cluster = protected_cluster()
    cluster.ps[1].standby_state = "silent"
    cluster.tick()
    cluster.ps[0].room = 1
    cluster.tick(T / 3 + 1)
    # The next one has room.
    assert holders(cluster) == [("ps/0", "ps/1"), ("ps/1", ""), ("ps/2", "ps/1")]
    assert phase(cluster) is Phase.RUNNING


def test_a_server_that_is_found_empty_before_it_was_missed_is_stood_in_for_and_becomes_a_standby() -> None:
    cluster = protected_cluster(ps=2)
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    assert holders(cluster) == [("ps/0", "ps/1"), ("ps/0", "ps/1")]
    assert cluster.program.state.losses.recoveries[0].lost == 0


def test_a_cut_right_after_a_failover_is_no_matter_of_the_server_that_came_back_empty() -> None:
    cluster = protected_cluster(ps=2, mode="async", checkpoint_every=10)
    cluster.hold_commands = True
    cluster.kill_ps(0)
    cluster.restart_ps(0)
    # Until it is to be led, so that commands go to it, and configured after that.
    while phase(cluster) is not Phase.RUNNING or not cluster.held:
        if cluster.held:
            cluster.carry_out(cluster.held.pop(0))
            cluster.settle()
        else:
            cluster.tick()
    assert isinstance(cluster.held[0].order, Lead)
    assert [task for task, _ in holders(cluster)] == ["ps/1", "ps/1"]
    assert not cluster.ps[0].timeline
    saves = len(cluster.saves)
    cluster.ps[1].advance(40)
    cluster.program.flows.servers.told("ps/1", cluster.ps[1].status(), asked=False)
    cluster.program.machine.settle(cluster.now_s)
    assert cluster.program.state.saves.cutting
    cluster.settle()
    cluster.release_commands()
    assert phase(cluster) is Phase.RUNNING, cluster.text()
    assert [save.step for save in cluster.saves[saves:]] == [40]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_server_with_standbys_alone_that_dies_while_all_are_prepared_is_done_without(resumed: bool) -> None:
    job = make_job(tensors=(TensorSpec(name="weight", shape=(8,), dtype="float32"),))
    cluster = Cluster(job=job, ps=3, standbys=1, resume=FakeResume() if resumed else None)
    cluster.join("worker")
    cluster.join("worker", 1)
    cluster.join("ps")
    cluster.join("ps", 1)
    cluster.hold_commands = True
    cluster.join("ps", 2)
    cluster.kill_ps(1)
    cluster.hold_commands = False
    cluster.release_commands()
    cluster.tick(1)
    if not resumed:
        cluster.initialize()
    assert phase(cluster) is Phase.RUNNING
    assert holders(cluster) == [("ps/0", "ps/2")]
    assert cluster.text().count("it held nothing") == 1


def test_a_standby_that_is_placed_elsewhere_while_its_server_is_led_is_led_there_too() -> None:
    job = make_job(tensors=(TensorSpec(name="weight", shape=(8,), dtype="float32"),))
    cluster = Cluster(job=job, ps=4, standbys=1)
    cluster.start()
    cluster.advance(17)
    cluster.ps[0].standby_state = "silent"
    cluster.tick()
    cluster.hold_commands = True
    cluster.tick(T / 3 + 1)
    assert [type(command.order) for command in cluster.held] == [Lead]
    assert holders(cluster) == [("ps/0", "ps/2")]
    cluster.tick(T / 3 + 1, silent=("ps/2",))
    assert holders(cluster) == [("ps/0", "ps/3")]
    cluster.release_commands()
    assert cluster.led == {"ps/0", "ps/3"}
    assert cluster.ps[3].held == (0,)

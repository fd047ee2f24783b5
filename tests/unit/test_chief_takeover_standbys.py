"""A chief and a server die together: the next chief asks the standbys what they hold, and has them take over."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.core.orders import Phase
from shardline.core.placement import Placement
from shardline.core.spec import TensorSpec
from shardline.core.status import PsStatus, ShardStatus, StandbyStatus
from shardline_chief.rules.actions import AskStatus, Configure, JournalLine, Promote, Promotion, Restore
from shardline_chief.rules.events import UNHEARD
from shardline_chief.rules.replay import replay
from shardline_chief.rules.state.standbys import as_found, protected, without_standbys
from tests.support.chief_cluster import FakePs, T, make_job, phase
from tests.support.mortal_chief import Killed, Mortal, cut, hear_twice

LARGE = tuple(TensorSpec(name=f"layer{number}", shape=(64, 64), dtype="float32") for number in range(6))


def protected_cluster(ps: int = 3, **options: Any) -> Mortal:
    """A job under way whose shards all have a standby, at step 17, with a checkpoint of step 10."""
    cluster = Mortal(job=make_job(tensors=LARGE, **options), ps=ps, standbys=1)
    cluster.start()
    if options.get("mode") != "async":
        cut(cluster, 10)
    cluster.advance(17)
    cluster.tick()
    return cluster


def holders(cluster: Mortal) -> list[tuple[str, str]]:
    return [(place.task, place.standby_task) for place in cluster.program.state.layout.placement]


def kinds(cluster: Mortal) -> list[str]:
    return [type(order).__name__ for order in cluster.commands if not isinstance(order, AskStatus)]


def goes_on(cluster: Mortal) -> None:
    """Training goes on where it was, and the job ends well."""
    assert cluster.program.state.phase is Phase.RUNNING
    assert not cluster.program.state.returning
    assert cluster.kinds(Restore) == []
    assert [ps.step for ps in cluster.ps if ps.shards] == [17] * sum(bool(ps.shards) for ps in cluster.ps)
    assert all(ps.active for ps in cluster.ps if ps.shards)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_that_died_with_the_chief_is_stood_in_for_and_nothing_goes_back(mode: str) -> None:
    cluster = protected_cluster(mode=mode)
    cluster.ps[1].dead = True
    cluster.next_chief()
    cluster.tick(T / 3 + 4)
    goes_on(cluster)
    assert holders(cluster) == [("ps/0", "ps/2"), ("ps/2", "ps/0"), ("ps/2", "ps/0")]
    found = [kind for kind in kinds(cluster) if kind not in ("Release", "Cut")]
    assert found[:6] == ["Lead", "Lead", "Promote", "Configure", "Members", "Activate"]
    (recovered,) = cluster.program.state.losses.recoveries
    assert (recovered.task, recovered.at_step, recovered.from_step, recovered.lost) == ("ps/1", 17, 17, 0)
    assert "taken over: shard 1 by ps/2; no step is lost" in cluster.text()
    assert cluster.program.state.layout.timeline >> 32 == cluster.settings.term
    assert cluster.orders("worker/0").first_step == 17


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_that_miss_a_server_do_not_decide_before_all_servers_are_heard(mode: str) -> None:
    cluster = protected_cluster(mode=mode)
    cluster.ps[1].dead = True
    cluster.next_chief()
    for number in range(2):
        cluster.suspects[f"worker/{number}"] = ("ps/1",)
    cluster.tick(T / 3 + 4)
    cluster.suspects.clear()
    cluster.tick(2)
    goes_on(cluster)
    assert cluster.program.state.stage not in UNHEARD
    assert [recovered.task for recovered in cluster.program.state.losses.recoveries] == ["ps/1"]


def test_of_two_servers_the_one_that_came_back_empty_holds_standbys_of_the_other() -> None:
    cluster = protected_cluster(ps=2)
    cluster.ps[1] = FakePs(1)
    cluster.next_chief()
    cluster.join("ps", 1)
    hear_twice(cluster)
    goes_on(cluster)
    assert holders(cluster) == [("ps/0", "ps/1"), ("ps/0", "ps/1")]
    assert cluster.ps[1].shards == ()
    assert cluster.ps[1].held == (0, 1)


def test_a_standby_that_is_not_whole_leaves_the_way_back() -> None:
    cluster = protected_cluster()
    cluster.ps[2].refuses = "it is being copied"
    cluster.ps[1] = FakePs(1, restored=10)
    cluster.next_chief()
    cluster.join("ps", 1)
    hear_twice(cluster)
    assert cluster.kinds(Promote) == []
    assert "rolling back all shards to the newest checkpoint (step 10 or later)" in cluster.text()
    assert [ps.step for ps in cluster.ps] == [10, 10, 10]


def test_a_standby_that_its_primary_was_let_go_without_is_not_promoted_by_the_next_chief() -> None:
    cluster = protected_cluster()
    cluster.ps[1].standby_state = "silent"
    cluster.tick()
    cluster.kill_in = -1
    stale = cluster.ps[2].held
    cluster.tick(T / 3 + 1)
    assert holders(cluster)[1][1] != "ps/2"
    # It never heard that it is none any more, and takes itself to be whole.
    cluster.ps[2].held = stale
    cluster.ps[0].held = ()
    cluster.ps[1] = FakePs(1, restored=10)
    cluster.next_chief()
    cluster.join("ps", 1)
    hear_twice(cluster)
    assert cluster.kinds(Promote) == []
    assert [ps.step for ps in cluster.ps] == [10, 10, 10]


def idle_holder() -> Mortal:
    """A job of one shard on ps/0, whose standby was given up on ps/1, which holds nothing else, and is on ps/2 now."""
    tensor = TensorSpec(name="weight", shape=(8,), dtype="float32")
    cluster = Mortal(job=make_job(tensors=(tensor,)), ps=3, standbys=1)
    cluster.start()
    cut(cluster, 10)
    cluster.advance(17)
    assert holders(cluster) == [("ps/0", "ps/1")]
    cluster.ps[0].standby_state = "silent"
    cluster.tick(T / 3 + 2)
    assert holders(cluster) == [("ps/0", "ps/2")]
    # Nobody has told it that it holds a standby no more.
    assert cluster.ps[1].held == (0,)
    cluster.ps[0].standby_state = "synced"
    cluster.tick(T)
    return cluster


def test_a_standby_that_was_given_up_and_is_placed_again_is_not_promoted_as_it_was() -> None:
    points = 0
    for actions in range(40):
        cluster = idle_holder()
        old = cluster.ps[1].copies[0]
        cluster.kill_in = actions
        try:
            cluster.kill_ps(2)
            cluster.tick(T / 3 + 2)
        except Killed:
            points += 1
            renewed = cluster.ps[1].copies.get(0) != old
            cluster.ps[0] = FakePs(0, restored=10)
            cluster.ps[2] = FakePs(2)
            cluster.next_chief()
            cluster.join("ps", 0)
            cluster.tick(T / 3 + 4)
            cluster.tick(2)
            assert phase(cluster) is Phase.RUNNING, actions
            assert bool(cluster.kinds(Promote)) == renewed, actions
            assert bool(cluster.kinds(Restore)) != renewed, actions
    assert points > 5


def test_a_server_that_is_lost_while_the_others_are_asked_is_stood_in_for_too() -> None:
    cluster = protected_cluster(ps=5)
    cluster.ps[1].dead = True
    cluster.next_chief()
    cluster.tick(T / 3 - 3)
    cluster.hold_commands = True
    cluster.tick(8)
    assert [type(command.order).__name__ for command in cluster.held] == ["Lead"]
    cluster.ps[3].dead = True
    cluster.release_commands()
    cluster.tick(2)
    goes_on(cluster)
    assert [task for task, _ in holders(cluster)] == ["ps/0", "ps/2", "ps/2", "ps/4", "ps/4"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_chief_killed_at_any_point_of_a_failover_is_followed_by_one_that_ends_it(mode: str) -> None:
    points = 0
    for actions in range(40):
        cluster = protected_cluster(mode=mode)
        cluster.kill_in = actions
        try:
            cluster.kill_ps(1)
            cluster.tick(T / 3 + 4)
            cluster.tick(2)
        except Killed:
            points += 1
            cluster.next_chief()
            cluster.tick(T / 3 + 4)
            cluster.tick(2)
            goes_on(cluster)
            assert [task for task, _ in holders(cluster)] == ["ps/0", "ps/2", "ps/2"], actions
            assert all(place.standby_task for place in cluster.program.state.layout.placement), actions
    assert points > 10


def test_a_chief_that_finds_all_as_it_was_leaves_history_and_standbys_alone() -> None:
    cluster = protected_cluster()
    timeline, before = cluster.program.state.layout.timeline, holders(cluster)
    cluster.next_chief()
    hear_twice(cluster)
    goes_on(cluster)
    assert (cluster.program.state.layout.timeline, holders(cluster)) == (timeline, before)
    assert cluster.program.state.losses.recoveries == []
    assert "no step is repeated" in cluster.text()
    (placed,) = cluster.kinds(Configure)
    assert placed.keep == placed.keep_standbys == {0, 1, 2}


def test_standbys_are_noted_with_the_timeline_and_before_a_primary_goes_on_without_one() -> None:
    cluster = protected_cluster()
    cluster.log.clear()
    cluster.ps[1].standby_state = "silent"
    cluster.tick()
    cluster.tick(T / 3 + 1)
    assert cluster.log.index("record standbys") < cluster.log.index("Configure")
    noted = [record for record in cluster.journal if isinstance(record, JournalLine) and record.kind == "standbys"]
    assert [shard for shard, *_ in noted[-1].fields["standbys"]] == [0, 1, 2]


def test_standbys_noted_by_an_earlier_build_without_addresses_are_found_at_their_members() -> None:
    cluster = protected_cluster()
    told = [[0, "ps/1"], [1, "ps/2"], [2, ""]]
    cluster.note("standbys", standbys=told)
    for ps in cluster.ps:
        # Its servers know of no appointments.
        ps.copies = dict.fromkeys(ps.held, 0)
    found = replay(cluster.entries).placement
    assert [(place.standby_task, place.standby_address) for place in found] == [
        ("ps/1", "h:1"),
        ("ps/2", "h:1"),
        ("", ""),
    ]
    cluster.ps[1].dead = True
    cluster.next_chief()
    cluster.tick(T / 3 + 4)
    goes_on(cluster)
    assert [task for task, _ in holders(cluster)] == ["ps/0", "ps/2", "ps/2"]


def test_a_standby_without_an_address_on_a_server_that_is_gone_is_none() -> None:
    cluster = protected_cluster()
    cluster.note("gone", task="ps/2", incarnation=cluster.lives["ps/2"])
    cluster.note("standbys", standbys=[[0, "ps/1"], [1, "ps/2"]])
    found = replay(cluster.entries).placement
    assert [place.standby_task for place in found] == ["ps/1", "", ""]


# The rule alone


def placed(*tasks: str) -> tuple[Placement, ...]:
    living = {f"ps/{number}": f"h:{number}" for number in range(3)}
    return protected(tuple(Placement(shard=n, task=task, address=living[task]) for n, task in enumerate(tasks)), living)


def server(timeline: int, shards: tuple[int, ...] = (), whole: tuple[int, ...] = (), copied: int = 0) -> PsStatus:
    return PsStatus(
        task="",
        timeline=timeline,
        shards=tuple(ShardStatus(shard=number, initialized=True) for number in shards),
        standbys=tuple(StandbyStatus(shard=number, synced=True, appointment=copied) for number in whole),
    )


LIVING = {f"ps/{number}": f"new:{number}" for number in range(3)}


def test_a_standby_counts_where_the_journal_has_it_and_nowhere_else() -> None:
    placement = placed("ps/0", "ps/1", "ps/2")
    servers = {"ps/0": server(5, (0,)), "ps/2": server(5, (2,), (1,))}
    found = as_found(placement, {}, servers, since=5, living=LIVING)
    assert found is not None
    assert found.promoted == {1: Promotion("ps/2")}
    assert [(place.task, place.standby_task) for place in found.placement] == [
        ("ps/0", ""),
        ("ps/2", ""),
        ("ps/2", "ps/0"),
    ]
    assert found.placement[1].address == "new:2"
    servers = {"ps/0": server(5, (0,), (1,)), "ps/2": server(5, (2,))}
    assert as_found(placement, {}, servers, since=5, living=LIVING) is None


def test_a_standby_that_was_copied_for_another_appointment_counts_for_nothing() -> None:
    primaries = tuple(Placement(shard=n, task=f"ps/{n}", address=LIVING[f"ps/{n}"]) for n in range(2))
    numbers = iter(range(7, 9))
    placement = protected(primaries, LIVING, appoint=lambda: next(numbers))
    assert [(place.standby_task, place.appointment) for place in placement] == [("ps/1", 7), ("ps/2", 8)]
    assert protected(placement, LIVING, appoint=lambda: 9) == placement
    for copied, found in ((8, {1: Promotion("ps/2", 8)}), (7, None), (0, None)):
        servers = {"ps/0": server(5, (0,)), "ps/2": server(5, (), (1,), copied)}
        turned = as_found(placement, {}, servers, since=5, living=LIVING)
        assert (turned.promoted if turned is not None else None) == found
    assert protected(without_standbys(placement, {1}), LIVING, appoint=lambda: 9)[1].appointment == 9


def test_what_was_promoted_already_is_the_primary_and_its_old_one_is_not_asked() -> None:
    placement = placed("ps/0", "ps/1", "ps/2")
    servers = {"ps/0": server(5, (0,)), "ps/1": server(5, (1,)), "ps/2": server(6, (1, 2))}
    found = as_found(placement, {1: Promotion("ps/2")}, servers, since=5, living=LIVING)
    assert found is not None
    assert found.promoted == {1: Promotion("ps/2")}


def test_values_of_an_older_history_count_for_nothing() -> None:
    placement = placed("ps/0", "ps/1", "ps/2")
    servers = {"ps/0": server(5, (0,)), "ps/1": server(4, (1,)), "ps/2": server(5, (2,))}
    assert as_found(placement, {}, servers, since=5, living=LIVING) is None
    assert as_found(placement, {}, servers, since=4, living=LIVING) is not None

"""Shards that move to other servers while the job trains."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.codecs.auto import options
from shardline.core.orders import Phase
from shardline.core.placement import Placement
from shardline.core.spec import TensorSpec
from shardline.errors import JobError, UsageError
from shardline_chief.rules.actions import AskStatus, Cut, Release
from shardline_chief.rules.codecs.choice import encoded
from shardline_chief.rules.events import Stage
from shardline_chief.rules.messages import MoveAnswer
from shardline_chief.rules.state.standbys import spread
from tests.support.chief_cluster import Cluster, FakePs, T, make_job, phase
from tests.support.mortal_chief import Killed, Mortal, hear_twice

LARGE = tuple(TensorSpec(name=f"layer{number}", shape=(64, 64), dtype="float32") for number in range(6))


def placed(*tasks: str) -> tuple[Placement, ...]:
    return tuple(Placement(shard=shard, task=task, address="h:1") for shard, task in enumerate(tasks))


@pytest.mark.parametrize(
    ("tasks", "sizes", "holders", "even", "moves"),
    [
        # A drained server's shards go to the emptiest, the largest first.
        (("ps/0", "ps/1", "ps/1"), (5, 3, 9), ("ps/0", "ps/2"), False, {1: "ps/0", 2: "ps/2"}),
        (("ps/0", "ps/1"), (5, 3), ("ps/0", "ps/1"), False, {}),
        (("ps/0", "ps/0"), (5, 5), ("ps/0", "ps/1"), True, {0: "ps/1"}),
        (("ps/0", "ps/0", "ps/0"), (4, 5, 6), ("ps/0", "ps/1"), True, {2: "ps/1"}),
        # A tenth of what moves is not worth it.
        (("ps/0", "ps/1", "ps/1"), (100, 99, 100), ("ps/0", "ps/1"), True, {}),
        (("ps/2", "ps/10"), (1, 1), ("ps/10", "ps/9"), False, {0: "ps/9"}),
    ],
)
def test_shards_move_to_the_servers_with_least(
    tasks: tuple[str, ...], sizes: tuple[int, ...], holders: tuple[str, ...], even: bool, moves: dict[int, str]
) -> None:
    assert spread(placed(*tasks), dict(enumerate(sizes)), holders, even=even) == moves


def training(ps: int = 3, **options: Any) -> Mortal:
    settings = {name: options.pop(name, 0) for name in ("standbys", "shards")}
    cluster = Mortal(job=make_job(tensors=LARGE, **options), ps=ps, **settings)
    cluster.start()
    cluster.advance(17)
    cluster.commands.clear()
    return cluster


def ask(cluster: Cluster, drain: str = "", number: int = 0) -> MoveAnswer:
    answer = cluster.program.move(drain, number, cluster.now_s)
    cluster.settle()
    return answer


def where(cluster: Cluster) -> list[str]:
    return [place.task for place in cluster.program.state.layout.placement]


def orders_of(cluster: Cluster) -> list[str]:
    return [type(one).__name__ for one in cluster.commands if not isinstance(one, (AskStatus, Release, Cut))]


@pytest.mark.parametrize("standbys", [0, 1])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_drained_server_holds_nothing_and_nothing_goes_back(mode: str, standbys: int) -> None:
    cluster = training(mode=mode, standbys=standbys)
    asked = ask(cluster, "ps/1")
    # With standbys a complete copy is there already.
    aim = "ps/2" if standbys else "ps/0"
    assert asked.moves == {1: aim} and not asked.failure and not asked.done
    cluster.tick(10)
    assert phase(cluster) is Phase.RUNNING
    assert where(cluster) == ["ps/0", aim, "ps/2"]
    assert orders_of(cluster).count("Promote") == 1 and "Restore" not in orders_of(cluster)
    assert ask(cluster, number=asked.number) == MoveAnswer(number=asked.number, done=True)
    # It has dropped its shard, and is given no standby.
    assert cluster.ps[1].shards == cluster.ps[1].held == ()
    assert [bool(place.standby_task) for place in cluster.program.state.layout.placement] == [bool(standbys)] * 3
    assert cluster.program.state.losses.recoveries == []
    assert cluster.orders("worker/0").first_step == 17
    # A call to it would be waited for once it has left.
    assert cluster.led == {"ps/0", "ps/2"}
    cluster.kill_ps(1)
    cluster.tick(T)
    assert phase(cluster) is Phase.RUNNING and "it held nothing" in cluster.text()
    cluster.advance(40)


def test_a_server_that_comes_back_gets_shards_when_asked() -> None:
    cluster = training()
    ask(cluster, "ps/1")
    cluster.tick(10)
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick(10)
    assert where(cluster) == ["ps/0", "ps/0", "ps/2"]
    ask(cluster)
    cluster.tick(10)
    assert sorted(where(cluster)) == ["ps/0", "ps/1", "ps/2"]
    assert not ask(cluster).moves
    cluster.advance(40)


def test_a_server_beyond_the_cluster_file_takes_its_part_of_many_shards() -> None:
    cluster = training(ps=2, shards=6)
    assert where(cluster) == ["ps/0", "ps/1"] * 3
    # Nobody is given a place beyond it: a server with another address waits for its own.
    assert not cluster.program.place("ps", "new:1", cluster.now_s).task and cluster.ask("ps", None)[0].retry
    cluster.ps.append(FakePs(2))
    cluster.join("ps", 2)
    cluster.tick(10)
    assert where(cluster) == ["ps/0", "ps/1"] * 3
    assert set(ask(cluster).moves.values()) == {"ps/2"}
    cluster.tick(10)
    assert sorted(where(cluster)) == ["ps/0", "ps/0", "ps/1", "ps/1", "ps/2", "ps/2"]
    assert phase(cluster) is Phase.RUNNING and cluster.program.state.losses.recoveries == []
    cluster.next_chief()
    for _ in range(6):
        hear_twice(cluster)
    assert phase(cluster) is Phase.RUNNING and "Restore" not in cluster.changes
    # It is one of them from now on: what it holds is missed.
    cluster.kill_ps(2)
    cluster.tick(2 * T)
    assert set(where(cluster)) == {"ps/0", "ps/1"} and phase(cluster) is Phase.RUNNING


def test_what_can_not_be_moved_is_refused_with_a_sentence() -> None:
    cluster = Cluster(job=make_job(tensors=LARGE), ps=2)
    with pytest.raises(UsageError, match="the job is not training"):
        ask(cluster, "ps/1")
    cluster = training(ps=2)
    with pytest.raises(UsageError, match=r"ps/7 is no living server of this job; did you mean 'ps/\d'\?"):
        ask(cluster, "ps/7")
    with pytest.raises(UsageError, match="the chief was restarted, or asked for other moves"):
        ask(cluster, number=3)
    ask(cluster, "ps/1")
    with pytest.raises(UsageError, match="no other server than ps/0 may hold shards"):
        ask(cluster, "ps/0")
    with pytest.raises(
        JobError, match=r"no shard can be moved, since it is first copied, as for --standbys 1: .*apply"
    ):
        ask(training(apply="worker"), "ps/1")


def test_a_move_to_a_server_without_room_is_given_up() -> None:
    cluster = training(ps=2)
    cluster.ps[0].room = 1
    asked = ask(cluster, "ps/1")
    cluster.tick(10)
    assert where(cluster) == ["ps/0", "ps/1"]
    failed = ask(cluster, number=asked.number)
    assert not failed.moves and not failed.done
    assert "ps/0 could not take, or keep, a copy of shard 1; what has not moved stays: shard 1" in failed.failure
    # It may hold what it held.
    assert not cluster.program.state.tasks.drained
    cluster.advance(40)


def test_a_copy_that_refuses_to_take_over_ends_the_move_and_nothing_goes_back() -> None:
    cluster = training()
    cluster.ps[0].refuses = "the standby of shard 1 is not whole"
    asked = ask(cluster, "ps/1")
    cluster.tick(T)
    assert "not whole; what has not moved stays: shard 1" in ask(cluster, number=asked.number).failure
    assert phase(cluster) is Phase.RUNNING and where(cluster) == ["ps/0", "ps/1", "ps/2"]
    assert "Restore" not in orders_of(cluster) and cluster.program.state.losses.recoveries == []
    cluster.ps[0].refuses = ""
    cluster.advance(40)
    ask(cluster, "ps/1")
    cluster.tick(10)
    assert where(cluster) == ["ps/0", "ps/0", "ps/2"]


def hand_over(cluster: Cluster) -> None:
    """Stop the clock within it: its orders are held."""
    for _ in range(60):
        layout = cluster.program.state.layout
        if cluster.program.state.stage is Stage.PREPARING:
            return
        cluster.hold_commands = layout.settled and any(place.standby_task for place in layout.placement)
        cluster.now_s += 0.1
        for task in list(cluster.lives):
            cluster.beat(task)
        cluster.program.tick(cluster.now_s)
        cluster.settle()
    raise AssertionError("nothing was handed over")


def test_a_new_server_that_dies_during_the_hand_over_leaves_all_as_it_was() -> None:
    cluster = training()
    ask(cluster, "ps/1")
    cluster.tick(10)
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick(10)
    at, asked = where(cluster), ask(cluster)
    assert set(asked.moves.values()) == {"ps/1"}
    cluster.commands.clear()
    hand_over(cluster)
    cluster.ps[1].dead = True
    cluster.release_commands()
    cluster.tick(T)
    assert where(cluster) == at and phase(cluster) is Phase.RUNNING and "Restore" not in orders_of(cluster)
    assert ask(cluster, number=asked.number).failure
    cluster.advance(40)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_who_ends_the_job_during_the_hand_over_ends_it_with_a_checkpoint(mode: str) -> None:
    cluster = training(mode=mode)
    ask(cluster, "ps/1")
    hand_over(cluster)
    cluster.program.stop("enough", cluster.now_s)
    cluster.release_commands()
    for _ in range(8):
        cluster.tick()
        for ps in cluster.ps:
            if ps.stop is not None:
                ps.advance(ps.stop)
    cluster.tick(10)
    assert cluster.finish is not None and cluster.finish.exit_code == 0, cluster.text()
    assert cluster.saves[-1].step >= 17


def test_a_move_whose_servers_are_all_gone_is_given_up_and_says_so() -> None:
    cluster = training(ps=2)
    cluster.ps[1].standby_state = "copying"
    asked = ask(cluster, "ps/1")
    cluster.tick(5)
    cluster.kill_ps(0)
    cluster.tick(T * 1.2)
    failed = ask(cluster, number=asked.number)
    assert not failed.done and "ps/0 is gone; what has not moved stays: shard 1" in failed.failure


def test_codecs_that_change_meanwhile_end_the_move() -> None:
    cluster = training(codec="auto", checkpoint_every=10)
    cluster.ps[1].standby_state = "copying"
    asked = ask(cluster, "ps/1")
    cluster.tick(5)
    state = cluster.program.state
    assert state.job is not None
    option = next(one for one in options(10) if "delta" in one.down)
    cluster.program.flows.codec_choice.change(encoded(state.job, option), cluster.now_s)
    cluster.settle()
    cluster.ps[1].standby_state = "synced"
    cluster.tick(10)
    assert where(cluster)[1] == "ps/1"
    assert "the codecs change" in ask(cluster, number=asked.number).failure


def test_a_server_with_copies_alone_is_drained_once_they_are_elsewhere() -> None:
    cluster = training(standbys=1)
    ask(cluster, "ps/1")
    cluster.tick(10)
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick(10)
    held = [place.standby_task for place in cluster.program.state.layout.placement]
    if "ps/1" not in held:
        cluster.kill_ps(2 if "ps/2" in held else 0)
        cluster.tick(T)
    asked = ask(cluster, "ps/1")
    assert not asked.moves and not asked.done
    cluster.tick(10)
    assert ask(cluster, number=asked.number).done
    assert "ps/1" not in [place.standby_task for place in cluster.program.state.layout.placement]


def test_where_the_new_server_dies_meanwhile_another_one_is_chosen() -> None:
    cluster = training(standbys=1)
    # Copying: shard 1 is not complete at its new place.
    cluster.ps[1].standby_state = "copying"
    ask(cluster, "ps/1")
    cluster.tick(10)
    cluster.kill_ps(0)
    cluster.tick(T / 3 + 2)
    cluster.ps[1].standby_state = "synced"
    cluster.tick(10)
    assert where(cluster)[1] == "ps/2"


@pytest.mark.parametrize(("mode", "standbys"), [("sync", 0), ("async", 1)])
@pytest.mark.parametrize("kill_in", range(30))
def test_a_chief_that_dies_at_any_moment_of_a_move_loses_nothing(mode: str, standbys: int, kill_in: int) -> None:
    cluster = training(mode=mode, standbys=standbys)
    cluster.kill_in = kill_in
    try:
        ask(cluster, "ps/1")
        cluster.tick(10)
    except Killed:
        pass
    cluster.next_chief()
    for _ in range(6):
        hear_twice(cluster)
    cluster.tick(10)
    assert phase(cluster) is Phase.RUNNING, cluster.text()
    assert "Restore" not in cluster.changes and min(ps.step for ps in cluster.ps if ps.shards) == 17
    ask(cluster, "ps/1")
    cluster.tick(10)
    assert "ps/1" not in where(cluster)
    cluster.advance(40)
    assert phase(cluster) is Phase.RUNNING


@pytest.mark.parametrize("standbys", [0, 1])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("kill_in", range(10))
def test_a_server_that_dies_at_any_order_of_a_move_stops_nobody(standbys: int, victim: int, kill_in: int) -> None:
    cluster = training(standbys=standbys)
    cluster.hold_commands = True
    ask(cluster, "ps/1")
    cluster.now_s += 0.1
    cluster.program.tick(cluster.now_s)
    cluster.settle()
    for _ in range(kill_in):
        if not cluster.held:
            cluster.tick()
        else:
            cluster.carry_out(cluster.held.pop(0))
            cluster.settle()
    cluster.kill_ps(victim)
    cluster.release_commands()
    cluster.tick(T / 3 + 2)
    cluster.restart_ps(victim)
    cluster.tick(2 * T)
    assert phase(cluster) is Phase.RUNNING, cluster.text()
    if victim != 1:
        assert "ps/1" not in where(cluster)
    cluster.advance(40)
    assert phase(cluster) is Phase.RUNNING, cluster.text()

from __future__ import annotations

import pytest

from shardline.core.orders import Phase
from shardline.core.placement import Placement
from shardline.core.spec import ConsistencySpec
from shardline_chief.rules.actions import Cut, Restore
from shardline_chief.rules.flows.recovery import ATTEMPTS, moved
from shardline_chief.rules.messages import Beat
from shardline_chief.rules.state.membership import Member
from tests.support.chief_cluster import Cluster, T, make_job, other, phase, running


def checkpoint(cluster: Cluster, step: int) -> None:
    """All shards reach the step, and their cut is committed."""
    for ps in cluster.ps:
        ps.obey(Cut(timeline=ps.timeline, step=step))
    cluster.advance(step)
    assert cluster.saves[-1].step == step


def checkpoint_held(cluster: Cluster, step: int) -> None:
    """All shards reach the step, and their cut is being fetched."""
    for ps in cluster.ps:
        ps.obey(Cut(timeline=ps.timeline, step=step))
    cluster.advance(step)
    assert cluster.held_saves[-1].step == step


# Synchronous


def test_lost_server_that_comes_back_is_filled_and_the_job_goes_on_from_its_checkpoint() -> None:
    cluster = running()
    checkpoint(cluster, 10)
    cluster.advance(17)
    before = cluster.program.state.layout.timeline
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    assert cluster.program.state.layout.timeline > before
    assert [ps.step for ps in cluster.ps] == [10, 10]
    assert all(ps.active and ps.timeline == cluster.program.state.layout.timeline for ps in cluster.ps)
    orders = cluster.orders("worker/0")
    assert (orders.phase, orders.first_step, orders.timeline) == (
        Phase.RUNNING,
        10,
        cluster.program.state.layout.timeline,
    )
    (recovered,) = cluster.program.state.losses.recoveries
    assert (recovered.task, recovered.at_step, recovered.from_step, recovered.lost) == ("ps/1", 17, 10, 7)
    assert (
        "ps/1 was restarted and is empty; ps/1 at h:1 held shard 1; rolling back all shards to the newest "
        "checkpoint (step 10 or later)" in cluster.text()
    )
    assert "training continues from step 10, 7 steps are repeated" in cluster.text()
    cluster.advance(100)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert cluster.saves[-1].step == 100


def test_every_server_has_the_new_timeline_before_any_is_restored_and_all_before_one_is_activated() -> None:
    cluster = running()
    checkpoint(cluster, 10)
    cluster.commands.clear()
    cluster.kill_ps(0)
    cluster.restart_ps(0)
    cluster.tick()
    kinds = [type(order).__name__ for order in cluster.commands if type(order).__name__ != "AskStatus"]
    assert kinds == ["Release", "Lead", "Configure", "Members", "Restore", "Activate", "Cut"] or kinds == [
        "Lead",
        "Configure",
        "Members",
        "Restore",
        "Activate",
        "Cut",
    ]
    records = [record.kind for record in cluster.journal]
    assert records[-4:] == ["timeline", "timeline", "stop", "recovered"]
    (restore,) = cluster.kinds(Restore)
    assert restore.keep == frozenset()


def test_workers_stand_still_from_the_moment_the_loss_is_known() -> None:
    cluster = running()
    before = cluster.orders("worker/0").timeline
    cluster.tick(T / 3 + 2, silent=("ps/1",))
    orders = cluster.orders("worker/0")
    assert orders.phase is Phase.INIT
    assert orders.timeline != before
    assert not orders.init


def test_shards_of_a_server_that_stays_away_move_to_the_others_after_a_third_of_the_timeout() -> None:
    cluster = running()
    checkpoint(cluster, 10)
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2)
    assert phase(cluster) is Phase.INIT
    cluster.tick(T / 3 + 2)
    assert phase(cluster) is Phase.RUNNING
    assert {place.task for place in cluster.program.state.layout.placement} == {"ps/0"}
    assert cluster.ps[0].shards == (0, 1)
    assert "shard 1 moves from ps/1 to ps/0" in cluster.text()
    # It may come back, and holds nothing: it is there for the next loss.
    cluster.restart_ps(1)
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    assert len(cluster.program.state.losses.recoveries) == 1
    cluster.kill_ps(0)
    cluster.tick(T / 3 + 2)
    cluster.tick(T / 3 + 2)
    assert phase(cluster) is Phase.RUNNING
    assert cluster.ps[1].shards == (0, 1)


def test_loss_of_a_server_that_holds_nothing_changes_nothing() -> None:
    cluster = running()
    checkpoint(cluster, 10)
    cluster.kill_ps(1)
    cluster.tick(2 * T / 3 + 4)
    cluster.restart_ps(1)
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2)
    assert phase(cluster) is Phase.RUNNING
    assert len(cluster.program.state.losses.recoveries) == 1
    assert "ps/1 is dead" in cluster.text()
    assert "it held nothing, so the job continues without it" in cluster.text()


def test_server_that_holds_nothing_may_leave_when_it_is_asked_to() -> None:
    cluster = running()
    checkpoint(cluster, 10)
    cluster.kill_ps(1)
    cluster.tick(2 * T / 3 + 4)
    cluster.restart_ps(1)
    cluster.beat("ps/1", leaving=True)
    assert phase(cluster) is Phase.RUNNING
    assert cluster.orders("ps/1").phase is Phase.ENDED
    assert "ps/1 is leaving as requested; it held nothing" in cluster.text()


def test_shards_that_fit_nowhere_else_wait_for_their_server_and_end_the_job_with_its_name() -> None:
    cluster = running()
    checkpoint(cluster, 10)
    cluster.ps[0].room = 1
    cluster.kill_ps(1)
    cluster.tick(2 * T / 3 + 4)
    assert phase(cluster) is Phase.INIT
    assert (
        "ps/0 can't take its shards: the shards of this ps need more than there is; waiting for ps/1" in cluster.text()
    )
    cluster.tick(2 * T / 3)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 4
    assert "ps/1 did not return within 60 s; ps/0 can't take its shards" in cluster.finish.reason
    assert "/out/step-10" in cluster.finish.reason


def test_shards_that_fit_nowhere_else_are_given_to_their_server_when_it_comes() -> None:
    cluster = running()
    checkpoint(cluster, 10)
    cluster.ps[0].room = 1
    cluster.kill_ps(1)
    cluster.tick(2 * T / 3 + 4)
    cluster.restart_ps(1)
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    assert [ps.shards for ps in cluster.ps] == [(0,), (1,)]


def test_only_server_is_waited_for_as_long_as_a_task_may_take_to_join() -> None:
    cluster = Cluster(job=make_job(), ps=1)
    cluster.start()
    checkpoint(cluster, 10)
    cluster.kill_ps(0)
    cluster.tick(T / 3 + 2)
    cluster.tick(T - 4)
    assert cluster.finish is None
    cluster.restart_ps(0)
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING


def test_loss_before_training_began_begins_the_job_anew_with_values_of_a_worker() -> None:
    cluster = Cluster(job=make_job())
    for number in (0, 1):
        cluster.join("ps", number)
        cluster.join("worker", number)
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick()
    assert phase(cluster) is Phase.INIT
    assert "there is no checkpoint yet, so the job starts over" in cluster.text()
    cluster.initialize()
    assert phase(cluster) is Phase.RUNNING
    assert cluster.orders("worker/0").first_step == 0


def test_loss_where_no_checkpoint_could_ever_be_written_ends_the_job_since_nobody_has_the_first_values() -> None:
    cluster = Cluster(job=make_job())
    cluster.disk_full = True
    cluster.start()
    cluster.advance(5)
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick()
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 4
    assert "ps/1 was lost before any checkpoint could be written" in cluster.finish.reason


def test_checkpoint_that_can_not_be_read_ends_the_job() -> None:
    cluster = running()
    cluster.lost_disk = True
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick()
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 6
    assert "ps/1 was lost, and no checkpoint can be read" in cluster.finish.reason


def test_checkpoint_that_is_being_written_is_waited_for_since_it_may_be_the_newest() -> None:
    cluster = running()
    checkpoint(cluster, 10)
    cluster.hold_saves = True
    checkpoint_held(cluster, 20)
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick()
    assert phase(cluster) is Phase.INIT
    cluster.release_saves()
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    assert [ps.step for ps in cluster.ps] == [20, 20]


def test_checkpoint_that_takes_longer_than_a_server_may_stay_away_leaves_the_others_their_turn() -> None:
    cluster = running()
    cluster.hold_saves = True
    checkpoint_held(cluster, 20)
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2)
    cluster.tick(T + 2)
    cluster.release_saves()
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    assert "shard 1 moves from ps/1 to ps/0" in cluster.text()


def test_checkpoint_that_never_comes_from_the_disk_is_waited_for_with_a_deadline() -> None:
    cluster = running()
    checkpoint(cluster, 10)
    cluster.hold_saves = True
    checkpoint_held(cluster, 20)
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick(T / 3 + 2)
    assert "could not be read within 20 s (limit 600 s): still waiting for it to be written or read" in cluster.text()
    cluster.tick(10 * T)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 6
    assert "does the disk respond? Continue with --resume from step 10" in cluster.finish.reason


@pytest.mark.parametrize("second", [0, 1])
def test_loss_in_the_middle_of_a_recovery_starts_it_over(second: int) -> None:
    cluster = running()
    checkpoint(cluster, 10)
    cluster.kill_ps(1)
    cluster.hold_commands = True
    cluster.restart_ps(1)
    cluster.tick()
    # Lead is under way to the new process.
    cluster.kill_ps(second)
    cluster.release_commands()
    cluster.restart_ps(second)
    cluster.tick()
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    assert [ps.step for ps in cluster.ps] == [10, 10]
    assert all(ps.timeline == cluster.program.state.layout.timeline for ps in cluster.ps)
    (recovered,) = cluster.program.state.losses.recoveries
    assert recovered.task == "ps/1"


def test_server_that_dies_again_and_again_ends_the_job_at_last() -> None:
    cluster = running()
    for _ in range(ATTEMPTS):
        cluster.kill_ps(1)
        cluster.restart_ps(1)
        cluster.tick()
        assert phase(cluster) is Phase.RUNNING
    cluster.kill_ps(1)
    cluster.ask("ps", 1)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 4
    assert "losses in a row without a step in between" in cluster.finish.reason


def test_losses_with_steps_between_them_are_not_counted_together() -> None:
    cluster = running()
    for number in range(ATTEMPTS + 2):
        cluster.kill_ps(1)
        cluster.restart_ps(1)
        cluster.tick()
        cluster.advance(number + 1)
    assert phase(cluster) is Phase.RUNNING


def test_heartbeat_from_before_the_recovery_does_not_make_a_healthy_server_a_lost_one() -> None:
    cluster = running()
    before = cluster.ps[0].status()
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick()
    beat = Beat(task="ps/0", incarnation=cluster.lives["ps/0"], ps=before)
    cluster.program.beat(beat, cluster.now_s)
    cluster.settle()
    assert phase(cluster) is Phase.RUNNING
    # One that says so itself when asked is.
    cluster.ps[0].timeline = before.timeline
    cluster.beat("ps/0")
    assert phase(cluster) is Phase.INIT
    assert f"ps/0 has timeline {before.timeline:#x} instead of" in cluster.text()


def test_late_answer_of_the_dead_server_does_not_harm_the_one_in_its_place() -> None:
    cluster = running()
    checkpoint(cluster, 10)
    cluster.hold_commands = True
    # A worker joins: the table goes out, and the dead server never takes it.
    cluster.ask("worker", 2)
    cluster.kill_ps(1)
    dead = cluster.ps[1]
    cluster.restart_ps(1)
    alive = cluster.ps[1]
    cluster.ps[1] = dead
    held, cluster.held = cluster.held, []
    for command in held[:1]:
        cluster.carry_out(command)
    cluster.ps[1] = alive
    cluster.held = held[1:]
    cluster.release_commands()
    cluster.tick()
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    assert cluster.program.state.tasks.members.get("ps/1").living


def test_loss_before_the_last_checkpoint_of_a_finished_job_takes_it_back() -> None:
    cluster = running()
    checkpoint(cluster, 10)
    cluster.hold_saves = True
    cluster.advance(100)
    assert phase(cluster) is Phase.STOPPING
    cluster.held_saves.clear()
    cluster.program.state.saves.saving = None
    cluster.kill_ps(1)
    cluster.hold_saves = False
    cluster.restart_ps(1)
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    assert cluster.orders("worker/0").first_step == 10
    cluster.advance(100)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0


def test_loss_while_the_job_stops_as_it_was_asked_to_ends_it_with_the_last_checkpoint_named() -> None:
    cluster = running()
    for ps in cluster.ps:
        ps.obey(Cut(timeline=ps.timeline, step=10))
    cluster.advance(10)
    cluster.program.stop("SIGTERM", cluster.now_s)
    cluster.settle()
    cluster.kill_ps(1)
    cluster.ask("ps", 1)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 4
    assert "Continue with --resume from step 10: /out/step-10" in cluster.finish.reason


def test_worker_that_dies_meanwhile_leaves_its_replicas_to_the_other() -> None:
    cluster = running()
    checkpoint(cluster, 10)
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    cluster.restart_ps(1)
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    assert cluster.orders("worker/0").replicas == (0, 1, 2, 3)
    assert all("worker/1" not in ps.members for ps in cluster.ps)


def test_finished_worker_of_a_job_file_has_more_to_do_after_a_loss() -> None:
    cluster = running()
    checkpoint(cluster, 10)
    state = cluster.program.state
    cluster.beat("worker/0", finished=True)
    assert state.tasks.finished == {"worker/0"}
    cluster.beat("worker/0", finished=False)
    assert state.tasks.finished == set()


def test_script_whose_worker_has_finished_can_not_go_back() -> None:
    cluster = Cluster(workers=2)
    job = make_job(script=True, steps=0, replicas=0)
    for number in (0, 1):
        cluster.join("ps", number)
    for number in (0, 1):
        cluster.join("worker", number, job=job)
    cluster.initialize()
    assert phase(cluster) is Phase.RUNNING
    cluster.beat("worker/0", finished=True)
    cluster.kill_ps(1)
    cluster.ask("ps", 1)
    assert cluster.finish is not None
    assert "worker/0 has finished and can't be rolled back" in cluster.finish.reason


def test_steps_that_are_voted_on_have_standbys_as_any_others() -> None:
    terms = ConsistencySpec(mode="sync", clip_norm=0.5)
    cluster = Cluster(job=other(make_job(), consistency=terms), standbys=1)
    for number in (0, 1):
        cluster.join("ps", number)
    assert cluster.finish is None
    assert [(place.task, place.standby_task) for place in cluster.program.state.layout.placement] == [
        ("ps/0", "ps/1"),
        ("ps/1", "ps/0"),
    ]


# Asynchronous


def test_only_the_lost_shard_is_restored_and_the_lost_updates_are_counted() -> None:
    cluster = Cluster(job=make_job(mode="async", checkpoint_every=10))
    cluster.start()
    for ps in cluster.ps:
        ps.version = 12
    cluster.tick()
    assert cluster.saves[-1].step == 12
    for ps in cluster.ps:
        ps.version = 19
    cluster.tick()
    lease = cluster.program.lease("worker/0", cluster.lives["worker/0"], (), cluster.now_s)
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    assert [ps.version for ps in cluster.ps] == [19, 12]
    (restore,) = cluster.kinds(Restore)
    assert restore.keep == frozenset({0})
    (recovered,) = cluster.program.state.losses.recoveries
    assert recovered.lost == 7
    assert "at least 7 acknowledged updates are lost" in cluster.text()
    again = cluster.program.lease("worker/0", cluster.lives["worker/0"], (lease.lease,), cluster.now_s)
    assert again.first == lease.count


def test_lease_of_a_worker_that_dies_while_a_shard_is_restored_is_handed_out_again() -> None:
    cluster = Cluster(job=make_job(mode="async"))
    cluster.start()
    lost = cluster.program.lease("worker/1", cluster.lives["worker/1"], (), cluster.now_s)
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    cluster.restart_ps(1)
    cluster.tick()
    again = cluster.program.lease("worker/0", cluster.lives["worker/0"], (), cluster.now_s)
    assert again.first == lost.first


def test_lease_of_a_worker_that_is_started_again_while_a_shard_is_restored_is_handed_out_again() -> None:
    cluster = Cluster(job=make_job(mode="async"))
    cluster.start()
    lost = cluster.program.lease("worker/1", cluster.lives["worker/1"], (), cluster.now_s)
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2)
    assert phase(cluster) is Phase.INIT
    cluster.program.stream_broken("worker/1", cluster.lives["worker/1"], cluster.now_s)
    cluster.join("worker", 1)
    cluster.restart_ps(1)
    cluster.tick()
    again = cluster.program.lease("worker/0", cluster.lives["worker/0"], (), cluster.now_s)
    assert again.first == lost.first


def test_last_checkpoint_after_a_loss_has_what_the_other_shards_did_since_the_one_before() -> None:
    cluster = Cluster(job=make_job(mode="async", checkpoint_every=10))
    cluster.start()
    for version in (12, 19):
        for ps in cluster.ps:
            ps.version = version
        cluster.tick()
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick()
    assert ([ps.version for ps in cluster.ps], cluster.saves[-1].step) == ([19, 12], 12)
    cluster.program.stop("SIGTERM", cluster.now_s)
    cluster.tick(T)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    # Its number can't be 12: that one is written, and other shards were in it.
    assert cluster.saves[-1].step == 13


# Who takes what


def test_orphans_go_to_whoever_holds_least() -> None:
    living = {
        task: Member(
            role="ps",
            index=index,
            incarnation=1,
            stable_id="s",
            address=f"h{index}:1",
            metrics_address="",
            last_heard_s=0,
        )
        for index, task in enumerate(("ps/0", "ps/1"))
    }
    before = tuple(Placement(shard=n, task=f"ps/{n}", address="old:1") for n in range(4))
    after = moved(before, living, {0: 10, 1: 4, 2: 5, 3: 3})
    assert [(place.shard, place.task, place.address) for place in after] == [
        (0, "ps/0", "h0:1"),
        (1, "ps/1", "h1:1"),
        (2, "ps/1", "h1:1"),
        (3, "ps/1", "h1:1"),
    ]

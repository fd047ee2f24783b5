"""A chief is killed at any point of a job, and the next one reads its journal and goes on."""

from __future__ import annotations

import dataclasses

import pytest

from shardline.core.orders import Phase
from shardline.core.spec import TensorSpec
from shardline.errors import FencedError, UsageError
from shardline_chief.rules.actions import (
    CommandResult,
    Configure,
    Cut,
    Finish,
    Lead,
    Members,
    Release,
    Restore,
)
from shardline_chief.rules.messages import Beat, Join, JoinAnswer
from shardline_chief.rules.replay import Remembered, obstacle, replay
from tests.support.chief_cluster import JOIN, FakePs, T, make_job, phase
from tests.support.mortal_chief import Killed, Mortal, cut, hear_twice, mortal

# Synchronous


def test_the_next_chief_takes_the_job_over_as_it_is_and_nothing_is_made_again() -> None:
    cluster = mortal()
    cut(cluster, 10)
    cluster.advance(17)
    timeline, assignment = cluster.program.state.layout.timeline, cluster.program.state.work.assignment
    cluster.next_chief()
    for ps in cluster.ps:
        ps.advance(23)  # meanwhile
    assert cluster.program.state.returning
    cluster.hear()
    state = cluster.program.state
    assert (state.phase, state.layout.timeline, state.work.assignment, state.progress.step) == (
        Phase.RUNNING,
        timeline,
        assignment,
        23,
    )
    assert (state.saves.checkpoint_step, state.progress.stop_step, state.losses.failovers) == (10, 100, 1)
    assert cluster.changes == ["Lead", "AskStatus", "Members", "Activate", "Cut"]
    assert all(ps.members == {task: cluster.lives[task] for task in ("worker/0", "worker/1")} for ps in cluster.ps)
    assert "training continues at step 23, and no step is repeated" in cluster.text()
    assert state.figures.seconds(cluster.now_s) == pytest.approx(cluster.now_s, abs=1.0)
    cluster.advance(100)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert cluster.kinds(Configure) == []


def test_no_order_is_given_and_no_batch_before_the_servers_have_been_led() -> None:
    cluster = mortal(mode="async")
    cluster.next_chief()
    cluster.beat("ps/0")
    cluster.beat("worker/0")
    cluster.program.tick(cluster.now_s)
    cluster.settle()
    assert cluster.program.state.returning
    assert cluster.changes == []
    assert cluster.program.lease("worker/0", cluster.lives["worker/0"], (), cluster.now_s).outcome == "WAITING"
    cluster.hear()
    assert not cluster.program.state.returning
    assert cluster.program.lease("worker/0", cluster.lives["worker/0"], (), cluster.now_s).outcome == "SERVED"


@pytest.mark.parametrize(
    "fields",
    [{"mode": "sync"}, {"mode": "async"}, {"codec": "onebit", "error_memory": "exact"}],
    ids=["sync", "async", "exact error memory"],
)
def test_killed_at_any_point_a_chief_is_followed_by_one_that_ends_the_job(fields: dict[str, str]) -> None:
    for actions in range(0, 120, 3):
        cluster = Mortal(job=make_job(**fields, steps=40))
        cluster.kill_in = actions
        configured = drive(cluster)
        assert cluster.finish is not None, actions
        assert cluster.finish.exit_code == 0, (actions, cluster.finish.reason)
        # Once training was under way no server had to be filled again, unless error memory may have moved.
        assert not configured or "error_memory" in fields, actions


def drive(cluster: Mortal) -> bool:
    """Tasks do their part until the job has ended; the chief is followed by another. Whether steps were undone."""
    held: dict[str, int] = {}
    undone = False
    for _ in range(150):
        running = phase(cluster) is Phase.RUNNING
        try:
            step(cluster, held)
        except Killed:
            training = any(entry["kind"] == "running" for entry in cluster.entries)
            cluster.next_chief()
            undone = undone or (training and running and cluster.kinds(Configure) != [])
        if cluster.finish is not None:
            return undone
    raise AssertionError(f"the job does not end: {cluster.text()}")


def step(cluster: Mortal, held: dict[str, int]) -> None:
    for task in ("ps/0", "ps/1", "worker/0", "worker/1"):
        role, _, index = task.partition("/")
        if task not in cluster.lives:
            cluster.ask(role, int(index), stable_id=f"s {task}")
    if any(cluster.orders(task).init for task in cluster.lives):
        for ps in cluster.ps:
            ps.initialized = True
    state = cluster.program.state
    if state.work.leases is not None:
        for task in ("worker/0", "worker/1"):
            number = held.get(task, 0)
            answer = cluster.program.lease(task, cluster.lives[task], (number,) if number else (), cluster.now_s)
            cluster.settle()
            held[task] = answer.lease
            for ps in cluster.ps:
                ps.version = ps.step = ps.version + answer.count
    elif all(ps.active for ps in cluster.ps):
        for ps in cluster.ps:
            ps.advance(ps.step + 7)
    cluster.hear()


def test_server_lost_with_its_chief_goes_back_to_the_checkpoint() -> None:
    cluster = mortal()
    cut(cluster, 10)
    cluster.advance(17)
    cluster.ps[1] = FakePs(1)
    cluster.next_chief()
    cluster.join("ps", 1)
    cluster.hear()
    cluster.hear()
    state = cluster.program.state
    assert [ps.step for ps in cluster.ps] == [10, 10]
    assert (state.phase, state.layout.timeline >> 32) == (Phase.RUNNING, state.settings.term)
    assert [(r.task, r.from_step) for r in state.losses.recoveries] == [("ps/1", 10)]
    assert state.losses.recoveries[0].at_step >= 10
    cluster.advance(100)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0


def test_server_that_came_back_empty_just_before_the_chief_died_keeps_nothing() -> None:
    cluster = mortal(mode="async")
    cluster.hold_commands = True
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.hold_commands = False
    cluster.next_chief()
    hear_twice(cluster)
    (restore,) = cluster.kinds(Restore)
    assert restore.keep == {0}
    assert phase(cluster) is Phase.RUNNING


def test_steps_that_are_made_again_are_counted_by_a_chief_that_has_not_seen_them() -> None:
    cluster = mortal()
    cut(cluster, 10)
    cluster.advance(17)
    cluster.ps[1].dead = True
    cluster.next_chief()
    # The server that is left tells where the job is before the other is found to be empty.
    cluster.hear()
    cluster.restart_ps(1)
    cluster.hear()
    cluster.hear()
    (recovered,) = cluster.program.state.losses.recoveries
    assert (recovered.at_step, recovered.from_step, recovered.lost) == (17, 10, 7)


def test_server_that_does_not_come_back_is_declared_dead_and_the_others_take_its_shards() -> None:
    tensors = tuple(TensorSpec(name=f"weight{n}", shape=(64, 64), dtype="float32") for n in range(3))
    cluster = Mortal(job=make_job(tensors=tensors), ps=3)
    cluster.start()
    cut(cluster, 10)
    held = cluster.program.state.layout.placement
    cluster.ps[1].dead = True
    cluster.next_chief()
    cluster.tick(T / 3 - 3)
    assert cluster.program.state.returning
    cluster.tick(T)
    assert phase(cluster) is Phase.RUNNING
    assert {place.task for place in held} == {"ps/0", "ps/1", "ps/2"}
    assert {place.task for place in cluster.program.state.layout.placement} == {"ps/0", "ps/2"}


def test_half_of_the_servers_are_too_few_to_go_on_with() -> None:
    cluster = mortal()
    cut(cluster, 10)
    cluster.ps[1].dead = True
    cluster.next_chief()
    cluster.tick(T / 3 + 3)
    assert cluster.changes == []
    assert "1 of 2 parameter servers are present: waiting" in cluster.text()
    cluster.restart_ps(1)
    cluster.hear()
    cluster.hear()
    assert phase(cluster) is Phase.RUNNING
    cluster = mortal()
    cluster.ps[1].dead = True
    cluster.next_chief()
    cluster.tick(JOIN + 3)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 4
    assert "ps/1 did not appear within 180 s, and with at most half of the servers" in cluster.finish.reason


def test_all_servers_started_again_with_the_chief_are_one_loss() -> None:
    cluster = mortal()
    cut(cluster, 10)
    cluster.next_chief()
    for number in (0, 1):
        cluster.ps[number] = FakePs(number)
        cluster.join("ps", number)
    cluster.hear()
    cluster.hear()
    assert phase(cluster) is Phase.RUNNING
    assert [ps.step for ps in cluster.ps] == [10, 10]
    assert len(cluster.program.state.losses.recoveries) == 1


def test_chief_that_died_while_it_filled_the_servers_fills_them_again() -> None:
    cluster = mortal()
    cut(cluster, 10)
    cluster.advance(17)
    cluster.hold_commands = True
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick()
    cluster.hold_commands = False
    held = [command.order for command in cluster.held]
    assert [type(order) for order in held][-1] is Lead
    cluster.note(
        "timeline", timeline=77, state="preparing", from_cut=10, placement=[[0, "ps/0", "h:1"], [1, "ps/1", "h:1"]]
    )
    cluster.next_chief()
    cluster.hear()
    cluster.hear()
    assert phase(cluster) is Phase.RUNNING
    assert [ps.step for ps in cluster.ps] == [10, 10]


# Tasks


def test_worker_that_died_with_the_chief_is_missed_and_its_replicas_move() -> None:
    cluster = mortal()
    cluster.next_chief()
    cluster.tick(T / 3 + 4, silent=("worker/1",))
    assert cluster.orders("worker/0").replicas == (0, 1, 2, 3)
    assert all("worker/1" not in ps.members for ps in cluster.ps)


def test_worker_started_again_meanwhile_takes_its_place_at_once() -> None:
    cluster = mortal()
    old = cluster.lives["worker/1"]
    cluster.next_chief()
    new = cluster.join("worker", 1).incarnation
    cluster.hear()
    assert new != old
    assert cluster.orders("worker/1").replicas == (2, 3)
    assert all(ps.members["worker/1"] == new for ps in cluster.ps)
    assert cluster.program.orders("worker/1", old).fenced


def test_what_was_fenced_stays_fenced_and_what_is_unknown_is_not_taken() -> None:
    cluster = mortal()
    dead = cluster.lives["worker/1"]
    cluster.hold_commands = True
    cluster.tick(T / 3 + 4, silent=("worker/1",))
    cluster.hold_commands = False
    cluster.next_chief()
    assert not cluster.program.beat(Beat(task="worker/1", incarnation=dead), cluster.now_s)
    assert not cluster.program.beat(Beat(task="worker/0", incarnation=12345), cluster.now_s)
    cluster.lives.pop("worker/1")
    cluster.hear()
    assert [members.members for members in cluster.kinds(Members)] == [{"worker/0": cluster.lives["worker/0"]}]


def test_join_whose_answer_was_lost_is_asked_again_by_the_same_process() -> None:
    cluster = mortal()
    answers: list[JoinAnswer] = []
    join = Join(role="worker", index=2, stable_id="mine", address="h:1")
    cluster.program.join(answers, join, cluster.now_s)
    cluster.kill_in = 2
    with pytest.raises(Killed):
        cluster.settle()
    assert answers == []
    cluster.next_chief()
    assert cluster.join("worker", 2, stable_id="mine").incarnation >> 32 == cluster.settings.term
    cluster.hear()
    assert all(ps.members["worker/2"] == cluster.lives["worker/2"] for ps in cluster.ps)


# Asynchronous


def lease(cluster: Mortal, task: str, *done: int) -> tuple[int, int, int]:
    answer = cluster.program.lease(task, cluster.lives[task], done, cluster.now_s)
    cluster.settle()
    return answer.lease, answer.first, answer.count


def test_acknowledged_batches_stay_done_and_open_ones_stay_with_their_worker() -> None:
    cluster = mortal(mode="async", steps=200)
    first = lease(cluster, "worker/0")
    second = lease(cluster, "worker/1")
    third = lease(cluster, "worker/0", first[0])
    cluster.next_chief()
    cluster.hear()
    leases = cluster.program.state.work.leases
    assert leases is not None
    assert (leases.done, leases.repeated, leases.outstanding) == (first[2], 0, 2)
    # Its answer may have been lost with the chief; so may that of the question which said that the first is done.
    assert lease(cluster, "worker/0", first[0]) == third
    fourth = lease(cluster, "worker/1", second[0])
    assert fourth[1] == third[1] + third[2]
    assert fourth[0] > third[0]


def test_leases_of_a_worker_that_died_with_the_chief_are_handed_out_again_and_counted() -> None:
    cluster = mortal(mode="async", steps=200)
    mine = lease(cluster, "worker/1")
    cluster.next_chief()
    cluster.tick(T / 3 + 4, silent=("worker/1",))
    leases = cluster.program.state.work.leases
    assert leases is not None
    assert leases.repeated == mine[2]
    assert lease(cluster, "worker/0")[1] == mine[1]


def test_batches_whose_updates_no_shard_has_any_more_are_trained_on_again() -> None:
    cluster = mortal(mode="async", steps=200)
    first = lease(cluster, "worker/0")
    second = lease(cluster, "worker/0", first[0])
    cluster.next_chief()
    for number in (0, 1):
        cluster.ps[number] = FakePs(number)
        cluster.join("ps", number)
    cluster.hear()
    cluster.hear()
    assert phase(cluster) is Phase.RUNNING
    leases = cluster.program.state.work.leases
    assert leases is not None
    assert (leases.done, leases.repeated) == (0, second[2])
    again = lease(cluster, "worker/0", second[0])
    assert again[1] == 0
    assert again[0] > second[0]


def test_copies_whose_finished_leases_died_with_the_chief_are_released_and_not_saved() -> None:
    cluster = mortal(mode="async", steps=200)
    for ps in cluster.ps:
        ps.version = ps.step = 30
        ps.obey(Cut(timeline=ps.timeline, step=30))
    saves = len(cluster.saves)
    cluster.next_chief()
    cluster.hear()
    assert [release.step for release in cluster.kinds(Release)] == [30]
    assert len(cluster.saves) == saves


# Ends


def test_stop_that_was_asked_for_is_kept() -> None:
    cluster = mortal()
    cluster.advance(10)
    cluster.hold_commands = True
    cluster.program.stop("enough", cluster.now_s)
    cluster.settle()
    cluster.hold_commands = False
    cluster.next_chief()
    cluster.hear()
    cluster.advance(99)
    cluster.hear()
    assert cluster.finish is not None
    assert cluster.finish.reason == "stopped: enough"
    assert cluster.finish.exit_code == 0
    assert cluster.saves[-1].step < 99


def test_stop_asked_for_while_the_chief_comes_back_waits_until_it_leads() -> None:
    cluster = mortal()
    cluster.next_chief()
    assert cluster.program.stop("enough", cluster.now_s) == 0
    cluster.settle()
    assert cluster.changes == []
    cluster.hear()
    assert phase(cluster) is Phase.STOPPING


def test_stop_of_a_job_that_was_started_again_as_a_whole_is_forgotten() -> None:
    cluster = mortal()
    cut(cluster, 10)
    cluster.hold_commands = True
    cluster.program.stop("enough", cluster.now_s)
    cluster.settle()
    cluster.hold_commands = False
    cluster.next_chief()
    for number in (0, 1):
        cluster.ps[number] = FakePs(number)
        cluster.join("ps", number)
    cluster.hear()
    cluster.advance(100)
    assert cluster.finish is not None
    assert cluster.finish.reason == "done"


def test_end_that_was_decided_is_told_by_the_next_chief() -> None:
    cluster = mortal()
    cluster.advance(100)
    assert cluster.finish is not None
    cluster.finish = None
    assert cluster.next_chief().ended == (0, "done")
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert cluster.orders("worker/0").phase is Phase.ENDED
    assert cluster.orders("worker/0").final_step == 100
    cluster.note("closed")
    assert not replay(cluster.entries).unfinished


def test_evaluation_and_best_are_remembered() -> None:
    cluster = mortal()
    cluster.join("evaluator", 0)
    cluster.program.report("evaluator/0", cluster.lives["evaluator/0"], 0, {"loss": 2.5, "acc": 0.5}, "", cluster.now_s)
    cluster.settle()
    cluster.next_chief()
    assert cluster.program.state.figures.best == (0, {"loss": 2.5, "acc": 0.5})
    assert list(cluster.program.state.figures.metrics[0]) == ["loss", "acc"]


def test_cluster_that_waited_for_its_chief_is_taken_over_too() -> None:
    cluster = Mortal(job=make_job())
    cluster.join("ps", 0)
    cluster.join("worker", 0)
    cluster.next_chief()
    cluster.join("ps", 1)
    assert phase(cluster) is Phase.WAITING
    cluster.hear()
    assert phase(cluster) is Phase.INIT
    assert cluster.orders("worker/0").init


# No two chiefs


def test_chief_that_meets_a_newer_one_leaves_everything_to_it() -> None:
    cluster = mortal()
    cluster.next_chief()
    cluster.hold_commands = True
    cluster.hear()
    (command,) = cluster.held
    assert isinstance(command.order, Lead)
    fenced = FencedError("ps/0 at h:1 obeys the chief of term 9; this one has term 4")
    cluster.program.done(command.number, CommandResult(errors={"ps/0": fenced}), cluster.now_s)
    cluster.settle()
    assert cluster.finish == Finish(
        exit_code=7, reason=f"{fenced}. Another chief leads this job, so this one ends", resigned=True
    )
    assert not any(entry["kind"] == "ended" for entry in cluster.entries)


# The journal


def test_another_job_is_named_and_the_same_is_not() -> None:
    cluster = mortal()
    remembered = replay(cluster.entries)
    assert obstacle(remembered, make_job(), cluster.settings) == ""
    assert obstacle(remembered, None, cluster.settings) == ""
    assert "batch_size: 7 here, 1 in the job" in obstacle(remembered, make_job(batch_size=7), cluster.settings)
    reason = obstacle(dataclasses.replace(remembered, plan_id="0" * 32), make_job(), cluster.settings)
    assert (
        "for a number of parameter servers other than 2, with another --bucket-mb, --shards or --with-ps, or by "
        in reason
    )


def test_a_run_goes_on_with_the_shares_that_it_began_with() -> None:
    tensors = tuple(TensorSpec(name=f"t{number}", shape=(500, 256), dtype="float32") for number in range(8))
    cluster = Mortal(job=make_job(tensors=tensors), shares=(0.25, 0.75))
    cluster.start()
    plan = cluster.program.state.layout.plan
    assert plan is not None and [shard.nbytes // 1_024_000 for shard in plan.shards] == [1, 3]
    assert "cut for the machines' links: 25 % on ps/0, 75 % on ps/1" in cluster.text()
    # As one of an earlier version, or with another cluster.json.
    cluster.next_chief()
    assert cluster.settings.shares == (0.25, 0.75) and cluster.program.state.layout.plan == plan


def test_a_start_that_takes_nothing_over_begins_a_run_of_its_own() -> None:
    cluster = mortal()
    cluster.note("closed")
    assert replay(cluster.entries).closed
    cluster.note("chief", uuid="w", resume=40, takes_over=None)
    remembered = replay(cluster.entries)
    assert (remembered.job, remembered.timeline, remembered.first_step, remembered.closed) == (None, 0, 40, False)
    assert not remembered.unfinished


def test_an_entry_that_can_not_be_read_is_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"an entry of the chief's journal can't be read.*timeline"):
        replay([{"kind": "timeline", "term": 1, "timeline": "x", "state": "preparing"}])


def test_nothing_is_remembered_of_an_empty_folder() -> None:
    assert replay([]) == Remembered()
    assert not replay([]).unfinished

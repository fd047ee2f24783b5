from __future__ import annotations

import dataclasses

import pytest

from shardline.core.orders import Phase
from shardline_chief.rules.actions import Activate, CommandResult, Configure, Cut, Members, Release, Restore
from shardline_chief.rules.events import EndAsked
from shardline_chief.rules.messages import Beat, Join
from tests.support.chief_cluster import JOIN, Cluster, FakeResume, T, make_job, other, running

# Start


def test_start_is_lead_configure_members_values_cut_zero_activate_and_the_stop_in_that_order() -> None:
    cluster = running()
    names = [name for name in cluster.log if name not in ("AskStatus", "Members", "Release", "record member")]
    assert names == [
        "record job",
        "record plan",
        "Lead",
        "record timeline",
        "Configure",
        "Cut",
        "record cut",
        "record timeline",
        "Activate",
        "record stop",
        "Cut",
        "record running",
    ]
    assert [save.step for save in cluster.saves] == [0]
    assert cluster.kinds(Cut)[-1].step == 100
    assert cluster.kinds(Cut)[-1].stop
    assert cluster.orders("worker/0").stop_step == 100
    assert cluster.orders("worker/0").replicas == (0, 1)
    assert cluster.orders("worker/1").replicas == (2, 3)
    assert cluster.orders("worker/0").workers == 2


def test_nothing_begins_before_every_ps_is_there() -> None:
    cluster = Cluster(job=make_job())
    cluster.join("ps", 0)
    cluster.join("worker", 0)
    cluster.tick(10)
    assert cluster.commands == []
    cluster.join("ps", 1)
    assert cluster.orders("worker/0").phase is Phase.INIT


def test_the_job_of_the_first_worker_is_taken_where_there_is_no_job_file() -> None:
    cluster = Cluster()
    for number in (0, 1):
        cluster.join("ps", number)
    assert cluster.commands == []
    cluster.join("worker", 0, job=make_job(name="theirs"))
    assert cluster.program.job_view().job.name == "theirs"


def test_only_one_worker_sets_the_first_values() -> None:
    cluster = Cluster(job=make_job())
    for number in (0, 1):
        cluster.join("ps", number)
    for number in (1, 0):
        cluster.join("worker", number)
    assert [cluster.orders(f"worker/{n}").init for n in (0, 1)] == [False, True]
    cluster.initialize()
    assert not cluster.orders("worker/1").init


def test_if_the_initialising_worker_dies_another_does_it_in_a_new_timeline() -> None:
    cluster = Cluster(job=make_job())
    for number in (0, 1):
        cluster.join("ps", number)
        cluster.join("worker", number)
    first = cluster.orders("worker/1").timeline
    assert cluster.orders("worker/0").init
    cluster.tick(T / 3 + 1, silent=("worker/0",))
    assert cluster.orders("worker/1").init
    assert cluster.orders("worker/1").timeline == first + 1
    assert len(cluster.kinds(Configure)) == 2
    assert cluster.orders("worker/0").fenced


def test_training_starts_without_late_workers_and_takes_them_when_they_come() -> None:
    cluster = Cluster(job=make_job())
    for number in (0, 1):
        cluster.join("ps", number)
    cluster.join("worker", 0)
    cluster.initialize()
    assert cluster.program.state.phase is Phase.INIT
    cluster.tick(T)
    assert cluster.program.state.phase is Phase.RUNNING
    assert cluster.orders("worker/0").replicas == (0, 1, 2, 3)
    assert "1 of 2 tasks that train did not join within 60 s" in cluster.text()
    cluster.join("worker", 1)
    assert cluster.orders("worker/1").replicas == (2, 3)
    assert cluster.orders("worker/0").replicas == (0, 1)


def test_missing_ps_ends_the_job_with_its_name_address_and_the_seconds_waited() -> None:
    cluster = Cluster(job=make_job())
    cluster.join("ps", 0)
    cluster.join("worker", 0)
    cluster.tick(JOIN + 1)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 3
    assert "ps/1 at host1:1 did not join within 180 s" in cluster.finish.reason
    assert cluster.orders("worker/0").phase is Phase.ENDED


def test_an_address_that_nobody_knows_yet_is_not_printed_as_port_0() -> None:
    cluster = Cluster(job=make_job())
    cluster.program.state.tasks.settings = dataclasses.replace(
        cluster.program.state.settings, ps=("127.0.0.1:0", "host1:1")
    )
    cluster.tick(JOIN + 1)
    assert cluster.finish is not None
    assert "ps/0 (address not known yet), ps/1 at host1:1 did not join within 180 s" in cluster.finish.reason


def test_no_worker_at_all_ends_the_job() -> None:
    cluster = Cluster(job=make_job())
    for number in (0, 1):
        cluster.join("ps", number)
    cluster.tick(JOIN + 1)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 3


def test_a_bad_job_ends_with_its_sentence_and_code_2() -> None:
    cluster = Cluster(job=make_job(steps=0))
    for number in (0, 1):
        cluster.join("ps", number)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 2


# Admission


def test_another_job_is_refused_with_the_difference_named() -> None:
    cluster = Cluster(job=make_job())
    (answer,) = cluster.ask("worker", 0, job=other(make_job(), batch_size=7))
    assert not answer.accepted
    assert not answer.retry
    assert "batch_size: 7 here, 1 in the job" in answer.reason


def test_another_machine_is_refused_in_synchronous_mode_unless_inexact() -> None:
    for inexact in (False, True):
        cluster = Cluster(job=make_job(), inexact=inexact)
        cluster.join("worker", 0, machine={"torch": "2.11", "cpu_capability": "AVX2"})
        (answer,) = cluster.ask("worker", 1, machine={"torch": "2.11", "cpu_capability": "AVX512"})
        assert answer.accepted is inexact
        assert inexact or "cpu_capability: AVX512 here, AVX2 in the cluster" in answer.reason


def test_another_machine_is_welcome_in_asynchronous_mode() -> None:
    cluster = Cluster(job=make_job(mode="async"))
    cluster.join("worker", 0, machine={"cpu_capability": "AVX2"})
    cluster.join("worker", 1, machine={"cpu_capability": "AVX512"})


def test_unknown_required_features_are_refused() -> None:
    cluster = Cluster(job=make_job())
    (answer,) = cluster.ask("worker", 0, required_features=("telepathy",))
    assert not answer.accepted
    assert "telepathy" in answer.reason


def test_a_joining_worker_is_answered_only_when_every_ps_has_it_in_its_table() -> None:
    cluster = running()
    cluster.hold_commands = True
    answers = cluster.ask("worker", 2)
    assert answers == []
    cluster.release_commands()
    (answer,) = answers
    assert answer.accepted
    assert all(ps.members["worker/2"] == answer.incarnation for ps in cluster.ps)


# Deaths


def test_replicas_of_a_dead_worker_move_only_after_every_ps_has_fenced_it() -> None:
    cluster = running()
    old = cluster.lives["worker/1"]
    cluster.hold_commands = True
    cluster.tick(T / 3 + 1, silent=("worker/1",))
    assert cluster.orders("worker/1").fenced
    assert cluster.orders("worker/0").replicas == (0, 1)
    cluster.release_commands()
    assert cluster.orders("worker/0").replicas == (0, 1, 2, 3)
    assert all(old not in ps.members.values() for ps in cluster.ps)
    assert "worker/1 is dead: last heard" in cluster.text()
    assert "replicas 2, 3 to worker/0" in cluster.text()


def test_a_restarted_worker_gets_its_place_back_without_waiting_for_its_death() -> None:
    cluster = running()
    old = cluster.lives["worker/1"]
    cluster.program.stream_broken("worker/1", old, cluster.now_s)
    cluster.settle()
    new = cluster.join("worker", 1).incarnation
    assert new != old
    assert cluster.orders("worker/1").replicas == (2, 3)
    assert all(ps.members["worker/1"] == new for ps in cluster.ps)
    assert cluster.program.orders("worker/1", old).fenced


def test_heartbeat_of_a_fenced_life_is_not_taken() -> None:
    cluster = running()
    cluster.tick(T / 3 + 1, silent=("worker/1",))
    assert not cluster.program.beat(Beat(task="worker/1", incarnation=cluster.lives["worker/1"]), cluster.now_s)


def test_with_nobody_left_to_train_the_job_waits_then_ends_with_the_checkpoint_named() -> None:
    cluster = running()
    for ps in cluster.ps:
        ps.obey(Cut(timeline=ps.timeline, step=10))
    cluster.advance(10)
    silent = ("worker/0", "worker/1")
    cluster.tick(T / 3 + 1, silent=silent)
    assert cluster.finish is None
    cluster.tick(T + 10, silent=silent)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 4
    assert "Continue with --resume from step 10: /out/step-10" in cluster.finish.reason


def test_a_worker_that_comes_in_time_takes_over_all_replicas() -> None:
    cluster = running()
    silent = ("worker/0", "worker/1")
    cluster.tick(T / 3 + 1, silent=silent)
    cluster.join("worker", 1)
    cluster.tick(T + 10, silent=("worker/0",))
    assert cluster.finish is None
    assert cluster.orders("worker/1").replicas == (0, 1, 2, 3)


def test_dead_evaluator_is_said_and_training_goes_on() -> None:
    cluster = running()
    cluster.join("evaluator", 0)
    cluster.tick(T / 3 + 1, silent=("evaluator/0",))
    assert cluster.finish is None
    assert "evaluator/0 is dead" in cluster.text()
    assert "the job continues without it" in cluster.text()


# Checkpoints


def test_cuts_are_saved_when_all_shards_hold_them_and_then_released() -> None:
    cluster = running(checkpoint_every=10)
    for ps in cluster.ps:
        ps.obey(Cut(timeline=ps.timeline, step=10))
    cluster.ps[0].advance(10)
    cluster.tick()
    assert [save.step for save in cluster.saves] == [0]
    cluster.ps[1].advance(10)
    cluster.tick()
    cluster.tick()
    assert [save.step for save in cluster.saves] == [0, 10]
    assert cluster.kinds(Release)[-1].step == 10
    assert cluster.orders("worker/0").checkpoint_step == 10


def test_full_disk_costs_a_checkpoint_and_not_the_training() -> None:
    cluster = running()
    for ps in cluster.ps:
        ps.obey(Cut(timeline=ps.timeline, step=10))
    cluster.disk_full = True
    cluster.advance(10)
    assert cluster.program.state.phase is Phase.RUNNING
    assert cluster.orders("worker/0").checkpoint_step == 0
    (error,) = [say for say in cluster.said if say.level == "error"]
    assert "No space left on device" in error.sentence
    cluster.disk_full = False
    cluster.advance(100)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0


def test_resume_restores_and_goes_on_from_the_step_without_a_cut_zero() -> None:
    cluster = Cluster(job=make_job(), resume=FakeResume())
    cluster.start()
    assert len(cluster.kinds(Restore)) == 1
    assert len(cluster.kinds(Activate)) == 1
    assert cluster.saves == []
    orders = cluster.orders("worker/0")
    assert (orders.phase, orders.first_step, orders.checkpoint_step) == (Phase.RUNNING, 40, 40)
    assert not orders.init
    cluster.advance(100)
    assert cluster.finish is not None
    assert [save.step for save in cluster.saves] == [100]


def test_resume_of_a_finished_job_ends_when_everybody_is_there_to_hear_it() -> None:
    cluster = Cluster(job=make_job(steps=40), resume=FakeResume(step=40), evaluators=1)
    cluster.tick()
    for task in (("ps", 0), ("worker", 0), ("ps", 1), ("worker", 1)):
        cluster.join(*task)
        assert cluster.finish is None
    assert "waiting up to 180 s for 2 ps, 2 worker, 1 evaluator, to inform them" in cluster.text()
    cluster.join("evaluator", 0)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert cluster.kinds(Configure) == []


def test_resume_of_a_finished_job_to_which_nobody_comes_ends_well() -> None:
    cluster = Cluster(job=make_job(steps=40), resume=FakeResume(step=40))
    cluster.tick(JOIN + 2)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0


def test_resume_of_a_finished_job_is_not_waited_with_for_longer_than_the_time_to_join() -> None:
    cluster = Cluster(job=make_job(steps=40), resume=FakeResume(step=40))
    for number in (0, 1):
        cluster.join("ps", number)
    # What happens to tasks of a job that needs none of them is no failure.
    cluster.tick(JOIN - 1, silent=("ps/1",))
    assert cluster.finish is None
    cluster.tick(2)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert cluster.finish.reason.startswith("nothing to do: /out/checkpoints/step-00000040 already has all 40 steps")


def test_resume_from_a_foreign_checkpoint_ends_with_its_sentence() -> None:
    cluster = Cluster(job=make_job(), resume=FakeResume(refuses="of another job: seed is 1"))
    for number in (0, 1):
        cluster.join("ps", number)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 6
    assert "seed is 1" in cluster.finish.reason


# The end


def test_the_last_step_is_checkpointed_scored_and_then_everybody_goes() -> None:
    cluster = running()
    cluster.join("evaluator", 0)
    cluster.advance(100)
    assert [save.step for save in cluster.saves] == [0, 100]
    assert cluster.finish is None
    assert cluster.orders("evaluator/0").final_step == 100
    cluster.program.report("evaluator/0", cluster.lives["evaluator/0"], 100, {"accuracy": 0.9}, "", cluster.now_s)
    cluster.settle()
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert cluster.orders("worker/0").phase is Phase.ENDED


def test_an_evaluator_that_never_answers_is_waited_for_until_the_timeout() -> None:
    cluster = running()
    cluster.join("evaluator", 0)
    cluster.advance(100)
    cluster.tick(T - 5)
    assert cluster.finish is None
    cluster.tick(10)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert "evaluator/0 did not score the last checkpoint" in cluster.text()


def test_the_final_cut_is_asked_for_again_where_the_servers_left_it_out() -> None:
    cluster = running()
    for ps in cluster.ps:
        ps.advance(100)
        ps.cuts.clear()
    cluster.tick()
    assert cluster.finish is None
    cluster.tick(5)
    assert [save.step for save in cluster.saves] == [0, 100]
    assert cluster.finish is not None


def test_without_the_last_checkpoint_the_job_does_not_end_well() -> None:
    cluster = running()
    cluster.disk_full = True
    cluster.advance(100)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 6
    assert "No space left" in cluster.finish.reason


def test_stop_cuts_at_a_step_ahead_of_all_shards_and_ends_with_code_0() -> None:
    cluster = running()
    cluster.advance(10)
    # Not the job's last step, which is what the servers stop at so far.
    assert cluster.program.stop("SIGTERM", cluster.now_s) == 0
    cluster.settle()
    stop = cluster.orders("worker/0").stop_step
    assert 12 <= stop < 100
    assert cluster.program.state.phase is Phase.STOPPING
    cluster.advance(100)
    assert [save.step for save in cluster.saves] == [0, stop]
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert cluster.finish.reason.startswith("stopped")


def test_a_stop_step_that_has_gone_by_is_chosen_again_higher() -> None:
    cluster = running()
    cluster.ps[1].passes = 1
    cluster.program.stop("SIGTERM", cluster.now_s)
    cluster.settle()
    cuts = [cut for cut in cluster.kinds(Cut) if cut.stop and cut.step != 100]
    assert len(cuts) == 2
    assert cluster.orders("worker/0").stop_step == cuts[1].step


def test_a_stop_that_is_not_reached_in_time_keeps_the_last_checkpoint_and_says_so() -> None:
    cluster = running()
    cluster.program.stop("SIGTERM", cluster.now_s)
    cluster.settle()
    cluster.tick(T / 3 + 5)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 6
    assert "no checkpoint at the end" in cluster.finish.reason
    assert "/out/step-0" in cluster.text()


def test_stop_before_training_ends_at_once() -> None:
    cluster = Cluster(job=make_job())
    cluster.program.stop("SIGINT", cluster.now_s)
    cluster.settle()
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0


def test_a_nan_ends_the_job_with_a_checkpoint_where_all_shards_stand_and_its_code() -> None:
    cluster = running()
    cluster.advance(10)
    cluster.beat("worker/1", failure="loss of step 10 is nan", failure_code=5)
    cluster.tick()
    assert [save.step for save in cluster.saves] == [0, 10]
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 5
    assert "worker/1: loss of step 10 is nan" in cluster.finish.reason


def test_a_stop_is_not_moved_by_reports_older_than_the_workers_end() -> None:
    cluster = running()
    cluster.advance(10)
    cluster.program.stop("SIGTERM", cluster.now_s)
    cluster.settle()
    stop = cluster.orders("worker/0").stop_step
    for ps in cluster.ps:
        ps.advance(stop)
    # The workers are at the stop step and say so before any ps does.
    cluster.hold_commands = True
    for task in ("worker/0", "worker/1"):
        cluster.program.beat(Beat(task=task, incarnation=cluster.lives[task], finished=True), cluster.now_s)
        cluster.settle()
    cluster.release_commands()
    cluster.tick()
    assert [save.step for save in cluster.saves] == [0, stop]
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0


def test_a_failure_seen_with_old_reports_still_ends_where_the_shards_stand() -> None:
    cluster = running()
    cluster.advance(10)
    cluster.program.machine.handle(EndAsked("worker/1: it broke", 1), cluster.now_s)
    # The question was answered before the shards went on to step 12, the cut was asked for after.
    (question,) = [action for action in cluster.program.state.outbox.actions if hasattr(action, "order")]
    cluster.program.state.outbox.actions.clear()
    statuses = {ps.task: ps.status() for ps in cluster.ps}
    for ps in cluster.ps:
        ps.advance(12)
    cluster.program.done(question.number, CommandResult(values=statuses), cluster.now_s)
    cluster.settle()
    cluster.tick(1)
    assert [save.step for save in cluster.saves] == [0, 12]
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 1


def test_a_failure_while_shards_differ_is_bounded() -> None:
    cluster = running()
    cluster.ps[0].advance(11)
    cluster.ps[1].advance(10)
    cluster.beat("worker/1", failure="it broke", failure_code=1)
    cluster.tick(T / 10 + 3)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 1
    assert [save.step for save in cluster.saves] == [0]


def test_a_worker_that_has_said_why_it_goes_is_not_called_suspect_when_it_does() -> None:
    cluster = running()
    cluster.ps[0].advance(11)
    cluster.ps[1].advance(10)
    cluster.beat("worker/1", failure="it broke", failure_code=1)
    cluster.program.stream_broken("worker/1", cluster.lives["worker/1"], cluster.now_s)
    cluster.program.stream_broken("worker/0", cluster.lives["worker/0"], cluster.now_s)
    cluster.settle()
    assert "worker/1: it broke" in cluster.text()
    assert "worker/1 is suspect" not in cluster.text()
    assert "worker/0 is suspect" in cluster.text()


def test_a_leaving_worker_is_fenced_and_its_replicas_move() -> None:
    cluster = running()
    cluster.beat("worker/0", leaving=True)
    assert cluster.orders("worker/1").replicas == (0, 1, 2, 3)
    gone = cluster.orders("worker/0")
    assert gone.phase is Phase.ENDED
    assert not gone.fenced
    assert gone.exit_code == 0
    assert all("worker/0" not in ps.members for ps in cluster.ps)
    assert cluster.finish is None


@pytest.mark.parametrize("task", ["ps/0", "worker/0"])
def test_who_can_not_be_replaced_leaves_with_the_job_and_a_checkpoint(task: str) -> None:
    cluster = running()
    cluster.beat("worker/1", leaving=True)
    cluster.beat(task, leaving=True)
    assert cluster.program.state.phase is Phase.STOPPING
    cluster.advance(100)
    assert len(cluster.saves) == 2
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert f"{task} was asked to end" in cluster.finish.reason


def test_an_evaluator_that_leaves_while_the_job_stops_is_not_waited_for() -> None:
    cluster = running()
    cluster.join("evaluator")
    cluster.program.stop("SIGTERM", cluster.now_s)
    cluster.settle()
    cluster.beat("evaluator/0", leaving=True)
    cluster.advance(100)
    cluster.tick(0.2)
    assert cluster.finish is not None
    assert "evaluator/0 is dead" not in cluster.text()


def test_a_worker_that_dies_while_the_job_stops_is_replaced_by_the_others() -> None:
    cluster = running()
    cluster.program.stop("SIGTERM", cluster.now_s)
    cluster.settle()
    cluster.tick(T / 3 - 1, silent=("worker/1",))
    cluster.join("worker", 1)
    assert cluster.orders("worker/1").phase is Phase.STOPPING
    assert cluster.orders("worker/1").replicas == (2, 3)


# Invariants


def test_every_timeline_is_in_the_journal_before_a_ps_hears_of_it() -> None:
    cluster = running()
    log = cluster.log
    assert log.index("record timeline") < log.index("Configure")
    assert len(cluster.journal) - 1 - [r.kind for r in cluster.journal][::-1].index("timeline") > 0
    active = max(i for i, name in enumerate(log) if name == "record timeline")
    assert active < log.index("Activate")


def test_a_member_table_never_holds_a_fenced_life() -> None:
    cluster = running()
    for _ in range(3):
        old = cluster.lives["worker/0"]
        cluster.program.stream_broken("worker/0", old, cluster.now_s)
        cluster.settle()
        cluster.join("worker", 0)
        tables = cluster.kinds(Members)
        assert old not in tables[-1].members.values()
        assert cluster.lives["worker/0"] in tables[-1].members.values()


def test_who_joins_after_the_end_is_let_in_to_be_told_so() -> None:
    cluster = running()
    cluster.advance(100)
    assert cluster.finish is not None
    cluster.join("worker", 5)
    assert cluster.orders("worker/5").phase is Phase.ENDED


def test_a_join_is_described_by_role_where_it_has_no_index() -> None:
    assert Join(role="worker", index=None, stable_id="a", address="h:1").name == "worker"

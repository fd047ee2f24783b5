from __future__ import annotations

import math
from typing import Any

import pytest

from shardline.core.orders import Phase
from shardline.errors import FencedError, JobError, TaskLostError
from shardline_chief.rules.actions import Cut
from shardline_chief.rules.messages import Beat
from shardline_chief.rules.replay import replay
from tests.support.chief_cluster import JOIN, Cluster, FakeResume, T, make_job, phase, running
from tests.support.mortal_chief import Mortal

# Evaluation


def test_best_is_the_highest_unless_the_name_says_less_is_better() -> None:
    for metrics, bests in (
        ([{"accuracy": 0.5}, {"accuracy": 0.4}, {"accuracy": 0.6}], [1, 3]),
        ([{"loss": 0.5}, {"loss": 0.4}, {"loss": 0.6}], [1, 2]),
        ([{"loss": math.nan}, {"loss": 0.4}], [2]),
    ):
        cluster = running()
        cluster.join("evaluator", 0)
        for step, values in enumerate(metrics, start=1):
            cluster.program.state.saves.committed(step, "")
            cluster.program.report("evaluator/0", cluster.lives["evaluator/0"], step, values, "", cluster.now_s)
            cluster.settle()
        assert cluster.bests == bests


def test_a_job_ends_once_its_patience_with_the_scores_is_over() -> None:
    cluster = running(patience=2)
    cluster.join("evaluator", 0)
    scores = [0.5, 0.4, 0.6, 0.6, None, 0.1]
    for step, score in enumerate(scores, start=1):
        assert cluster.program.state.phase is Phase.RUNNING
        cluster.program.state.saves.committed(step, "")
        metrics = {} if score is None else {"accuracy": score}
        failure = "" if metrics else "out of memory"
        cluster.program.report("evaluator/0", cluster.lives["evaluator/0"], step, metrics, failure, cluster.now_s)
        cluster.settle()
    assert cluster.program.state.phase is Phase.STOPPING
    assert "stopped: the 2 scores since step 3 are no better than its own" in cluster.text()


def following(**settings: Any) -> Mortal:
    """A running job whose learning rate follows the scores of each tenth step, with an evaluator."""
    cluster = Mortal(job=make_job(follows_scores=True, checkpoint_every=10, best_metric="loss"), **settings)
    cluster.start()
    cluster.join("evaluator", 0)
    return cluster


def score(cluster: Cluster, step: int, metrics: dict[str, float]) -> None:
    cluster.program.state.saves.committed(step, "")
    failure = "" if metrics else "out of memory"
    cluster.program.report("evaluator/0", cluster.lives["evaluator/0"], step, metrics, failure, cluster.now_s)
    cluster.settle()


def test_orders_have_the_scores_that_a_learning_rate_follows_also_of_the_next_chief() -> None:
    cluster = following(evaluators=1)
    # Before the first step, between two checkpoints, and again after the job has gone back: these are for people.
    for step, loss in ((0, 9.0), (10, 0.5), (15, 0.4), (20, None), (30, 0.25), (30, 7.0), (20, 7.0)):
        score(cluster, step, {"accuracy": 0.1, "loss": loss} if loss is not None else {})
    expected = ((10, 0.5), (20, None), (30, 0.25))
    assert all(cluster.orders(task).scores == expected for task in ("worker/0", "worker/1"))
    remembered = cluster.next_chief()
    cluster.hear()
    assert cluster.program.state.figures.followed == dict(expected)
    assert [*remembered.scores_until(20)] == [0, 10, 15, 20]
    plain = running(checkpoint_every=10)
    plain.join("evaluator", 0)
    score(plain, 10, {"loss": 0.5})
    assert plain.orders("worker/0").scores == ()


def test_a_resumed_run_follows_the_scores_of_the_one_before() -> None:
    job = make_job(follows_scores=True, checkpoint_every=10)
    scores = {10: {"loss": 0.5}, 15: {"loss": 0.4}, 20: {}}
    cluster = Cluster(job=job, resume=FakeResume(), scores=scores, evaluators=1)
    assert cluster.program.state.figures.followed == {10: 0.5, 20: None}
    known = replay(
        [
            {"kind": "chief", "term": 1, "resume": None},
            *({"kind": "evaluation", "term": 1, "step": n, "metrics": [["loss", n]], "best": False} for n in (10, 20)),
            {"kind": "chief", "term": 2, "resume": 10},
        ]
    )
    assert (known.metrics, known.followed) == ({}, {10: {"loss": 10.0}})


def test_a_score_that_nobody_makes_is_given_up_and_the_job_goes_on() -> None:
    cluster = following(evaluators=1)
    score(cluster, 10, {"loss": 0.5})
    cluster.advance(30)
    # The evaluator is at work, for however long.
    cluster.program.state.saves.committed(20, "")
    for _ in range(3):
        cluster.tick(T)
    assert cluster.orders("worker/0").scores == ((10, 0.5),)
    del cluster.lives["evaluator/0"]
    for _ in range(4):
        cluster.tick(T / 2)
    assert cluster.orders("worker/0").scores == ((10, 0.5), (20, None))
    assert f"no evaluator scored step 20 within {T:g} s; the learning rate stays as it is" in cluster.text()


def test_a_learning_rate_that_follows_scores_needs_an_evaluator() -> None:
    cluster = Cluster(job=make_job(follows_scores=True, checkpoint_every=10))
    cluster.ask("ps", 0)
    cluster.ask("ps", 1)
    assert "follows the scores of an evaluator, and the cluster has none" in cluster.program.state.reason


def test_a_best_metric_that_evaluate_does_not_return_ends_the_job_at_the_first_score() -> None:
    cluster = running(best_metric="acuracy")
    cluster.join("evaluator", 0)
    cluster.program.state.saves.committed(1, "")
    scored = {"accuracy": 0.5, "loss": 0.1}
    cluster.program.report("evaluator/0", cluster.lives["evaluator/0"], 1, scored, "", cluster.now_s)
    cluster.settle()
    said = "best_metric is 'acuracy', but evaluate(model) returns accuracy, loss; did you mean 'accuracy'?"
    assert (cluster.program.state.phase, cluster.program.state.reason) == (Phase.STOPPING, said)
    for _ in range(100):
        cluster.tick(1.0)
    assert cluster.finish is not None and cluster.finish.exit_code == JobError.exit_code
    # Another score on the way changes nothing, nor does one of a job that has all its steps.
    cluster = running(best_metric="acuracy")
    cluster.join("evaluator", 0)
    cluster.advance(100)
    for worker in ("worker/0", "worker/1"):
        cluster.beat(worker, finished=True)
    cluster.program.state.saves.committed(100, "")
    cluster.program.report("evaluator/0", cluster.lives["evaluator/0"], 100, scored, "", cluster.now_s)
    cluster.settle()
    cluster.tick(1.0)
    assert f"{said}; no checkpoint is marked as the best" in cluster.text()
    assert cluster.finish is not None and cluster.finish.exit_code == 0


@pytest.mark.parametrize(("codec", "said"), [("int8", True), ("raw", False), ("", False)])
def test_a_codec_for_stages_in_a_job_without_any_is_said_to_change_nothing(codec: str, said: bool) -> None:
    assert ("codec_parcels is 'int8', which changes nothing" in running(codec_parcels=codec).text()) == said


def test_a_failing_evaluation_is_a_sentence_and_not_the_end() -> None:
    cluster = running()
    cluster.join("evaluator", 0)
    cluster.program.report(
        "evaluator/0", cluster.lives["evaluator/0"], 0, {}, "evaluate raised KeyError", cluster.now_s
    )
    cluster.settle()
    assert "evaluate raised KeyError" in cluster.text()
    assert cluster.finish is None


@pytest.mark.parametrize("task", ["evaluator/0", "worker/7", "nobody"])
def test_what_nobody_admitted_reports_changes_nothing(task: str) -> None:
    cluster = running()
    cluster.join("evaluator", 0)
    with pytest.raises(FencedError, match=f"{task} incarnation 0x5 is not admitted; its score of step 3 is ignored"):
        cluster.program.report(task, 5, 3, {"loss": 0.1}, "", cluster.now_s)
    cluster.settle()
    assert not cluster.bests and not cluster.program.state.figures.metrics


# Asynchronous


def lease_all(cluster: Cluster, task: str) -> list[int]:
    batches: list[int] = []
    done: tuple[int, ...] = ()
    while True:
        answer = cluster.program.lease(task, cluster.lives[task], done, cluster.now_s)
        cluster.settle()
        if answer.outcome != "SERVED":
            return batches
        batches.extend(range(answer.first, answer.first + answer.count))
        done = (answer.lease,)
        for ps in cluster.ps:
            ps.version += answer.count


def test_asynchronous_job_ends_when_all_leases_are_done_with_a_cut_of_that_version() -> None:
    cluster = Cluster(job=make_job(mode="async"), workers=1)
    cluster.start(workers=1)
    assert lease_all(cluster, "worker/0") == list(range(100))
    cluster.tick()
    assert [save.step for save in cluster.saves] == [0, 100]
    assert cluster.saves[-1].cursor["done"] == [[0, 100]]
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0


def test_asynchronous_cut_notes_its_leases_before_the_shards_copy_themselves() -> None:
    cluster = Cluster(job=make_job(mode="async", checkpoint_every=10), workers=1)
    cluster.start(workers=1)
    program = cluster.program
    first = program.lease("worker/0", cluster.lives["worker/0"], (), cluster.now_s)
    for ps in cluster.ps:
        ps.version = 16
    cluster.hold_commands = True
    cluster.tick()
    program.lease("worker/0", cluster.lives["worker/0"], (first.lease,), cluster.now_s)
    cluster.release_commands()
    assert cluster.saves[-1].step == 16
    assert cluster.saves[-1].cursor["done"] == []


def test_leases_of_a_dead_worker_are_handed_out_again_after_the_fence() -> None:
    cluster = Cluster(job=make_job(mode="async"))
    cluster.start()
    lost = cluster.program.lease("worker/1", cluster.lives["worker/1"], (), cluster.now_s)
    cluster.tick(T / 3 + 1, silent=("worker/1",))
    again = cluster.program.lease("worker/0", cluster.lives["worker/0"], (), cluster.now_s)
    assert again.first == lost.first
    fenced = cluster.program.lease("worker/1", cluster.lives["worker/1"], (), cluster.now_s)
    assert fenced.outcome == "FENCED"


def test_asynchronous_stop_waits_for_leases_out_then_cuts() -> None:
    cluster = Cluster(job=make_job(mode="async"), workers=1)
    cluster.start(workers=1)
    answer = cluster.program.lease("worker/0", cluster.lives["worker/0"], (), cluster.now_s)
    cluster.program.stop("SIGTERM", cluster.now_s)
    cluster.tick()
    assert cluster.finish is None
    for ps in cluster.ps:
        ps.version = answer.count
    last = cluster.program.lease("worker/0", cluster.lives["worker/0"], (answer.lease,), cluster.now_s)
    assert last.outcome == "STOPPED"
    cluster.tick()
    assert cluster.finish is not None
    assert cluster.saves[-1].cursor["done"] == [[0, answer.count]]


def test_asynchronous_stop_during_a_save_asks_for_one_last_cut_and_ends_with_it() -> None:
    cluster = Cluster(job=make_job(mode="async", checkpoint_every=10), workers=1)
    cluster.start(workers=1)
    answer = cluster.program.lease("worker/0", cluster.lives["worker/0"], (), cluster.now_s)
    cluster.hold_saves = True
    for ps in cluster.ps:
        ps.version = 10
    cluster.tick()
    assert [save.step for save in cluster.held_saves] == [10]
    for ps in cluster.ps:
        ps.version = 12
    cluster.program.stop("SIGTERM", cluster.now_s)
    # Past the time in which leases may be finished: the stop goes on while the worker does.
    cluster.tick(T / 6 + 1)
    for ps in cluster.ps:
        ps.version = answer.count
    cluster.tick()
    cluster.release_saves()
    cluster.tick(3)
    assert [save.step for save in cluster.saves] == [0, 10, answer.count]
    assert len([cut for cut in cluster.kinds(Cut) if cut.stop]) == 1
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0


def test_asynchronous_stop_with_nothing_new_since_the_last_checkpoint_ends_with_that_one() -> None:
    cluster = Cluster(job=make_job(mode="async", checkpoint_every=10), workers=1)
    cluster.start(workers=1)
    for ps in cluster.ps:
        ps.version = 10
    cluster.tick()
    cluster.program.stop("SIGTERM", cluster.now_s)
    cluster.tick(1)
    assert [save.step for save in cluster.saves] == [0, 10]
    assert [cut.step for cut in cluster.kinds(Cut) if cut.stop] == [10]
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0


# Scripts


def script(workers: int = 2, **changes: object) -> Cluster:
    cluster = Cluster(workers=workers)
    job = make_job(**{"script": True, "steps": 0, "replicas": 1 if "mode" in changes else 0, **changes})
    for number in (0, 1):
        cluster.join("ps", number)
    for number in range(workers):
        cluster.join("worker", number, job=job)
    cluster.initialize()
    return cluster


def test_a_script_has_one_replica_per_worker_and_needs_all_of_them() -> None:
    cluster = script()
    assert cluster.program.job_view().job.replicas == 2
    assert [cluster.orders(f"worker/{n}").replicas for n in (0, 1)] == [(0,), (1,)]


def test_a_script_waits_for_its_workers_and_then_names_the_missing() -> None:
    cluster = Cluster()
    for number in (0, 1):
        cluster.join("ps", number)
    cluster.join("worker", 0, job=make_job(script=True, steps=0))
    cluster.initialize()
    cluster.tick(JOIN + 1)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 3
    assert "worker/1 did not join within 180 s" in cluster.finish.reason


def test_a_script_ends_when_all_its_workers_have_finished() -> None:
    cluster = script()
    cluster.advance(37)
    cluster.beat("worker/0", finished=True)
    cluster.program.stream_broken("worker/0", cluster.lives["worker/0"], cluster.now_s)
    cluster.tick()
    assert cluster.finish is None
    cluster.beat("worker/1", finished=True)
    cluster.tick()
    assert [save.step for save in cluster.saves] == [0, 37]
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0


def test_only_those_that_train_finish_a_script() -> None:
    """Whoever has the job token may be an evaluator, and several of them."""
    cluster = script()
    for index in (0, 1):
        cluster.join("evaluator", index)
        cluster.beat(f"evaluator/{index}", finished=True)
    cluster.tick(T)
    assert cluster.program.state.tasks.finished == set()
    assert cluster.finish is None and phase(cluster) is Phase.RUNNING


def test_a_script_whose_workers_make_different_numbers_of_steps_fails_where_the_first_finished() -> None:
    cluster = script()
    # Reports of the last common step, still open: worker/1 was faster.
    for ps in cluster.ps:
        ps.waiting_for = (0,)
    cluster.advance(4)
    cluster.program.beat(
        Beat(task="worker/0", incarnation=cluster.lives["worker/0"], step=5, finished=True), cluster.now_s
    )
    cluster.program.tick(cluster.now_s)
    assert cluster.program.state.phase is Phase.RUNNING
    for ps in cluster.ps:
        ps.waiting_for = (0, 1)
    cluster.advance(5)
    cluster.program.beat(
        Beat(task="worker/0", incarnation=cluster.lives["worker/0"], step=5, finished=True), cluster.now_s
    )
    cluster.program.tick(cluster.now_s)
    assert cluster.program.state.phase is Phase.RUNNING, "worker/1 may be evaluating, however long"
    for ps in cluster.ps:
        ps.waiting_for = (0,)
    for ps in cluster.ps:
        cluster.beat(ps.task)
    cluster.program.tick(cluster.now_s)
    cluster.settle()
    cluster.tick()
    assert [save.step for save in cluster.saves] == [0, 5]
    assert cluster.finish is not None
    assert cluster.finish.exit_code == JobError.exit_code
    assert cluster.finish.reason.startswith("worker/0 ended after 5 steps, but worker/1 was to make 6 or more: ")
    assert [say.level for say in cluster.said if say.sentence == cluster.finish.reason] == ["error", "error"]


def test_a_script_whose_worker_is_gone_ends_with_its_name() -> None:
    cluster = script(workers=3)
    cluster.advance(5)
    cluster.tick(T / 2, silent=("worker/1",))
    assert cluster.finish is None
    cluster.tick(T, silent=("worker/1",))
    assert cluster.finish is not None
    assert cluster.finish.exit_code == TaskLostError.exit_code
    assert cluster.finish.reason.startswith(
        "worker/1, without which a script can't continue, is gone and no replacement joined within"
    )


def test_a_third_worker_that_is_busy_elsewhere_is_given_time_before_an_uneven_script_ends() -> None:
    cluster = script(workers=3)
    cluster.advance(5)
    for ps in cluster.ps:
        ps.waiting_for = (0, 2)
    cluster.lives.pop("worker/0")
    cluster.program.beat(
        Beat(
            task="worker/0",
            incarnation=cluster.program.state.tasks.members.get("worker/0").incarnation,
            finished=True,
            step=5,
        ),
        cluster.now_s,
    )
    cluster.tick(T / 2)
    assert cluster.program.state.phase is Phase.RUNNING
    cluster.tick(T)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == JobError.exit_code
    assert cluster.saves[-1].step == 5


def test_a_stop_while_a_script_worker_has_finished_ends_at_its_step() -> None:
    cluster = script()
    cluster.advance(37)
    cluster.beat("worker/0", finished=True, step=37)
    cluster.program.stop("SIGTERM", cluster.now_s)
    cluster.settle()
    cluster.tick()
    assert cluster.saves[-1].step == 37
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0


def test_an_asynchronous_script_trains_until_all_its_workers_have_finished() -> None:
    cluster = script(mode="async", checkpoint_every=100)
    cluster.tick(5)
    assert cluster.program.state.phase is Phase.RUNNING
    for version in (99, 130):
        for ps in cluster.ps:
            ps.version = version
        cluster.tick()
    assert [save.step for save in cluster.saves] == [0, 130]
    cluster.beat("worker/0", finished=True)
    cluster.tick()
    assert cluster.finish is None
    for ps in cluster.ps:
        ps.version = 180
    cluster.beat("worker/1", finished=True)
    cluster.tick()
    assert [save.step for save in cluster.saves] == [0, 130, 180]
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0


def test_an_asynchronous_script_is_stopped_where_its_shards_are() -> None:
    cluster = script(mode="async")
    for ps in cluster.ps:
        ps.version = 70
    cluster.program.stop("SIGTERM", cluster.now_s)
    cluster.tick()
    assert [cut.step for cut in cluster.kinds(Cut) if cut.stop] == [70]
    assert [save.step for save in cluster.saves] == [0, 70]
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0


def test_a_script_is_given_no_leases_and_told_why() -> None:
    cluster = script(mode="async")
    answer = cluster.program.lease("worker/0", cluster.lives["worker/0"], (), cluster.now_s)
    assert answer.outcome == "REFUSED"
    assert "script" in answer.reason


def test_a_dead_script_worker_can_come_back_and_is_waited_for() -> None:
    cluster = script()
    cluster.tick(T / 3 + 1, silent=("worker/1",))
    assert cluster.orders("worker/0").replicas == (0,)
    cluster.join("worker", 1, job=make_job(script=True, steps=0))
    assert cluster.orders("worker/1").replicas == (1,)
    cluster.tick(T + 10)
    assert cluster.finish is None


# Topology


@pytest.mark.parametrize(
    ("topology", "aggregators", "warning"),
    [
        ("flat", 0, ""),
        ("flat", 1, "no worker goes to the cluster's aggregators, since the topology is flat"),
        ("local-sum", 0, ""),
        ("local-sum", 2, "no worker goes to the cluster's aggregators, since the topology is local-sum"),
        ("aggregators", 0, "topology aggregators, but the cluster has no aggregator"),
        ("aggregators", 1, ""),
    ],
)
def test_aggregators_that_nobody_uses_or_that_are_not_there_are_told(
    topology: str, aggregators: int, warning: str
) -> None:
    cluster = Cluster(job=make_job(topology=topology), others={"aggregator": aggregators})
    cluster.start()
    found = [one.sentence for one in cluster.said if one.kind == "topology"]
    assert len(found) == bool(warning) and all(one.startswith(warning) for one in found), found

"""The last checkpoint of a job gets its score, or it is said why not; what a resumed job does otherwise is said too."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardline.checkpoint.compat import resume_notes
from shardline.cli.train import report
from shardline.core.spec import RuleSpec
from shardline.errors import CheckpointError
from shardline.observability.metrics import Metrics
from shardline_chief.io.reporter import Reporter
from shardline_chief.io.summary import summary
from shardline_chief.rules.state.checkpoints import Resume
from tests.support.chief_cluster import Cluster, FakeResume, T, make_job


def ended(cluster: Cluster) -> bool:
    return cluster.finish is not None


def unscored(cluster: Cluster) -> str:
    reporter = Reporter(Path("/out"), Metrics("chief", "chief/0"))
    return str(summary(cluster.program, reporter, sha256="", out=Path("/out"), now_s=cluster.now_s)["unscored"])


def short_job(evaluators: int = 1) -> Cluster:
    """A job whose last step is made."""
    cluster = Cluster(job=make_job(), evaluators=evaluators)
    cluster.start()
    cluster.advance(100)
    return cluster


def score(cluster: Cluster, metrics: dict[str, float], failure: str = "") -> None:
    life = cluster.lives["evaluator/0"]
    cluster.program.report("evaluator/0", life, 100, metrics, failure, cluster.now_s)
    cluster.settle()
    cluster.tick()


def test_an_evaluator_that_is_still_starting_when_the_job_is_done_is_waited_for() -> None:
    cluster = short_job()
    cluster.tick(T / 2)
    assert not ended(cluster)
    assert "waiting up to 60 s for evaluator/0 to join and to score the last checkpoint" in cluster.text()
    cluster.join("evaluator", 0)
    assert cluster.orders("evaluator/0").final_step == 100
    score(cluster, {"accuracy": 0.9})
    assert ended(cluster)
    assert unscored(cluster) == ""


def test_an_evaluator_that_never_comes_is_waited_for_within_bounds_and_named() -> None:
    cluster = short_job()
    cluster.tick(T + 4)
    assert ended(cluster)
    assert unscored(cluster) == "evaluator/0 did not join within 60 s of the last step"


def test_a_job_that_is_stopped_or_has_no_evaluator_waits_for_none() -> None:
    assert ended(short_job(evaluators=0))
    assert unscored(short_job(evaluators=0)) == ""
    cluster = Cluster(job=make_job(), evaluators=1)
    cluster.start()
    cluster.program.stop("SIGTERM", cluster.now_s)
    cluster.settle()
    cluster.advance(cluster.program.state.progress.stop_step)
    assert ended(cluster)
    assert unscored(cluster) == "evaluator/0 had not joined when the job was stopped"


def test_why_a_checkpoint_has_no_score_is_what_the_evaluator_said_of_it() -> None:
    cluster = short_job()
    cluster.join("evaluator", 0)
    score(cluster, {})
    assert ended(cluster)
    assert unscored(cluster) == "the job has no `evaluate`"
    cluster = short_job()
    cluster.join("evaluator", 0)
    score(cluster, {}, "evaluate(model) raised KeyError: 'x' (job.py, line 7)")
    assert unscored(cluster) == "evaluate(model) raised KeyError: 'x' (job.py, line 7)"


def test_an_evaluator_that_failed_is_not_waited_for_and_says_what_it_failed_of() -> None:
    cluster = Cluster(job=make_job(), evaluators=1)
    cluster.start()
    cluster.join("evaluator", 0)
    cluster.beat("evaluator/0", failure="evaluate(model) called sys.exit(3) (job.py, line 41)", failure_code=2)
    assert "evaluator/0: evaluate(model) called sys.exit(3) (job.py, line 41); training continues" in cluster.text()
    cluster.advance(100)
    assert ended(cluster)
    assert cluster.finish is not None and cluster.finish.exit_code == 0
    assert unscored(cluster) == "evaluate(model) called sys.exit(3) (job.py, line 41)"


def test_an_evaluator_that_is_too_slow_or_dead_is_named() -> None:
    cluster = short_job()
    cluster.join("evaluator", 0)
    cluster.tick(T + 4)
    assert unscored(cluster) == "evaluator/0 did not score it within 60 s"
    cluster = Cluster(job=make_job(), evaluators=1)
    cluster.start()
    cluster.join("evaluator", 0)
    cluster.tick(T / 3 + 3, silent=("evaluator/0",))
    cluster.advance(100)
    assert ended(cluster)
    assert unscored(cluster) == "evaluator/0 was dead"


def test_the_end_of_a_run_says_which_step_has_no_score_and_why(tmp_path: Path) -> None:
    why = "evaluator/0 did not join within 60 s of the last step"
    assert report(tmp_path, {"unscored": why}, None) == [f"evaluation: no checkpoint was scored: {why}"]
    earlier = {"last": {"step": 40, "metrics": {"accuracy": 0.5}}}
    assert report(tmp_path, {"evaluation": earlier, "checkpoint_step": 50, "unscored": why}, None) == [
        "evaluation at step 40: accuracy 0.5000",
        f"evaluation: step 50 was not scored: {why}",
    ]


# Resuming with other settings


LR = "rule.groups[0].lr: 0.5 in the job, 0.1 in the checkpoint"


def test_a_resumed_job_says_what_it_does_differently_and_trains_on() -> None:
    cluster = Cluster(job=make_job(), resume=FakeResume(notes=(LR,)))
    cluster.start()
    (said,) = [say for say in cluster.said if say.kind == "resume"]
    assert said.level == "warning"
    assert said.sentence == f"resuming from step 40 with settings that differ from the checkpoint's: {LR}"
    assert cluster.finish is None


def test_a_resumed_job_that_is_the_same_says_nothing() -> None:
    cluster = Cluster(job=make_job(), resume=FakeResume())
    cluster.start()
    assert not [say for say in cluster.said if say.kind == "resume"]


def test_other_arguments_of_the_rule_are_told_and_more_steps_go_without_saying() -> None:
    stored = make_job()
    changed = dataclasses.replace(stored.rule, groups=({"lr": 0.5},))
    checkpoint = SimpleNamespace(job=stored, compatible=lambda job: resume_notes(stored, job, "/out/step-40"))
    point = Resume(checkpoint)  # type: ignore[arg-type]
    assert point.check(make_job(rule=changed)) == [LR]
    assert point.check(make_job(steps=300, checkpoint_every=7, checkpoint_keep=1, name="n")) == []
    with pytest.raises(CheckpointError, match="the update rule is Adam in the job, SGD in the checkpoint"):
        point.check(make_job(rule=dataclasses.replace(stored.rule, name="Adam")))


def test_arguments_under_which_the_rule_keeps_another_state_are_refused_and_named() -> None:
    stored = make_job(rule=RuleSpec(name="Adam", groups=({"lr": 0.1, "amsgrad": True},)))
    plain = make_job(rule=RuleSpec(name="Adam", groups=({"lr": 0.5, "amsgrad": False},)))
    says = "the state of the update rule is step, exp_avg, exp_avg_sq in the job, step, exp_avg, exp_avg_sq, max"
    with pytest.raises(CheckpointError, match=says):
        resume_notes(stored, plain, "/out/step-40")
    # Momentum may begin, and end, at any step.
    for before, after in ((0.0, 0.9), (0.9, 0.0)):
        rules = [RuleSpec(name="SGD", groups=({"lr": 0.1, "momentum": value},)) for value in (before, after)]
        notes = resume_notes(make_job(rule=rules[0]), make_job(rule=rules[1]), "/out/step-40")
        assert notes == [f"rule.groups[0].momentum: {after} in the job, {before} in the checkpoint"]


@pytest.mark.parametrize("phase", ["waiting", "training"])
def test_a_resumed_job_that_fails_before_its_next_checkpoint_names_the_one_it_came_from(phase: str) -> None:
    cluster = Cluster(job=make_job(), resume=FakeResume())
    if phase == "training":
        cluster.start()
    advice = cluster.program.state.saves.how_to_go_on()
    assert advice == "Continue with --resume from step 40: /out/checkpoints/step-00000040"

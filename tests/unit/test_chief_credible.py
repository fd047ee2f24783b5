"""What a worker or an evaluator says that can't be: refused, or without effect on the run, its logs and its summary."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from shardline.core.orders import BarrierPlace, PassReport, StepReport
from shardline.core.status import ShardStatus, Traffic
from shardline.errors import ProtocolError
from shardline.observability.metrics import Metrics
from shardline_chief.io.reporter import Reporter
from shardline_chief.io.summary import overview, summary
from shardline_chief.page.steps import LINES_EACH, OPEN_STEPS
from shardline_chief.rules.credible import MOST, SCORE_NAMES, SCORES_EACH
from tests.support.chief_cluster import Cluster, running

NAN, INF = math.nan, math.inf


def report(step: int, replica: int = 0, **fields: Any) -> StepReport:
    return StepReport(**{"step": step, "replica": replica, "loss": 1.0, "samples": 8, **fields})


def a_pass(step: int, version: int = 0) -> PassReport:
    return PassReport(
        step=step, replica=0, stage=0, microbatch=0, back=False, start_s=0.0, end_s=1.0, version=version, held=1
    )


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "a figure that is no number": ({"figures": {"lost_updates": NAN}}, "figure 'lost_updates' is nan"),
    "an infinite figure": ({"figures": {"lost_updates": INF}}, "is inf"),
    "a negative figure": ({"figures": {"lost_updates": -1.0}}, "is -1.0"),
    "a figure beyond all counting": ({"figures": {"lost_updates": 1e300}}, r"is 1e\+300"),
    "a far step": ({"step": 1 << 63}, "step is 9223372036854775808"),
    "an exit code of 0 to a shell": ({"failure": "x", "failure_code": 256}, "failure_code is 256"),
    "far traffic": ({"traffic": Traffic(push_raw_bytes=1 << 63)}, "traffic: push_raw_bytes"),
    "a far barrier": ({"barrier": BarrierPlace(1 << 60, True, 0)}, "barrier: step"),
    "a long broadcast": ({"barrier": BarrierPlace(1, True, 0, "x" * 70_000)}, "barrier: value has 70000 characters"),
    "a server that there is not": ({"suspects": ("ps/7",)}, "'ps/7', which is no parameter server"),
    "a report of a far step": ({"steps": (report((1 << 63) + 5),)}, "step 9223372036854775813"),
    "a report of a replica that there is not": ({"steps": (report(1, 4),)}, "replica 4; this job has 4"),
    "a report of more samples than there are": ({"steps": (report(1, samples=1 << 40),)}, "1099511627776 samples"),
    "a report of a far staleness": ({"steps": (report(1, staleness=1 << 60),)}, "staleness 1152921504606846976"),
    "a far pass": ({"passes": (a_pass(1 << 60),)}, "a pass of step 1152921504606846976"),
    "a pass of a far version": ({"passes": (a_pass(1, 1 << 60),)}, "version 1152921504606846976"),
    "a clock that shows nothing": ({"clock_s": NAN}, "clock_s is nan"),
}


@pytest.mark.parametrize(("fields", "words"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_heartbeat_that_can_not_be_is_refused_by_name_and_changes_nothing(fields: dict[str, Any], words: str) -> None:
    cluster = running()
    member, figures = cluster.program.state.tasks.members.get("worker/0"), cluster.program.state.figures
    cluster.now_s += 1.0
    for _ in range(2):
        with pytest.raises(ProtocolError, match=rf"heartbeat of worker/0: .*{words}"):
            cluster.beat("worker/0", **fields)
    cluster.settle()
    assert cluster.program.state.tasks.members.get("worker/0") == member
    assert not figures.lives and cluster.finish is None
    assert [say.kind for say in cluster.said].count("refused") == 1


def test_a_loss_that_is_not_finite_is_what_an_honest_worker_may_have() -> None:
    cluster = running()
    assert cluster.beat("worker/0", steps=(report(1, loss=NAN), report(2, loss=-INF)))


def test_bytes_of_months_at_ten_gigabytes_a_second_are_what_an_honest_task_may_have_moved() -> None:
    assert running().beat("worker/0", traffic=Traffic(push_raw_bytes=90 * 86400 * 10**10))


# Scores


def scored(cluster: Cluster, step: int, metrics: dict[str, float], failure: str = "") -> bool:
    life = cluster.lives["evaluator/0"]
    found = cluster.program.report("evaluator/0", life, step, metrics, failure, cluster.now_s)
    cluster.settle()
    return found


def with_evaluator() -> Cluster:
    """A job with a checkpoint of step 0."""
    cluster = running(checkpoint_every=10)
    cluster.join("evaluator", 0)
    assert cluster.program.state.saves.checkpoint_step == 0
    return cluster


@pytest.mark.parametrize("step", [1, 10, (1 << 63) + 5])
def test_a_score_of_a_step_that_has_no_checkpoint_is_refused(step: int) -> None:
    cluster = with_evaluator()
    with pytest.raises(ProtocolError, match=f"score of step {step} by evaluator/0: there is no checkpoint"):
        scored(cluster, step, {"loss": 0.0})
    assert cluster.program.state.figures.best is None and not cluster.bests


def test_scores_of_older_checkpoints_count_and_only_finite_ones_are_the_best() -> None:
    cluster = with_evaluator()
    cluster.program.state.saves.committed(10, "/out/step-10")
    assert not scored(cluster, 10, {"accuracy": INF})
    assert scored(cluster, 0, {"accuracy": 0.5})
    assert cluster.bests == [0]


def test_a_score_that_took_as_long_as_many_checkpoints_counts() -> None:
    cluster = with_evaluator()
    for step in range(1, 1000):
        cluster.program.state.saves.committed(step, f"/out/step-{step}")
    assert scored(cluster, 0, {"accuracy": 0.5})
    assert cluster.bests == [0]


def test_scores_have_a_budget_by_checkpoint_by_length_and_by_names() -> None:
    cluster = with_evaluator()
    with pytest.raises(ProtocolError, match="the names of its metrics have 102400 characters"):
        scored(cluster, 0, {f"{number:0>1024}": 0.0 for number in range(100)})
    for number in range(SCORES_EACH):
        scored(cluster, 0, {f"{number}.{part}": 0.0 for part in range(SCORE_NAMES // SCORES_EACH)})
    with pytest.raises(ProtocolError, match="16 scores were taken of this run's 1 checkpoints, 16 for each"):
        scored(cluster, 0, {"0.0": 0.0})
    cluster.program.state.saves.committed(10, "/out/step-10")
    with pytest.raises(ProtocolError, match="with it this run has 1025 different names of metrics"):
        scored(cluster, 10, {"another": 0.0})
    # Events are in each status: they name the first metrics only.
    assert max(len(say.sentence) for say in cluster.said if say.kind == "evaluation") < 400


# Logs


def logged(folder: Path) -> list[dict[str, Any]]:
    path = folder / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_steps_far_ahead_wait_for_the_servers_and_stop_no_log(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
    reporter.begin(replicas=2, joined=True, timeline=5, first_step=0)
    reporter.report("worker/0", [report(MOST, 0), report(MOST - 1, 0), report(5000, 0), report(5000, 1)], 0)
    for step in range(400):
        reporter.report("worker/0", [report(step, 0)], step)
        reporter.report("worker/1", [report(step, 1)], step)
    assert [(line["step"], line["replicas"]) for line in logged(tmp_path)] == [(step, 2) for step in range(400)]
    # Servers tell less often than workers: these were true.
    reporter.report("ps/0", [], 5000)
    reporter.close()
    assert logged(tmp_path)[-1]["step"] == 5000
    assert [
        event for event in reporter.said if "worker/0: 2 reports of steps that no server had reached" in event.sentence
    ]


def test_a_worker_that_counts_its_own_steps_logs_about_as_many_as_servers_took(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
    reporter.begin(replicas=1, joined=False, timeline=5, first_step=0)
    for _ in range(5):
        reporter.report("worker/0", [report(number % 2, staleness=number) for number in range(3000)], 10)
    reporter.report("worker/1", [report(8)], 10)
    reporter.report("worker/1", [report(11 + OPEN_STEPS)], 10)
    reporter.close()
    tasks = [line["task"] for line in logged(tmp_path)]
    assert (tasks.count("worker/0"), tasks.count("worker/1")) == (LINES_EACH + 2 * 10, 1)
    # Each value is a line of the summary.
    assert len(reporter.paces["worker/0"].whole()["staleness"]) == 1024


def test_steps_of_a_worker_that_counts_its_own_are_logged_after_its_shards_went_back(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
    reporter.begin(replicas=1, joined=False, timeline=5, first_step=0)
    reporter.report("worker/0", [report(step) for step in range(500)], 500)
    reporter.begin(replicas=1, joined=False, timeline=6, first_step=100)
    reporter.report("worker/0", [report(step) for step in range(500, 520)], 120)
    assert [line["step"] for line in logged(tmp_path)] == list(range(520))


def test_a_push_that_is_skipped_is_a_step_of_its_worker() -> None:
    program = running(mode="async").program
    state, heartbeats = program.state, program.heartbeats
    state.work.leases = None  # as in a script, where workers choose their batches
    state.progress.shards = {0: ShardStatus(shard=0, step_max=10, version=10, pushes=10, skipped_steps=300)}
    assert heartbeats.reached == 310


def test_a_sink_that_fails_costs_what_it_shows_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))

    def broken(*args: Any) -> None:
        raise ValueError("step 2**63 does not fit")

    monkeypatch.setattr(reporter.history, "add", broken)
    reporter.begin(replicas=1, joined=True, timeline=5, first_step=0)
    for step in range(3):
        reporter.report("worker/0", [report(step)], 3)
        reporter.evaluation(step, {"accuracy": 0.5})
        reporter.rates(step, {}, float(step))
    reporter.close()
    assert len([record for record in caplog.records if "failed; the run continues without it" in record.message]) == 3


def test_the_summary_is_right_after_all_that_was_refused(tmp_path: Path) -> None:
    cluster = running(checkpoint_every=10)
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
    for fields, _ in IMPOSSIBLE.values():
        with pytest.raises(ProtocolError):
            cluster.beat("worker/0", **fields)
    cluster.beat("worker/0", figures={"lost_updates": 3.0})
    cluster.advance(100)
    assert cluster.finish is not None and cluster.finish.exit_code == 0
    found = summary(cluster.program, reporter, sha256="", out=tmp_path, now_s=cluster.now_s)
    json.dumps(found, allow_nan=False)
    assert (found["steps"], found["lost_updates"], found["exit_code"]) == (100, 3, 0)
    assert dataclasses.asdict(overview(cluster.program, reporter, tmp_path, cluster.now_s))["exit_code"] == 0

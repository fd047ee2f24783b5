"""What fails while a job goes on is said where people look: in the launcher, in status, on the page."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardline.cli.process_exits import Ended, lacking
from shardline.cli.status_frame import Frame
from shardline.cli.train import AGAIN_S, Polled, StatusWarnings
from shardline.core.status import ChiefStatus, EventStatus, TaskStatus
from shardline.observability.metrics import Metrics
from shardline.observability.view import as_json, cluster_view
from shardline.rpc.messages.status import chief_status_from_proto, chief_status_to_proto
from shardline_chief.io.reporter import Reporter
from shardline_chief.io.summary import overview
from shardline_chief.rules.actions import Cut
from tests.support.chief_cluster import Cluster, running
from tests.support.launched import Launched, Watch

FAULT = "no checkpoint at step 40: No space left on device; the last good checkpoint is of step 10: /out/step-10"
STATUS = ChiefStatus(job="digits", phase="running", step=45, steps=100, faults=(FAULT,))


# The chief


def fail_to_save(cluster: Cluster, step: int) -> None:
    for ps in cluster.ps:
        ps.obey(Cut(timeline=ps.timeline, step=step))
    cluster.disk_full = True
    cluster.advance(step)


def test_a_failed_checkpoint_is_a_fault_with_its_reason_and_the_last_good_one_until_one_succeeds() -> None:
    cluster = running()
    faults = cluster.program.state.figures.faults
    assert faults == {}
    fail_to_save(cluster, 10)
    last = "the last good checkpoint is of step 0: /out/step-0"
    assert faults["checkpoint"] == f"no checkpoint at step 10: No space left on device; {last}"
    fail_to_save(cluster, 20)
    assert faults["checkpoint"].startswith("no checkpoint at step 20 (2 in a row failed): No space left on device; ")
    cluster.disk_full = False
    cluster.advance(100)
    assert faults == {}


def test_a_job_without_its_last_checkpoint_ends_with_the_newest_one_named() -> None:
    cluster = running()
    for step in (10, 20):
        for ps in cluster.ps:
            ps.obey(Cut(timeline=ps.timeline, step=step))
        cluster.advance(step)
    cluster.disk_full = True
    cluster.advance(100)
    assert cluster.finish is not None
    assert "No space left on device" in cluster.finish.reason
    assert cluster.finish.reason.endswith("Continue with --resume from step 20: /out/step-20")


def test_a_checkpoint_of_no_step_is_nothing_to_go_on_from() -> None:
    cluster = running()
    saves = cluster.program.state.saves
    assert saves.newest() == (0, "/out/step-0")
    assert saves.how_to_go_on() == "No checkpoint after step 0 exists yet; start the job again."


def test_logs_that_can_not_be_written_are_a_fault_as_long_as_that_lasts(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way of the folder")
    reporter = Reporter(tmp_path / "logs", Metrics("chief", "chief/0"))
    reporter.event("joined", "worker/0 joined", "info", {})
    said = f"logs under {tmp_path / 'logs'} can't be written (File exists); training continues without them"
    program = running().program
    assert overview(program, reporter, tmp_path, 0.0).faults == (said,)
    assert [event.sentence for event in reporter.said if event.level == "error"] == [said]
    (tmp_path / "logs").unlink()
    reporter.event("joined", "worker/1 joined", "info", {})
    assert overview(program, reporter, tmp_path, 0.0).faults == ()
    reporter.close()


# Where people look


def test_faults_survive_the_wire_and_stand_in_status_and_the_pages_view() -> None:
    assert chief_status_from_proto(chief_status_to_proto(STATUS)).faults == (FAULT,)
    view = cluster_view(STATUS)
    assert as_json(view)["faults"] == [FAULT]
    console = Console(file=io.StringIO(), width=200)
    console.print(Frame(view=view))
    assert FAULT in console.file.getvalue()  # type: ignore[attr-defined]


def said(*events: tuple[float, str, str], reason: str = "") -> ChiefStatus:
    found = tuple(EventStatus(time=time, level=level, sentence=sentence) for time, level, sentence in events)
    return dataclasses.replace(STATUS, said=found, reason=reason)


def test_news_are_warnings_and_errors_once_and_the_same_with_other_numbers_once_a_minute() -> None:
    news = StatusWarnings()
    first = [(1.0, "info", "worker/0 joined"), (2.0, "error", "no checkpoint at step 10: full")]
    assert news.of(said(*first), 0.0) == ["no checkpoint at step 10: full"]
    assert news.of(said(*first), 1.0) == []
    again = [*first, (3.0, "error", "no checkpoint at step 20: full"), (4.0, "warning", "ps/0 is suspect")]
    assert news.of(said(*again), 2.0) == ["ps/0 is suspect"]
    later = [(5.0, "error", "no checkpoint at step 900: full")]
    assert news.of(said(*later), AGAIN_S + 1.0) == ["no checkpoint at step 900: full"]
    # The command itself ends with it.
    assert news.of(said((6.0, "error", "the disk is full"), reason="the disk is full"), AGAIN_S + 2.0) == []


# The launcher: who is gone


@pytest.mark.parametrize(
    ("gone", "begun", "settings", "phrase"),
    [
        ({"worker/0": 2}, False, {}, ""),
        ({"worker/0": 2}, True, {}, ""),
        ({"worker/0": 2, "worker/1": -9}, True, {}, "no task is left to train"),
        ({"worker/0": 0, "worker/1": 0}, True, {}, "no task is left to train"),
        ({"worker/0": 2, "worker/1": 2}, True, {"chief_trains": True}, ""),
        ({"ps/1": 2}, False, {}, "the job can't start without it"),
        ({"ps/1": 2}, True, {}, ""),
        ({"evaluator/0": 2}, False, {}, ""),
        ({"worker/1": 2}, False, {"min_workers": 2}, "1 of at least 2 tasks that train are left"),
        ({"worker/1": 2}, True, {"script": True}, "a script needs all its workers"),
        ({"worker/1": 0}, True, {"script": True}, ""),
    ],
)
def test_the_job_can_not_go_on_where_those_that_it_needs_are_gone_for_good(
    gone: dict[str, int], begun: bool, settings: dict[str, Any], phrase: str
) -> None:
    tasks = ("chief/0", "ps/0", "ps/1", "worker/0", "worker/1", "evaluator/0")
    fields = {"chief_trains": False, "min_workers": 1, "script": False, **settings}
    assert lacking(tasks, gone, begun=begun, **fields) == phrase


def failure(capsys: pytest.CaptureFixture[str]) -> str:
    """Why the run failed, as its user reads it; empty if it did not."""
    return capsys.readouterr().err.partition("\n")[0].removeprefix("shardline: ")


def polled(phase: str, **states: str) -> Polled:
    tasks = tuple(TaskStatus(task=name.replace("_", "/"), state=state) for name, state in states.items())
    return Polled(ChiefStatus(phase=phase, step=7, tasks=tasks))


DONE = Ended("chief/0", 0, False, "done")
QUIET = Ended("worker/0", 0, False, "its work is done")


def test_a_task_that_ends_with_0_while_the_job_runs_is_said(tmp_path: Path, watch: Watch) -> None:
    seen = [polled("running", worker_0="alive"), QUIET]
    code, lines = watch(Launched(tmp_path, *seen, *[polled("running", worker_0="suspect")] * 3, DONE))
    assert code == 0
    (line,) = lines
    assert line.startswith("worker/0 ended with exit code 0 although the job has not ended (step 7)")


@pytest.mark.parametrize(
    "after",
    [[polled("running", worker_0="left")] * 3, [polled("stopping", worker_0="alive")] * 3, [], [polled("ended")]],
)
def test_a_task_that_was_asked_to_go_or_goes_with_the_job_is_not_said(
    tmp_path: Path, watch: Watch, after: list[Polled]
) -> None:
    _, lines = watch(Launched(tmp_path, polled("running", worker_0="alive"), QUIET, *after, DONE))
    assert lines == []


def test_with_nobody_left_the_chief_is_asked_at_once_to_end_with_a_checkpoint(
    tmp_path: Path, watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = Ended("worker/0", -9, False, "worker/0 was killed by SIGKILL: it was already restarted 3 times")
    running = polled("running", worker_0="dead")
    cluster = Launched(tmp_path, running, killed, running, running, running, DONE, why="no task is left to train")
    code, lines = watch(cluster)
    # The chief ended as it was asked to; the run failed as the last worker did.
    assert (code, cluster.interrupted) == (128 + 9, 1)
    assert lines[-1] == "no task is left to train: ending with a checkpoint"
    assert failure(capsys) == "worker/0: worker/0 has had enough; no task is left to train"


def test_a_server_that_is_gone_before_training_began_ends_the_run_at_once(
    tmp_path: Path, watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Ended("ps/1", 2, False, "ps/1 ended with exit code 2")
    waiting = polled("waiting", ps_0="alive")
    why = "the job can't start without it"
    cluster = Launched(tmp_path, waiting, refused, waiting, waiting, why=why)
    assert watch(cluster)[0] == 2
    assert failure(capsys) == f"ps/1: ps/1 has had enough; {why}"
    assert cluster.interrupted == 0, "the chief has nothing to save"


def test_a_job_that_goes_on_without_the_one_that_is_gone_is_left_alone(
    tmp_path: Path, watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Ended("ps/1", 2, False, "ps/1 ended with exit code 2")
    cluster = Launched(tmp_path, polled("init"), refused, polled("running"), DONE, why="the job can't start without it")
    plain, cluster.lacking = cluster.lacking, lambda *, begun: "" if begun else cluster.why  # type: ignore[method-assign]
    assert plain(begun=True)
    assert watch(cluster)[0] == 0
    assert (failure(capsys), cluster.interrupted) == ("", 0)


@pytest.mark.parametrize("told", [False, True])
def test_the_last_words_are_the_chiefs_own_where_its_log_could_not_take_them(
    tmp_path: Path, watch: Watch, capsys: pytest.CaptureFixture[str], told: bool
) -> None:
    reason = "no checkpoint at the end: the disk is full"
    last = Polled(ChiefStatus(phase="ended", exit_code=6, reason=reason)) if told else polled("running")
    assert watch(Launched(tmp_path, last, Ended("chief/0", 6, False, "the job ends with it")))[0] == 6
    assert failure(capsys) == (reason if told else "chief/0 has had enough")


@pytest.mark.parametrize("step", [-1, 0, 20])
def test_a_run_that_can_not_go_on_names_a_checkpoint_only_where_it_holds_a_step(
    tmp_path: Path, watch: Watch, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"checkpoint_step": step}))
    running = polled("running", worker_0="alive")
    cluster = Launched(tmp_path, running, QUIET, running, running, DONE, why="no task is left to train")
    assert watch(cluster)[0] == 4
    assert failure(capsys).endswith(
        "no task is left to train" + (". Continue with --resume from step 20" if step == 20 else "")
    )


def test_address_of_the_page_is_said_once_and_again_when_a_new_chief_has_another(tmp_path: Path, watch: Watch) -> None:
    pages = [Polled(ChiefStatus(phase="running", page=f"http://127.0.0.1:{port}/")) for port in (1, 1, 2, 2)]
    code, lines = watch(Launched(tmp_path, *pages, DONE))
    assert (code, lines) == (0, ["page: http://127.0.0.1:1/", "page: http://127.0.0.1:2/"])

"""The page of a run without its chief: what its files tell, beside what the chief told."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shardline.cli.main import main
from shardline.core.orders import PassReport, StepReport
from shardline.core.status import ChiefStatus
from shardline.errors import UsageError
from shardline.observability.metrics import Metrics
from shardline.observability.view import ClusterView, cluster_view
from shardline_chief.io.reporter import Reporter
from shardline_chief.io.summary import overview, summary, write_json
from shardline_chief.page.history import History
from shardline_chief.page.viewer import SILENT_S, RunFiles
from shardline_pipeline.timeline import TaskPass, passes_in, trace
from shardline_pipeline.timeline.board import PassBoard
from tests.support.chief_cluster import T
from tests.support.mortal_chief import Mortal, cut, mortal

PATIENCE_S = 60.0


class Run:
    """A cluster without a network whose chief writes the files of a run."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.cluster: Mortal = mortal(replicas=2, checkpoint_every=10)
        self.history = History()
        self.open()
        self._began = time.time() - 1000.0
        self._noted = self._said = self._steps = 0
        self.write()

    def open(self) -> None:
        self.reporter = Reporter(self.out / "logs", Metrics("chief", "chief/0"), self.history)
        self.reporter.begin(replicas=2, joined=True, timeline=1, first_step=0)

    def write(self) -> None:
        """Write what is new to the journal and the logs."""
        folder = self.out / "chief"
        folder.mkdir(exist_ok=True, parents=True)
        with (folder / "journal-3.jsonl").open("a") as file:
            for entry in self.cluster.entries[self._noted :]:
                if entry["kind"] == "ended":
                    now_s = self.cluster.now_s
                    entry["summary"] = summary(
                        self.cluster.program, self.reporter, sha256="", out=self.out, now_s=now_s
                    )
                file.write(json.dumps({**entry, "time": entry["time"] + self._began}) + "\n")
        self._noted = len(self.cluster.entries)
        for said in self.cluster.said[self._said :]:
            self.reporter.event(said.kind, said.sentence, said.level, said.fields)
        self._said = len(self.cluster.said)
        reached = self.cluster.program.state.progress.step
        for step in range(self._steps, reached):
            for replica in (0, 1):
                told = StepReport(step=step, replica=replica, samples=8, loss=9.0 - step / 20, staleness=1)
                self.reporter.report(f"worker/{replica}", [told])
        self._steps = reached
        # A line every two seconds.
        self.reporter.rates(reached, {"ps/0": (100 * reached, 200 * reached)}, 2.0 * reached)

    def train(self, step: int) -> None:
        """Train to a step, and write a checkpoint of it."""
        cut(self.cluster, step)
        folder = self.out / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text("{}")
        self.write()

    def end(self) -> None:
        """Train the last step, and end."""
        self.train(100)
        for worker in ("worker/0", "worker/1"):
            self.cluster.beat(worker, finished=True)
        self.cluster.tick(1.0)
        assert self.cluster.finish is not None
        self.write()
        self.reporter.close()

    def told(self) -> ClusterView:
        """The page of the chief."""
        return cluster_view(overview(self.cluster.program, self.reporter, self.out, self.cluster.now_s))


def read(out: Path, now: float | None = None) -> ClusterView:
    """The page of the files."""
    found = RunFiles(out, History(), PassBoard())
    return cluster_view(found.status(time.time() if now is None else now), found.written())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "runs" / "one")


def test_the_page_of_a_finished_run_is_the_last_one_of_its_chief(run: Run) -> None:
    run.train(40)
    run.end()
    told, found = run.told(), read(run.out)
    same = ("job", "mode", "rule", "codecs", "replicas", "phase", "doing", "reason", "exit_code", "step", "steps")
    same += ("first_step", "progress", "seconds", "left_s", "steps_per_s", "loss", "staleness", "best", "evaluation")
    for name in same:
        assert getattr(found, name) == pytest.approx(getattr(told, name)), name
    assert (found.phase, found.step, found.steps_per_s > 0) == ("ended", 100, True)
    assert [(task.name, task.shards, task.incarnation) for task in found.tasks] == [
        (task.name, task.shards, task.incarnation) for task in told.tasks
    ]
    assert [(shard.shard, shard.ps, shard.bytes, shard.version) for shard in found.shards] == [
        (shard.shard, shard.ps, shard.bytes, shard.version) for shard in told.shards
    ]
    assert [event.sentence for event in found.events] == [event.sentence for event in told.events]
    assert [point.step for point in found.checkpoints] == [100, 40]
    assert told.written is None
    assert found.written == pytest.approx(time.time(), abs=PATIENCE_S)


def test_curves_go_on_while_the_files_grow(run: Run) -> None:
    run.train(10)
    history = History()
    files = RunFiles(run.out, history, PassBoard())
    assert cluster_view(files.status(time.time())).phase == "running"
    assert files.status(time.time()).step == 10
    run.train(20)
    assert files.status(time.time()).step == 20
    run.end()
    status = files.status(time.time() + 3600.0)
    assert (status.phase, status.step, status.reason) == ("ended", 100, "done")

    def points(of: History) -> dict[str, list[list[float]]]:
        return {name: curve["points"] for name, curve in of.since()["curves"].items()}

    assert points(history)["loss"] == points(run.history)["loss"]


def test_a_task_that_was_lost_is_dead_and_one_that_took_its_place_is_alive(run: Run) -> None:
    run.train(10)
    run.cluster.tick(T / 3 + 3.0, silent=("worker/1",))
    run.write()
    states = {task.name: task.state for task in read(run.out).tasks}
    assert states == {"ps/0": "alive", "ps/1": "alive", "worker/0": "alive", "worker/1": "dead"}
    run.cluster.join("worker", 1, device="cuda:1")
    run.cluster.entries[-1]["time"] += 2000.0
    run.write()
    found = next(task for task in read(run.out).tasks if task.name == "worker/1")
    assert (found.state, found.device) == ("alive", "cuda:1")


def test_a_run_whose_chief_writes_nothing_any_more_waits_for_the_chief(run: Run) -> None:
    run.train(10)
    found = read(run.out)
    assert (found.standstill, found.doing) == (None, "training")
    later = time.time() + SILENT_S + 5.0
    found = read(run.out, later)
    assert found.standstill is not None
    assert found.standstill.since == pytest.approx(later - SILENT_S - 5.0, abs=PATIENCE_S)
    assert found.standstill.whom == "chief/0"
    assert (found.steps_per_s, found.left_s, found.push_bytes_per_s) == (0.0, None, 0.0)


def test_a_folder_that_is_away_for_a_while_is_shown_as_it_was(run: Run) -> None:
    run.train(10)
    files = RunFiles(run.out, History(), PassBoard())
    before = files.status(time.time())
    # TensorBoard's thread opens its file by name with each write.
    run.reporter.close()
    away = run.out.rename(run.out.with_name("away"))
    found = files.status(before.time)
    assert (found.step, found.standstill) == (10, None)
    away.rename(run.out)
    run.open()
    run.train(20)
    assert files.status(before.time + SILENT_S).step == 20


def passes() -> list[TaskPass]:
    """Two steps of two replicas and stages with two microbatches."""
    return [
        TaskPass(
            f"worker/{stage}",
            PassReport(
                step=step,
                replica=replica,
                stage=stage,
                microbatch=microbatch,
                back=back,
                start_s=step + 0.25 * back + 0.125 * microbatch,
                end_s=step + 0.25 * back + 0.125 * microbatch + 0.125,
                version=step,
                held=1 + microbatch,
            ),
        )
        for replica in (0, 1)
        for stage in (0, 1)
        for step in (0, 1)
        for back in (False, True)
        for microbatch in (0, 1)
    ]


def test_a_trace_has_the_passes_that_it_was_made_of() -> None:
    assert sorted(map(repr, passes_in(trace(passes())))) == sorted(map(repr, passes()))
    for damage in ({}, {"traceEvents": 1}, {"traceEvents": [{}]}, {"traceEvents": [{"name": "process_name"}]}):
        assert passes_in(damage) == []


def test_a_pipeline_is_drawn_from_its_trace(run: Run) -> None:
    write_json(run.out / "pipeline-trace.json", trace(passes()))
    board = PassBoard()
    files = RunFiles(run.out, History(), board)
    assert [stage.tasks for stage in files.status(time.time()).stages] == [("worker/0",), ("worker/1",)]
    assert len(json.loads(board.recent())["passes"]) == 32


def test_a_folder_without_a_run_is_refused_with_the_runs_that_are_in_it(tmp_path: Path, run: Run) -> None:
    with pytest.raises(UsageError, match="nowhere is not a folder; give the folder of a run, its --out"):
        RunFiles(tmp_path / "nowhere", History(), PassBoard())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty contains no run; give the folder of a run, its --out$"):
        RunFiles(tmp_path / "empty", History(), PassBoard())
    with pytest.raises(UsageError, match=re.escape(f"contains no run; give the folder of a run, such as {run.out}")):
        RunFiles(run.out.parent, History(), PassBoard())


# The command


def test_the_command_refuses_an_unknown_folder_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["page", str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"shardline: {tmp_path / 'nowhere'} is not a folder; give the folder of a run, its --out\n"


def test_more_runs_than_colours_are_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["page", *(str(run.out / str(number)) for number in range(9))]) == 2
    assert capsys.readouterr().err == "shardline: 9 runs are more than the 8 that a page shows; leave some out\n"


class Printed(io.StringIO):
    """An output whose first line another thread can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.there = threading.Event()

    def flush(self) -> None:
        if self.getvalue():
            self.there.set()


def test_the_command_serves_the_page_until_ctrl_c_and_changes_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.end()
    other = Run(tmp_path / "before" / "one")
    other.train(40)
    (tmp_path / "token").write_text("correct-horse-battery")
    command = ["page", str(run.out), str(other.out), "--token-file", str(tmp_path / "token")]
    before = sorted((path, path.stat().st_mtime_ns) for path in run.out.rglob("*"))
    printed, views, curves, answers = Printed(), list[dict[str, Any]](), list[dict[str, Any]](), list[int]()

    def look() -> None:
        if not printed.there.wait(PATIENCE_S):
            return
        address = printed.getvalue().removeprefix("page: http://").rstrip("/\n")
        try:
            with closing(http.client.HTTPConnection(address, timeout=PATIENCE_S)) as connection:
                connection.request("GET", "/api/view")
                answer = connection.getresponse()
                answers.append(answer.status)
                answer.read()
                connection.request("GET", "/api/view", headers={"Authorization": "Bearer correct-horse-battery"})
                views.append(json.load(connection.getresponse()))
                connection.request("GET", "/api/history", headers={"Authorization": "Bearer correct-horse-battery"})
                curves.append(json.load(connection.getresponse()))
            answers.append(main([*command, "--port", address.rpartition(":")[2]]))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    reader = threading.Thread(target=look)
    # A shell that starts tests in the background has them ignore Ctrl-C.
    ignoring = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        reader.start()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", printed)
            assert main(command) == 0
    finally:
        signal.signal(signal.SIGINT, ignoring)
    reader.join(PATIENCE_S)
    assert [(view["phase"], view["step"], view["written"] is not None) for view in views] == [("ended", 100, True)]
    # Both folders have the same name.
    assert [news["run"] for news in curves] == [str(run.out)]
    assert [len(news["curves"]["loss"]["points"]) for news in curves] == [100]
    assert [len(news["beside"][str(other.out)]["curves"]["loss"]["points"]) for news in curves] == [40]
    assert re.fullmatch(r"page: http://127\.0\.0\.1:\d+/\n", printed.getvalue())
    assert answers == [401, 2]
    assert re.fullmatch(
        r"shardline: the page can't be served at 127\.0\.0\.1:\d+: .*; use another --port \(0 = a free one\)\n",
        capsys.readouterr().err,
    )
    assert sorted((path, path.stat().st_mtime_ns) for path in run.out.rglob("*")) == before


def test_a_status_of_a_chief_has_no_files() -> None:
    assert cluster_view(ChiefStatus()).written is None

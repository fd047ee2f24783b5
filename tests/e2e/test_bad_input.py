"""Bad input: one sentence that names it, the right exit code, nothing lost and nothing left running."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.support import (
    Command,
    Finished,
    HandCluster,
    assert_refused,
    events,
    expected_sha256,
    shardline,
    small_disk,
    summary_of,
    train,
    train_command,
    wait_for_event,
    wait_for_step,
    write_job,
)

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

HEAD = "import torch\nfrom torch import nn\nfrom shardline import Job\n"
REST = "loss=lambda m, b: m(b).sum(), dataset=torch.zeros(8, 2), optimizer='SGD', batch_size=2, steps=5)\n"


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        (None, [r"job file .*job\.py does not exist"]),
        (f"{HEAD}x = 1 / 0\njob = None", [r"job\.py, line 4: ZeroDivisionError: division by zero"]),
        (f"{HEAD}job = Job(model=nn.ReLU, {REST}", [r"no parameters"]),
        (
            f"{HEAD}job = Job(model=lambda: nn.Linear(2, 2), {REST.replace('SGD', 'LBFGS')}",
            [r"job\.py, line 4: .*LBFGS"],
        ),
    ],
    ids=["missing", "raises", "no-parameters", "optimizer"],
)
def test_a_bad_job_file_ends_train_with_one_sentence_and_leaves_no_process(
    tmp_path: Path, text: str | None, patterns: list[str]
) -> None:
    job = tmp_path / "job.py"
    if text is not None:
        job.write_text(text)
    finished = train(job, tmp_path / "run", "--ps", "1", "--workers", "1")
    assert_refused(finished, 2, *patterns)
    assert len(finished.sentences) <= 2


def run_task(task: str, folder: Path, spec: Mapping[str, list[str]], *flags: str) -> Finished:
    path = folder / "cluster.json"
    path.write_text(json.dumps(spec))
    return shardline(
        task.split("/")[0], "--cluster", path, "--task", task, "--timeout", "3", "--join-timeout", "3", *flags
    )


@pytest.mark.parametrize(
    ("task", "spec", "pattern"),
    [
        ("worker/0", {"chief": ["a:1"], "worker": ["b:1"]}, r'cluster\.json has no "ps"'),
        ("worker/7", {"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1"]}, r"worker/7 is not in .* worker/0"),
        ("ps/0", {"chief": ["a:1"], "ps": ["b:1", "b:1"]}, r"ps/0 and ps/1 have the same address b:1"),
    ],
    ids=["no-ps", "unknown-task", "same-address"],
)
def test_a_bad_cluster_spec_is_named(tmp_path: Path, task: str, spec: dict[str, list[str]], pattern: str) -> None:
    finished = run_task(task, tmp_path, spec)
    assert_refused(finished, 2, pattern)
    assert len(finished.sentences) == 1


def test_a_task_whose_chief_is_not_there_says_whom_it_waited_for_and_how_long(tmp_path: Path) -> None:
    cluster = HandCluster.write(tmp_path, ps=1, worker=1)
    chief = cluster.tasks["chief"][0]
    finished = run_task("ps/0", tmp_path, {role: list(tasks) for role, tasks in cluster.tasks.items()})
    assert_refused(finished, 3, rf"chief(/0)? at {re.escape(chief)} did not answer", r"within [34]\.\d s")
    assert len(finished.sentences) == 1


def test_a_chief_whose_ps_is_not_there_says_which_and_how_long(tmp_path: Path) -> None:
    cluster = HandCluster.write(tmp_path, ps=1, worker=1)
    job = write_job(tmp_path / "job.py")
    spec = {role: list(tasks) for role, tasks in cluster.tasks.items()}
    finished = run_task("chief/0", tmp_path, spec, "--job", str(job), "--out", str(tmp_path / "out"))
    ps = re.escape(cluster.tasks["ps"][0])
    assert_refused(finished, 3, rf"ps/0 at {ps} did not join within 3 s; is it running")
    assert summary_of(tmp_path / "out")["exit_code"] == 3


def test_a_script_that_never_joins_ends_train_when_it_ends(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("print('hello')\n")
    finished = train(script, tmp_path / "run", "--script", "--ps", "1", "--workers", "1")
    assert_refused(finished, 2, r"worker/0: the script ended without joining: it must call shardline\.connect\(\)")


@pytest.mark.parametrize(("apply", "workers"), [("server", 2), ("worker", 2), ("worker", 1)])
def test_a_nan_stops_the_job_by_name_and_everybody_ends(tmp_path: Path, apply: str, workers: int) -> None:
    job = write_job(
        tmp_path / "job.py",
        replicas=2,
        apply=apply,
        after_loss="value = value * (float('nan') if float(points[0, 0]) > 2.2 else 1.0)",
    )
    finished = train(job, tmp_path / "run", "--ps", "1", "--workers", str(workers))
    assert_refused(
        finished, 5, r"worker/\d: step \d+, replica \d: loss.* has NaN or infinity; nothing was sent", "skip"
    )
    found = summary_of(tmp_path / "run")
    assert found["exit_code"] == 5
    assert found["checkpoint_step"] == found["steps"]


def test_a_nan_that_is_skipped_is_counted_and_a_chief_that_trains_takes_its_share(tmp_path: Path) -> None:
    job = write_job(
        tmp_path / "job.py",
        replicas=3,
        nan_policy="skip",
        after_loss="value = value * (float('nan') if float(points[0, 0]) > 2.2 else 1.0)",
    )
    out = tmp_path / "run"
    finished = train(job, out, "--ps", "3", "--workers", "1", "--chief-trains", "--min-workers", "2")
    assert finished.code == 0, finished
    found = summary_of(out)
    assert (found["steps"], found["workers"]) == (40, 2)
    assert found["skipped_steps"] > 0
    assert found["versions"] == [40 - found["skipped_steps"]] * 3
    assert found["sha256"] == expected_sha256(job)
    assert any("joined" in text and text.startswith("chief/0") for text in events(out)), events(out)


def test_a_foreign_and_a_wholly_damaged_checkpoint_are_refused_at_resume(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", steps=5)
    wider = write_job(tmp_path / "wider.py", width=48, steps=10)
    out = tmp_path / "run"
    assert train(job, out, "--ps", "1", "--workers", "1").code == 0
    before = sorted(path.name for path in (out / "checkpoints").iterdir())

    workers_log = (out / "logs" / "worker-0.log").read_text()
    finished = train(wider, out, "--resume")
    assert_refused(
        finished, 6, r"step-00000005", r"0\.weight.*\(40, 12\).*\(48, 12\)|0\.weight.*\(48, 12\).*\(40, 12\)"
    )
    # The worker may have been started beside the chief, but it is not admitted.
    added = (out / "logs" / "worker-0.log").read_text().removeprefix(workers_log)
    assert "step" in workers_log and "step" not in added and "joined" not in added, added
    for step in ("step-00000000", "step-00000005"):
        (out / "checkpoints" / step / "manifest.json").write_text("{}")
    finished = train(job, out, "--resume", "--steps", "10")
    assert_refused(finished, 6, r"step-0000000\d")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == before


def test_a_full_disk_costs_checkpoints_but_not_the_training(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", width=4000, steps=100_000, checkpoint_every=10, checkpoint_keep=1)
    out = tmp_path / "run"
    folder = out / "checkpoints"
    with small_disk(folder, "2m"):
        filler = folder / "filler"
        filler.write_bytes(bytes(1_400_000))
        command = Command(*train_command(job, out, "--ps", "1", "--workers", "1"))
        sentence = wait_for_event(out, "checkpoint_failed", while_runs=command)
        assert re.search(r"no checkpoint at step 10: .*No space left.*the last one is kept: step 0", sentence), sentence
        wait_for_step(out, 25, while_runs=command)
        assert (folder / "step-00000000" / "manifest.json").exists()
        filler.unlink()
        wait_for_event(out, "checkpoint", "checkpoint of step", more_than=1, while_runs=command)
        stopped = shardline("stop", "--cluster", out / "cluster.json")
        assert stopped.code == 0, stopped
        finished = command.finish()
        assert finished.code == 0, finished
        assert "no checkpoint at step 10" in (out / "logs" / "chief-0.log").read_text()
        assert summary_of(out)["checkpoint_step"] == summary_of(out)["steps"]

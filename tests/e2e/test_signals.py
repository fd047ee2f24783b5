"""SIGTERM and Ctrl-C, at the launcher and at single tasks: a checkpoint, the right code, and the same bits later."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.support import (
    Command,
    events,
    expected_sha256,
    json_lines,
    newest_checkpoint,
    pid_of,
    summary_of,
    train_command,
    wait_for_event,
    wait_for_step,
    write_job,
)

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.usefixtures("warm")
def test_signals_end_the_job_with_a_checkpoint_and_each_resume_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", replicas=2, steps=100_000, clip_norm=1.0, accumulate=2)
    out = tmp_path / "run"

    # A worker alone: the other takes over. Then the launcher: 143.
    command = Command(*train_command(job, out, "--ps", "2", "--workers", "2"))
    wait_for_step(out, 5, while_runs=command)
    os.kill(pid_of(out, "worker/1"), signal.SIGTERM)
    sentence = wait_for_event(out, "life", "worker/1 is leaving", while_runs=command)
    assert re.search(r"is leaving as requested; replica 1 to worker/0", sentence), sentence
    wait_for_step(out, last_logged(out) + 5, while_runs=command)
    command.signal(signal.SIGTERM)
    first = ends_with_checkpoint(command, out, 143, job)
    told = [line for line in command.finish().err.splitlines() if "worker/1" in line and "waiting for" not in line]
    assert told == []

    # A parameter server alone: it can't leave by itself, so the job ends, well.
    command = Command(*train_command(job, out, "--resume", "--ps", "1", "--workers", "1"))
    wait_for_step(out, first + 5, while_runs=command)
    os.kill(pid_of(out, "ps/0"), signal.SIGTERM)
    second = ends_with_checkpoint(command, out, 0, job)
    assert second > first
    assert any("ps/0 was asked to end" in text for text in events(out)), events(out)

    # The only worker: nobody can take its place, so the job ends here too. Ctrl-C at the launcher comes on top.
    command = Command(*train_command(job, out, "--resume", "--ps", "1", "--workers", "1"))
    wait_for_step(out, second + 5, while_runs=command)
    os.kill(pid_of(out, "worker/0"), signal.SIGTERM)
    third = ends_with_checkpoint(command, out, 0, job)
    assert third > second
    assert any("worker/0 was asked to end, and no other task can replace it" in text for text in events(out)), events(
        out
    )


@pytest.mark.usefixtures("warm")
def test_a_mirrored_worker_that_is_asked_to_end_ends_the_job_with_a_checkpoint_that_is_scored(tmp_path: Path) -> None:
    # One replica in the job file: the evaluator has to count as many as chief and workers.
    job, out = write_job(tmp_path / "job.py", steps=100_000), tmp_path / "run"
    command = Command(*train_command(job, out, "--mirrored", "2", "--evaluators", "1"))
    wait_for_step(out, 5, while_runs=command)
    os.kill(pid_of(out, "worker/1"), signal.SIGTERM)
    step = ends_with_checkpoint(command, out, 0, write_job(tmp_path / "two.py", steps=100_000, replicas=2))
    assert any("ps/1 was asked to end" in text for text in events(out)), events(out)
    assert summary_of(out)["evaluation"]["last"]["step"] == step


@pytest.mark.usefixtures("warm")
def test_ctrl_c_at_the_launcher_gives_130_and_before_the_chief_is_up_nothing_stays(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", steps=100_000)
    out = tmp_path / "run"
    command = Command(*train_command(job, out))
    wait_for_step(out, 5, while_runs=command)
    command.signal(signal.SIGINT)
    ends_with_checkpoint(command, out, 130, job)

    early = tmp_path / "early"
    command = Command(*train_command(job, early), cold=True)
    while not (early / "logs" / "chief-0.log").exists():
        assert command.process.poll() is None
    command.signal(signal.SIGTERM)
    finished = command.finish()
    assert (finished.code, finished.out) == (143, ""), finished
    assert not (early / "summary.json").exists()


def ends_with_checkpoint(command: Command, out: Path, code: int, job: Path) -> int:
    """The command ends with this code; its last checkpoint is the reference's at that step, which is returned."""
    finished = command.finish()
    assert finished.code == code, (finished, events(out))
    assert "Traceback" not in finished.err, finished.err
    found = summary_of(out)
    step = newest_checkpoint(out)
    assert (found["exit_code"], found["steps"], found["checkpoint_step"]) == (0, step, step)
    assert found["reason"].startswith("stopped: "), found
    assert found["sha256"] == expected_sha256(job, steps=step)
    return step


def last_logged(out: Path) -> int:
    """Highest step in the log."""
    return max(line["step"] for line in json_lines(out / "logs" / "steps.jsonl"))

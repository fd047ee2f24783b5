"""How a run ends that its own code, a second command or a missing task would otherwise leave hanging."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from shardline.errors import TaskLostError
from tests.e2e.support import (
    DEATH_TIMEOUT_S,
    Command,
    assert_refused,
    events,
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
EXIT = "if torch.rand(()) < 0.2: sys.exit(3)"


def line_of(job: Path, text: str) -> int:
    return next(n for n, line in enumerate(job.read_text().splitlines(), 1) if text in line)


def test_sys_exit_in_the_loss_ends_the_job_at_once_with_its_line(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", imports="import sys", after_loss=EXIT, steps=10_000)
    out = tmp_path / "run"
    finished = train(job, out, "--ps", "1", "--workers", "2")
    line = line_of(job, EXIT)
    says = (
        rf"worker/\d: loss\(model, batch\), in step \d+ of replica 0, called sys\.exit\(3\) \(.*job\.py, line {line}\)"
    )
    assert_refused(finished, 2, says)
    assert summary_of(out)["exit_code"] == 2
    assert any(re.search(says, sentence) for sentence in events(out, "failure"))


def test_an_exception_in_backward_ends_the_job_at_once_with_its_line(tmp_path: Path) -> None:
    hook = "value.register_hook(lambda gradient: {}['mine'])"
    job = write_job(tmp_path / "job.py", after_loss=hook, steps=10_000)
    finished = train(job, tmp_path / "run", "--ps", "1", "--workers", "2")
    line = line_of(job, hook)
    says = rf"worker/\d: backward\(\), in step 0 of replica 0, raised KeyError: 'mine' \(.*job\.py, line {line}\)"
    assert_refused(finished, 2, says)
    assert "restart 1" not in finished.err, finished


def test_an_exception_of_a_script_before_it_connects_ends_the_run_at_once_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json\n\njson.loads('{')\n")
    finished = train(script, tmp_path / "run", "--script", "--ps", "1", "--workers", "1")
    assert_refused(finished, 2, r"worker/0: the script raised json\.decoder\.JSONDecodeError: .*script\.py, line 3\)")
    assert "restart 1" not in finished.err, finished


def test_sys_exit_in_the_data_set_ends_the_job_at_once_with_its_line(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", imports="import sys", steps=10_000)
    text = job.read_text()
    job.write_text(
        text.replace("point = self.points[index]", "point = self.points[index] if index != 7 else sys.exit(3)")
    )
    finished = train(job, tmp_path / "run", "--ps", "1", "--workers", "1")
    line = line_of(job, "sys.exit(3)")
    assert_refused(finished, 2, rf"worker/0: dataset\[7\] \(of 256\) called sys\.exit\(3\) \(.*job\.py, line {line}\)")


def test_sys_exit_in_evaluate_ends_the_evaluator_alone_and_is_said(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", imports="import sys")
    job.write_text(job.read_text().replace("    data = Points()\n", "    data = sys.exit(3)\n"))
    out = tmp_path / "run"
    finished = train(job, out, "--ps", "1", "--workers", "1", "--evaluators", "1")
    assert finished.code == 0, finished
    says = rf"evaluate\(model\) called sys\.exit\(3\) \(.*job\.py, line {line_of(job, 'sys.exit(3)')}\)"
    assert re.search(rf"evaluator/0: {says}", finished.err), finished
    assert re.search(rf"evaluation: no checkpoint was scored: {says}", finished.out), finished
    assert "UnreachableError" not in finished.err + finished.out
    assert summary_of(out)["steps"] == 40


def test_workers_that_end_with_0_are_said_and_the_job_ends_when_none_is_left(tmp_path: Path) -> None:
    job = write_job(
        tmp_path / "job.py", imports="import os", after_loss="if torch.rand(()) < 0.1: os._exit(0)", steps=10_000
    )
    out = tmp_path / "run"
    finished = train(job, out, "--ps", "1", "--workers", "2", "--timeout", str(DEATH_TIMEOUT_S))
    assert finished.code == TaskLostError.exit_code, finished
    assert re.search(r"worker/\d ended with exit code 0 although the job has not ended \(step \d+\)", finished.err)
    says = (
        r"shardline: worker/\d ended with exit code 0 .*no task is left to train\. Continue with --resume from "
        r"step \d+"
    )
    assert re.search(says, finished.err), finished
    found = summary_of(out)
    assert found["checkpoint_step"] == found["steps"]


def contents(folder: Path) -> dict[str, str]:
    """What no run that lives writes to by itself: digests by name."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".jsonl", ".log")]
    files = [path for path in files if "tensorboard" not in path.parts and "checkpoints" not in path.parts]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_second_command_in_the_folder_of_a_run_changes_nothing_and_its_tasks_find_their_chief(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", imports="import time", after_loss="time.sleep(0.05)", steps=100_000)
    out = tmp_path / "run"
    command = Command(*train_command(job, out, "--ps", "1", "--workers", "1"))
    wait_for_step(out, 3, while_runs=command)
    before = contents(out)
    for flags in (["--workers", "3", "--resume"], ["--ps", "2", "--resume", "--summary", tmp_path / "new" / "s.json"]):
        assert_refused(train(job, out, *flags), 2, r"is in use by another run \(process \d+\); wait for it to end")
    assert_refused(train(job, out), 2, "contains an earlier run")
    place = ["--cluster", out / "cluster.json", "--job", job, "--out", out]
    assert_refused(shardline("chief", *place, "--resume"), 2, "is in use by another run")
    assert contents(out) == before
    assert not (tmp_path / "new").exists()
    command.signal(signal.SIGTERM)
    finished = command.finish()
    assert finished.code == 143, finished
    assert summary_of(out)["exit_code"] == 0


def test_a_server_that_can_not_start_ends_the_run_long_before_the_deadline_of_joining(tmp_path: Path) -> None:
    job, plugin = write_job(tmp_path / "job.py", steps=10), tmp_path / "plugin.py"
    plugin.write_text('import sys\nif "ps" in sys.argv:\n    raise RuntimeError("not for servers")\n')
    start_s = time.monotonic()
    arguments = train_command(job, tmp_path / "run", "--ps", "1", "--workers", "1", "--plugin", str(plugin))
    finished = Command(*arguments, cold=True).finish()
    assert_refused(finished, 2, r"ps/0: plugin .*, line 3: RuntimeError: not for servers; the job can't start without")
    assert time.monotonic() - start_s < 120


def test_a_resumed_job_with_another_learning_rate_says_so_on_the_terminal_and_in_the_events(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", steps=5)
    out = tmp_path / "run"
    assert train(job, out, "--ps", "1", "--workers", "1").code == 0
    # Longer than the launcher takes to ask the chief what there is to tell.
    write_job(job, imports="import time", after_loss="time.sleep(0.3)", steps=10)
    job.write_text(job.read_text().replace('"lr": 0.05', '"lr": 0.25'))
    finished = train(job, out, "--ps", "1", "--workers", "1", "--resume")
    assert finished.code == 0, finished
    said = (
        "resuming from step 5 with settings that differ from the checkpoint's: "
        "rule.groups[0].lr: 0.25 in the job, 0.05 in"
    )
    assert said in finished.err
    assert any(said in sentence for sentence in events(out, "resume"))
    assert "step-00000010" in finished.out
    # Another rule has another state.
    job.write_text(job.read_text().replace('optimizer="SGD"', 'optimizer="RMSprop"'))
    assert_refused(
        train(job, out, "--resume", "--steps", "20"), 6, "the update rule is RMSprop in the job, SGD in the checkpoint"
    )


def fill(path: Path) -> None:
    """Take all the room that its disk has."""
    handle = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    with contextlib.suppress(OSError):
        while True:
            os.write(handle, bytes(4096))
    os.close(handle)


def test_a_full_disk_is_said_on_the_terminal_in_status_and_at_the_end_and_a_second_run_there_names_it(
    tmp_path: Path,
) -> None:
    job = write_job(tmp_path / "job.py", width=4000, steps=100_000, checkpoint_every=10, checkpoint_keep=1)
    disk = tmp_path / "disk"
    with small_disk(disk, "8m"):
        out = disk / "run"
        command = Command(*train_command(job, out, "--ps", "1", "--workers", "1"))
        wait_for_event(out, "checkpoint", "checkpoint of step [1-9]", while_runs=command)
        fill(disk / "filler")
        spec = out / "cluster.json"
        deadline_s = time.monotonic() + 60
        while "No space left" not in (status := shardline("status", "--cluster", spec, env={"COLUMNS": "240"})).out:
            assert time.monotonic() < deadline_s, status
        assert shardline("stop", "--cluster", spec).code == 0
        finished = command.finish()
        assert finished.code == 6, finished
        # The log took none of it, so the last words come from the chief itself.
        newest = re.search(
            r"Continue with --resume from step (\d+): \S+/checkpoints/step-0*(\d+)", finished.sentences[-2]
        )
        assert newest is not None and int(newest[1]) == int(newest[2]) >= 10, finished
        assert len(re.findall(r"logs under \S+ can't be written", finished.err)) == 1
        assert re.search(r"no checkpoint at step \d+: .*No space left on device", finished.err)
        start_s = time.monotonic()
        assert_refused(train(job, out, "--resume"), 2, "can't be written: .*No space left on device")
        assert time.monotonic() - start_s < 30

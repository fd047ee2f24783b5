"""A second command in the folder of a run that lives is refused, and changes nothing there."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardline.cli.launcher import LocalCluster
from shardline.errors import UsageError
from shardline.host.run_lock import ROOM, RunLock, ever_begun
from tests.support.fake_roles import job_file, launch, started_train, tell_chief, wait_for_start

COMMAND = (sys.executable, "-m", "shardline")


def state_of(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Every file and folder below: mode, time of the last change, digest."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" in path.parts:
            continue
        stat = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (stat.st_mode, stat.st_mtime_ns, digest)
    return found


def wait_for_words(*logs: Path) -> None:
    """Each of these tasks has said all that it says."""
    deadline_s = time.monotonic() + 60.0
    while not all(" args " in log.read_text() for log in logs):
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.02)


def refused(*arguments: str | Path) -> str:
    """The one sentence that a command ends with at once, with exit code 2."""
    finished = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 2, finished
    (sentence,) = finished.stderr.splitlines()
    return sentence


def test_the_second_to_take_a_lock_is_told_who_holds_it_and_changes_nothing(tmp_path: Path) -> None:
    lock = RunLock.take(tmp_path / "run" / "chief")
    before = state_of(tmp_path)
    with pytest.raises(UsageError, match=rf"run is in use by another run \(process {os.getpid()}\)"):
        RunLock.take(tmp_path / "run" / "chief")
    assert state_of(tmp_path) == before
    lock.close()
    RunLock.take(tmp_path / "run" / "chief").close()


def test_a_lock_lives_on_in_the_process_that_inherited_it(tmp_path: Path) -> None:
    lock = RunLock.take(tmp_path / "chief")
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    heir = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[lock.fd]
    )
    assert heir.stdout is not None and heir.stdout.readline() == b"up\n"
    lock.close()
    with pytest.raises(UsageError, match="is in use"):
        RunLock.take(tmp_path / "chief")
    heir.communicate(timeout=10)
    RunLock.take(tmp_path / "chief").close()


def test_a_disk_without_room_for_a_run_is_named_at_once_and_the_lock_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunLock.take(tmp_path / "chief").close()
    (tmp_path / "chief" / ".lock").write_text("12345678")
    before = {name: value[2] for name, value in state_of(tmp_path).items()}

    def full(fd: int, offset: int, length: int) -> None:
        assert length == ROOM
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UsageError, match=r"--out .* can't be written: No space left on device; choose a folder"):
            RunLock.take(tmp_path / "chief")
    assert {name: value[2] for name, value in state_of(tmp_path).items()} == before
    RunLock.take(tmp_path / "chief").close()


@pytest.mark.parametrize("there", ["", "run", "run/chief"])
def test_a_start_without_room_leaves_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match="No space left on device"):
        RunLock.take(tmp_path / "run" / "chief")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_a_link_to_nothing_is_refused_as_that(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match=rf"{out} is a link to {tmp_path / 'gone'}, which does not exist"):
        RunLock.take(out / "chief")


def test_a_lock_that_was_removed_while_it_was_opened_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chief" / ".lock"
    RunLock.take(path.parent).close()
    taken = fcntl.flock
    calls: list[int] = []

    def slow(fd: int, how: int) -> None:
        if not calls:
            path.unlink()
        calls.append(fd)
        taken(fd, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    lock = RunLock.take(path.parent)
    assert len(calls) == 2 and lock.stands(path)
    lock.close()


def test_a_start_that_came_to_nothing_makes_no_run_of_its_folder(tmp_path: Path) -> None:
    assert not ever_begun(tmp_path)
    RunLock.take(tmp_path / "chief").close()
    assert not ever_begun(tmp_path)
    (tmp_path / "chief" / "term-1").touch()
    assert ever_begun(tmp_path)


@pytest.mark.processes
def test_commands_in_the_folder_of_a_run_that_lives_change_no_byte(tmp_path: Path, fake_roles: Path) -> None:
    with started_train(tmp_path) as process:
        change_no_byte(tmp_path, process)


def change_no_byte(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    wait_for_start(process, tmp_path)
    out = tmp_path / "run"
    wait_for_words(out / "logs" / "ps-0.log", out / "logs" / "worker-0.log")
    (out / "chief" / "term-1").touch()
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"chief": ["127.0.0.1:2"], "ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:0"]}))
    token = tmp_path / "token"
    token.write_text("a-token-of-enough-characters")
    job, summary = tmp_path / "job.py", tmp_path / "new" / "summary.json"
    before = state_of(tmp_path)
    # A chief by hand has something to log at its start.
    chief = ["chief", "--cluster", cluster, "--job", job, "--out", out, "--token-file", token]
    for command in (
        ["train", job, "--out", out, "--resume"],
        ["train", job, "--out", out, "--resume", "--summary", summary],
        chief,
        [*chief, "--resume"],
    ):
        assert f"{out} is in use by another run (process {process.pid})" in refused(*command)
        assert state_of(tmp_path) == before, command
    assert "contains an earlier run" in refused("train", job, "--out", out, "--summary", summary)
    assert state_of(tmp_path) == before


def test_train_is_refused_where_a_chief_was_started_by_hand(tmp_path: Path, fake_roles: Path) -> None:
    out = tmp_path / "run"
    lock = RunLock.take(out / "chief")
    (out / "chief" / "term-1").touch()
    before = state_of(tmp_path)
    assert "is in use" in refused("train", job_file(tmp_path), "--out", out, "--resume")
    assert {name: value for name, value in state_of(tmp_path).items() if name != "job.py"} == before
    lock.close()


@pytest.mark.processes
def test_the_lock_is_held_while_no_chief_is_there_and_free_after_the_end(tmp_path: Path, fake_roles: Path) -> None:
    with LocalCluster(launch(tmp_path, restart=False)) as cluster:
        cluster.kill("chief/0", restart=False)
        with pytest.raises(UsageError, match="is in use"):
            RunLock.take(tmp_path / "out" / "chief")
        cluster.restart("chief/0")
    RunLock.take(tmp_path / "out" / "chief").close()


@pytest.mark.processes
def test_a_chief_whose_launcher_was_killed_keeps_the_lock_until_its_end(tmp_path: Path, fake_roles: Path) -> None:
    cluster = LocalCluster(launch(tmp_path))
    with cluster:
        # As the kernel does with the descriptors of a launcher that is killed.
        assert cluster.lock is not None
        cluster.lock.close()
        with pytest.raises(UsageError, match="is in use"):
            RunLock.take(tmp_path / "out" / "chief")
        tell_chief(cluster, "exit 0")
        assert cluster.wait(timeout_s=10) == 0
    RunLock.take(tmp_path / "out" / "chief").close()


def test_a_summary_that_can_not_be_written_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = state_of(tmp_path)
    job = job_file(tmp_path)
    sentence = refused("train", job, "--out", tmp_path / "run", "--summary", tmp_path / "file" / "x" / "summary.json")
    assert "can't be written: Not a directory" in sentence
    job.unlink()
    assert state_of(tmp_path).keys() == before.keys()

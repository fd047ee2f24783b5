"""Stand-ins for the roles, for tests that start processes and need no training."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardline.cli.launcher import LaunchOptions, LocalCluster, cluster_path, settings_path, task_command
from shardline.cli.options import role_config
from shardline.cli.process_exits import Ended
from shardline.cli.roles import role_command
from shardline.config import RoleConfig, Timeouts
from shardline.host.forkserver import PR_SET_PDEATHSIG, prctl
from tests.support.waiting import wait_for

# Stand-ins for the roles. The chief obeys lines sent to its address ("exit 4"); the others end when it does, like real
# tasks. A job file may make one of them fail.
FAKE_ROLES = """
import json, os, signal, socket, sys, time

def chief(config):
    settings = json.loads(config.job.read_text())
    if settings.get("busy"):
        signal.pause()
    if "chief" in settings:
        print("shardline: " + settings["chief"], file=sys.stderr, flush=True)
        return 6
    host, port = config.cluster.chief.split(":")
    server = socket.create_server((host, int(port)))
    (config.out.parent / "chief-listens").touch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if config.ready_fd is not None:
        os.write(config.ready_fd, f"127.0.0.1:{server.getsockname()[1]}\\n".encode())
        os.close(config.ready_fd)
    held = []
    while True:
        connection, _ = server.accept()
        held.append(connection)
        line = connection.makefile(errors="replace").readline().split()
        if line and line[0] == "exit":
            (config.out / "summary.json").write_text(json.dumps({"steps": 3, "seconds": 1.5, "steps_per_second": 2.0}))
            return int(line[1])

def other(config):
    # A ps is told of no job.
    settings = json.loads((config.job or config.out.parent / "job.py").read_text())
    print(config.task, "args", os.environ.get("SHARDLINE_JOB_ARGS", ""), flush=True)
    if config.task in settings:
        print(f"shardline: {config.task} has had enough", file=sys.stderr, flush=True)
        return settings[config.task]
    if config.task == settings.get("stays"):
        signal.pause()
    # All are started at once.
    while not (config.out.parent / "chief-listens").exists():
        time.sleep(0.01)
    host, port = config.cluster.chief.split(":")
    try:
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"here {config.task}\\n".encode())
            connection.recv(1)
    except ConnectionError:
        pass  # the chief has ended already
    return 0
"""


# All tasks have torch imported before their role begins, which takes seconds and is of no use to a stand-in.
WITHOUT_TORCH = """
import sys, types
eager = types.ModuleType("shardline.update.torch_optim.eager")
eager.leave_compiler_out = lambda: None
sys.modules[eager.__name__] = eager
"""


@pytest.fixture
def fake_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the children's path whose roles take the place of the installed ones.

    It has the installed distribution's name, so that nobody imports the real roles as well.
    """
    folder = tmp_path / "fakes"
    info = folder / "shardline-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "fake_roles.py").write_text(FAKE_ROLES)
    (folder / "sitecustomize.py").write_text(WITHOUT_TORCH)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shardline\nVersion: 1.0\n")
    roles = {"chief": "chief", "ps": "other", "worker": "other", "evaluator": "other"}
    lines = [f"{role} = fake_roles:{function}" for role, function in roles.items()]
    (info / "entry_points.txt").write_text("[shardline.roles]\n" + "\n".join(lines) + "\n")
    # Before anything else that the children are to find, such as this source tree.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    # Tests compare all files before and after.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return folder


def job_file(folder: Path, **settings: object) -> Path:
    path = folder / "job.py"
    path.write_text(json.dumps(settings))
    return path


def launch(tmp_path: Path, **settings: Any) -> LaunchOptions:
    job = settings.pop("job", None) or job_file(tmp_path)
    defaults: dict[str, Any] = {"workers": 2, "out": tmp_path / "out", "timeouts": Timeouts(total_s=30.0)}
    return LaunchOptions(job=job, **{**defaults, **settings})


def read_back(settings: LaunchOptions, task: str, *, ready_fd: int | None = None) -> RoleConfig:
    """The settings of a task, as its own process takes them from the launcher's file and command line."""
    found: list[RoleConfig] = []
    settings.out.mkdir(exist_ok=True)
    settings_path(settings.out).write_text(json.dumps(settings.settings()))
    cluster_path(settings.out).write_text(settings.spec("127.0.0.1:4").to_json())
    settings.job.touch()
    command = task_command(settings, task, ready_fd=ready_fd, life_fd=8)
    assert command[:4] == [sys.executable, "-P", "-m", "shardline"]

    def keep(role: str, flags: dict[str, Any]) -> int:
        found.append(role_config(role, flags, {}))
        return 0

    role_command(command[4], keep).main(command[5:], standalone_mode=False)
    return found[0]


def tell_chief(cluster: LocalCluster, line: str) -> None:
    host, port = cluster.chief_address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(line.encode() + b"\n")


def next_end(cluster: LocalCluster, timeout_s: float = 10.0) -> Ended:
    event = cluster.events.get(timeout=timeout_s)
    assert isinstance(event, Ended)
    return event


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@contextlib.contextmanager
def started_train(tmp_path: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A running `shardline train`, which ends with the block, however that ends, or with the process that runs it."""
    command = [sys.executable, "-m", "shardline", "train", str(job_file(tmp_path)), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 no lock is taken in it
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=20)


def children(tmp_path: Path) -> dict[str, int]:
    """Pids of the tasks of a `shardline train` that have got their command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            # A forked task shows its command line as one text.
            words = (entry / "cmdline").read_bytes().decode().replace("\0", " ").split()
            if "--life-fd" in words and str(settings_path(tmp_path / "run")) in words:
                found[words[words.index("--task") + 1]] = int(entry.name)
    return found


def wait_for_start(process: subprocess.Popen[str], tmp_path: Path) -> dict[str, int]:
    """Pids of the tasks of a `shardline train`, once all have been started."""
    assert process.stderr is not None
    assert process.stderr.readline().startswith("started 1 chief, 1 ps, 1 worker; logs: ")
    # A forked task gets its command line a little after it has begun.
    wait_for(lambda: len(children(tmp_path)) == 3, "the tasks' command lines")
    found = children(tmp_path)
    assert set(found) == {"chief/0", "ps/0", "worker/0"}
    return found


def wait_gone(pids: dict[str, int], timeout_s: float) -> None:
    for task, pid in pids.items():
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([handle], [], [], timeout_s)
        os.close(handle)
        assert ready, f"{task} is still there"

"""Tasks that are forked from one process that has done their imports: like commands that were started by exec."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardline.host import forkserver
from shardline.host.forkserver import COMMAND, ForkedProcess, ForkServer, TaskStarter, can_fork
from tests.support.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tasks are forked on Linux only")

without_torch = pytest.mark.usefixtures("fake_roles")
"""For servers of which each test needs its own: they import in a moment."""

PLUGIN = """
import json, os, pathlib, random, signal, sys, time
import numpy
folder = pathlib.Path(os.environ["FOLDER"])
fds = sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}"))
said = {
    "environment": dict(os.environ), "random": random.random(), "numpy": float(numpy.random.rand()), "argv": sys.argv,
    "session": os.getsid(0), "pid": os.getpid(), "fds": fds,
    "input": os.readlink("/proc/self/fd/0"), "command": pathlib.Path("/proc/self/cmdline").read_text(),
}
folder.joinpath(f"{os.getpid()}.new").write_text(json.dumps(said))
folder.joinpath(f"{os.getpid()}.new").rename(folder / f"{os.getpid()}.json")
if "WAIT" in os.environ:
    signal.pause()
"""


Light = Callable[..., list[str]]


class Forks:
    """A fork server, and what is needed to ask it for processes that say what they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plugin = folder / "plugin.py"
        self.plugin.write_text(PLUGIN)
        self.server = ForkServer(dict(os.environ))
        self.started: list[ForkedProcess] = []

    def command(self) -> list[str]:
        return [*COMMAND, "methods", "--plugin", str(self.plugin)]

    def start(self, *, kept: tuple[int, ...] = (), **environment: str) -> ForkedProcess:
        with (self.folder / "log").open("ab") as log:
            settings = {"FOLDER": str(self.folder), "PATH": os.environ["PATH"], **environment}
            process = ForkedProcess(self.server.start(self.command(), settings, (log.fileno(),) * 2, kept))
        self.started.append(process)
        return process

    def said(self, process: ForkedProcess) -> dict[str, Any]:
        path = self.folder / f"{process.pid}.json"
        wait_for(path.exists, f"what process {process.pid} says")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


@pytest.fixture
def light(fake_roles: Path) -> Light:
    """Makes the command of a role that runs some code and ends, without the seconds that it takes to import torch."""

    def command(code: str = PLUGIN) -> list[str]:
        (fake_roles / "light.py").write_text(f"def run(config):\n{textwrap.indent(code, '    ')}\n    return 0\n")
        next(fake_roles.glob("*.dist-info/entry_points.txt")).write_text("[shardline.roles]\nps = light:run\n")
        cluster = fake_roles / "cluster.json"
        cluster.write_text(json.dumps({"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:0"]}))
        return [*COMMAND, "ps", "--task", "ps/0", "--cluster", str(cluster)]

    return command


def assert_execs(starter: TaskStarter, command: list[str], folder: Path) -> None:
    """It starts a task by exec; ends it."""
    with (folder / "log").open("ab") as output:
        process = starter.start(command, {**os.environ, "FOLDER": str(folder)}, (output.fileno(),) * 2, ())
    assert isinstance(process, subprocess.Popen)
    assert process.wait() == 0
    starter.close()


def with_path(folder: Path) -> dict[str, str]:
    """This environment with a folder in front of all others that modules are looked for in."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    for process in made.started:
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    made.server.close()


@pytest.mark.processes
def test_a_task_is_a_child_in_a_session_of_its_own_with_its_own_command_line(forks: Forks) -> None:
    process = forks.start(COLOUR="blue", WAIT="")
    # Seen from here: it may have looked while the process between was still ending.
    parent = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent == os.getpid()
    said = forks.said(process)
    # Tests, and people, find processes by what they began with.
    assert f"PATH={os.environ['PATH']}\0" in Path(f"/proc/{process.pid}/environ").read_text()
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert said["pid"] == said["session"] == process.pid
    assert said["argv"][1:] == forks.command()[len(COMMAND) :]
    assert said["command"].rstrip("\0") == " ".join(forks.command())
    assert said["input"] == os.devnull
    # The environment that was asked for, and nothing that the process that was forked began with.
    given = {"FOLDER", "PATH", "COLOUR", "WAIT", "GRPC_VERBOSITY"}  # the last is set by the command itself
    assert not (said["environment"].keys() - given) & os.environ.keys()
    process = forks.start()
    assert process.wait() == 0
    assert "--consistency" in (forks.folder / "log").read_text()


def test_tasks_draw_different_random_numbers(forks: Forks) -> None:
    processes = [forks.start() for _ in range(2)]
    first, second = map(forks.said, processes)
    assert [process.wait() for process in processes] == [0, 0]
    assert first["random"] != second["random"]
    assert first["numpy"] != second["numpy"]


def test_descriptors_keep_their_numbers_and_no_others_are_inherited(forks: Forks) -> None:
    pipes = [os.pipe() for _ in range(3)]
    # In an order in which one of them lies where another is to be.
    kept = (pipes[2][1], pipes[0][0], pipes[1][1])
    process = forks.start(kept=kept, WAIT="")
    assert forks.said(process)["fds"] == sorted(kept)
    for read, write in pipes[1:]:
        os.close(write)
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    for read, _ in pipes[1:]:
        assert os.read(read, 1) == b""
    for fd in (*pipes[0], pipes[1][0], pipes[2][0]):
        os.close(fd)


def test_signals_do_what_they_do_to_a_new_process(forks: Forks) -> None:
    process = forks.start(WAIT="")
    forks.said(process)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_a_wrong_command_ends_with_its_exit_code_and_sentence(forks: Forks) -> None:
    with (forks.folder / "wrong").open("wb") as log:
        settings = {"PATH": os.environ["PATH"]}
        pid = forks.server.start([*COMMAND, "ps", "--cluster", "nowhere.json"], settings, (log.fileno(),) * 2, ())
    assert ForkedProcess(pid).wait() == 2
    assert "nowhere.json" in (forks.folder / "wrong").read_text()


def test_only_commands_of_this_interpreter_can_be_forked() -> None:
    assert can_fork([*COMMAND, "ps"])
    assert not can_fork([sys.executable, "script.py"])


def test_a_fork_server_that_is_gone_is_an_error_at_once(tmp_path: Path) -> None:
    forks = Forks(tmp_path)
    os.kill(forks.server.pid, signal.SIGKILL)
    with pytest.raises(OSError, match=r"ended|reset|pipe"):
        forks.start()
    forks.server.close()


@pytest.mark.processes
def test_tasks_are_started_by_exec_once_the_fork_server_has_gone(tmp_path: Path, light: Light) -> None:
    command = light()
    starter = TaskStarter()
    starter.begin(dict(os.environ))
    settings = {**os.environ, "FOLDER": str(tmp_path)}
    kinds = []
    for _ in range(2):
        with (tmp_path / "log").open("ab") as output:
            process = starter.start(command, settings, (output.fileno(),) * 2, ())
        assert process.wait() == 0
        kinds.append(type(process))
        assert starter.server is None or not os.kill(starter.server.pid, signal.SIGKILL)
    assert kinds == [ForkedProcess, subprocess.Popen]
    assert len(list(tmp_path.glob("*.json"))) == 2
    starter.close()


@pytest.mark.processes
def test_a_stopped_fork_server_costs_its_deadline_and_no_task_is_started_twice(
    tmp_path: Path, light: Light, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "ANSWER_S", 0.5)
    command = light()
    starter = TaskStarter()
    starter.begin(dict(os.environ))
    assert starter.await_ready(60.0)
    assert starter.server is not None
    os.kill(starter.server.pid, signal.SIGSTOP)
    assert_execs(starter, command, tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 1


@without_torch
def test_a_fork_server_is_closed_while_it_imports() -> None:
    starter = TaskStarter()
    starter.begin(dict(os.environ))
    starter.close()


@pytest.mark.processes
@without_torch
def test_an_answer_that_was_not_waited_for_is_not_taken_for_another(
    forks: Forks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = Forks(tmp_path)

    def interrupted(connection: object) -> bytes:
        raise KeyboardInterrupt

    assert other.server.await_ready(60.0)
    with monkeypatch.context() as patched:
        patched.setattr(forkserver, "_read_line", interrupted)
        with pytest.raises(KeyboardInterrupt):
            other.start()
    with pytest.raises(OSError, match="Bad file descriptor"):
        other.start()
    other.server.close()


def test_a_task_leads_its_group_as_soon_as_it_is_known(forks: Forks) -> None:
    for _ in range(5):
        process = forks.start(WAIT="")
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


@pytest.mark.processes
def test_what_the_job_imports_is_there_and_what_fails_is_left_to_the_task(tmp_path: Path, light: Light) -> None:
    command = light("import sys\nassert 'colorsys' in sys.modules")
    server = ForkServer(dict(os.environ), ["colorsys", "no_such_module"])
    with (tmp_path / "log").open("ab") as log:
        assert ForkedProcess(server.start(command, os.environ, (log.fileno(),) * 2, ())).wait() == 0
    server.close()


@pytest.mark.processes
def test_an_import_that_starts_a_thread_is_named_and_tasks_are_started_by_exec(
    tmp_path: Path, light: Light, caplog: pytest.LogCaptureFixture
) -> None:
    command = light()
    (tmp_path / "beating.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, name='heart', daemon=True).start()"
    )
    environment = with_path(tmp_path)
    starter = TaskStarter()
    starter.begin(environment, ["beating"])
    assert starter.await_ready(60.0)
    assert "an import has started threads, which a forked process would not have: heart" in caplog.text
    assert_execs(starter, command, tmp_path)


@pytest.mark.processes
@without_torch
def test_imports_that_take_long_are_waited_for_in_parts() -> None:
    starter = TaskStarter()
    starter.begin(dict(os.environ))
    assert not starter.await_ready(0.0)
    assert starter.await_ready(60.0)
    starter.close()


@pytest.mark.processes
def test_a_task_computes_with_several_threads_though_an_import_has_computed_before(tmp_path: Path) -> None:
    (tmp_path / "tables.py").write_text("import torch\ntorch.randn(1 << 22).exp()")
    environment = with_path(tmp_path)
    server = ForkServer(environment, ["tables"])
    (tmp_path / "plugin.py").write_text(
        "import sys, torch\nassert 'tables' in sys.modules\ntorch.set_num_threads(2)\ntorch.randn(1 << 22).exp()"
    )
    with (tmp_path / "log").open("ab") as log:
        command = [*COMMAND, "methods", "--plugin", str(tmp_path / "plugin.py")]
        process = ForkedProcess(server.start(command, os.environ, (log.fileno(),) * 2, ()))
    codes: list[int] = []
    waiter = threading.Thread(target=lambda: codes.append(process.wait()), daemon=True)
    waiter.start()
    waiter.join(30.0)
    if waiter.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    server.close()
    assert codes == [0]


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("raise RuntimeError('gone wrong')", 1, "RuntimeError: gone wrong"),
        ("sys.exit('no more')", 1, "no more"),
        ("sys.exit(7)", 7, "atexit ran"),
        ("threading.Thread(target=threading.Event().wait, name='mine').start(); return 7", 7, "not ours: mine"),
    ],
)
def test_a_forked_task_ends_as_an_interpreter_does(ending: str, code: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(
        "import atexit, sys, threading\nfrom shardline.host import lifeline\nlifeline.LEFT_S = 0.0\n"
        f"atexit.register(print, 'atexit ran')\ndef run():\n    {ending}\n"
    )
    program = "from shardline.host.forkserver import end_as_fork; import ends; end_as_fork(ends.run)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=with_path(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout
    assert "atexit ran" in done.stdout
    assert words in done.stdout

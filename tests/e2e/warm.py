"""Commands without their imports: one process imports everything once, and is forked for a command and its tasks.

Most of what a small cluster costs is six times importing torch. Tests of what a cluster does are spared that; those of
how one is started, and whatever looks for processes by their command line, start cold.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from shardline.cli.main import main
from shardline.host import forkserver
from tests.chaos.nursery import Nursery, serve

# Imported late by one task or another; torch._dynamo by a script's optimizer, which takes 2 s of processor time.
MODULES = (
    "pytest",
    "rich.console",
    "rich.progress",
    "shardline.cli.progress",
    "sklearn.datasets",
    "torch._dynamo",
    "torch.utils.tensorboard",
)
CALL = "call"
"""In place of a command: call a function, `module:name`, with the arguments that a JSON object gives."""
PR_SET_CHILD_SUBREAPER = 36


class WarmProcess:
    """A command that was forked; the part of subprocess.Popen that Command uses."""

    def __init__(self, nursery: Nursery, arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path | None) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self._nursery = nursery
        self._ended = threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="shardline-e2e-"))
        request = {
            "arguments": list(arguments),
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "outputs": [str(self._folder / name) for name in ("out", "err")],
        }
        self.pid = nursery.ask(request, self._has_ended)

    def _has_ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        self._nursery.signal(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        out, err = ((self._folder / name).read_text(errors="replace") for name in ("out", "err"))
        shutil.rmtree(self._folder)
        return out, err


def descendants(pid: int) -> dict[int, str]:
    """Names of the living processes that this one started, directly or not, by process id; of a task: such as ps/0."""
    parents, names = {}, {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            before, _, after = (folder / "stat").read_text().rpartition(")")
            state, parent = after.split()[:2]
            if state != "Z":
                parents[int(folder.name)] = int(parent)
                names[int(folder.name)] = before.partition("(")[2]
    found: dict[int, str] = {}
    while new := {child for child, parent in parents.items() if parent in {pid, *found}} - set(found):
        found.update((child, names[child]) for child in new)
    return found


# The other side


class WarmForkServer(forkserver.ForkServer):
    """The launcher's fork server, forked itself instead of importing everything once more."""

    def _start(self, theirs: socket.socket, environment: Mapping[str, str], modules: Sequence[str]) -> Any:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            forkserver.end_as_fork(lambda: self._serve(theirs, environment))
        return forkserver.ForkedProcess(pid)

    def _serve(self, theirs: socket.socket, environment: Mapping[str, str]) -> int:
        _begin((os.open(os.devnull, os.O_WRONLY),) * 2, environment, [theirs.fileno()])
        task = forkserver.serve(socket.socket(fileno=theirs.detach()))
        return 0 if task is None else task()


class ForkedTask:
    """What a launcher gets where it asks for subprocess.Popen, for a script: a child like any, but for the exec."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int],
        **_: object,
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become_task(command, env, (stdout, stderr), pass_fds)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def start_task(command: Sequence[str], **fields: Any) -> Any:
    """Fork while only the main thread does anything; what is started again later, beside calls under way, is cold."""
    if threading.current_thread() is threading.main_thread():
        return ForkedTask(command, **fields)
    return subprocess.Popen(command, **fields)


def _become_task(
    command: Sequence[str], env: Mapping[str, str], output: tuple[int, int], kept: Sequence[int]
) -> NoReturn:
    def run() -> int:
        _begin(output, env, kept)
        return _script(command[1:])

    forkserver.end_as_fork(run)


def _begin(output: tuple[int, int], env: Mapping[str, str], kept: Sequence[int]) -> None:
    """What an exec would do: a session, standard streams and an environment of its own, and no other descriptors."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output[0], 1)
    os.dup2(output[1], 2)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)
    os.environ.clear()
    os.environ.update(env)


def _prctl(option: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value!r}): {os.strerror(ctypes.get_errno())}")


def _script(arguments: Sequence[str]) -> int:
    """Run a training script as `python SCRIPT ARGUMENTS` would; returns its exit code."""
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).parent))
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def become(request: Mapping[str, Any]) -> NoReturn:
    """A command for the rest of this process's life."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for handle, path in enumerate(request["outputs"], start=1):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(opened, handle)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    faked = {**vars(subprocess), "Popen": start_task}
    forkserver.ForkServer = WarmForkServer  # type: ignore[misc]
    forkserver.subprocess = types.SimpleNamespace(**faked)  # type: ignore[assignment]
    arguments = request["arguments"]
    sys.argv = ["shardline", *arguments]
    forkserver.end_as_fork(lambda: _call(*arguments[1:]) if arguments[0] == CALL else main(arguments))


def _call(place: str, given: str) -> int:
    """Call the function and print what it returns."""
    module, name = place.split(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(**json.loads(given))))
    return 0


if __name__ == "__main__":
    # Orphans become children of this process, so that none is overlooked.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    sys.exit(serve(int(sys.argv[1]), become, MODULES))

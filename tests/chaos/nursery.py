"""Processes of tasks, started in milliseconds: one process imports everything once and forks whoever is asked for.

Each is a process of its own with a group of its own, like one started from a shell; only the imports are shared. Cold
starts `python -m shardline` instead, as people do. Both end what they started when they are closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from shardline.host.allocator import ALLOCATOR

ROOT = Path(__file__).parents[2]
PATHS = (ROOT, *(ROOT / name for name in ("services", "worker", "chief", "evaluator", "pipeline", "lab", "launchers")))
READY_S = 120.0
"""Importing torch takes a while on a busy machine."""
ANSWER_S = 30.0
CLONE_NEWNET = 0x40000000

Ended = Callable[[int], None]


class Starter(Protocol):
    """Starts and signals processes of tasks."""

    def start(
        self, arguments: Sequence[str], *, log: Path, network: str, settings: Mapping[str, str], ended: Ended
    ) -> int:
        """Run `shardline ARGUMENTS` with its output in log and `settings` in its environment; returns its pid.

        network: name of a network namespace; "" = this process's. ended(code) is called from a thread of the starter's
        when the process is gone; -N = signal N.
        """

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Signal a started process and what it started; False where it has ended."""


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """A task's environment."""
    paths = os.pathsep.join(str(path) for path in PATHS)
    return {**os.environ, **ALLOCATOR, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths, **settings}


class Cold:
    """Every process begins with an exec."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._living: dict[int, subprocess.Popen[bytes]] = {}
        self._watchers: list[threading.Thread] = []

    def __enter__(self) -> Cold:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            living = list(self._living)
        for pid in living:
            self.signal(pid, signal.SIGKILL)
        for watcher in self._watchers:
            watcher.join(10.0)

    def start(
        self, arguments: Sequence[str], *, log: Path, network: str, settings: Mapping[str, str], ended: Ended
    ) -> int:
        """See Starter."""
        command = ["ip", "netns", "exec", network] if network else []
        command += [sys.executable, "-P", "-m", "shardline", *arguments]
        with self._lock, log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(settings),
                start_new_session=True,
            )
            self._living[process.pid] = process
        watcher = threading.Thread(target=self._watch, args=(process, ended), daemon=True)
        self._watchers.append(watcher)
        watcher.start()
        return process.pid

    def _watch(self, process: subprocess.Popen[bytes], ended: Ended) -> None:
        # It stays a zombie until it is forgotten, so that its pid is nobody else's.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            del self._living[process.pid]
            code = process.wait()
        ended(code)

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """See Starter."""
        with self._lock:
            if pid not in self._living:
                return False
            os.killpg(pid, number)
            return True


class Nursery:
    """Processes are forked from one that has imported everything.

    module: what is run as that process; it is given the number of a socket and calls serve().
    """

    def __init__(self, module: str = "tests.chaos.nursery") -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, Future[int]] = {}
        self._ended: dict[int, Ended] = {}
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment({"OPENBLAS_NUM_THREADS": "1"}),
                start_new_session=True,
            )
        ready: Future[int] = Future()
        self._answers[-1] = ready
        self._reader = threading.Thread(target=self._read, daemon=True, name="nursery")
        self._reader.start()
        try:
            ready.result(READY_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all of it."""
        # The end of the socket tells it to kill what it has started, and to go.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)
        self._reader.join(10.0)
        self._socket.close()

    @property
    def pid(self) -> int:
        """Of the process that forks."""
        return self._process.pid

    def start(
        self, arguments: Sequence[str], *, log: Path, network: str, settings: Mapping[str, str], ended: Ended
    ) -> int:
        """See Starter."""
        request = {"arguments": list(arguments), "log": str(log), "network": network, "settings": dict(settings)}
        return self.ask(request, ended)

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """See Starter."""
        return bool(self.ask({"pid": pid, "signal": int(number)}))

    def ask(self, request: Mapping[str, Any], ended: Ended | None = None) -> int:
        """Fork a process that does what is requested, and returns its pid; or signal one."""
        answer: Future[int] = Future()
        with self._lock:
            number = next(self._numbers)
            self._answers[number] = answer
            if ended is not None:
                self._ended[number] = ended
            self._socket.sendall(json.dumps({**request, "number": number}).encode() + b"\n")
        return answer.result(ANSWER_S)

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                said = json.loads(line)
                if "code" in said:
                    self._ended.pop(said["number"])(said["code"])
                else:
                    self._answers.pop(said["number"]).set_result(said["answer"])
        for answer in list(self._answers.values()):
            answer.set_exception(RuntimeError("the process that starts all others has ended"))


# The other side


def _import_everything(others: Sequence[str]) -> None:
    for name in ("shardline.cli.main", "shardline.cli.train", "shardline.rpc.names", *others):
        importlib.import_module(name)

    for role in importlib.metadata.entry_points(group="shardline.roles"):
        role.load()


class _Forker:
    """Forks whoever is asked for, and tells how each ends. One thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._data = b""
        self._living: dict[int, int] = {}

    def say(self, **said: int) -> None:
        self._socket.sendall(json.dumps(said).encode() + b"\n")

    def serve(self) -> Mapping[str, Any] | None:
        """Until the other side is gone: None. In a forked process: what it is to run."""
        woken, wake = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake.fileno())
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is woken:
                        with contextlib.suppress(BlockingIOError):
                            woken.recv(4096)
                        self._reap()
                        continue
                    data = self._socket.recv(1 << 16)
                    if not data:
                        self._kill_all()
                        return None
                    *lines, self._data = (self._data + data).split(b"\n")
                    for line in lines:
                        request = json.loads(line)
                        if self._serve(request):
                            signal.set_wakeup_fd(-1)
                            woken.close()
                            wake.close()
                            return request  # type: ignore[no-any-return]

    def _serve(self, request: Mapping[str, Any]) -> bool:
        """Do as asked; True in the process that was forked."""
        if "signal" in request:
            known = request["pid"] in self._living
            if known:
                os.killpg(request["pid"], request["signal"])
            self.say(number=request["number"], answer=int(known))
            return False
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            return True
        # Whoever comes first: the group must be there before anybody signals it.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._living[pid] = request["number"]
        self.say(number=request["number"], answer=pid)
        return False

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # What a process of ours left behind may have become a child of this one.
            number = self._living.pop(pid, None)
            if number is not None:
                self.say(number=number, code=os.waitstatus_to_exitcode(status))

    def _kill_all(self) -> None:
        for pid in self._living:
            os.killpg(pid, signal.SIGKILL)
        for pid in self._living:
            os.waitpid(pid, 0)


def _become(request: Mapping[str, Any]) -> int:
    """What a forked process does for the rest of its life."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(request["settings"])
    if request["network"]:
        handle = os.open(f"/run/netns/{request['network']}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"can't enter the network {request['network']}")
        os.close(handle)
    from shardline.cli.main import main

    sys.argv = ["shardline", *request["arguments"]]
    return main(request["arguments"])


def serve(handle: int, become: Callable[[Mapping[str, Any]], int], modules: Sequence[str]) -> int:
    """Import all tasks' modules and these, then fork for each request; returns the exit code, of a fork too."""
    connection = socket.socket(fileno=handle)
    # A shell without job control has what it starts in the background ignore Ctrl-C; forks are to hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _import_everything(modules)
    # What is imported stays: no collection in a fork goes through it, and its pages remain shared.
    gc.freeze()
    forker = _Forker(connection)
    forker.say(number=-1, answer=0)
    request = forker.serve()
    connection.close()
    return 0 if request is None else become(request)


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), _become, ("tests.chaos.job", "torch._dynamo")))

"""Processes of one machine without their imports: one process imports what all tasks need and is forked for each.

It runs no Python thread and opens no connection, so a fork of it is like a new interpreter after its imports. A forked
task becomes a child of the process that asked (which is made a "subreaper" for that), so it is waited for and
signalled like any other child. Linux only; elsewhere, and where it fails, tasks are started by exec.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib
import importlib.metadata
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import setproctitle

from shardline.host import lifeline

log = logging.getLogger("shardline.host.forkserver")

MAIN = "shardline.cli.main"
MODULES = (MAIN, "shardline.cli.roles", "shardline.rpc.names")
ENTRY_POINTS = "shardline.roles"
START_S = 120.0
"""Importing torch takes a while on a busy machine."""
READY = b"ready\n"
ANSWER_S = 20.0
MIN_WAIT_S = 0.001
"""A socket with a timeout of 0 doesn't wait at all."""
MAX_FDS = 16
MAX_REASON = 1000
"""Bytes of the sentence that says why no process can be forked."""
TITLE_BYTES = 4096
"""Room for a task's command line. The alternative, setproctitle's own, is the memory that /proc/PID/environ shows."""
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
CAN_FORK = sys.platform == "linux"
BEGUN_WITH = frozenset(os.environ)
"""Variables that this process began with."""
COMMAND = [sys.executable, "-P", "-m", "shardline"]
"""What a task's command line begins with; only such commands can be forked."""


class ForkedProcess:
    """A forked task, a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Reap it; returns its exit code, -N = ended by signal N."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkServer:
    """The process that is forked, as seen by the process that asks. Thread-safe."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        """Start it; returns at once.

        environment: what tasks have in common, since libraries read it as they load. modules: what it is to import
        besides Shardline and torch, where that works.
        """
        # From now on tasks become children of this process when the one that forked them has gone.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._lock = threading.Lock()
        self._ready = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process: Any = self._start(theirs, environment, modules)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def _start(self, theirs: socket.socket, environment: Mapping[str, str], modules: Sequence[str]) -> Any:
        arguments = [str(theirs.fileno()), *modules, " " * TITLE_BYTES]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "shardline.host.forkserver", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**environment, "SPT_NOENV": "1"},
            start_new_session=True,
        )

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: tuple[int, int], kept: Sequence[int]
    ) -> int:
        """Fork a task; returns its process id.

        command: COMMAND and the task's arguments. output: descriptors of its standard output and error. kept:
        descriptors that it inherits under the same numbers. Raises OSError where that can't be done.
        """
        request = {"command": list(command), "environment": dict(environment), "kept": list(kept)}
        data = json.dumps(request).encode()
        with self._lock:
            try:
                if not self._ready and not self._await_ready(START_S):
                    raise TimeoutError(f"imports took longer than {START_S:.0f} s")
                self._socket.settimeout(ANSWER_S)
                socket.send_fds(self._socket, [len(data).to_bytes(4, "big")], [*output, *kept])
                self._socket.sendall(data)
                pid = int(_read_line(self._socket))
            except BaseException:
                # Its answer may still come; it must never be taken for that of a later request.
                self._socket.close()
                raise
        if pid <= 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def await_ready(self, timeout_s: float) -> bool:
        """Wait until the imports are done; False after timeout_s. Raises OSError if no process can be forked."""
        with self._lock:
            return self._ready or self._await_ready(timeout_s)

    def _await_ready(self, timeout_s: float) -> bool:
        self._socket.settimeout(max(timeout_s, MIN_WAIT_S))
        try:
            line = _read_line(self._socket)
        except TimeoutError:
            return False
        if line != READY:
            raise OSError(line.decode(errors="replace").strip())
        self._ready = True
        return True

    def close(self) -> None:
        """End it, and a fork that it has not answered for; the tasks live on: each leads a session of its own."""
        self._socket.close()
        for end in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)
        self._process.wait()


class TaskStarter:
    """Starts tasks: as forks where that is possible, else with exec. Used by one thread at a time."""

    def __init__(self) -> None:
        self.server: ForkServer | None = None
        """The process that is forked; None where tasks are started by exec."""

    def begin(self, environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        """Begin the imports; returns at once. See ForkServer for the arguments."""
        if CAN_FORK:
            try:
                self.server = ForkServer(environment, modules)
            except OSError as error:
                log.warning("starting tasks without fork, since no process can be forked for them: %s", error)

    def await_ready(self, timeout_s: float) -> bool:
        """Wait until tasks can be started; False after timeout_s. For a thread that signals may interrupt."""
        if self.server is None:
            return True
        try:
            return self.server.await_ready(timeout_s)
        except OSError as error:
            self.give_up(error)
            return True

    def give_up(self, error: OSError) -> None:
        log.warning("starting tasks without fork from now on: %s", error)
        self.close()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: tuple[int, int], kept: Sequence[int]
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        """A new process in a session of its own; see ForkServer.start(). Raises OSError."""
        if self.server is not None and can_fork(command):
            try:
                return ForkedProcess(self.server.start(command, environment, output, kept))
            except OSError as error:
                self.give_up(error)
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output[0],
            stderr=output[1],
            env=environment,
            pass_fds=kept,
            start_new_session=True,
        )

    def close(self) -> None:
        """End the process that is forked; the tasks go on."""
        if self.server is not None:
            self.server.close()
            self.server = None


def can_fork(command: Sequence[str]) -> bool:
    """Whether a forked process can do the same as this command."""
    return CAN_FORK and list(command[: len(COMMAND)]) == COMMAND


def _read_line(connection: socket.socket) -> bytes:
    """A line; raises OSError where the other side has ended or takes too long."""
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(1024)
        if not data:
            raise ConnectionError("the process that forks the tasks has ended")
        line += data
    return line


def prctl(option: int, value: int | bytes) -> None:
    """Linux' call of this name. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


# The process that is forked


def import_all(modules: Sequence[str] = ()) -> None:
    """Import what any task needs, and these modules: a task that needs one that fails will say so itself.

    Raises RuntimeError where a fork of this process would not be like a new one.
    """
    for name in MODULES:
        importlib.import_module(name)
    for role in importlib.metadata.entry_points(group=ENTRY_POINTS):
        role.load()
    # Imports torch, as the roles do.
    from shardline.host.process import torch_threads

    # Other threads of torch's would be missing in a fork, which would wait for them.
    with torch_threads(1):
        for name in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.current_thread())
        raise RuntimeError(f"an import has started threads, which a forked process would not have: {names}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("an import has initialized CUDA, which can't be used after a fork")


def serve(connection: socket.socket) -> Callable[[], int] | None:
    """Fork for each request until the other side has gone: None. In a forked process: what it is to do."""
    connection.sendall(READY)
    while True:
        head, fds, _, _ = socket.recv_fds(connection, 4, MAX_FDS)
        if not head:
            return None
        request = json.loads(_read_exactly(connection, int.from_bytes(head, "big")))
        task = _fork(request, fds, connection)
        if task is not None:
            return task
        for fd in fds:
            os.close(fd)


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("a request was cut short")
        data += part
    return data


def _fork(request: Mapping[str, Any], fds: Sequence[int], connection: socket.socket) -> Callable[[], int] | None:
    """Fork twice, so that the task has no living parent here, and answer with its process id. None in this process."""
    read, write = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        os.close(read)
        os.close(write)
        connection.sendall(f"{-(error.errno or 1)}\n".encode())
        return None
    if between:
        os.close(write)
        with open(read, "rb") as answer:
            said = answer.read(64)
        # Only now is the task a child of the process that asked.
        os.waitpid(between, 0)
        connection.sendall(said or f"{-errno.EAGAIN}\n".encode())
        return None
    os.close(read)
    connection.close()
    try:
        pid = os.fork()
    except OSError as error:
        os.write(write, f"{-(error.errno or 1)}\n".encode())
        os._exit(0)
    if pid:
        os._exit(0)
    # Before its process id is known: it may be signalled as a group at once.
    os.setsid()
    os.write(write, f"{os.getpid()}\n".encode())
    os.close(write)
    return lambda: _become(request, fds)


def _become(request: Mapping[str, Any], fds: Sequence[int]) -> int:
    """Be the task for the rest of this process's life; returns its exit code."""
    command, kept = request["command"], request["kept"]
    for number, fd in enumerate(fds[:2], 1):
        os.dup2(fd, number)
        os.close(fd)
    _place(dict(zip(fds[2:], kept, strict=True)))
    # Before the environment changes: the new title takes the memory of the one that the process began with.
    # Show the task's own command line and name in lists of processes.
    setproctitle.setproctitle(" ".join(command).encode(errors="backslashreplace").decode())
    if "--task" in command:
        with contextlib.suppress(OSError):
            prctl(PR_SET_NAME, command[command.index("--task") + 1].encode())
    # What a module set as it was imported stays, as it would in a new interpreter.
    for name in BEGUN_WITH - request["environment"].keys():
        os.environ.pop(name, None)
    os.environ.update(request["environment"])
    # Generators that a new interpreter would seed from the system differ between tasks here too.
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    sys.argv = ["shardline", *command[len(COMMAND) :]]
    return int(importlib.import_module(MAIN).main(sys.argv[1:]))


def _place(wanted: Mapping[int, int]) -> None:
    """Give descriptors the numbers that the command names; inheritable, as subprocess leaves them."""
    # All are moved out of the way first: one may be where another is to be.
    above = 3 + max((*wanted.keys(), *wanted.values()), default=0)
    moved = {}
    for fd, number in wanted.items():
        moved[fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above)] = number
        os.close(fd)
    for fd, number in moved.items():
        os.dup2(fd, number)
        os.close(fd)


def reap_group(group: int) -> None:
    """Reap orphans of an ended task, which became children of this process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def _main() -> int:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    setproctitle.setproctitle(f"{sys.executable} -P -m shardline.host.forkserver")
    try:
        import_all([name for name in sys.argv[2:] if name.strip()])
    except Exception as error:
        connection.sendall(" ".join(f"{type(error).__name__}: {error}\n".split()).encode()[:MAX_REASON] + b"\n")
        return 1
    # What is imported stays: no collection in a fork looks at it, so its pages stay shared.
    gc.collect()
    gc.freeze()
    try:
        task = serve(connection)
    except ConnectionError:
        return 0
    if task is not None:
        end_as_fork(task)
    return 0


def end_as_fork(task: Callable[[], int]) -> NoReturn:
    """Run a forked task and end its process as an interpreter does, but for taking the inherited modules apart.

    That would take half a second, to copy and free pages that this process shares with others.
    """
    code = 1
    try:
        code = task()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    try:
        lifeline.leave(code)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(_main())

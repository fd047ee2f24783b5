"""A whole cluster on this machine, each task in a process of its own.

    with LocalCluster(LaunchOptions(job=Path("job.py"), ps=2, workers=2, out=Path("runs/x"))) as cluster:
        cluster.kill("worker/1")
        code = cluster.wait(timeout_s=60)

The launcher reserves the chief's port, so that a restarted chief can use it again; the chief reports on an inherited
pipe when it listens. The other tasks bind free ports and report them in their Join. Every task leads a session of its
own, so Ctrl-C in the terminal doesn't reach it, and has the read end of a pipe that closes when the launcher dies, in
whatever way.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from shardline import methods
from shardline.cli import prints
from shardline.cli.process_exits import (
    MAX_RESTARTS as MAX_RESTARTS,
    Ended,
    TaskExits,
    describe_code,
    lacking,
    last_words,
)
from shardline.cli.roles import COMMANDS
from shardline.cluster import ClusterSpec, parse_address, parse_task
from shardline.config import TaskSettings, check_out, check_standbys
from shardline.core.timeouts import Timeouts
from shardline.core.waiting import EVERY_S, Waiting
from shardline.errors import InternalError, ShardlineError, TaskLostError, UsageError, nearest
from shardline.host import files
from shardline.host.allocator import ALLOCATOR
from shardline.host.awake import awake_s
from shardline.host.forkserver import ForkedProcess, TaskStarter, reap_group
from shardline.host.ports import CAN_HOLD, held_port
from shardline.host.python_file import installed_imports
from shardline.host.run_lock import RunLock, unwritable
from shardline.lanes import AUTO, LANES
from shardline.roles import ROLES
from shardline.security import check_bind

FOR_SCRIPTS = (
    *("cluster", "timeout", "join_timeout", "device", "lane", "overlap", "run_dir", "out", "profile", "with_ps"),
    *("cold_dir", "tls_cert", "tls_key", "tls_ca", "token_file"),
)
"""Settings that shardline.connect() takes from the environment."""
AS_GIVEN = {one.name for one in fields(TaskSettings)} - (
    {"timeouts", "overrides", "security", "page", "replay", "run_dir", "cold_dir"}
)
"""Settings that are written for the tasks as they are."""
SCRIPT_FIELDS = ("consistency", "seed", "checkpoint_every")
"""Settings that shardline.connect() takes from the environment unless the script passes them."""
TAIL_BYTES = 8192
TAIL_LINES = 200
PRINTS_S = 2.0
"""How long the last prints of an ended task are waited for: a process that left its group may hold the pipe."""
LIFE_FD = "SHARDLINE_LIFE_FD"
"""Environment variable with a script's pipe that closes with the launcher; other tasks get --life-fd."""

# Tasks get their flags from the command line only: SHARDLINE_METRICS_PORT and the like were for the launcher.
# LOCAL_RANK and SLURM_LOCALID number the launcher itself.
NOT_INHERITED = {"TF_CONFIG", LIFE_FD, "LOCAL_RANK", "SLURM_LOCALID"} | {
    str(parameter.envvar) for command in COMMANDS for parameter in command.params if parameter.envvar
}


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(TaskSettings):
    """Options of a local cluster. job: the job file, or the training script if script is True."""

    job: Path
    out: Path
    ps: int = 1
    workers: int = 1
    evaluators: int = 0
    tasks: tuple[tuple[str, int], ...] = ()
    """Number of tasks of each other role: aggregators, and those that a plugin adds."""
    ps_device: str = "cpu"
    script: bool = False
    script_args: tuple[str, ...] = ()
    restart: bool = True
    """Restart tasks that die, at most MAX_RESTARTS times each."""
    prints: str = prints.NONE
    """Tasks whose prints LocalCluster hands on: the first worker (first), all tasks (all), or none (none)."""

    def __post_init__(self) -> None:
        check_out(self.out)
        if self.ps < 1:
            raise UsageError(f"--ps is {self.ps}; at least one parameter server is needed")
        check_standbys(self.standbys, self.ps)
        if self.workers < 0 or self.evaluators < 0:
            raise UsageError("--workers and --evaluators can't be negative")
        for role, count in self.tasks:
            if role not in ROLES or not ROLES[role].optional:
                what = "has a flag of its own" if role in ROLES else "does not exist, or its plugin is not loaded"
                instead = "use --ps, --workers or --evaluators, or load its plugin: --plugin FILE"
                close = "" if role in ROLES else nearest(role, ROLES)
                raise UsageError(f"--tasks {role}={count}: the role {what}; {instead}{close}")
        if self.workers == 0 and not self.chief_trains:
            raise UsageError("--workers is 0, so no task would train; add workers, or use --chief-trains")
        trainers = self.workers + self.chief_trains
        if self.min_workers > trainers:
            raise UsageError(
                f"--min-workers is {self.min_workers}, but only {trainers} tasks train: the job would wait forever; "
                f"use at most {trainers}, or more --workers"
            )
        if self.script and (self.evaluators or self.chief_trains):
            raise UsageError("--script allows only workers: --evaluators and --chief-trains need a job file")
        for name, _ in self.overrides if self.script else ():
            if name not in SCRIPT_FIELDS:
                raise UsageError(
                    f"--script: {name} is decided by the script itself; pass it to the script after --, or set one of "
                    f"{', '.join(SCRIPT_FIELDS)}"
                )
        for name, text in self.overrides:
            methods.check_override(name, text)
        if self.page is not None:
            host = parse_address(self.page, "--page")[0]
            check_bind("the chief's page", host, "--page", self.security, insecure=self.insecure_bind)

    def check_tasks(self) -> None:
        """Raise JobError or UsageError for flags that every task would refuse.

        Imports torch if it has to look: best done while the process that is forked imports it too.
        """
        for name, text in self.overrides:
            methods.check_method(name, text)
        for flag, name in (("--device", self.device), ("--ps-device", self.ps_device)):
            if name != "cpu":
                # Imports torch, which --help must not do.
                from shardline.host.process import check_device

                check_device(name, flag)
            # A script may put its model elsewhere.
            if self.lane != AUTO and not (self.script and flag == "--device"):
                import torch

                if not LANES.parse(self.lane).suits(local=True, device=torch.device(name)):
                    raise UsageError(
                        f"--lane {self.lane} can't share the memory of {flag} {name}: use --device cuda and "
                        "--ps-device cuda, or --lane auto"
                    )

    def runs_script(self, task: str) -> bool:
        return self.script and parse_task(task)[0] == "worker"

    def describe(self, task: str, code: int) -> str:
        """How a process of a task ended, for messages."""
        return describe_code(code, script=self.runs_script(task))

    def settings(self) -> dict[str, Any]:
        """Settings of all tasks, by the names of their flags, for --settings-file; a task reads those of its role."""
        paths = {**vars(self.security), "run_dir": self.run_dir, "cold_dir": self.cold_dir, "replay": self.replay}
        return {
            "cluster": str(cluster_path(self.out)),
            "out": str(self.out),
            "job": None if self.script else str(self.job),
            "settings": [f"{name}={value}" for name, value in self.overrides],
            "timeout": self.timeouts.total_s,
            "join_timeout": self.timeouts.join_s,
            "page": self.page or "off",
            **{name: getattr(self, name) for name in sorted(AS_GIVEN)},
            # Absolute, since a script may change its folder; never the secrets themselves.
            **{name: str(path.absolute()) for name, path in paths.items() if isinstance(path, Path)},
        }

    def spec(self, chief: str = "127.0.0.1:0") -> ClusterSpec:
        """The cluster spec; port 0 means that the task binds a free port."""
        counts = {"ps": self.ps, "worker": self.workers, "evaluator": self.evaluators, **dict(self.tasks)}
        tasks = {role: ("127.0.0.1:0",) * count for role, count in counts.items() if count}
        return ClusterSpec({"chief": (chief,), **tasks})

    @property
    def processes(self) -> tuple[str, ...]:
        """The tasks that have a process of their own."""
        own = {f"ps/{index}" for index in range(self.workers)} if self.with_ps else {}
        return tuple(task for task in self.spec().task_names() if task not in own)


def task_command(
    options: LaunchOptions, task: str, *, ready_fd: int | None, life_fd: int, lock_fd: int | None = None
) -> list[str]:
    if options.runs_script(task):
        return [sys.executable, str(options.job), *options.script_args]
    role, _ = parse_task(task)
    # -P: modules in the working directory (a user's queue.py) must not hide the standard library's.
    command = [sys.executable, "-P", "-m", "shardline", role, "--task", task]
    command += ["--settings-file", str(settings_path(options.out)), "--life-fd", str(life_fd)]
    for flag, fd in (("--ready-fd", ready_fd), ("--lock-fd", lock_fd)):
        command += [flag, str(fd)] if fd is not None else []
    return command + (["--device", options.ps_device] if ROLES[role].holds else [])


def common_environment(base: Mapping[str, str]) -> dict[str, str]:
    settings = {name: value for name, value in base.items() if name not in NOT_INHERITED}
    return {**settings, **ALLOCATOR, "PYTHONUNBUFFERED": "1"}


def task_environment(options: LaunchOptions, task: str, *, life_fd: int, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of a task; the number of threads is left to the job."""
    settings = common_environment(base)
    if options.runs_script(task):
        for name, value in options.settings().items():
            if name in FOR_SCRIPTS:
                settings[f"SHARDLINE_{name.upper()}"] = str(int(value)) if isinstance(value, bool) else str(value)
        settings |= {"SHARDLINE_TASK": task, LIFE_FD: str(life_fd)}
        # As torchrun does: otherwise each of several processes would use all cores, at the others' expense.
        settings.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.workers)))
        settings |= {f"SHARDLINE_{name.upper()}": value for name, value in options.overrides}
    return settings


def cluster_path(out: Path) -> Path:
    return out / "cluster.json"


def settings_path(out: Path) -> Path:
    return out / "settings.json"


def _write(path: Path, text: str) -> None:
    try:
        files.replace(path, text.encode())
    except OSError as error:
        raise unwritable(path.parent, error) from None


@dataclass
class _Child:
    process: subprocess.Popen[bytes] | ForkedProcess
    printed: prints.Printed
    watcher: threading.Thread | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    code: int | None = None

    def ends_by(self, deadline_s: float) -> bool:
        """Wait until it has ended; False if it has not by then."""
        while not self.ended.wait(max(0.0, deadline_s - awake_s())):
            if awake_s() >= deadline_s:
                return False
        return True


class LaunchError(ShardlineError):
    """The chief ended before the cluster was up; `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class LocalCluster:
    """Starts, watches, restarts and ends the processes of one cluster. Thread-safe.

    `events` gets an Ended for each process that ends; reading it is optional.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self.options = options
        self.say: Callable[[str], None] = lambda sentence: None
        """Called with a message for the user on what the start waits for."""
        self.printed: Callable[[str, str], None] = lambda task, line: None
        """Called with a task that options.prints chooses, and each line that it prints, on threads of their own."""
        self.lock: RunLock | None = None
        """Lock of --out, held from before the first byte is written there until every process has ended."""
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.chief_address = ""
        self._lock = threading.RLock()
        self._children: dict[str, _Child] = {}
        self._exits = TaskExits(options.processes, script=options.script)
        self._stopping = False
        self._held: set[str] = set()
        self.up = False
        """Entered as a context, with all processes started."""
        self._spawning = False
        self._given_up: BaseException | None = None
        self._chief_port: socket.socket | None = None
        """Reserves the port, so that no connection of this machine can take it while the chief is restarted."""
        self._life_read, self._life_write = os.pipe()
        self._starter = TaskStarter()

    def __enter__(self) -> LocalCluster:
        try:
            self.start()
            self.up = True
        except BaseException:
            self.stop(grace_s=0.0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    # Starting

    def start(self) -> None:
        """Start all tasks and read the chief's address. Raises LaunchError if the chief ends first."""
        with self._undisturbed():
            modules = [] if self.options.script else installed_imports(self.options.job)
            self._starter.begin(common_environment(os.environ), modules)
        self.options.check_tasks()
        self.lock = RunLock.take(self.options.out / "chief")
        try:
            (self.options.out / "logs").mkdir(parents=True, exist_ok=True)
            _write(settings_path(self.options.out), json.dumps(self.options.settings(), indent=2))
            _write(cluster_path(self.options.out), self.options.spec(self.reserved_address()).to_json())
            _prepare_logs([self.log_path(task) for task in self.tasks()], keep=self.options.resume)
        except OSError as error:
            raise unwritable(self.options.out, error) from None
        # Here, where nothing is held and a signal ends it.
        _await_imports(self._starter, _join_wait(self.options.timeouts), self.say)
        ready_read, ready_write = os.pipe()
        try:
            try:
                self._spawn("chief/0", ready_fd=ready_write)
            finally:
                # Only the chief may hold the write end, or its death would not close the pipe.
                os.close(ready_write)
            others = [task for task in self.tasks() if task != "chief/0"]
            if self._chief_port is not None:
                # Its address is known, so the others start while it does, and dial it until it listens.
                for task in others:
                    self._spawn(task)
            self.chief_address = self._read_address(ready_read)
        finally:
            os.close(ready_read)
        if self._chief_port is None:
            _write(cluster_path(self.options.out), self.options.spec(self.chief_address).to_json())
            for task in others:
                self._spawn(task)

    def reserved_address(self) -> str:
        """Reserve a port for the chief; returns its address."""
        if not CAN_HOLD:
            return "127.0.0.1:0"
        self._chief_port = held_port()
        return f"127.0.0.1:{self._chief_port.getsockname()[1]}"

    def _read_address(self, fd: int) -> str:
        """Read the address that the chief reports once it listens; waits as long as its process is running."""
        waiting = _join_wait(self.options.timeouts)
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                ready = selector.select(waiting.pause_s(awake_s()))
                # Children of the chief may keep the write end open after its death.
                if not ready and not self._child("chief/0").ended.is_set():
                    now_s = awake_s()
                    if now_s >= waiting.deadline_s:
                        raise TaskLostError(
                            f"chief/0 did not report its address within {self.options.timeouts.join_s:.0f} s; see "
                            f"{self.log_path('chief/0')}"
                        )
                    self.say(waiting.sentence(now_s, "chief/0 to start"))
                    continue
                data = os.read(fd, 256) if ready else b""
                if not data:
                    code = self.wait_exit("chief/0", timeout_s=10.0)
                    raise LaunchError(self.last_words("chief/0") or f"chief/0 {describe_code(code)}", code)
                line += data
        return line.decode().strip()

    def _spawn(self, task: str, *, ready_fd: int | None = None) -> None:
        life_fd = self._life_read
        lock_fd = self.lock.fd if self.lock is not None and task == "chief/0" else None
        command = task_command(self.options, task, ready_fd=ready_fd, life_fd=life_fd, lock_fd=lock_fd)
        with self._undisturbed(), self._lock, os.fdopen(files.append_fd(self.log_path(task)), "ab") as log:
            if self._stopping:
                return
            environment = task_environment(self.options, task, life_fd=life_fd, base=os.environ)
            kept = [fd for fd in (life_fd, ready_fd, lock_fd) if fd is not None]
            shown = task in prints.shown(self.options.prints, self.tasks())
            with prints.Printed(log.fileno(), (lambda line: self.printed(task, line)) if shown else None) as printed:
                child = _Child(self._starter.start(command, environment, (printed.fd, log.fileno()), kept), printed)
            self._children[task] = child
            child.watcher = threading.Thread(target=self._watch, args=(task, child), name=f"watch-{task}", daemon=True)
            child.watcher.start()

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Within it, no signal handler raises between a process's start and its registration; see give_up()."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._spawning = True
        try:
            yield
        finally:
            self._spawning = False
        if self._given_up is not None:
            raise self._given_up

    def give_up(self, error: BaseException) -> None:
        """For signal handlers during the start: raise the error, but only once a process being started is registered.

        Does nothing if the cluster is being shut down already.
        """
        if self._spawning:
            self._given_up = error
        elif not self._stopping:
            raise error

    # Watching

    def _watch(self, task: str, child: _Child) -> None:
        pid = child.process.pid
        # The process stays a zombie until it is reaped under the lock, so we can't signal another process with its pid.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        # Also end what the task itself started and left behind.
        _signal_group(pid, signal.SIGKILL)
        child.printed.join(PRINTS_S)
        with self._lock:
            code = child.process.wait()
            reap_group(pid)
            child.code = code
            restarted, reason = self._after(task, code)
            child.ended.set()
        self.events.put(Ended(task, code, restarted, f"{task} {self.options.describe(task, code)}: {reason}"))

    def _after(self, task: str, code: int) -> tuple[bool, str]:
        chief = self._children["chief/0"]
        if self._stopping or (task != "chief/0" and chief.code is not None):
            return False, "the job has ended"
        if not self.options.restart or task in self._held:
            return False, "it is not restarted"
        if task == "chief/0" and not self.chief_address:
            return False, "it had not started"
        restart, reason = self._exits.ended(task, code)
        if not restart:
            return False, reason
        try:
            self._spawn(task)
        except OSError as error:
            return False, f"it can't be restarted: {error.strerror}"
        return True, reason

    def _child(self, task: str) -> _Child:
        with self._lock:
            if task not in self._children:
                known = ", ".join(self._children) or "none yet"
                raise InternalError(f"no process was started for task {task}; started: {known}")
            return self._children[task]

    def tasks(self) -> tuple[str, ...]:
        return self.options.processes

    def pid(self, task: str) -> int:
        return self._child(task).process.pid

    def running(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(task for task, child in self._children.items() if child.code is None)

    def lacking(self, *, begun: bool) -> str:
        """Why the job can't continue without the processes that are gone for good, as a phrase; empty if it can.

        Includes processes with exit code 0: only the chief knows whether the job still needs them.
        """
        options = self.options
        with self._lock:
            gone = {task: child.code for task, child in self._children.items() if child.code is not None}
        return lacking(
            options.processes,
            gone,
            chief_trains=options.chief_trains,
            min_workers=options.min_workers,
            script=options.script,
            begun=begun,
        )

    def log_path(self, task: str) -> Path:
        return self.options.out / "logs" / f"{task.replace('/', '-')}.log"

    def log_tail(self, task: str, lines: int = 10) -> list[str]:
        try:
            with files.open_binary(self.log_path(task)) as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                return log.read().decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []

    def last_words(self, task: str) -> str:
        """The message a task ended with: that of the command, or its last logged error; empty if there is none."""
        return last_words(self.log_tail(task, TAIL_LINES), script=self.options.runs_script(task))

    def wait_exit(self, task: str, *, timeout_s: float) -> int:
        """Wait until a task's current process ends; returns its exit code. Raises TaskLostError after timeout_s."""
        child = self._child(task)
        if not child.ends_by(awake_s() + timeout_s) or child.code is None:
            raise TaskLostError(f"{task} did not end within {timeout_s:.0f} s")
        return child.code

    def wait(self, *, timeout_s: float) -> int:
        """Wait until the job has ended; returns the chief's exit code. Raises TaskLostError after timeout_s.

        A chief that is restarted has not ended the job.
        """
        deadline_s = awake_s() + timeout_s
        while True:
            child = self._child("chief/0")
            code = self.wait_exit("chief/0", timeout_s=max(0.0, deadline_s - awake_s()))
            if self._child("chief/0") is child:
                return code

    def wait_all(self, *, timeout_s: float) -> tuple[str, ...]:
        """Wait until every process has ended by itself; returns the tasks still running after timeout_s."""
        deadline_s = awake_s() + timeout_s
        with self._lock:
            children = list(self._children.values())
        for child in children:
            child.ends_by(deadline_s)
        return self.running()

    # Ending

    def _signal(self, task: str, number: signal.Signals, *, group: bool) -> None:
        with self._lock:
            child = self._child(task)
            if child.code is not None:
                return
            if group:
                _signal_group(child.process.pid, number)
            else:
                os.kill(child.process.pid, number)

    def interrupt(self) -> None:
        """Ask the chief to end the job with a checkpoint; it notifies all others."""
        self._signal("chief/0", signal.SIGTERM, group=False)

    def kill(self, task: str, *, restart: bool = True) -> None:
        """SIGKILL a task and its children; it is restarted like any dead task, unless restart is False."""
        with self._lock:
            child = self._child(task)
            (self._held.discard if restart else self._held.add)(task)
            self._signal(task, signal.SIGKILL, group=True)
        if not child.ended.wait(10.0):
            raise InternalError(f"{task} (pid {child.process.pid}) is still running 10 s after SIGKILL")

    def restart(self, task: str) -> None:
        """Start a task again, after killing any process it has. Doesn't count as one of its restarts."""
        self.kill(task, restart=False)
        with self._lock:
            self._held.discard(task)
            self._spawn(task)

    def stop(self, *, grace_s: float = 5.0) -> None:
        """End every process: SIGTERM, then SIGKILL after grace_s seconds. All are gone on return. Repeatable."""
        with self._lock:
            self._stopping = True
            for task in self.running():
                self._signal(task, signal.SIGTERM, group=False)
        if grace_s > 0:
            self.wait_all(timeout_s=grace_s)
        for task in self.running():
            self._signal(task, signal.SIGKILL, group=True)
        left = self.wait_all(timeout_s=10.0)
        with self._lock:
            self._starter.close()
            if self._chief_port is not None:
                self._chief_port.close()
            if self.lock is not None:
                self.lock.close()
            for fd in (self._life_read, self._life_write):
                if fd >= 0:
                    os.close(fd)
            self._life_read = self._life_write = -1
        if left:
            raise InternalError(f"{', '.join(left)} can't be killed; pids {[self.pid(task) for task in left]}")


def _prepare_logs(paths: list[Path], *, keep: bool) -> None:
    """Remove all logs in the tasks' folder, unless `keep`. Raises OSError where one of these can't be written."""
    for old in [] if keep else paths[0].parent.glob("*.log"):
        old.unlink()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.close(files.update_fd(path))


def _join_wait(timeouts: Timeouts) -> Waiting:
    now_s = awake_s()
    return Waiting(now_s, now_s + timeouts.join_s, first_s=EVERY_S)


def _await_imports(starter: TaskStarter, waiting: Waiting, say: Callable[[str], None]) -> None:
    while not starter.await_ready(waiting.pause_s(awake_s())):
        now_s = awake_s()
        if now_s >= waiting.deadline_s:
            starter.give_up(TimeoutError("imports take too long"))
            return
        say(waiting.sentence(now_s, "Python to import torch and the tasks' code"))


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)

"""A cluster of real processes that can be killed, paused, kept away and cut off from each other, by whoever started it.

Each task may have a network namespace of its own, on a switch that has one too: nothing of the machine's own network is
touched, and all of it goes with the namespaces. That needs root and iptables; see why_no_networks().
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from shardline.allocator import ALLOCATOR
from tests.e2e.support import free_ports

NET = "10.97.0"
PORT = 2222
RESTARTS = 12
"""How often a task that failed is started again, as a supervisor would."""
GRACE_S = 10.0


def why_no_networks() -> str:
    """Why tasks can't have networks of their own here; empty where they can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [tool for tool in ("ip", "iptables", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    name = f"slprobe{os.getpid()}"
    try:
        _ip("netns", "add", name)
        try:
            _run("ip", "netns", "exec", name, "iptables", "-A", "INPUT", "-s", "192.0.2.1", "-j", "DROP")
        finally:
            _ip("netns", "delete", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"they can't be made here: {error}"
    return ""


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=check)
    return done.stdout


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


class Networks:
    """A namespace per task with one interface, 10.97.0.N, and a switch between them."""

    def __init__(self, tasks: Sequence[str]) -> None:
        self.name = f"slc{os.getpid()}"
        self._numbers = {task: number for number, task in enumerate(tasks, start=1)}
        self._made: list[str] = []

    def __enter__(self) -> Networks:
        try:
            switch = self._make("s")
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
            for number in self._numbers.values():
                host = self._make(str(number))
                _ip("-n", host, "link", "set", "lo", "up")
                _ip("-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{number}")
                _ip("-n", host, "link", "set", f"p{number}", "netns", switch)
                _ip("-n", host, "addr", "add", f"{NET}.{number}/24", "dev", "eth0")
                _ip("-n", host, "link", "set", "eth0", "up")
                _ip("-n", switch, "link", "set", f"p{number}", "master", "br0", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _make(self, suffix: str) -> str:
        name = f"{self.name}{suffix}"
        _ip("netns", "add", name)
        self._made.append(name)
        return name

    def close(self) -> None:
        """Take all of it away."""
        for name in self._made:
            _run("ip", "netns", "delete", name, check=False)
        self._made.clear()

    def address(self, task: str) -> str:
        """IP address of a task."""
        return f"{NET}.{self._numbers[task]}"

    def prefix(self, task: str) -> list[str]:
        """What stands before a command to run it in a task's network."""
        return ["ip", "netns", "exec", f"{self.name}{self._numbers[task]}"]

    @contextlib.contextmanager
    def deaf(self, task: str, peer: str) -> Iterator[None]:
        """Nothing from peer reaches task."""
        rule = ["INPUT", "-s", self.address(peer), "-j", "DROP"]
        _run(*self.prefix(task), "iptables", "-A", *rule)
        try:
            yield
        finally:
            _run(*self.prefix(task), "iptables", "-D", *rule)

    @contextlib.contextmanager
    def slow(self, task: str) -> Iterator[None]:
        """What the task sends goes at 1 Mbit/s."""
        shape = ["tbf", "rate", "1mbit", "burst", "16kb", "latency", "400ms"]
        _run(*self.prefix(task), "tc", "qdisc", "add", "dev", "eth0", "root", *shape)
        try:
            yield
        finally:
            _run(*self.prefix(task), "tc", "qdisc", "del", "dev", "eth0", "root")


@dataclass
class Task:
    """One place in the cluster, and the process that has it at present."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    away: bool = False
    codes: list[int] = field(default_factory=list)


class Field:
    """The cluster. A task that ends with another code than 0 is started again, unless it is kept away."""

    def __init__(
        self,
        folder: Path,
        job: Path,
        *,
        counts: Mapping[str, int],
        timeout_s: float,
        flags: Sequence[str] = (),
        networks: bool = False,
    ) -> None:
        self.folder = folder
        self.out = folder / "run"
        self._job = job
        self._timeout_s = timeout_s
        self._flags = tuple(flags)
        names = [f"{role}/{index}" for role, count in counts.items() for index in range(count)]
        self.tasks = {name: Task(name) for name in names}
        self.networks = Networks(names) if networks else None
        ports = iter(free_ports(len(names)))
        where = {
            name: f"{self.networks.address(name)}:{PORT}" if self.networks else f"127.0.0.1:{next(ports)}"
            for name in names
        }
        self._spec = {role: [where[f"{role}/{index}"] for index in range(count)] for role, count in counts.items()}
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._watchers: list[threading.Thread] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Field:
        (self.out / "logs").mkdir(parents=True)
        (self.folder / "cluster.json").write_text(json.dumps(self._spec), encoding="utf-8")
        if self.networks is not None:
            self._stack.enter_context(self.networks)
        for name in self.tasks:
            self.start(name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        with self._lock:
            living = [task.process for task in self.tasks.values() if task.process is not None]
        for process in living:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGKILL)
        for watcher in self._watchers:
            watcher.join(GRACE_S)
        self._stack.close()

    def log(self, name: str) -> Path:
        """What a task has printed, all of its processes."""
        return self.out / "logs" / f"{name.replace('/', '-')}.log"

    def start(self, name: str) -> None:
        """Start a task's process."""
        role = name.split("/")[0]
        command = [] if self.networks is None else self.networks.prefix(name)
        command += [sys.executable, "-P", "-m", "shardline", role, "--cluster", str(self.folder / "cluster.json")]
        command += ["--task", name, "--out", str(self.out), "--timeout", str(self._timeout_s), "--job", str(self._job)]
        command += self._flags if role == "chief" else ()
        # The own network of this test is nobody else's.
        plain = {} if self.networks is None else {"SHARDLINE_INSECURE_BIND": "true"}
        with self._lock, self.log(name).open("ab") as log:
            if self._ended.is_set():
                return
            task = self.tasks[name]
            task.starts += 1
            task.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ALLOCATOR, **plain, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
            watcher = threading.Thread(target=self._watch, args=(task, task.process), daemon=True)
            self._watchers.append(watcher)
            watcher.start()

    def _watch(self, task: Task, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._lock:
            task.codes.append(code)
            if task.process is process:
                task.process = None
            again = code != 0 and not task.away and task.starts <= RESTARTS
        # As supervisors do: not at once, in case it fails at once.
        if again and not self._ended.wait(0.3):
            self.start(task.name)

    # What happens to it

    def kill(self, name: str) -> float:
        """SIGKILL; returns the time of it."""
        with self._lock:
            process = self.tasks[name].process
            if process is not None:
                os.killpg(process.pid, signal.SIGKILL)
            return time.time()

    def keep_away(self, name: str, seconds: float) -> None:
        """Kill it, and start it again later."""
        task = self.tasks[name]
        with self._lock:
            task.away = True
        self.kill(name)
        self._ended.wait(seconds)
        with self._lock:
            task.away = False
        if not self._ended.is_set():
            self.start(name)

    def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later, to the same process."""
        with self._lock:
            process = self.tasks[name].process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGSTOP)
            self._ended.wait(seconds)
            os.killpg(process.pid, signal.SIGCONT)

    def cut(self, name: str, peer: str, seconds: float, *, both: bool) -> None:
        """No packets from peer to the task, and with `both` none the other way either."""
        assert self.networks is not None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.networks.deaf(name, peer))
            if both:
                stack.enter_context(self.networks.deaf(peer, name))
            self._ended.wait(seconds)

    def slow(self, name: str, seconds: float) -> None:
        """A slow link."""
        assert self.networks is not None
        with self.networks.slow(name):
            self._ended.wait(seconds)

    def wait(self, name: str, limit_s: float) -> int:
        """Wait until a task has ended for good; its exit code. Raises AssertionError when the time is up."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            with self._lock:
                task = self.tasks[name]
                done = task.process is None and bool(task.codes) and (task.codes[-1] == 0 or task.starts > RESTARTS)
            if done:
                return task.codes[-1]
            self._ended.wait(0.05)
        raise AssertionError(f"{name} has not ended within {limit_s:.0f} s; it ended with {self.tasks[name].codes}")

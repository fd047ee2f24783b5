"""A cluster of real processes that can be killed, paused, kept away and cut off, under a supervisor that starts them.

Each task may have a network namespace of its own (network.py). The supervisor is one as people use them: a task that
ends with another code than 0 is started again a moment later, with the same command line; nothing else is done for it.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.chaos.job import MARKS, STEP_S, read_marks
from tests.chaos.network import Networks
from tests.chaos.nursery import Starter
from tests.e2e.support import held_ports

PORT = 2222
RESTART_DELAY_S = 0.3
PACE_S = 0.03
"""A batch takes at least this long, so that there is a middle to be killed in."""
WRITING_POLL_S = 0.001
"""A small checkpoint is written in tens of milliseconds."""


@dataclass
class Task:
    """One place in the cluster, and the process that has it at present."""

    name: str
    pid: int = 0
    """0 = none."""
    starts: int = 0
    away: bool = False
    codes: list[int] = field(default_factory=list)
    """Of all its processes that have ended."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Of the present process."""


class Field:
    """The cluster. Open with a folder that is empty."""

    def __init__(
        self,
        starter: Starter,
        folder: Path,
        job: Path,
        *,
        counts: Mapping[str, int],
        timeout_s: float,
        flags: Sequence[str] = (),
        own: bool = False,
        networks: bool = False,
        restarts: int = 12,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """flags: of the chief. own: each worker is also the ps with its index. restarts: so often is a task that failed
        started again. settings: environment.
        """
        self.folder = folder
        self.out = folder / "run"
        self._starter = starter
        self._job = job
        self._timeout_s = timeout_s
        self._flags = tuple(flags)
        self._restarts = restarts
        names = [f"{role}/{index}" for role, count in counts.items() for index in range(count)]
        self._names, self._own = names, own
        within = {f"ps/{index}" for index in range(counts["worker"])} if own else {}
        self.tasks = {name: Task(name) for name in names if name not in within}
        self.networks = Networks(names) if networks else None
        self._counts = counts
        # The own network of this test is nobody else's.
        plain = {"SHARDLINE_INSECURE_BIND": "true"} if networks else {}
        self._settings = {MARKS: str(folder / "marks"), STEP_S: str(PACE_S), **plain, **(settings or {})}
        self._lock = threading.Lock()
        """One start at a time."""
        self._book = threading.Lock()
        """What is known of the tasks' processes; held for moments only."""
        self._over = threading.Event()
        self._due: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True, name="supervisor")
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Field:
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            (self.out / "logs").mkdir(parents=True)
            if self.networks is not None:
                stack.enter_context(self.networks)
            self._write_spec(stack)
            self._supervisor.start()
            for task in self.tasks.values():
                self._start(task)
            # Processes must be gone before their networks are.
            stack.callback(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def _end(self) -> None:
        self._over.set()
        self._due.put(None)
        if self._supervisor.is_alive():
            self._supervisor.join(10.0)
        with self._lock, self._book:
            living = [task for task in self.tasks.values() if task.pid]
        for task in living:
            self._starter.signal(task.pid, signal.SIGKILL)
        for task in living:
            task.ended.wait(10.0)

    def _write_spec(self, stack: contextlib.ExitStack) -> None:
        """cluster.json; ports of this machine stay the tasks' own until the end, whoever of them is away."""
        names = self._names
        if self.networks is not None:
            places = {name: f"{self.networks.address(name)}:{PORT}" for name in names}
        else:
            ports = stack.enter_context(held_ports(len(names)))
            places = {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}
        spec: dict[str, list[str]] = {}
        for name, place in places.items():
            spec.setdefault(name.split("/")[0], []).append(place)
        (self.folder / "cluster.json").write_text(json.dumps(spec), encoding="utf-8")

    # The supervisor

    def log(self, name: str) -> Path:
        """What a task has printed, all of its processes."""
        return self.out / "logs" / f"{name.replace('/', '-')}.log"

    def command(self, name: str) -> list[str]:
        """Arguments of `shardline` for a task."""
        role = name.split("/")[0]
        command = [role, "--cluster", str(self.folder / "cluster.json"), "--task", name, "--out", str(self.out)]
        # Who is started again after the job's end finds no chief, and need not wait for it for minutes here.
        limits = ["--timeout", str(self._timeout_s), "--join-timeout", str(self._timeout_s)]
        command += [*limits, "--job", str(self._job)]
        command += ["--with-ps"] if self._own and role in ("chief", "worker", "evaluator") else []
        return [*command, *self._flags] if role == "chief" else command

    def run(self, name: str, log: Path, limit_s: float) -> int:
        """A second process with a task's command line and network, run to its end; its exit code."""
        found: queue.SimpleQueue[int] = queue.SimpleQueue()
        pid = self._launch(name, log, found.put)
        try:
            return found.get(timeout=limit_s)
        except queue.Empty:
            self._starter.signal(pid, signal.SIGKILL)
            found.get(timeout=10.0)
            raise AssertionError(f"a second {name} has not ended within {limit_s:.0f} s; see {log}") from None

    def _launch(self, name: str, log: Path, ended: Callable[[int], None]) -> int:
        network = "" if self.networks is None else self.networks.namespace(name)
        return self._starter.start(self.command(name), log=log, network=network, settings=self._settings, ended=ended)

    def _start(self, task: Task) -> None:
        with self._lock:
            if self._over.is_set() or task.pid:
                return
            task.starts += 1
            task.ended = gone = threading.Event()

            def ended(code: int) -> None:
                # In the starter's thread, which must go on: it is what answers the next start.
                with self._book:
                    task.codes.append(code)
                    task.pid = 0
                    gone.set()
                if code != 0:
                    self._due.put(task)

            pid = self._launch(task.name, self.log(task.name), ended)
            with self._book:
                # It may have ended before it is known to have begun.
                if not gone.is_set():
                    task.pid = pid

    def _supervise(self) -> None:
        while (task := self._due.get()) is not None:
            if self._over.wait(RESTART_DELAY_S):
                return
            if not task.away and task.starts <= self._restarts:
                self._start(task)

    # What happens to it

    def kill(self, name: str) -> float:
        """SIGKILL; returns the unix time of it."""
        at = time.time()
        self._signal(name, signal.SIGKILL)
        return at

    def _signal(self, name: str, number: signal.Signals) -> int:
        pid = self.tasks[name].pid
        return pid if pid and self._starter.signal(pid, number) else 0

    def keep_away(self, name: str, seconds: float) -> None:
        """Kill it, and start it again only later."""
        task = self.tasks[name]
        gone = task.ended
        task.away = True
        try:
            if self.tasks[name].pid:
                self.kill(name)
                gone.wait(10.0)
            self._over.wait(seconds)
        finally:
            task.away = False
        if task.codes[-1:] != [0]:
            self._due.put(task)

    def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later, to the same process."""
        pid = self._signal(name, signal.SIGSTOP)
        if pid:
            self._over.wait(seconds)
            self._starter.signal(pid, signal.SIGCONT)

    def freeze(self, seconds: float) -> None:
        """SIGSTOP to every task that is there, and SIGCONT later, as when their machine is frozen or moved."""
        # Nobody is started meanwhile either.
        with self._lock:
            stopped = [pid for name in self.tasks if (pid := self._signal(name, signal.SIGSTOP))]
            self._over.wait(seconds)
            for pid in stopped:
                self._starter.signal(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def cut(self, name: str, peers: Sequence[str], *, there: bool, back: bool) -> Iterator[None]:
        """No packets from the task to its peers (there), from them to it (back)."""
        assert self.networks is not None
        with contextlib.ExitStack() as stack:
            if back:
                stack.enter_context(self.networks.deaf(name, peers))
            for peer in peers if there else ():
                stack.enter_context(self.networks.deaf(peer, [name]))
            yield

    def writing(self, limit_s: float) -> bool:
        """Wait until a checkpoint is being written; False where the job ends before, or nothing comes in that time."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s and not self.finished():
            if any((self.out / "checkpoints").glob("tmp-*")):
                return True
            # A file wakes nobody.
            if self._over.wait(WRITING_POLL_S):
                return False
        return False

    def sleep(self, seconds: float) -> bool:
        """Let time pass; True where the field is being ended."""
        return self._over.wait(seconds)

    def marks(self) -> list[float]:
        """Unix time of every batch that was computed."""
        return read_marks(self.folder / "marks")

    def finished(self) -> bool:
        """Whether the chief has ended the job."""
        return self.tasks["chief/0"].codes[-1:] == [0]

    def wait(self, name: str, limit_s: float) -> int:
        """Wait until a task has ended for good; its exit code. Raises AssertionError when the time is up."""
        task = self.tasks[name]
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if not task.pid and task.codes and (task.codes[-1] == 0 or task.starts > self._restarts):
                return task.codes[-1]
            task.ended.wait(0.05)
            self._over.wait(0.02)
        raise AssertionError(f"{name} has not ended within {limit_s:.0f} s; its processes ended with {task.codes}")

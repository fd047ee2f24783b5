"""shardline run --hosts a,b: every task by ssh, from one terminal.

The system's ssh checks the hosts' keys and finds users, ports and jump hosts in its own files. One connection to each
host carries all of its tasks, see host_tasks.py; they end with its input, so nothing is left when this process or the
connection dies.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardline.cli.process_exits import TaskExits, describe_code
from shardline.cluster import UNNAMED, ClusterSpec, format_address
from shardline.errors import UsageError
from shardline.host import lifeline
from shardline.host.awake import awake_s
from shardline.host.printable import printable
from shardline.security import is_loopback
from shardline_launchers.host_tasks import BETWEEN, ENDED, STARTED
from shardline_launchers.places import LOOPBACK, Asked

REFUSED = 255
"""Exit code of ssh itself."""
SSH = (
    *("ssh", "-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
"""With BatchMode nothing is asked, so a host whose key is unknown is refused, unless the user's own files say else."""
ASK_S, END_S = 20.0, 10.0


def host_name(target: str) -> str:
    """Name or address behind a target of ssh, which may be an alias in the user's files. Raises UsageError."""
    try:
        said = subprocess.run(["ssh", "-G", "--", target], capture_output=True, text=True, timeout=ASK_S, check=False)
    except FileNotFoundError:
        raise UsageError("--hosts needs ssh, and there is none on PATH") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"`ssh -G {target}` did not answer within {ASK_S:.0f} s") from None
    names = [line.split(maxsplit=1)[1] for line in said.stdout.splitlines() if line.startswith("hostname ")]
    if said.returncode or not names:
        raise UsageError(f"--hosts: ssh can't use {target!r}: {said.stderr.strip() or 'it names no host'}")
    return names[0]


def spread(
    targets: Sequence[str], asked: Asked, port: int, name: Callable[[str], str]
) -> tuple[ClusterSpec, dict[str, str]]:
    """The cluster, and each task's target: the chief on the first, others in turn, a worker on each by default.

    name: the host name of a target; one host that is named in several ways is several.
    """
    hosts = {target: name(target) for target in targets}
    if all(is_loopback(host) for host in hosts.values()):
        hosts = dict.fromkeys(targets, LOOPBACK)
    workers = len(targets) if asked.workers is None else asked.workers
    spec = asked.spec(format_address(hosts[targets[0]], port), workers, UNNAMED)
    on: dict[str, str] = {}
    for role in spec.tasks:
        for task, target in zip(spec.task_names(role), itertools.cycle(targets), strict=False):
            on[task] = target
            spec = spec if role == "chief" else spec.with_address(task, format_address(hosts[target], 0))
    return spec, on


@dataclass(frozen=True)
class _Line:
    task: str
    text: str


@dataclass(frozen=True)
class _End:
    task: str
    code: int
    host: _Host | None = None
    """The connection that ended with it."""


@dataclass
class _Host:
    """A connection, and what it has said."""

    process: subprocess.Popen[bytes]
    heard: bool = False
    """What fails from now on is no longer ssh."""
    last: str = ""


@dataclass(frozen=True)
class _Lost:
    target: str
    host: _Host
    code: int


@dataclass
class _Remote:
    host: _Host
    code: int | None = None


class RemoteTasks:
    """The tasks of one job on other machines.

    on: the target of ssh by task. line: for the shell there. head: the first line of its input. arguments(task): of
    `shardline`. grace_s: how long the job may take to end.
    """

    def __init__(
        self,
        on: Mapping[str, str],
        line: str,
        head: Sequence[object],
        arguments: Callable[[str], list[str]],
        *,
        script: bool,
        asked: Asked,
        grace_s: float,
    ) -> None:
        self._on = on
        self._line = line
        self._head = head
        self._arguments = arguments
        self._exits = TaskExits(tuple(on), script=script, chief_trains=asked.chief_trains)
        self._grace_s = grace_s
        self._events: queue.SimpleQueue[_Line | _End | _Lost | int] = queue.SimpleQueue()
        self._hosts: dict[str, _Host] = {}
        self._tasks: dict[str, _Remote] = {}
        self._failed: int | None = None
        """Exit code of a task without which the job can't go on."""

    def run(self) -> int:
        """Start all tasks and follow them to the end of the job; returns its exit code. Raises UsageError."""
        before = {
            number: signal.signal(number, lambda caught, _frame: self._events.put(caught))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            for task in self._on:
                self._start(task)
            return self._follow()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, task: str) -> None:
        target = self._on[task]
        host = self._hosts.get(target)
        if host is None:
            # Ctrl-C in the terminal is for this process only.
            process = subprocess.Popen(
                [*SSH, "--", target, self._line],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            host = self._hosts[target] = _Host(process)
            threading.Thread(target=self._read, args=(target, host), name=f"read-{target}", daemon=True).start()
            _order(host, self._head)
        self._tasks[task] = _Remote(host)
        _order(host, [task, self._arguments(task)])

    def _read(self, target: str, host: _Host) -> None:
        assert host.process.stdout is not None
        first = next(task for task, on in self._on.items() if on == target)
        try:
            for line in host.process.stdout:
                text = line.decode(errors="replace").rstrip("\r\n")
                if not host.heard and text.endswith(STARTED):
                    # The shell's own files may have printed something without a newline first.
                    host.heard = True
                elif host.heard and (end := self._ended(text)) is not None:
                    self._events.put(end)
                else:
                    task, found, said = text.partition(BETWEEN)
                    host.last = text
                    self._events.put(_Line(task, said) if found and task in self._on else _Line(first, text))
        except BaseException:
            host.process.kill()
            raise
        finally:
            self._events.put(_Lost(target, host, host.process.wait()))

    def _ended(self, text: str) -> _End | None:
        """The end that a line of a host tells; None for any other line, and for one that came damaged."""
        if text.startswith(ENDED):
            with contextlib.suppress(ValueError, TypeError):
                task, code = json.loads(text.removeprefix(ENDED))
                if task in tuple(self._on) and isinstance(code, int):
                    return _End(task, code)
        return None

    def _follow(self) -> int:
        signalled: int | None = None
        deadline_s = float("inf")
        while True:
            try:
                event = self._events.get(timeout=max(0.0, min(deadline_s - awake_s(), 3600.0)))
            except queue.Empty:
                if awake_s() < deadline_s:
                    continue
                _say(f"the chief did not end within {self._grace_s:.0f} s")
                return self._failed or (128 + signalled if signalled is not None else 1)
            if isinstance(event, _Line):
                print(f"{event.task}{BETWEEN}{printable(event.text)}", flush=True)
            elif isinstance(event, _Lost):
                self._close(event)
            elif isinstance(event, _End) and self._known(event):
                continue
            elif isinstance(event, _End):
                self._tasks[event.task].code = event.code
                if event.task == "chief/0" and not self._again(event):
                    self._await_others()
                    return self._failed or (128 + signalled if signalled is not None else _code(event.code))
                if event.task != "chief/0" and deadline_s == float("inf") and not self._again(event) and event.code:
                    deadline_s = self._lost(event, deadline_s)
            elif signalled is not None:
                _say("ended immediately; the last checkpoint is kept")
                return 128 + event
            else:
                signalled, deadline_s = event, awake_s() + self._grace_s
                _say("ending with a checkpoint; press Ctrl-C again to end immediately")
                self._ask_chief()

    def _again(self, end: _End) -> bool:
        """Start the task again if that may help; returns whether it did. Raises UsageError if ssh never reached it."""
        host = self._tasks[end.task].host
        lost = end.host is not None
        if lost and not host.heard:
            raise UsageError(f"ssh {self._on[end.task]} failed for {end.task}: {host.last or 'it gave no reason'}")
        # A connection that broke says nothing of how the task ended.
        again, reason = self._exits.ended(end.task, -signal.SIGHUP if lost else end.code)
        if end.code:
            how = "was lost with its connection" if lost else describe_code(end.code)
            _say(f"{end.task} on {self._on[end.task]} {how}: {reason}")
        if again:
            self._start(end.task)
        return again

    def _lost(self, end: _End, deadline_s: float) -> float:
        """Take in that a task has ended for good; returns the time by which the job must have ended."""
        why = self._exits.hopeless(end.code)
        if not why:
            return deadline_s
        _say(f"{why}: ending the job")
        self._failed = _code(end.code)
        self._ask_chief()
        return awake_s() + self._grace_s

    def _ask_chief(self) -> None:
        """Ask the chief to end the job with a checkpoint."""
        _order(self._tasks["chief/0"].host, ["chief/0", None])

    def _close(self, lost: _Lost) -> None:
        """A connection ends the tasks that it has."""
        if self._hosts.get(lost.target) is lost.host:
            del self._hosts[lost.target]
        for task, remote in self._tasks.items():
            if remote.host is lost.host:
                self._events.put(_End(task, lost.code or REFUSED, lost.host))

    def _known(self, end: _End) -> bool:
        """Whether this end was taken in before."""
        remote = self._tasks[end.task]
        return remote.code is not None or (end.host is not None and remote.host is not end.host)

    def _await_others(self) -> None:
        deadline_s = awake_s() + self._grace_s / 3
        while any(remote.code is None for remote in self._tasks.values()):
            try:
                event = self._events.get(timeout=max(0.0, deadline_s - awake_s()))
            except queue.Empty:
                return
            if isinstance(event, _End):
                self._tasks[event.task].code = event.code
            elif isinstance(event, _Lost):
                self._close(event)
            elif isinstance(event, _Line):
                print(f"{event.task}{BETWEEN}{printable(event.text)}", flush=True)
            else:
                return

    def _end(self) -> None:
        """End whatever still runs: the tasks by closing their hosts' inputs, then ssh itself."""
        running = [host.process for host in {id(one.host): one.host for one in self._tasks.values()}.values()]
        for process in running:
            if process.stdin is not None:
                # What was not sent is not wanted any more.
                with contextlib.suppress(OSError):
                    process.stdin.close()
        deadline_s = awake_s() + lifeline.GRACE_S + END_S
        for process in running:
            try:
                process.wait(max(0.1, deadline_s - awake_s()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _order(host: _Host, order: Sequence[object]) -> None:
    assert host.process.stdin is not None
    # The end of one that has ended is reported by its reader.
    with contextlib.suppress(OSError):
        host.process.stdin.write(json.dumps(order).encode() + b"\n")
        host.process.stdin.flush()


def _code(code: int) -> int:
    return 128 - code if code < 0 else code


def _say(sentence: str) -> None:
    print(f"shardline: {sentence}", file=sys.stderr, flush=True)

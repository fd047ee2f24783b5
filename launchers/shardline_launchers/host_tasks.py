"""The tasks of one of --hosts: forked from a process that has imported torch once, and told by lines how to go on.

On standard input come, as JSON, the variables of all tasks and the job file, then orders: [TASK, [ARGUMENT, ...]]
starts `shardline ARGUMENT ...`, [TASK, null] asks a task to end. What a task prints goes out as "TASK | text", its exit
code behind ENDED. When the input closes, the tasks end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardline.cli.launcher import PRINTS_S
from shardline.host import lifeline
from shardline.host.allocator import ALLOCATOR
from shardline.host.awake import awake_s
from shardline.host.forkserver import COMMAND, START_S, TaskStarter, reap_group
from shardline.host.python_file import installed_imports

STARTED = "shardline-host-started"
"""First line of a host: ssh and the shell have done their part."""
ENDED = "shardline-task-ended "
LIFE_FD = "{life_fd}"
"""Stands in arguments for the descriptor of a pipe that closes with this process."""
BETWEEN = " | "
ASKED_CODE = 128 + signal.SIGTERM
"""Exit code of a task that was asked to end before it could see to that itself."""
LOOK_S = 1.0
"""How often a wait for the imports looks whether the input has closed."""


def serve() -> int:
    """Start and end tasks as standard input says; returns once it has closed and all tasks have ended."""
    print(STARTED, flush=True)
    variables, job = json.loads(sys.stdin.readline() or "[{}, null]")
    environment = {**os.environ, **variables, **ALLOCATOR, "PYTHONUNBUFFERED": "1"}
    tasks = _Tasks(environment, installed_imports(Path(job)) if job is not None else [])
    try:
        for line in sys.stdin:
            task, arguments = json.loads(line)
            if arguments is None:
                tasks.ask(task)
            else:
                tasks.start(task, arguments)
    finally:
        tasks.end()
    return 0


class _Tasks:
    """The tasks of this host, each followed by a thread."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self._environment = environment
        self._starter = TaskStarter()
        self._starter.begin(environment, modules)
        self._life_read, self._life_write = os.pipe()
        self._running: dict[str, int] = {}
        """Process ids of tasks that are not reaped yet."""
        self._asked: set[str] = set()
        """Tasks that are to end, started or not."""
        self._followers: list[threading.Thread] = []
        self._starting, self._talking, self._knowing = threading.Lock(), threading.Lock(), threading.Lock()

    def start(self, task: str, arguments: Sequence[str]) -> None:
        """Start a task, once the imports are done; returns at once."""
        self._followers.append(threading.Thread(target=self._follow, args=(task, arguments), name=task))
        self._followers[-1].start()

    def ask(self, task: str) -> None:
        """Ask a task to end; one that has not started yet never will."""
        with self._knowing:
            self._asked.add(task)
            if task in self._running:
                os.kill(self._running[task], signal.SIGTERM)

    def end(self) -> None:
        """End all tasks; returns once they have, killing those that do not end when their pipe closes."""
        with self._knowing:
            self._asked.update(follower.name for follower in self._followers)
        os.close(self._life_write)
        deadline_s = awake_s() + lifeline.GRACE_S + PRINTS_S
        for follower in self._followers:
            follower.join(max(0.0, deadline_s - awake_s()))
            with self._knowing:
                if follower.is_alive() and follower.name in self._running:
                    os.kill(self._running[follower.name], signal.SIGKILL)
            follower.join()
        self._starter.close()

    def _say(self, line: str) -> None:
        # Nobody may listen any more; the input says so, too.
        with self._talking, contextlib.suppress(OSError):
            print(line, flush=True)

    def _follow(self, task: str, arguments: Sequence[str]) -> None:
        with self._starting:
            deadline_s = awake_s() + START_S
            while task not in self._asked and not self._starter.await_ready(LOOK_S) and awake_s() < deadline_s:
                continue
        code = ASKED_CODE if task in self._asked else self._run(task, arguments)
        if task in self._asked and code == -signal.SIGTERM:
            # It was too young to have a handler, and is not to be started again.
            code = ASKED_CODE
        self._say(ENDED + json.dumps([task, code]))

    def _run(self, task: str, arguments: Sequence[str]) -> int:
        """Run a task to its end; returns its exit code."""
        command = [*COMMAND, *(part.replace(LIFE_FD, str(self._life_read)) for part in arguments)]
        read, write = os.pipe()
        try:
            with self._starting:
                process = self._starter.start(command, self._environment, (write, write), [self._life_read])
        except OSError as error:
            os.close(read)
            self._say(f"{task}{BETWEEN}it can't be started: {error}")
            return 1
        finally:
            os.close(write)
        printed = threading.Thread(target=self._pass_on, args=(task, read), name=f"print-{task}", daemon=True)
        printed.start()
        with self._knowing:
            self._running[task] = process.pid
            if task in self._asked:
                os.kill(process.pid, signal.SIGTERM)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._knowing:
            del self._running[task]
        # What the task left behind ends too; not reaped yet, its process id is still that of its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        printed.join(PRINTS_S)
        code = process.wait()
        reap_group(process.pid)
        return code

    def _pass_on(self, task: str, output: int) -> None:
        with open(output, errors="replace") as lines:
            for line in lines:
                self._say(f"{task}{BETWEEN}{line.rstrip()}")

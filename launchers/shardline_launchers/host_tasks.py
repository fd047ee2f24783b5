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
from pathlib import Path

from shardline.host.allocator import ALLOCATOR
from shardline.host.awake import awake_s
from shardline.host.forkserver import COMMAND, START_S, TaskStarter
from shardline.host.python_file import installed_imports

STARTED = "shardline-host-started"
"""First line of a host: ssh and the shell have done their part."""
ENDED = "shardline-task-ended "
LIFE_FD = "{life_fd}"
"""Stands in arguments for the descriptor of a pipe that closes with this process."""
BETWEEN = " | "
LOOK_S = 1.0
"""How often a wait for the imports looks whether the input has closed."""


def serve() -> int:
    """Start and end tasks as standard input says; returns once it has closed and all tasks have ended."""
    print(STARTED, flush=True)
    variables, job = json.loads(sys.stdin.readline() or "[{}, null]")
    environment = {**os.environ, **variables, **ALLOCATOR, "PYTHONUNBUFFERED": "1"}
    starter, running = TaskStarter(), dict[str, int]()
    starting, talking, ending = threading.Lock(), threading.Lock(), threading.Event()
    starter.begin(environment, installed_imports(Path(job)) if job is not None else [])
    life_read, life_write = os.pipe()
    followers = []

    def say(line: str) -> None:
        # Nobody may listen any more; the input says so, too.
        with talking, contextlib.suppress(OSError):
            print(line, flush=True)

    def follow(task: str, arguments: list[str]) -> None:
        with starting:
            deadline_s = awake_s() + START_S
            while not starter.await_ready(LOOK_S) and not ending.is_set() and awake_s() < deadline_s:
                continue
        if ending.is_set():
            return
        read, write = os.pipe()
        command = [*COMMAND, *(part.replace(LIFE_FD, str(life_read)) for part in arguments)]
        with open(read, errors="replace") as lines:
            try:
                with starting:
                    process = starter.start(command, environment, (write, write), [life_read])
                    running[task] = process.pid
            except OSError as error:
                say(f"{task}{BETWEEN}it can't be started: {error}")
                say(ENDED + json.dumps([task, 1]))
                return
            finally:
                os.close(write)
            for line in lines:
                say(f"{task}{BETWEEN}{line.rstrip()}")
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with starting:
            del running[task]
        code = process.wait()
        say(ENDED + json.dumps([task, code]))

    for line in sys.stdin:
        task, arguments = json.loads(line)
        if arguments is not None:
            followers.append(threading.Thread(target=follow, args=(task, arguments), name=task))
            followers[-1].start()
            continue
        with starting:
            # Not reaped yet: the process id is still the task's.
            if task in running:
                os.kill(running[task], signal.SIGTERM)
    ending.set()
    os.close(life_write)
    for follower in followers:
        follower.join()
    starter.close()
    return 0

"""Decides what follows the end of a process: a restart or not, and whether the job can continue. Pure."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardline.cluster import parse_task
from shardline.errors import exit_code_name, owner_of
from shardline.roles import ROLES

MAX_RESTARTS = 3
HOPELESS_CODES = (2, 5, 6)
"""A bad job, NaN, a bad checkpoint: the same process would end the same way. Not 7: a worker that was fenced after a
pause has no successor but the one started here."""
SCRIPT_RAISED = 1
"""Exit code of Python after an exception that nobody caught: in a script, one of the user's code."""
LAST_WORDS = re.compile(r"(?:shardline: |\d\d:\d\d:\d\d \S+ (?:step \d+ )?(?:ERROR|CRITICAL) )(.+)")
LAST_LINES = 10
TRACEBACK = "Traceback (most recent call last):"
FRAME = re.compile(r'  File "(.+)", line (\d+)')


@dataclass(frozen=True)
class Ended:
    task: str
    code: int
    """Exit code; -N if killed by signal N."""
    restarted: bool
    reason: str
    """Message for the user: how it ended and what happens next."""


def describe_code(code: int, *, script: bool = False) -> str:
    """How a process ended, for messages. script: it ran the user's script."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    if script and code == SCRIPT_RAISED:
        return f"ended with exit code {code} (raised by the script)"
    return f"ended with exit code {code} ({exit_code_name(code)})"


def last_words(lines: Sequence[str], *, script: bool = False) -> str:
    """The message that a log ends with: the command's, the last logged error, or a script's exception; "" if none."""
    said = (match[1] for line in reversed(lines[-LAST_LINES:]) if (match := LAST_WORDS.match(line)))
    return next(said, "") or (exception_in(lines) if script else "")


def says_more(lines: Sequence[str], words: str) -> bool:
    """Return whether a log has more than the message that its task ended with. words: those that were shown."""
    said = {match[1] for line in lines if (match := LAST_WORDS.match(line)) and match[1] in words}
    return any(line.strip() and not any(line.endswith(one) for one in said) for line in lines)


def exception_in(lines: Sequence[str]) -> str:
    """The exception that a log ends with, as one sentence with the innermost line of the user's code; "" if none."""
    # A SyntaxError has only the last part of a traceback.
    begin = max((number for number, line in enumerate(lines) if line == TRACEBACK), default=0)
    frames = [(number, match) for number, line in enumerate(lines) if number >= begin and (match := FRAME.match(line))]
    if not frames:
        return ""
    message = next((line for line in lines[frames[-1][0] :] if line and not line.startswith(" ")), "an exception")
    theirs = [match for _, match in frames if owner_of(match[1]) == "user"]
    where = f" ({theirs[-1][1]}, line {theirs[-1][2]})" if theirs else ""
    return f"the script raised {message}{where}"


def may_restart(role: str, code: int, restarts: int, *, script: bool = False) -> tuple[bool, str]:
    """Decide whether to restart a task that ended; returns that and the reason. script: it ran the user's script."""
    if code == 0:
        return False, "its work is done"
    if ROLES[role].leads and code > 0:
        # It had decided how the job ends. If it was killed, it had not, and the next one continues from --out.
        return False, "the job ends with it"
    if code in HOPELESS_CODES or (script and code == SCRIPT_RAISED):
        return False, "it would end the same way again"
    if restarts >= MAX_RESTARTS:
        return False, f"it was already restarted {restarts} times"
    return True, f"restart {restarts + 1} of {MAX_RESTARTS}"


class TaskExits:
    """Decides, for each end of a process of a cluster, on a restart, and whether the job can go on once it trains."""

    def __init__(self, tasks: tuple[str, ...], *, script: bool, chief_trains: bool = False) -> None:
        self._tasks = tasks
        self._script = script
        self._chief_trains = chief_trains
        self._restarts: dict[str, int] = {}
        self._gone: dict[str, int] = {}

    def ended(self, task: str, code: int) -> tuple[bool, str]:
        """Take in how a task ended; returns whether to start it again, and why."""
        restarts = self._restarts.get(task, 0)
        again, reason = may_restart(parse_task(task)[0], code, restarts, script=self.runs_script(task))
        if again:
            self._restarts[task] = restarts + 1
        else:
            self._gone[task] = code
        return again, reason

    def runs_script(self, task: str) -> bool:
        return self._script and task.startswith("worker/")

    def hopeless(self, code: int) -> str:
        """Why the job can't go on, after a task has ended for good with this code; empty if it can."""
        if code in HOPELESS_CODES:
            return "it would end the same way again"
        kinds = {"chief_trains": self._chief_trains, "script": self._script}
        return lacking(self._tasks, self._gone, min_workers=1, begun=True, **kinds)


def lacking(
    tasks: tuple[str, ...], gone: Mapping[str, int], *, chief_trains: bool, min_workers: int, script: bool, begun: bool
) -> str:
    """Why the job can't continue, as a phrase; empty if it can.

    tasks: all tasks of the cluster. gone: exit codes of processes that ended and are not restarted. begun: training has
    begun, so the chief handles the loss of a server.
    """
    rows = {task: ROLES[parse_task(task)[0]] for task in tasks}
    workers = [task for task, row in rows.items() if row.trains and not row.leads]
    trainers = len([task for task in workers if task not in gone]) + chief_trains
    if not trainers:
        return "no task is left to train"
    if script and any(gone.get(task) for task in workers):
        return "a script needs all its workers"
    if begun:
        return ""
    if any(rows[task].holds for task in gone):
        return "the job can't start without it"
    if trainers < min_workers:
        return f"{trainers} of at least {min_workers} tasks that train are left"
    return ""

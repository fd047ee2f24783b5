"""shardline train: a whole cluster on this machine, from the first process to the last."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from shardline import plugins
from shardline.cli import options, prints
from shardline.cli.launcher import TAIL_LINES, LaunchError, LaunchOptions, LocalCluster
from shardline.cli.process_exits import SCRIPT_RAISED, Ended, says_more
from shardline.core.timeouts import Timeouts
from shardline.errors import ShardlineError, TaskLostError, UsageError, exit_code_name
from shardline.host import files
from shardline.host.awake import awake_s
from shardline.host.printable import printable
from shardline.host.run_lock import ever_begun, unwritable
from shardline.security import Security

if TYPE_CHECKING:
    from shardline.cli.progress import Display
    from shardline.cli.terminal import PlainConsole
    from shardline.core.status import ChiefStatus


AGAIN_S = 60.0
_NUMBER = re.compile(r"\d+(\.\d+)?")


class StatusWarnings:
    """Selects from the chief's statuses what a launcher's terminal shows. Pure; the clock is an argument."""

    def __init__(self) -> None:
        self._until = 0.0
        """Unix time of the newest event seen."""
        self._shown_s: dict[str, float] = {}
        """When each message was last shown, by its text without numbers."""

    def of(self, status: ChiefStatus, now_s: float) -> list[str]:
        """New warnings and errors, without the reason for the job's end, which is shown at the end."""
        new = [event for event in status.said if event.time > self._until]
        self._until = max([self._until, *(event.time for event in new)])
        told = [event.sentence for event in new if event.level != "info" and event.sentence != status.reason]
        return [sentence for sentence in told if self._fresh(sentence, now_s)]

    def _fresh(self, sentence: str, now_s: float) -> bool:
        kind = _NUMBER.sub("#", sentence)
        if now_s - self._shown_s.get(kind, -AGAIN_S) < AGAIN_S:
            return False
        self._shown_s[kind] = now_s
        return True


POLL_S = 0.5
SUMMARY_BYTES = 16 << 20
"""Most bytes of a run's summary.json, which consists mainly of its recoveries."""
SURE_POLLS = 2
"""Answers needed after a process has ended: the first may have been on its way before."""
UNBEGUN = ("waiting", "init")
UNENDED = (*UNBEGUN, "running")
POLL_TIMEOUT_S = 6.0
"""Timeout of the progress bar's own calls, in seconds: a slow chief costs an update of the display, not the job."""
EPILOG = "Arguments after -- are passed to the script, or to the job file as SHARDLINE_JOB_ARGS."


@click.command(epilog=EPILOG, options_metavar="[OPTIONS]", short_help="Run a whole cluster on this machine.")
@click.argument("job", metavar="JOB.py", type=click.Path(path_type=Path))
@options.option("--ps", type=click.IntRange(min=1), help="Parameter servers. Default: 1, or with --mirrored none.")
@options.option("--workers", type=click.IntRange(min=0), default=1, help="Workers.")
@options.option(
    "--mirrored",
    type=click.IntRange(min=1),
    metavar="N",
    help="N workers with all-reduce: each keeps 1/N of the parameters in its own process. With --ps M, "
    "embedding tables, or what Job.communication says, are on M servers beside them.",
)
@options.option("--evaluators", type=click.IntRange(min=0), default=0, help="Evaluators.")
@options.tasks
@options.job_fields
@options.plugin
@options.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Default: runs/JOB-DATE-TIME.")
@options.resume
@options.option(
    "--summary", type=click.Path(path_type=Path), metavar="FILE", help="Copy the summary of the run (JSON) here."
)
@options.option("--script", is_flag=True, help="JOB.py is a training script that calls shardline.connect().")
@options.device
@options.option("--ps-device", default="cpu", callback=options.check_device, help="Device of the parameter servers.")
@options.gpu_memory_fraction
@options.chief_trains
@options.min_workers
@options.bucket_mb
@options.shards
@options.standbys
@options.cold_dir
@options.inexact
@options.replay
@options.lanes
@options.profile
@options.page
@options.trackers
@options.option(
    "--prints",
    type=click.Choice(prints.CHOICES),
    default=prints.FIRST,
    help="Whose prints to show here: the first worker's, all tasks', with their names, or none. Logs have all of them.",
)
@options.secured
@options.admin
@options.insecure_bind
@options.timeout
@options.join_timeout
@click.option(
    "--restart/--no-restart", default=True, help="Restart tasks that died, up to 3 times each.  [default: on]"
)
def train(**flags: Any) -> int:
    """Train JOB.py on a cluster of separate processes on this machine.

    Ctrl-C ends the job with a checkpoint; a second one ends it immediately.
    """
    summary: Path | None = flags.pop("summary")
    launch = launch_options(flags)
    if summary is not None:
        check_summary(summary)
    if flags["out"] is not None:
        return run(launch, summary=summary)
    launch = replace(launch, out=new_folder(launch.out))
    try:
        return run(launch, summary=summary)
    finally:
        # A start that was refused leaves nothing.
        with contextlib.suppress(OSError):
            launch.out.rmdir()


def new_folder(wanted: Path) -> Path:
    """Make the folder of a run, with a number after its name if another run began in the same second."""
    path, number = wanted, 1
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
            number += 1
            path = wanted.with_name(f"{wanted.name}-{number}")
    except OSError as error:
        raise unwritable(path, error) from None


def check_summary(path: Path) -> None:
    """Refuse, before anything is written or trained, a --summary path that can't be written."""
    # Its folder is created at the end: a refused command leaves none. A link is followed, also to nothing.
    place = Path(os.path.realpath(path))
    there = next(one for one in (place, *place.parents) if one.exists())
    reason = ""
    if path.is_dir():
        reason = "Is a directory"
    elif there != place and not there.is_dir():
        reason = "Not a directory"
    elif path.is_fifo() or path.is_socket():
        # Opening one would wait for a reader at the end of the run.
        reason = "Is not a regular file"
    elif not os.access(there, os.W_OK):
        reason = "Permission denied"
    if reason:
        raise UsageError(
            f"--summary {path} can't be written: {reason}; choose a file in a folder that you can write to"
        )


def launch_options(flags: Mapping[str, Any]) -> LaunchOptions:
    """Options of the local cluster from parsed flags; refuses to overwrite an earlier run."""
    flags = {**flags, **mirrored(flags)}
    job: Path = flags["job"]
    options.existing_job(job)
    # Each task would refuse a bad one, after all have been started.
    plugins.load()
    out: Path | None = flags["out"]
    if out is None:
        if flags["resume"]:
            raise UsageError("--resume needs --out, the folder of the run to continue")
        out = Path("runs") / f"{job.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    used = ever_begun(out)
    if used and not flags["resume"]:
        raise UsageError(f"--out {out} contains an earlier run; continue it with --resume, or choose another folder")
    if flags["resume"] and not used:
        raise UsageError(f"--resume: {out} contains no earlier run")
    given = {
        "job": job.absolute(),
        "out": out.absolute(),
        "overrides": options.overrides(flags),
        "timeouts": options.timeouts(flags),
        "script_args": tuple(shlex.split(os.environ.get(options.JOB_ARGS, ""))),
        "security": options.security(flags),
        "page": options.page_address(flags),
        # Two processes take turns on a GPU: few, large pieces of work mean few turns.
        "bucket_mb": flags["bucket_mb"] or (1024 if _share_a_gpu(flags) else 0),
    }
    return LaunchOptions(**{**options.same_names(LaunchOptions, flags), **given})


def mirrored(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags for which --mirrored stands, which launchers don't have. Raises UsageError for what contradicts it."""
    count, servers = flags.get("mirrored"), flags["ps"]
    if count is None:
        return {"ps": servers or 1}
    plain: dict[str, Any] = {"workers": 1, "chief_trains": False, "admin_token_file": None}
    if not servers:
        plain["ps_device"] = "cpu"
    for name in (name for name, value in plain.items() if flags[name] != value):
        raise UsageError(
            f"--mirrored {count} starts {count} workers that hold the parameters, without an admin token; leave "
            f"--{name.replace('_', '-')} out"
        )
    # Without a standby, a worker that is missing lacks its share of the parameters, too.
    least = flags["min_workers"] if flags["standbys"] else count
    mine: dict[str, Any] = {} if servers else {"ps_device": flags["device"]}
    # All share this machine's cores, where fewer, larger pieces of work cost less (4 workers, 64 MB: 15 % of a step).
    mine["bucket_mb"] = flags["bucket_mb"] or 16
    return {"ps": count + (servers or 0), "workers": count, "min_workers": least, "with_ps": True, **mine}


def _share_a_gpu(flags: Mapping[str, Any]) -> bool:
    shared = "cpu" not in (flags["device"], flags["ps_device"]) and flags.get("mirrored") is None
    return shared and flags["lane"] in ("auto", "cuda")


@dataclass(frozen=True)
class Signalled:
    """The launcher got a signal."""

    number: int


@dataclass(frozen=True)
class Polled:
    status: ChiefStatus


@dataclass
class _Hopeless:
    """The job can't continue with the remaining processes; the chief is asked whether it still needs the others."""

    end: Ended
    """The last process that ended."""
    deadline_s: float
    """When to stop waiting for the chief's answer."""
    why: str
    """Reason, such as "nobody is left to train"."""
    polls: int = 0
    """Number of the chief's answers since then."""


class _Early(BaseException):
    """A signal came before the cluster was up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _signals(cluster: LocalCluster) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into events of the cluster; during the start, when no one reads those, raise _Early."""

    def handle(number: int, _frame: FrameType | None) -> None:
        if cluster.up:
            cluster.events.put(Signalled(number))
        else:
            cluster.give_up(_Early(number))

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Poller:
    """Polls the chief's status on a thread of its own, and puts the answers into a queue."""

    def __init__(self, address: str, events: queue.SimpleQueue[object], security: Security) -> None:
        self._address = address
        self._security = security
        self._events = events
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status-poller", daemon=True)

    def __enter__(self) -> _Poller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._thread.join(timeout=POLL_TIMEOUT_S)

    def end(self) -> None:
        """Stop polling; a running call ends by itself."""
        self._ended.set()

    def _run(self) -> None:
        # Imports grpc, which --help must not do.
        from shardline.rpc.watch import ChiefWatch

        client = ChiefWatch(self._address, Timeouts(total_s=POLL_TIMEOUT_S), self._security)
        try:
            while not self._ended.wait(POLL_S):
                # A busy chief, or one that has just ended, is not news: the end of its process is what counts.
                with contextlib.suppress(ShardlineError):
                    self._events.put(Polled(client.status()))
        finally:
            client.close()


def run(
    launch: LaunchOptions, *, summary: Path | None = None, kind: Callable[[Any], LocalCluster] = LocalCluster
) -> int:
    """Run the cluster to its end; returns the exit code: the chief's, or 130 / 143 after a signal."""
    from shardline.cli.terminal import PlainConsole

    console = PlainConsole(stderr=True)
    cluster = kind(launch)
    cluster.say = console.say
    named = launch.prints == prints.ALL
    cluster.printed = lambda task, line: prints.show(console, f"{task}: {line}" if named else line)
    try:
        with _signals(cluster), cluster:
            return LaunchedRun(cluster, console).to_the_end(summary)
    except _Early as early:
        return 128 + early.number
    except LaunchError as error:
        # Nothing has run: what the others have logged is that they waited.
        _show_failure(cluster, str(error), error.code, logs=("chief/0",))
        return error.code


class LaunchedRun:
    """One run of a started cluster: what is shown, and how signals are handled."""

    def __init__(self, cluster: LocalCluster, console: PlainConsole) -> None:
        self._cluster = cluster
        self._console = console
        # Reaching the last step, the last cut and its score may each take a share of --timeout.
        self._limit_s = 2 * cluster.options.timeouts.total_s
        self._signal: int | None = None
        self._deadline_s = float("inf")
        self._last: ChiefStatus | None = None
        self._hopeless: _Hopeless | None = None
        self._ended_for: _Hopeless | None = None
        """Why the chief was asked to end the job."""
        self._warnings = StatusWarnings()
        self._quiet: dict[str, int] = {}
        """The chief's answers since a task ended with exit code 0, by task, until it is clear whether it should."""

    def to_the_end(self, summary: Path | None) -> int:
        """Follow the run; returns its exit code. summary: where a copy of the chief's summary goes."""
        from shardline.cli.progress import make_display

        events = self._cluster.events
        with _Poller(self._cluster.chief_address, events, self._cluster.options.security) as poller:
            with make_display(self._console) as display:
                display.say(f"started {started(self._cluster.tasks())}; logs: {self._cluster.options.out / 'logs'}")
                code = self._loop(display)
            poller.end()
            if code is None and self._hopeless is not None:
                code = self._fail_for(self._hopeless)
                self._cluster.stop()
            elif code is None:
                self._cluster.stop()
                self._console.say("ended immediately; the last checkpoint is kept")
            else:
                code = self._finish(code, summary)
        if self._signal is not None:
            return 128 + self._signal
        return 1 if code is None else 128 - code if code < 0 else code

    def _loop(self, display: Display) -> int | None:
        """Wait for the chief's end; returns its code, or None if the user, a deadline or lack of workers ended it."""
        while True:
            deadline_s = min(self._deadline_s, self._hopeless.deadline_s if self._hopeless else float("inf"))
            try:
                event = self._cluster.events.get(timeout=max(0.0, min(deadline_s - awake_s(), 3600.0)))
            except queue.Empty:
                if self._gives_up(display):
                    return None
                if awake_s() < self._deadline_s:
                    continue
                display.say(f"the chief did not end within {self._limit_s:.0f} s")
                return None
            if isinstance(event, Ended):
                if event.task == "chief/0" and not event.restarted:
                    return event.code
                if event.code != 0:
                    display.say(event.reason)
                    words = self._cluster.last_words(event.task)
                    for text in [words] if words else self._cluster.log_tail(event.task, 5):
                        display.say(f"  {event.task}: {text}")
                if not event.restarted:
                    self._gone(event)
            elif isinstance(event, Signalled):
                if self._signal is not None:
                    return None
                self._signal, self._hopeless = event.number, None
                self._deadline_s = awake_s() + self._limit_s
                display.say("ending with a checkpoint; press Ctrl-C again to end immediately")
                self._cluster.interrupt()
            elif isinstance(event, Polled):
                if event.status.page and (self._last is None or event.status.page != self._last.page):
                    # Printed again for a restarted chief: with port 0 its address has changed.
                    display.say(f"page: {event.status.page}")
                # Say, once, how many passes the job's steps will be if they are more than one each.
                from shardline.observability.counting import plan

                told = self._last is not None and plan(self._last.counting, self._last.steps)
                if not told and (text := plan(event.status.counting, event.status.steps)):
                    display.say(f"{text}; --steps sets the {event.status.counting.asked}s, not the passes")
                self._last = event.status
                display.update(event.status)
                for sentence in self._warnings.of(event.status, awake_s()):
                    display.say(sentence)
                self._tell_quiet(event.status, display)
                if self._hopeless is not None:
                    self._hopeless.polls += 1
                if self._gives_up(display):
                    return None

    def _gone(self, event: Ended) -> None:
        if event.code == 0:
            self._quiet[event.task] = 0
        why = self._cluster.lacking(begun=self._begun) if self._signal is None and self._hopeless is None else ""
        if why:
            # If it ended with code 0, only the chief knows whether the job still needs it.
            patience_s = POLL_TIMEOUT_S if event.code else math.inf
            self._hopeless = _Hopeless(event, awake_s() + patience_s, why)

    @property
    def _begun(self) -> bool:
        return self._last is not None and self._last.phase not in UNBEGUN

    def _tell_quiet(self, status: ChiefStatus, display: Display) -> None:
        """Report tasks that ended with exit code 0 although no one had asked them to."""
        for task, polls in list(self._quiet.items()):
            self._quiet[task] = polls + 1
            states = {row.task: row.state for row in status.tasks}
            if status.phase not in UNENDED or states.get(task) == "left":
                del self._quiet[task]
            elif polls + 1 >= SURE_POLLS:
                del self._quiet[task]
                display.say(
                    f"{task} ended with exit code 0 although the job has not ended (step {status.step}): its own code "
                    "must have ended it; it is not restarted"
                )

    def _fail_for(self, hopeless: _Hopeless) -> int:
        """Report why the job could not continue; returns the exit code."""
        code = hopeless.end.code
        if code == 0:
            code = TaskLostError.exit_code if self._begun else UsageError.exit_code
        elif code == SCRIPT_RAISED and self._cluster.options.script:
            code = UsageError.exit_code
        step = (read_summary(self._cluster.options.out) or {}).get("checkpoint_step", -1) if self._begun else -1
        rest = f". Continue with --resume from step {step}" if step > 0 else ""
        _show_failure(self._cluster, f"{self._last_of(hopeless.end)}; {hopeless.why}{rest}", code)
        return code

    def _last_of(self, end: Ended) -> str:
        """The last message of the worker that ended last, or how it ended."""
        if end.code == 0 and self._cluster.options.script and not self._begun:
            return (
                f"{end.task}: the script ended without joining: it must call shardline.connect() and train in "
                "session.steps() (start a job file without --script)"
            )
        if end.code == 0:
            return f"{end.task} ended with exit code 0 although the job had not ended"
        words = self._cluster.last_words(end.task)
        tail = self._cluster.log_tail(end.task, 1)
        how = self._cluster.options.describe(end.task, end.code)
        return f"{end.task}: {words or ': '.join([how, *tail])}"

    def _gives_up(self, display: Display) -> bool:
        """Whether training never began and no longer can. Once it has begun, the chief ends the job, at once."""
        hopeless = self._hopeless
        if hopeless is None:
            return False
        sure = hopeless.polls >= SURE_POLLS
        if not self._begun:
            return sure or awake_s() >= hopeless.deadline_s
        hopeless.why = self._cluster.lacking(begun=True)
        ending = self._last is not None and self._last.phase not in UNENDED
        if ending or not hopeless.why:
            # The chief knows better whether to end or to continue.
            self._hopeless = None
        elif sure:
            self._hopeless, self._ended_for = None, hopeless
            self._deadline_s = awake_s() + self._limit_s
            display.say(f"{hopeless.why}: ending with a checkpoint")
            self._cluster.interrupt()
        return False

    def _await_others(self) -> None:
        deadline_s = awake_s() + self._cluster.options.timeouts.dead_s
        while self._cluster.running():
            try:
                event = self._cluster.events.get(timeout=max(0.0, deadline_s - awake_s()))
            except queue.Empty:
                if awake_s() < deadline_s:
                    continue
                return
            if isinstance(event, Signalled):
                self._signal = self._signal or event.number
                return

    def _finish(self, code: int, summary: Path | None) -> int:
        """Everything after the chief's end; returns the exit code."""
        # Show a failure before waiting for anything.
        failed = self._ended_for if code == 0 else None
        if failed is not None:
            code = self._fail_for(failed)
        elif code != 0:
            _show_failure(self._cluster, self._last_words(), code)
        if code != 0:
            # After a failure: end tasks that never joined, which would keep asking a chief that is gone.
            joined = {row.task for row in self._last.tasks} if self._last is not None else set()
            for task in self._cluster.running():
                if task not in joined:
                    self._cluster.kill(task, restart=False)
        self._await_others()
        late = self._cluster.running()
        self._cluster.stop()
        if late:
            self._console.say(f"killed {', '.join(late)}, still running after the chief ended")
        found = read_summary(self._cluster.options.out)
        if found is not None and summary is not None:
            own = summary_path(self._cluster.options.out)
            try:
                summary.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(own, summary)
            except OSError as error:
                raise UsageError(
                    f"--summary {summary} can't be written: {error.strerror}; the summary is in {own}"
                ) from None
        if code == 0:
            for text in report(self._cluster.options.out, found, self._last):
                print(printable(text))
        return code

    def _last_words(self) -> str:
        """Why the job failed, from the chief's last answer, since its log may be on a full disk."""
        last = self._last
        if last is not None and last.phase == "ended" and last.exit_code:
            return last.reason
        return self._cluster.last_words("chief/0")


def started(tasks: Sequence[str]) -> str:
    """Number of processes by role, such as "1 chief, 2 ps, 2 workers"."""
    counts = Counter(task.partition("/")[0] for task in tasks)
    return ", ".join(f"{count} {role}{'s' if count > 1 and role != 'ps' else ''}" for role, count in counts.items())


def _show_failure(cluster: LocalCluster, words: str, code: int, *, logs: Sequence[str] = ()) -> None:
    """Print why the run failed. logs: the tasks whose logs may say more; () = all."""
    if not words:
        for text in cluster.log_tail("chief/0"):
            print(f"chief/0: {printable(text)}", file=sys.stderr)
        words = f"the chief ended with exit code {code} ({exit_code_name(code)})"
    print(f"shardline: {printable(words)}", file=sys.stderr)
    if any(says_more(cluster.log_tail(task, TAIL_LINES), words) for task in logs or cluster.tasks()):
        print(f"shardline: logs are in {cluster.options.out / 'logs'}", file=sys.stderr)


def summary_path(out: Path) -> Path:
    return out / "summary.json"


def read_summary(out: Path) -> dict[str, Any] | None:
    """The run's summary, or None if the chief wrote none. Raises ShardlineError if it can't be read."""
    try:
        found = json.loads(files.read_text(summary_path(out), SUMMARY_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ShardlineError(f"the summary {summary_path(out)} can't be read: {error}") from None
    return found if isinstance(found, dict) else None


def report(out: Path, summary: Mapping[str, Any] | None, last: ChiefStatus | None) -> list[str]:
    """The lines that a finished run prints: outcome and location of the results."""
    from shardline.core.status import Counting
    from shardline.observability.counting import made, speed

    found = dict(summary or {})
    lines = []
    if "steps" in found and "seconds" in found:
        rate = found.get("steps_per_second", 0.0)
        counting = Counting(**(found.get("counting") or {}))
        what = made(counting, found["steps"], found.get("done", found["steps"]))
        lines.append(f"{what} in {found['seconds']:.1f} s ({speed(counting, f'{rate:.1f}')})")
    scored = (found.get("evaluation") or {}).get("last") or {}
    metrics = scored.get("metrics") or (dict(last.last_metrics) if last is not None else {})
    if metrics:
        # The summary has null for values that aren't finite: JSON has no NaN.
        shown = (f"{name} {math.nan if value is None else value:.4f}" for name, value in sorted(metrics.items()))
        at = f" at step {scored['step']}" if "step" in scored else ""
        lines.append(f"evaluation{at}: {', '.join(shown)}")
    late = {task: counts["dropped"] for task, counts in found.get("contributions", {}).items() if counts["dropped"]}
    if late:
        lines.append(
            f"too late:    {', '.join(f'{count} gradients of {task}' for task, count in sorted(late.items()))}"
        )
    if skipped := found.get("skipped_steps"):
        lines.append(f"skipped:     {skipped} step{'s' if skipped > 1 else ''} with NaN or infinity, changing nothing")
    if unscored := found.get("unscored"):
        step = found.get("checkpoint_step")
        what = f"step {step} was not scored" if metrics else "no checkpoint was scored"
        lines.append(f"evaluation: {what}: {unscored}")
    places = {
        "checkpoint": found.get("checkpoint") or (last.checkpoint_path if last is not None else ""),
        "logs": out / "logs",
        "metrics": out / "logs" / "steps.jsonl",
        "tensorboard": out / "logs" / "tensorboard",
        "summary": summary_path(out),
    }
    lines += [f"{name + ':':<12} {place}" for name, place in places.items() if place and Path(place).exists()]
    lines += [f"{'trace:':<12} {place} (open it at ui.perfetto.dev)" for place in sorted(out.glob("trace-*.json"))]
    return lines

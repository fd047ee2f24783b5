"""shardline.connect(): the user's own training script joins a cluster."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, overload

from shardline import plugins
from shardline.client.api.reader import Reader
from shardline.client.api.script_job import ScriptSettings, choose_settings
from shardline.client.api.session import Session
from shardline.cluster import chief_address, locate, wants_place
from shardline.config import (
    RoleConfig,
    environment,
    environment_path,
    environment_security,
    environment_switch,
)
from shardline.consistency import CONSISTENCIES
from shardline.core.spec import ConsistencySpec
from shardline.core.timeouts import Timeouts
from shardline.errors import ClusterSpecError, ShardlineError, UsageError, job_error
from shardline.host import files, lifeline
from shardline.host.allocator import tune_allocator
from shardline.host.printable import printable, unicode
from shardline.host.process import Termination
from shardline.lanes import AUTO, check_choice
from shardline.observability import log
from shardline.observability.log import protect_output
from shardline.rpc.index_request import assigned_place
from shardline.rpc.names import wait_for_own_name
from shardline.seams import Resident
from shardline.update import RULES

_session: Session | None = None
"""The newest one; a forked child has its parent's."""


@overload
def connect(*, cluster: str | None = None, timeout_s: float | None = None, read_only: Literal[True]) -> Reader: ...
@overload
def connect(
    *,
    cluster: str | None = None,
    task: str | None = None,
    consistency: str | Resident | None = None,
    rule: str | Resident | None = None,
    clip_norm: float = 0.0,
    nan_policy: str = "stop",
    timeout_s: float | None = None,
    device: str | None = None,
    name: str | None = None,
    read_only: Literal[False] = False,
    **settings: int | float | bool | str | Resident | None,
) -> Session: ...
def connect(
    *,
    cluster: str | None = None,
    task: str | None = None,
    consistency: str | Resident | None = None,
    rule: str | Resident | None = None,
    clip_norm: float = 0.0,
    nan_policy: str = "stop",
    timeout_s: float | None = None,
    device: str | None = None,
    name: str | None = None,
    read_only: bool = False,
    **settings: int | float | bool | str | Resident | None,
) -> Session | Reader:
    """Take the task in a cluster that the arguments or the environment name; call attach() next.

    cluster: path or text of a cluster.json, default SHARDLINE_CLUSTER or TF_CONFIG. task: "worker/0", default
    SHARDLINE_TASK or TF_CONFIG's; the chief assigns the index of "worker/any". settings: `seed`, `checkpoint_every`,
    `checkpoint_keep`, `codec`, `cadence`, `topology`, as in a job file. Omitted arguments default to
    SHARDLINE_CONSISTENCY, SHARDLINE_SEED and so on, then to sync, 0, no intermediate checkpoints, 60 s, cpu. They are
    part of the job: all workers must agree. Without any cluster or task, a chief and a server start in this process:
    the session is that of a cluster of one worker. read_only: take no task, and read the job's newest checkpoint; of
    the other arguments only cluster and timeout_s have a meaning then.

    Raises ClusterSpecError, JobError, UsageError; CheckpointError if there is no checkpoint to read yet.
    """
    if read_only:
        return _reader(cluster, timeout_s, {**settings, "task": task, "consistency": consistency, "rule": rule})
    global _session
    _check_process()
    files.check_descriptors()
    beside = contextlib.ExitStack()
    alone = not any((cluster, task, environment("cluster"), environment("task"), os.environ.get("TF_CONFIG")))
    if alone:
        cluster, task = _start_beside(beside), "worker/0"
    config = _config(cluster, task, timeout_s, device)
    _prepare_process(config, logging.WARNING if alone else logging.INFO)
    termination = Termination()
    termination.install()
    session = _session = Session(
        config,
        termination=termination,
        script=ScriptSettings(
            name=name or unicode(Path(sys.argv[0]).stem) or "script",
            consistency=ConsistencySpec(
                mode=CONSISTENCIES.canonical(consistency or environment("consistency") or ConsistencySpec.mode),
                clip_norm=clip_norm,
                nan_policy=nan_policy,
            ),
            rule=RULES.canonical(rule or environment("rule") or ScriptSettings.rule),
            settings=choose_settings(settings, environment),
        ),
    )
    session.beside.push(beside)
    _tell_what_ends_the_script(session)
    _EndOfScript(session).register()
    return session


def _prepare_process(config: RoleConfig, level: int) -> None:
    protect_output()
    log.setup(config.task, level=level)
    for caution in config.cautions():
        logging.getLogger("shardline").warning("%s", caution)
    tune_allocator()
    if config.life_fd is not None:
        lifeline.watch(config.life_fd)
    wait_for_own_name(config.task, config.listens_at, config.timeouts.join_s)


def _check_process() -> None:
    """Raise UsageError in a child process that would take its parent's task."""
    # As multiprocessing itself asks, of a child that is importing its parent's script.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            f"shardline.connect() was called in a child process that imports {Path(sys.argv[0]).name} to find its "
            "classes, as the start methods spawn and forkserver do; put the script's own code under "
            'if __name__ == "__main__":'
        )
    if _session is not None and _session.owner.elsewhere:
        raise UsageError(
            f"shardline.connect() was called in a forked child of the process that is connected as "
            f"{_session.config.task}; connect in one of them only"
        )


def _start_beside(beside: contextlib.ExitStack) -> str:
    """Start a chief and a server in this process; returns their cluster.json. Raises ClusterSpecError, UsageError."""
    if _session is not None and not _session.owner.ended:
        raise UsageError(
            f"this process is connected as {_session.config.task} already; close that session before connect() starts "
            "another one without a cluster"
        )
    script = Path(sys.argv[0]).name or "train.py"
    start = f"start the script with `shardline train --script {script}`"
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ClusterSpecError(
            f"no cluster is given, but WORLD_SIZE={os.environ['WORLD_SIZE']} says that this is one of several "
            f"processes, which would each train alone: {start} instead of torchrun, mpirun or `accelerate launch`"
        )
    text = f"no cluster is given: training in this process alone; {start} for a cluster"
    print(f"shardline: {printable(text)}", file=sys.stderr)
    servers = plugins.installed("shardline.alone", "cluster", "servers for a script without a cluster")()
    beside.callback(servers.close)
    return str(servers.cluster)


def _timeouts(timeout_s: float | None) -> Timeouts:
    return Timeouts(
        total_s=timeout_s if timeout_s is not None else _number("timeout", Timeouts.total_s),
        join_s=_number("join_timeout", Timeouts.join_s),
    )


def _reader(cluster: str | None, timeout_s: float | None, others: Mapping[str, object]) -> Reader:
    if given := [name for name, value in others.items() if value is not None]:
        raise UsageError(f"connect(read_only=True) takes cluster and timeout_s only; leave out {', '.join(given)}")
    return Reader(chief_address(cluster or environment("cluster")), _timeouts(timeout_s), environment_security())


def _config(cluster: str | None, task: str | None, timeout_s: float | None, device: str | None) -> RoleConfig:
    """The worker's settings: from the script, else from the environment."""
    timeouts = _timeouts(timeout_s)
    named, found = task or environment("task"), cluster or environment("cluster")
    secured_by = environment_security()
    if wants_place(named) == "worker":
        # Until its index is known, its log lines carry the role only.
        log.setup("worker")
        place = assigned_place(
            str(named), found, address=environment("address"), timeouts=timeouts, security=secured_by
        )
    else:
        place = locate("worker", cluster=found, task=named, tf_config=os.environ.get("TF_CONFIG") or None)
    life_fd = environment("life_fd")
    return RoleConfig(
        role="worker",
        index=place.index,
        cluster=place.spec,
        timeouts=timeouts,
        device=device or environment("device") or "cpu",
        metrics_port=int(_number("metrics_port", 0)),
        host=environment("host") or "127.0.0.1",
        bind=environment("bind"),
        insecure_bind=environment_switch("insecure_bind", default=False),
        life_fd=int(life_fd) if life_fd else None,
        security=secured_by,
        lane=check_choice(environment("lane") or AUTO),
        overlap=environment_switch("overlap", default=True),
        run_dir=environment_path("run_dir"),
        cold_dir=environment_path("cold_dir"),
        out=environment_path("out"),
        profile=environment("profile") or "",
        with_ps=environment_switch("with_ps", default=False),
    )


class _EndOfScript:
    """Closes the session of a script that doesn't: it has done its part, so nobody should wait for it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._error: ShardlineError | None = None

    def register(self) -> None:
        """Close the session when the main thread has ended, or when the process ends if another thread trains."""
        atexit.register(self.process_ends)
        # Python waits for threads before it calls atexit's functions: for a library's that never ends, for ever.
        with contextlib.suppress(RuntimeError):
            threading._register_atexit(self.main_thread_ends)  # type: ignore[attr-defined]

    def main_thread_ends(self) -> None:
        """Close the session if the main thread made the last step."""
        if self._session.owner.steps_in is not threading.main_thread() or self._session.owner.elsewhere:
            return
        self._close()
        if left := lifeline.left():
            names = ", ".join(thread.name for thread in left)
            logging.getLogger("shardline").info("the script has ended, but Python waits for its threads: %s", names)

    def process_ends(self) -> None:
        """Close the session; after an error, exit with its code, which Python does not do in an atexit handler."""
        self._close()
        if self._error is not None:
            _end_with(self._error)

    def _close(self) -> None:
        try:
            self._session.close()
        except ShardlineError as error:
            self._error = error
            _say(error)


def _tell_what_ends_the_script(session: Session) -> None:
    """Report an uncaught exception to the chief so that nobody waits; a ShardlineError exits with its own code.

    Python exits with 1 for any uncaught exception, so a launcher would retry what can't succeed.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ShardlineError):
            _say(error)
            known = error
        else:
            before(kind, error, trace)
            known = job_error("the script", error)
        if isinstance(error, Exception):
            session.fail(known)
        session.shutdown()
        if isinstance(error, ShardlineError):
            _end_with(error)

    sys.excepthook = hook


def _say(error: ShardlineError) -> None:
    print(f"shardline: {error}", file=sys.stderr)


def _end_with(error: ShardlineError) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code)


def _number(name: str, default: float) -> float:
    text = environment(name)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"SHARDLINE_{name.upper()} is {text!r}; it must be a number") from None

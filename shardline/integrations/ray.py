"""A job on a Ray cluster: an actor for each task, all in one placement group.

    import shardline.integrations.ray

    summary = shardline.integrations.ray.run("job.py", out="/shared/runs/digits", ps=2, workers=4)

Each actor runs its task in a process of its own, which ends with the actor.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shardline.cli.process_exits import TaskExits, describe_code, last_words
from shardline.cluster import ClusterSpec, format_address, parse_address, parse_task
from shardline.errors import ShardlineError, TaskLostError, UsageError, ended_with
from shardline.host.ports import held_port
from shardline.roles import ROLES

LOOPBACK = "127.0.0.1"
SERVICE_CPUS = 0.1
"""Share of a core that Ray reserves for a task that does not train."""
PLACE_S = 120.0
"""Time for Ray to find room for all actors, which may mean new nodes, and for one of them to start."""
END_S = 30.0
OWN_END_S = 5.0
"""Time for a chief to end by itself, once another task has ended for good: most such ends are the job's."""
WAIT_S = 3600.0
TAIL_LINES = 200
MOST_WORDS = 300
LIFE_FD = "{life_fd}"
"""Stands in a command for the descriptor of a pipe that closes with the actor."""

log = logging.getLogger("shardline.integrations.ray")


class TaskActor:
    """Hosts one task. Several methods run at once: one waits for the task's process while another ends it."""

    def __init__(self) -> None:
        self._port: socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def host(self) -> str:
        return str(ray.util.get_node_ip_address())

    def reserve(self, host: str) -> str:
        """Reserve a port for the chief for as long as the actor lives; returns its address."""
        self._port = held_port(host)
        return format_address(host, self._port.getsockname()[1])

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        """Run the task's process to its end; returns its exit code and its last message."""
        life_read, life_write = os.pipe()
        lines: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        try:
            self._process = subprocess.Popen(
                [part.replace(LIFE_FD, str(life_read)) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "PYTHONUNBUFFERED": "1", "SHARDLINE_LIFE_FD": str(life_read)},
                pass_fds=[life_read],
                start_new_session=True,
            )
            assert self._process.stdout is not None
            for line in self._process.stdout:
                text = line.decode(errors="replace").rstrip("\n")
                lines.append(text)
                print(text, flush=True)
            return self._process.wait(), last_words(list(lines), script=True)
        finally:
            os.close(life_read)
            os.close(life_write)

    def end(self) -> None:
        """Ask the task to end, as Ctrl-C in its terminal does."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def read(self, path: str) -> str:
        """Text of a file on the actor's node; empty if there is none."""
        try:
            return Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""


def run(
    job: str | Path,
    *,
    out: str | Path,
    ps: int = 1,
    workers: int = 1,
    evaluators: int = 0,
    script: bool = False,
    script_args: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
    options: Mapping[str, object] | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    strategy: str = "SPREAD",
) -> dict[str, Any]:
    """Train a job on Ray's cluster until its end; returns the chief's summary.

    job: path of the job file, or of the training script if script is True, on every node; relative to the runtime
    environment's working_dir if there is one. out: folder of the results on the chief's node, the same for all nodes if
    the chief is to be restarted on another. settings: fields of the job, such as {"steps": 200}. options: flags of all
    tasks by name, such as {"timeout": 60, "insecure_bind": True}; on several nodes they need that one or TLS files.
    cpus, gpus: what Ray reserves for each worker; with gpus, workers train on cuda. strategy: of the placement group.

    A task that dies is started again, up to three times. Ctrl-C ends the job with a checkpoint. Raises UsageError if
    Ray has no room for all tasks, otherwise the error that ended the job.
    """
    counts = {"ps": ps, "worker": workers, "evaluator": evaluators}
    here = f"{LOOPBACK}:0"
    spec = ClusterSpec({"chief": (here,), **{role: (here,) * count for role, count in counts.items() if count}})
    overrides = [part for name, value in (settings or {}).items() for part in ("--set", f"{name}={value}")]

    def command(task: str) -> list[str]:
        role, _ = parse_task(task)
        if script and role == "worker":
            return [sys.executable, str(job), *script_args]
        line = [sys.executable, "-P", "-m", "shardline", role, "--task", task, "--life-fd", LIFE_FD]
        if ROLES[role].computes and not script:
            line += ["--job", str(job), *overrides]
        return [*line, *(["--out", str(out)] if ROLES[role].leads else ["--exit-with-job"])]

    # A role ignores variables for others, and a script's connect() reads them too.
    variables = {f"SHARDLINE_{name.upper()}": str(value) for name, value in (options or {}).items()}
    with _placed(spec, cpus, gpus, strategy) as tasks:
        return _Run(tasks, command, variables, str(out), script=script).to_the_end()


@contextlib.contextmanager
def _placed(spec: ClusterSpec, cpus: float, gpus: float, strategy: str) -> Iterator[_Tasks]:
    """The actors of all tasks in a placement group, which ends with the context. Raises UsageError, TaskLostError."""
    if not ray.is_initialized():
        ray.init()
    bundles = [_bundle(task, cpus, gpus) for task in spec.task_names()]
    group = placement_group(bundles, strategy=strategy)
    tasks = _Tasks(group, bundles, spec)
    try:
        if not group.wait(PLACE_S):
            raise UsageError(
                f"Ray has no room for {len(bundles)} tasks, of which {spec.num('worker')} are workers with {cpus:g} "
                f"CPUs and {gpus:g} GPUs each, within {PLACE_S:.0f} s; it has {_resources()}: lower workers, cpus or "
                "gpus, or add nodes"
            )
        tasks.place()
        yield tasks
    finally:
        tasks.kill()
        remove_placement_group(group)


def _get(promised: Any) -> Any:
    """Wait for what an actor returns. Raises TaskLostError."""
    try:
        return ray.get(promised, timeout=PLACE_S)
    except RayError as error:
        raise TaskLostError(f"Ray's actors did not start: {_line(error)}") from None


def _bundle(task: str, cpus: float, gpus: float) -> dict[str, float]:
    if not task.startswith("worker/"):
        return {"CPU": SERVICE_CPUS}
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def _resources() -> str:
    found = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")}
    return ", ".join(f"{count:g} {name}s" for name, count in sorted(found.items())) or "none"


@dataclass
class _Tasks:
    """The actors, by task, each in its bundle of the placement group."""

    group: PlacementGroup
    bundles: list[dict[str, float]]
    spec: ClusterSpec
    actors: dict[str, Any] = field(default_factory=dict)

    def start(self, task: str) -> Any:
        bundle, number = self.bundle(task), self.spec.task_names().index(task)
        self.actors[task] = (
            ray.remote(TaskActor)
            .options(
                max_concurrency=4,
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number),
            )
            .remote()
        )
        return self.actors[task]

    def bundle(self, task: str) -> dict[str, float]:
        return self.bundles[self.spec.task_names().index(task)]

    def place(self) -> None:
        """Start all actors, and put their addresses into the spec. Raises TaskLostError."""
        started = {task: self.start(task).host.remote() for task in self.spec.task_names()}
        found = dict(zip(started, _get(list(started.values())), strict=True))
        if len(set(found.values())) == 1:
            found = dict.fromkeys(found, LOOPBACK)
        for task, host in found.items():
            self.spec = self.spec.with_address(task, format_address(host, 0))
        self.spec = self.spec.with_address("chief/0", _get(self.actors["chief/0"].reserve.remote(found["chief/0"])))

    def replace(self, task: str) -> None:
        """Start another actor for a task, maybe on another node. Raises TaskLostError."""
        host = _get(self.start(task).host.remote())
        if parse_address(self.spec.chief)[0] != LOOPBACK:
            self.spec = self.spec.with_address(task, format_address(host, 0))

    def kill(self) -> None:
        for actor in self.actors.values():
            ray.kill(actor)


class _Run:
    """Follows the tasks' processes to the end of the job."""

    def __init__(
        self,
        tasks: _Tasks,
        command: Callable[[str], list[str]],
        variables: Mapping[str, str],
        out: str,
        *,
        script: bool,
    ) -> None:
        self._tasks = tasks
        self._command = command
        self._variables = variables
        self._out = out
        self._exits = TaskExits(tasks.spec.task_names(), script=script)
        self._running: dict[Any, str] = {}
        """Tasks by what Ray promises of their processes."""
        self._fatal: ShardlineError | None = None
        """Why the job can't go on, once a task has ended for good."""
        self._asked_to_end = False
        """The chief was sent SIGTERM, of which it may die on its last lines."""

    def to_the_end(self) -> dict[str, Any]:
        """Run all tasks; returns the chief's summary. Raises the error that ended the job."""
        for task in self._tasks.spec.task_names():
            self._begin(task)
        chief = self._tasks.actors["chief/0"]
        try:
            code, words = self._follow()
        except KeyboardInterrupt:
            self._end(chief)
            code, words = self._follow()
        if self._asked_to_end and code == -signal.SIGTERM:
            code = 0
        if self._fatal is not None and not code:
            raise self._fatal
        if code:
            raise ended_with(code, words or f"the chief {describe_code(code)}")
        summary = _get(chief.read.remote(f"{self._out}/summary.json"))
        self._await_others()
        return dict(json.loads(summary or "{}"))

    def _end(self, chief: Any) -> None:
        self._asked_to_end = True
        chief.end.remote()

    def _begin(self, task: str) -> None:
        cluster = json.dumps({role: list(addresses) for role, addresses in self._tasks.spec.tasks.items()})
        place = {**self._variables, "SHARDLINE_CLUSTER": cluster, "SHARDLINE_TASK": task}
        if "GPU" in self._tasks.bundle(task):
            place["SHARDLINE_DEVICE"] = "cuda"
        self._running[self._tasks.actors[task].run.remote(self._command(task), place)] = task

    def _follow(self) -> tuple[int, str]:
        """Wait for the end of the job; returns its exit code and last message."""
        while True:
            # Ray wakes this thread when a process has ended, or its actor.
            patience_s = END_S if self._asked_to_end else OWN_END_S if self._fatal is not None else WAIT_S
            ended, _ = ray.wait(list(self._running), timeout=patience_s)
            if not ended and self._fatal is not None:
                if self._asked_to_end:
                    raise self._fatal
                self._end(self._tasks.actors["chief/0"])
            for one in ended:
                task = self._running.pop(one)
                code, words = self._result(task, one)
                again, reason = self._exits.ended(task, code)
                how = describe_code(code, script=self._exits.runs_script(task))
                if code:
                    log.warning("%s %s: %s", task, how, reason)
                if again and not (task == "chief/0" and self._asked_to_end):
                    self._begin(task)
                elif task == "chief/0":
                    return code, words
                elif code and self._fatal is None and (why := self._exits.hopeless(code)):
                    # The chief knows better why, if it ends by itself.
                    self._fatal = ended_with(code, f"{task}: {words or how}; {why}")

    def _result(self, task: str, ended: Any) -> tuple[int, str]:
        """Exit code and last message of a task; a task that was lost with its actor gets another one."""
        try:
            code, words = ray.get(ended, timeout=PLACE_S)
        except RayActorError as error:
            if task == "chief/0":
                raise TaskLostError(
                    f"the chief is lost with its actor ({_line(error)}); run the job again with the option resume"
                ) from None
            self._tasks.replace(task)
            return -signal.SIGKILL, _line(error)
        return int(code), str(words)

    def _await_others(self) -> None:
        """Let the other tasks end by themselves, which the chief has told them to do."""
        ray.wait(list(self._running), num_returns=len(self._running), timeout=END_S)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:MOST_WORDS]

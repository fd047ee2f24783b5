"""A small job, clusters of real processes that train it, and waiting for what they say instead of for the clock."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardline.checkpoint import committed_steps
from shardline.cli.launcher import LaunchOptions, LocalCluster
from shardline.core.timeouts import Timeouts
from shardline.host.ports import held_port
from shardline.job import load_job
from shardline.testing import reference
from tests.chaos.nursery import Nursery
from tests.e2e.warm import CALL, WarmProcess, descendants

COMMAND = (sys.executable, "-P", "-m", "shardline")
TIMEOUT_S = 60
"""--timeout of clusters that are to end well: what takes its full length is a failure."""
DEATH_TIMEOUT_S = 20
"""The same where tasks die: a third of it passes before a silent one is dead."""
DEVICE_MEMORY = Path(__file__).parents[1] / "support" / "device_memory.py"
"""A plugin with which lane cuda shares memory of the host."""
PATIENCE_S = 120.0
"""Every wait ends here; a busy machine takes a while to import torch six times."""
RUN_ID = "E2E_RUN_ID"
"""Environment variable by which a test's processes are found, wherever they went."""

# Dropout, batch norm and augmentation all draw from generators; a 40-wide layer gives each of 3 shards something.
JOB = """
from __future__ import annotations
import torch
from torch import nn
from shardline import Job
{imports}

class Points:
    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.points = torch.randn(256, 12, generator=generator)
        self.labels = (self.points @ torch.randn(12, 4, generator=generator)).argmax(dim=1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        point = self.points[index]
        if torch.rand(()) < 0.5:
            point = point * 1.1
        return point + 0.05 * torch.randn(12), self.labels[index]

def make_model():
    return nn.Sequential(
        nn.Linear(12, {width}), nn.BatchNorm1d({width}), nn.ReLU(), nn.Dropout(0.2), nn.Linear({width}, 4)
    )

def loss(model, batch):
    points, labels = batch
    value = nn.functional.cross_entropy(model(points), labels)
    {after_loss}
    return value

def evaluate(model):
    data = Points()
    logits = model(data.points)
    return {{
        "accuracy": float((logits.argmax(dim=1) == data.labels).double().mean()),
        "loss": float(nn.functional.cross_entropy(logits, data.labels)),
    }}

job = Job(
    model=make_model,
    loss=loss,
    dataset=Points,
    evaluate=evaluate,
    optimizer="SGD",
    optimizer_args={{"lr": 0.05, "momentum": 0.9}},
    batch_size=8,
    {settings}
)
{after}
"""

TABLED = """
import dataclasses
from shardline import EmbeddingTable
from shardline.nn import EmbeddingBag

class Tabled(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = EmbeddingBag(EmbeddingTable("signs", 4, rule="adam:lr=0.05"))
        self.rest, self.last = make_model(), nn.Linear(4, 4)

    def forward(self, points):
        return self.rest(points) + self.last(self.bag((points * 3).long() * 997))

job = dataclasses.replace(job, model=Tabled)
"""
"""For `after`: the model has an embedding table too."""


def write_job(
    path: Path, *, width: int = 40, imports: str = "", after_loss: str = "", after: str = "", **settings: Any
) -> Path:
    """Write the small job; settings: further fields of Job."""
    fields = "\n    ".join(f"{name}={value!r}," for name, value in {"steps": 40, **settings}.items())
    text = JOB.format(imports=imports, width=width, after_loss=after_loss or "pass", after=after, settings=fields)
    path.write_text(text, encoding="utf-8")
    return path


def slow_job(path: Path, *, step_s: float = 0.02, **settings: Any) -> Path:
    """The small job at a pace that leaves time to kill somebody before it ends."""
    return write_job(path, imports="import time", after_loss=f"time.sleep({step_s})", **settings)


def expected_sha256(job: Path, **overrides: int | str) -> str:
    """Where one process with a plain torch optimizer ends."""
    return reference(load_job(job, [(name, str(value)) for name, value in overrides.items()])).sha256


# Waiting


def wait_until(
    found: Callable[[], Any],
    what: str,
    *,
    limit_s: float = PATIENCE_S,
    while_runs: Command | None = None,
    seen: Callable[[], object] = lambda: "nothing",
) -> Any:
    """The first true value of found(), asked again and again; files and other processes wake nobody.

    Fails when the time is up or the command ends before; `seen` says what there is instead.
    """
    deadline_s = time.monotonic() + limit_s
    never = threading.Event()
    while not (value := found()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what}: not within {limit_s:.0f} s; there is {seen()}")
        if while_runs is not None and while_runs.process.poll() is not None and not found():
            raise AssertionError(f"{what}: the command has ended before: {while_runs.finish()}; there is {seen()}")
        never.wait(0.02)
    return value


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON lines file; the line that is being written is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def traced(out: Path, worker: int) -> Counter[str]:
    """Number of the spans of steps and exchanges in a worker's trace, by name; all pulls are within the trace."""
    found = json.loads((out / f"trace-worker-{worker}.json").read_text())["traceEvents"]
    spans = [event for event in found if event["ph"] == "X"]
    until = max(event["ts"] + event["dur"] for event in spans if event.get("cat") == "user_annotation")
    began = min(event["ts"] for event in spans if event.get("cat") == "user_annotation")
    named = [event for event in spans if event.get("cat") in ("shardline", "user_annotation")]
    computed = [event for event in spans if event["name"] == "aten::linear"]
    assert computed, "torch's own operations are in it"
    assert all(began <= event["ts"] + event["dur"] <= until + 10e6 for event in named)
    return Counter(event["name"] for event in named)


def events(out: Path, kind: str = "") -> list[str]:
    """Sentences of the chief's event log, of one kind or all."""
    found = json_lines(out / "logs" / "events.jsonl")
    return [event["message"] for event in found if not kind or event["kind"] == kind]


def wait_for_event(
    out: Path, kind: str, pattern: str = "", *, more_than: int = 0, while_runs: Command | None = None
) -> str:
    """The chief has told such a sentence, more_than of them not counted."""

    def found() -> str:
        matches = [text for text in events(out, kind) if re.search(pattern, text)]
        return matches[more_than] if len(matches) > more_than else ""

    return str(wait_until(found, f"event {kind!r} {pattern!r}", while_runs=while_runs, seen=lambda: events(out)))


def wait_for_step(out: Path, step: int, *, while_runs: Command | None = None) -> None:
    """The chief has logged this step or a later one."""

    def reached() -> bool:
        return any(line["step"] >= step for line in json_lines(out / "logs" / "steps.jsonl")[-4:])

    wait_until(reached, f"step {step}", while_runs=while_runs, seen=lambda: events(out))


def summary_of(out: Path) -> dict[str, Any]:
    """What the chief wrote at the end."""
    found: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return found


def newest_checkpoint(out: Path) -> int:
    """Step of the newest committed checkpoint."""
    return committed_steps(out / "checkpoints")[-1]


# Processes


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def sentences(self) -> list[str]:
        """Lines of the error output that say why it ended: of the command, or of a task's log."""
        return [line for line in self.err.splitlines() if line.startswith("shardline: ") or " ERROR " in line]


nursery: Nursery | None = None
"""Where commands are forked from; None = each begins with an exec, as people's do. See the fixture `warm`."""


class Command:
    """A running `shardline` command, both outputs captured; cold: begin with an exec whatever others do."""

    def __init__(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        cold: bool = False,
    ) -> None:
        self._finished: Finished | None = None
        self.process: subprocess.Popen[str] | WarmProcess
        if nursery is not None and not cold:
            full = {**os.environ, **(env or {})}
            self.process = WarmProcess(nursery, [str(argument) for argument in arguments], env=full, cwd=cwd)
            return
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, **(env or {})},
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        self.process.send_signal(number)

    def finish(self, *, limit_s: float = PATIENCE_S) -> Finished:
        """Wait for the end; a command that goes on too long is killed and the test fails with what it said."""
        if self._finished is None:
            try:
                out, err = self.process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                out, err = self.process.communicate()
                raise AssertionError(f"{self.process.args} did not end within {limit_s} s:\n{out}\n{err}") from None
            self._finished = Finished(self.process.returncode, out, err)
        return self._finished


def shardline(*arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Finished:
    """Run a command to its end."""
    return Command(*arguments, env=env, cwd=cwd).finish()


def in_a_fork(function: Callable[..., Any], **given: Any) -> Any:
    """Call a module's function in a process whose LocalCluster forks its tasks; given and returned are JSON's values.

    For tests with the fixture `warm`: the tasks of a LocalCluster in pytest's own process begin with an exec.
    """
    assert nursery is not None, "use the fixture warm"
    called = Command(CALL, f"{function.__module__}:{function.__name__}", json.dumps(given))
    finished = called.finish(limit_s=2 * PATIENCE_S)
    assert finished.code == 0, finished.err
    return json.loads(finished.out.splitlines()[-1])


def train_command(job: Path, out: Path, *flags: str | Path) -> list[str | Path]:
    """Arguments of `shardline train` for tests."""
    return ["train", job, "--out", out, "--timeout", str(TIMEOUT_S), *flags]


def train(job: Path, out: Path, *flags: str | Path) -> Finished:
    """Run `shardline train` to its end."""
    return shardline(*train_command(job, out, *flags))


def assert_refused(finished: Finished, code: int, *patterns: str) -> None:
    """It ended with this code and one sentence that matches all patterns, and without a traceback."""
    assert finished.code == code, finished
    assert "Traceback" not in finished.err + finished.out, finished.err
    assert finished.sentences, finished
    for pattern in patterns:
        assert re.search(pattern, finished.sentences[0]), f"{pattern!r} is not in: {finished.sentences[0]}"


def processes(run_id: str) -> dict[int, str]:
    """Command lines of the living processes that a test started, directly or not, by process id."""
    wanted = f"{RUN_ID}={run_id}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return found


def pid_of(out: Path, task: str) -> int:
    """Process id of a task that a `shardline train` of this test started."""
    if nursery is not None:
        (pid,) = [pid for pid, name in descendants(nursery.pid).items() if name == task]
        return pid
    started = processes(os.environ[RUN_ID]).items()
    (pid,) = [pid for pid, line in started if f" --task {task} " in line and str(out) in line]
    return pid


def end_processes(pids: Sequence[int]) -> None:
    """Kill what a failed test left behind."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def mortal_cluster(job: Path, out: Path, **options: Any) -> LocalCluster:
    """Two servers and two workers whose deaths are noticed within seconds."""
    fields = {"ps": 2, "workers": 2, "timeouts": Timeouts(total_s=DEATH_TIMEOUT_S), **options}
    return LocalCluster(LaunchOptions(job=job, out=out, **fields))


# Clusters by hand


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different."""
    with held_ports(count) as ports:
        return ports


@contextlib.contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Ports, all different, that nobody else is given meanwhile; tasks of a cluster can listen there."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(held_port()).getsockname()[1] for _ in range(count)]


@dataclass
class HandCluster:
    """Tasks started one by one from a cluster.json with fixed ports."""

    folder: Path
    tasks: Mapping[str, Sequence[str]]
    commands: dict[str, Command] = field(default_factory=dict)
    ports: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Holds them until the cluster, entered as a context, is ended."""

    @classmethod
    def write(cls, folder: Path, *, chief: int = 1, **counts: int) -> HandCluster:
        """A cluster.json with this many tasks per role."""
        wanted = {role: count for role, count in {"chief": chief, **counts}.items() if count}
        stack = contextlib.ExitStack()
        ports = iter(stack.enter_context(held_ports(sum(wanted.values()))))
        tasks = {role: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for role, count in wanted.items()}
        (folder / "cluster.json").write_text(json.dumps(tasks))
        return cls(folder, tasks, ports=stack)

    @property
    def path(self) -> Path:
        """The cluster.json."""
        return self.folder / "cluster.json"

    def tf_config(self, role: str, index: int) -> dict[str, str]:
        """TensorFlow's environment variable for a task."""
        cluster = {name: list(addresses) for name, addresses in self.tasks.items()}
        return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})}

    def start(self, task: str, *flags: str | Path, env: Mapping[str, str] | None = None, cold: bool = False) -> Command:
        """Start a task; with `env` it learns its place from there alone."""
        place = [] if env else ["--cluster", self.path, "--task", task]
        arguments = [task.split("/")[0], *place, "--timeout", str(TIMEOUT_S), *flags]
        command = Command(*arguments, env=env, cwd=self.folder, cold=cold)
        self.commands[task] = command
        return command

    def __enter__(self) -> HandCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for command in self.commands.values():
            if command.process.poll() is None:
                command.process.kill()
            command.finish()
        self.ports.close()


def scrape(address: str) -> dict[str, float]:
    """A task's metrics page: value by name and labels, such as 'shardline_step{task="ps/0"}'."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    values = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    return values


def total(values: Mapping[str, float], name: str) -> float:
    """Sum of a metric over its labels."""
    return sum(value for key, value in values.items() if key == name or key.startswith(f"{name}{{"))


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of this size at the folder; skips the test where this user may not mount one."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    made = subprocess.run(mount, check=False, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"can't mount a small file system here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)

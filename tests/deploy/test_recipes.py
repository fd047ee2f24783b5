"""The commands of docs/deploy.md, read off the page and run: on one machine instead of six, with TLS and token."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from shardline.host.ports import held_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy.md"
MACHINES = re.compile(r"10\.0\.0\.\d+")
PATIENCE_S = 110.0
JOB = """
import torch
from torch import nn
from shardline import Job

points = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(points, points.sum(dim=1, keepdim=True))

def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

job = Job(
    model=lambda: nn.Linear(8, 1), loss=loss, dataset=lambda: data, evaluate=lambda model: {"bias": float(model.bias)},
    optimizer="SGD", optimizer_args={"lr": 0.01}, batch_size=8, replicas=2, steps=1_000_000, checkpoint_every=50,
)
"""


def section(title: str) -> str:
    """Text of one section of the page."""
    text = PAGE.read_text()
    assert f"\n## {title}\n" in text
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def blocks(title: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section(title), re.DOTALL)


class Machine:
    """A folder with what the page says each machine has, and the commands that run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARDLINE_")}
        self.environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = contextlib.ExitStack()

    def prepare(self) -> None:
        """cluster.json, certificates, token and job, as the page has them."""
        (cluster,) = blocks("What all of them share", "json")
        spec = json.loads(MACHINES.sub("127.0.0.1", cluster))
        ready = {role: [self.place() for _ in addresses] for role, addresses in spec.items()}
        (self.folder / "cluster.json").write_text(json.dumps(ready))
        (self.folder / "job.py").write_text(JOB)
        (commands,) = blocks("What all of them share", "sh")
        self.run(f"set -e\n{commands}")
        (self.folder / "certs" / "ca.pem").rename(self.folder / "ca.pem")

    def place(self) -> str:
        """An address that is nobody else's until the end."""
        return f"127.0.0.1:{self.ports.enter_context(held_port()).getsockname()[1]}"

    def run(self, command: str) -> str:
        """Run a command to its end; returns what it printed."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def start(self, name: str, command: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                ["bash", "-c", command], cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )

    def wait_for(self, name: str, text: str) -> None:
        """Wait until a command has printed a text."""
        deadline_s = time.monotonic() + PATIENCE_S
        path = self.folder / f"{name}.log"
        while text not in path.read_text():
            assert time.monotonic() < deadline_s, self.logs()
            assert all(one.poll() is None for one in self.running.values()), self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        return "".join(f"\n--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def codes(self) -> dict[str, int]:
        """Exit codes of all that were started; waits for their end."""
        deadline_s = time.monotonic() + PATIENCE_S
        try:
            return {name: one.wait(max(0.1, deadline_s - time.monotonic())) for name, one in self.running.items()}
        except subprocess.TimeoutExpired:
            pytest.fail(f"not all tasks ended:{self.logs()}")

    def close(self) -> None:
        for one in self.running.values():
            if one.poll() is None:
                one.send_signal(signal.SIGKILL)
                one.wait(10.0)
        self.ports.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    found = Machine(tmp_path)
    yield found
    found.close()


@pytest.mark.e2e
@pytest.mark.timeout(240)
@pytest.mark.processes
def test_plain_processes_of_the_page_train_are_watched_stopped_and_exported(machine: Machine) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the page's tokens need the openssl command")
    machine.prepare()
    start, watch, after = blocks("Plain processes", "sh")
    secured, *lines = [line for line in start.splitlines() if not line.startswith("#")]
    assert secured.startswith("SECURED=") and len(lines) == 6
    for number, line in enumerate(lines):
        role, task = line.split()[1], re.search(r"--task (\S+)", line)
        # One folder stands for all machines, whose task.pem are different ones.
        name = task[1].replace("/", "-") if task else f"{role}-0"
        machine.start(f"{number}-{role}", f"{secured.replace('task.', f'certs/{name}.')}\nexec {line}")
    secured = secured.replace("task.", "certs/chief-0.")
    for text in ("training from step 0", "evaluator/0 joined"):
        machine.wait_for("0-chief", text)
    status, top, stop = watch.splitlines()
    frame = machine.run(f"{secured}\n{top} --once")
    table = machine.run(f"{secured}\n{status}")
    for task in ("ps/0", "ps/1", "worker/0", "worker/1", "evaluator/0"):
        assert re.search(rf"^{task} +alive ", frame, re.MULTILINE), frame
        assert re.search(rf"^{task} +alive ", table, re.MULTILINE), table
    assert "will end with a checkpoint" in machine.run(f"{secured}\n{stop}")
    assert machine.codes() == dict.fromkeys(machine.running, 0), machine.logs()
    assert "model.safetensors" in machine.run(after)
    assert (machine.folder / "model.safetensors").stat().st_size > 0
    summary = json.loads((machine.folder / "runs" / "digits" / "summary.json").read_text())
    assert summary["reason"] == "stopped: enough for today"


def test_page_names_files_that_are_there() -> None:
    text = PAGE.read_text()
    names = set(re.findall(r"deploy/(?:kubernetes|systemd|compose-per-machine)[\w/.@-]*", text))
    assert len(names) >= 8
    missing = [name for name in names if not (ROOT / name.rstrip("./")).exists()]
    assert missing == []
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (PAGE.parent / target).exists(), target


def test_commands_of_the_page_are_flags_that_exist() -> None:
    from shardline.cli.main import cli

    commands = re.findall(
        r"shardline (chief|ps|worker|evaluator|top|status|stop|export|health|certs)((?: --?[\w-]+[^\n]*)?)",
        PAGE.read_text(),
    )
    assert len(commands) >= 10
    for name, arguments in commands:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z][\w-]*", arguments)) <= known, (name, arguments)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_folders_that_the_page_applies_can_be_rendered() -> None:
    folders = set(re.findall(r"(?:apply|delete) -k (\S+?)`?[\s.]", PAGE.read_text()))
    assert folders == {"deploy/kubernetes/secured"}
    for folder in folders:
        done = subprocess.run(
            ["kubectl", "kustomize", str(ROOT / folder)], capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0 and b"kind: StatefulSet" in done.stdout

"""The recipe "compose per machine" of docs/deploy.md: one folder and one compose project for each machine.

Loopback addresses stand in for the machines, and their commands are read off the page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from shardline.job import load_job
from shardline.testing import reference
from tests.containers.stack import IMAGE, ROOT, START_S, free_port, kill, run, until

PAGE = ROOT / "docs" / "deploy.md"
FOLDER = ROOT / "deploy" / "compose-per-machine"
EXAMPLE = ROOT / "examples" / "digits" / "job.py"
COMMANDING = ("chief", "ps")
LABEL = "label=com.docker.compose.project"


def commands(section: str) -> list[str]:
    """The shell blocks of a section of the page."""
    text = PAGE.read_text().split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```sh\n(.*?)```", text, re.DOTALL)


class Machine:
    """One machine: a copy of the recipe's folder with what the page has put into it, and its compose project."""

    def __init__(self, folder: Path, task: str, address: str) -> None:
        self.folder, self.task, self.address = folder, task, address
        self.role = task.partition("/")[0]
        self.project = f"shardline-e2e-{task.replace('/', '-')}-{os.getpid()}"
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SHARDLINE_", "COMPOSE_"))}
        # What a machine of its own needs not say: several of them share one here.
        self._env = {
            **kept,
            "COMPOSE_PROJECT_NAME": self.project,
            "SHARDLINE_IMAGE": IMAGE,
            "METRICS_PORT": "0",
            "TIMEOUT": "120",
            "PAGE": "127.0.0.1:0",
        }

    @property
    def container(self) -> str:
        return f"{self.project}-{self.role}-1"

    def run(self, line: str) -> str:
        """A command of the page, which has it for ps/0 at 10.0.0.2:2222."""
        line = line.replace("10.0.0.2:2222", self.address).replace("ps/0", self.task)
        line = re.sub(r"(PROFILES=|exec )ps\b", rf"\g<1>{self.role}", line)
        return run("bash", "-c", f"set -e\n{line}", cwd=self.folder, env=self._env)

    def compose(self, *arguments: str) -> str:
        return run("docker", "compose", "--ansi", "never", *arguments, cwd=self.folder, env=self._env)

    def lines(self) -> list[str]:
        return run("docker", "logs", self.container).splitlines()

    def wait_line(self, pattern: str, *, after: int = 0) -> None:
        """Wait until it has said this, in a line after the first `after`."""

        def said() -> bool:
            return any(re.search(pattern, line) for line in self.lines()[after:])

        until(said, lambda: f"{self.task} says {pattern!r}\n" + "\n".join(self.lines()), START_S)

    def exit_code(self) -> int:
        """Once it has ended for good."""

        def ended() -> bool:
            return run("docker", "inspect", "-f", "{{.State.Status}}", self.container).strip() == "exited"

        until(ended, lambda: f"{self.task} ended\n" + "\n".join(self.lines()), START_S)
        return int(run("docker", "inspect", "-f", "{{.State.ExitCode}}", self.container))

    def left(self, kind: str) -> list[str]:
        """Names of the project's containers, networks or volumes that exist."""
        every = ["-a"] if kind == "container" else []
        shown = "{{.Names}}" if kind == "container" else "{{.Name}}"
        return run("docker", kind, "ls", *every, "--filter", f"{LABEL}={self.project}", "--format", shown).split()


class Machines:
    """A cluster of machines with files as the page hands them out. Nothing is left of it at the end."""

    def __init__(self, folder: Path, *tasks: str) -> None:
        self._spec: dict[str, list[str]] = {}
        self.all: dict[str, Machine] = {}
        for number, task in enumerate(tasks, 11):
            address = f"127.0.0.{number}:{free_port()}"
            self._spec.setdefault(task.partition("/")[0], []).append(address)
            self.all[task] = Machine(folder / task.replace("/", "-"), task, address)
        self._home = folder

    def prepare(self) -> None:
        """The files of each machine's folder."""
        (self._home / "cluster.json").write_text(json.dumps(self._spec))
        (make,) = commands("What all of them share")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(["bash", "-ec", make], cwd=self._home, env={**os.environ, "PATH": path}, timeout=60, check=True)
        for one in self.all.values():
            shutil.copytree(FOLDER, one.folder)
            for name in ("cluster.json", "token", "certs/ca.pem", *(["admin-token"] * (one.role in COMMANDING))):
                shutil.copy(self._home / name, one.folder)
            for kind in ("pem", "key"):
                shutil.copy(self._home / "certs" / f"{one.task.replace('/', '-')}.{kind}", one.folder / f"task.{kind}")
            if one.role != "ps":
                (one.folder / "job").mkdir()
                shutil.copy(EXAMPLE, one.folder / "job")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self.all.values():
            if kind is not None:
                print(one.task, run("docker", "logs", one.container, check=False)[-5000:])
            if (one.folder / ".env").exists():
                one.compose("down", "-t", "5", "-v")
        assert not [name for one in self.all.values() for kind in ("container", "volume") for name in one.left(kind)]


@pytest.mark.long
def test_recipe_of_the_page_gives_the_same_bits_though_a_worker_is_restarted_and_a_server_killed(
    tmp_path: Path,
) -> None:
    start, manage = commands("Compose per machine")
    with Machines(tmp_path, "chief/0", "ps/0", "worker/0", "worker/1") as machines:
        machines.prepare()
        chief, server, worker = (machines.all[task] for task in ("chief/0", "ps/0", "worker/0"))
        # However slow this machine is, the job is not over before the worker is back.
        both = 'services: { chief: { environment: { SHARDLINE_MIN_WORKERS: "2" } } }'
        (chief.folder / "compose.override.yaml").write_text(both)
        for one in machines.all.values():
            one.run(start)
        chief.wait_line("training from step 0 until step 500")
        after = len(chief.lines())
        worker.compose("restart", "worker")
        chief.wait_line("worker/0 joined", after=after)
        after = len(chief.lines())
        kill(server.container)
        chief.wait_line(r"training continues from step \d+", after=after)
        _, status, _, down = manage.splitlines()
        assert re.search(r"^worker/0 +alive ", server.run(status.replace("exec", "exec -T")), re.MULTILINE)
        assert {one.task: one.exit_code() for one in machines.all.values()} == dict.fromkeys(machines.all, 0)
        chief.compose("cp", "chief:/out/summary.json", ".")
        summary = json.loads((chief.folder / "summary.json").read_text())
        assert (summary["steps"], summary["sha256"]) == (500, reference(load_job(EXAMPLE)).sha256)
        # Both are on one machine here, in its own network.
        assert any(line.endswith("lane shm") for line in worker.lines())
        for one in machines.all.values():
            one.run(down)
            assert one.left("container") == one.left("network") == []
            assert one.left("volume") == ([f"{one.project}_out"] if one.role == "chief" else [])

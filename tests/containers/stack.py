"""A compose project of its own: up, faults from outside, logs, exit codes, and nothing left of it but what is meant to.

with Stack("faults", STEPS="100000") as stack:
    stack.up()
    stack.wait_line("chief", "training from step")
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("SHARDLINE_E2E_IMAGE") or "shardline:e2e"
TASKS = ("chief", "ps", "worker", "evaluator")
START_S = 180.0
"""A whole cluster on two busy cores."""


def run(
    *command: str, timeout_s: float = 120.0, check: bool = True, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> str:
    """Standard output and error of a command; raises where it fails (check) or takes longer."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0 or not check, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def has_engine() -> bool:
    """Whether a Docker engine and Compose v2 answer."""
    if shutil.which("docker") is None:
        return False
    probes = (["docker", "info"], ["docker", "compose", "version"])
    return all(
        subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False).returncode == 0
        for probe in probes
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(found: Callable[[], Any], what: str | Callable[[], str], timeout_s: float) -> Any:
    """The first true answer. Docker tells none of what is asked for as an event, so it is asked again and again."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        answer = found()
        if answer:
            return answer
        if time.monotonic() >= deadline_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.3)


def kill(container: str) -> None:
    """Kill the task in a container as the kernel would, so that the restart policy acts."""
    top = run("docker", "top", container, "-eo", "pid,args").splitlines()[1:]
    # The first is init, where there is one: it dies with the last of its children and hands its exit code on. A health
    # check may be among the others.
    tasks = [line.split()[0] for line in top if " health" not in line and "wget" not in line]
    run("kill", "-9", tasks[min(1, len(tasks) - 1)])


class Stack:
    """One compose project. files: compose files on top of docker-compose.yml; knobs: what .env may set."""

    def __init__(self, name: str, *files: str | Path, **knobs: str) -> None:
        self.project = f"shardline-e2e-{name}-{os.getpid()}"
        self.prometheus_port = free_port()
        self._files = ["docker-compose.yml", *map(str, files)]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SHARDLINE_", "COMPOSE_"))}
        self._env = {
            **kept,
            "SHARDLINE_IMAGE": IMAGE,
            "PROMETHEUS_PORT": str(self.prometheus_port),
            **knobs,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self.compose("ps", "-a", check=False), self.compose("logs", "--no-color", check=False)[-20_000:])
        self.down("-v")
        assert not self.left("container") + self.left("network") + self.left("volume")

    # Compose

    def compose(self, *arguments: str, timeout_s: float = 240.0, check: bool = True) -> str:
        """docker compose ... in this project."""
        files = [part for file in self._files for part in ("-f", file)]
        command = ("docker", "compose", "-p", self.project, "--ansi", "never", *files, *arguments)
        return run(*command, timeout_s=timeout_s, check=check, env=self._env)

    def up(self, *services: str, check: bool = True) -> str:
        """Start services (default: the tasks, without Prometheus)."""
        return self.compose("up", "-d", "--no-build", *(services or TASKS), check=check)

    def down(self, *arguments: str) -> None:
        """Stop and remove everything but the volumes; "-v": those too."""
        self.compose("down", "--remove-orphans", "-t", "5", *arguments)

    def left(self, kind: str) -> list[str]:
        """Names of the project's containers, networks or volumes that exist."""
        arguments = ["-a"] if kind == "container" else []
        shown = "{{.Names}}" if kind == "container" else "{{.Name}}"
        label = f"label=com.docker.compose.project={self.project}"
        return run("docker", kind, "ls", *arguments, "--filter", label, "--format", shown).split()

    # Containers

    def containers(self, *services: str) -> list[str]:
        """Names of the services' containers, ended ones too, in order."""
        label = f"label=com.docker.compose.project={self.project}"
        found = run("docker", "container", "ls", "-a", "--filter", label, "--format", "{{.Names}}").split()
        pattern = "|".join(services or TASKS)
        return sorted(name for name in found if re.fullmatch(rf"{self.project}-({pattern})-\d+", name))

    def one(self, service: str, number: int = 1) -> str:
        """A container's name."""
        return f"{self.project}-{service}-{number}"

    def inspect(self, container: str) -> dict[str, Any]:
        """What the engine knows of it."""
        found: dict[str, Any] = json.loads(run("docker", "container", "inspect", container))[0]
        return found

    def kill(self, container: str) -> None:
        """As the kernel would, so that the restart policy acts; `docker kill` counts as a stop by hand."""
        kill(container)

    def address(self, container: str) -> str:
        """Its IP address."""
        networks = self.inspect(container)["NetworkSettings"]["Networks"]
        address: str = networks[f"{self.project}_cluster"]["IPAddress"]
        return address

    def restarts(self, container: str) -> int:
        """How often the policy started it again."""
        count: int = self.inspect(container)["RestartCount"]
        return count

    def exit_codes(self, *services: str, timeout_s: float = START_S) -> dict[str, int]:
        """Exit code by container, once all have ended for good."""

        def ended() -> bool:
            states = [self.inspect(name)["State"] for name in self.containers(*services)]
            return bool(states) and all(state["Status"] == "exited" for state in states)

        until(ended, lambda: f"all of {services or TASKS} ended\n{self.compose('ps', '-a')}", timeout_s)
        return {name: self.inspect(name)["State"]["ExitCode"] for name in self.containers(*services)}

    def file(self, service: str, path: str) -> str:
        """Text of a file in a container, ended or not."""
        target = f"{self.one(service)}:{path}"
        archive = subprocess.run(["docker", "cp", target, "-"], capture_output=True, timeout=60, check=True).stdout
        return subprocess.run(
            ["tar", "-xO"], input=archive, capture_output=True, timeout=60, check=True
        ).stdout.decode()

    # What they say

    def lines(self, service: str) -> list[str]:
        """What a service's containers have printed so far."""
        text = self.compose("logs", "--no-log-prefix", "--no-color", service)
        # Compose erases the terminal's line before each of its own, terminal or not.
        return text.replace("\x1b[2K", "").splitlines()

    def mark(self, service: str) -> int:
        """How many lines there are now, for wait_line."""
        return len(self.lines(service))

    def wait_line(self, service: str, pattern: str, *, after: int = 0, timeout_s: float = START_S) -> str:
        """The first line that matches, of those after the first `after`."""

        def found() -> str | None:
            return next((line for line in self.lines(service)[after:] if re.search(pattern, line)), None)

        line: str = until(found, lambda: f"{service} says {pattern!r}\n" + "\n".join(self.lines(service)), timeout_s)
        return line

    def goes_on(self, *, timeout_s: float = START_S) -> None:
        """Wait for a checkpoint that is newer than all there are."""
        self.wait_line("chief", r"checkpoint of step [1-9]", after=self.mark("chief"), timeout_s=timeout_s)

    def summary(self) -> dict[str, Any]:
        """The chief's summary.json."""
        found: dict[str, Any] = json.loads(self.file("chief", "/out/summary.json"))
        return found

    # Prometheus

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Samples of an instant query; [] while Prometheus does not answer."""
        return list(self._ask(f"query?{urllib.parse.urlencode({'query': expression})}").get("result", ()))

    def targets(self) -> list[dict[str, Any]]:
        """Tasks that Prometheus scrapes."""
        found: Sequence[dict[str, Any]] = self._ask("targets?state=active").get("activeTargets", ())
        return [target for target in found if ":9464" in target["scrapeUrl"]]

    def _ask(self, what: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.prometheus_port}/api/v1/{what}", timeout=10) as reply:
                data: dict[str, Any] = json.load(reply)["data"]
                return data
        except OSError:
            return {}

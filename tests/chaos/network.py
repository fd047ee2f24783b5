"""A network namespace per task, on a switch that has one too: links that can be cut one way, both ways, or made slow.

Nothing of the machine's own network is touched, and all of it goes with the namespaces. It needs root, ip, iptables and
tc; why_no_networks() says what lacks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from types import TracebackType

NET = "10.97.0"
SLOW = ("tbf", "rate", "1mbit", "burst", "16kb", "latency", "400ms")
"""Not netem, which not every kernel has: 1 Mbit/s and a queue of up to 0.4 s."""


@functools.cache
def why_no_networks() -> str:
    """Why tasks can't have networks of their own here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "iptables", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    try:
        with (
            Networks(["probe/0"], name=f"slprobe{os.getpid()}-") as networks,
            networks.deaf("probe/0", ["probe/0"]),
            networks.resetting("probe/0", ["probe/0"]),
        ):
            pass
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces can't be made here: {error}"
    return ""


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, capture_output=True, text=True, timeout=20, check=check)


class Networks:
    """Namespaces of tasks, each with one interface, 10.97.0.N."""

    def __init__(self, tasks: Sequence[str], *, name: str = "") -> None:
        self.name = name or f"slc{os.getpid()}-"
        self.tasks = tuple(tasks)
        self._made: list[str] = []

    def __enter__(self) -> Networks:
        try:
            switch = self._make("s")
            _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "br0", "up")
            for task in self.tasks:
                self._plug(switch, task)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _make(self, suffix: str) -> str:
        name = f"{self.name}{suffix}"
        _run("ip", "netns", "add", name)
        self._made.append(name)
        return name

    def _plug(self, switch: str, task: str) -> None:
        port = f"p{self._number(task)}"
        host = self._make(str(self._number(task)))
        for arguments in (
            ("link", "set", "lo", "up"),
            ("link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch),
            ("addr", "add", f"{self.address(task)}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            _run("ip", "-n", host, *arguments)
        _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")

    def close(self) -> None:
        """Take all of it away."""
        for name in self._made:
            _run("ip", "netns", "delete", name, check=False)
        self._made.clear()

    def _number(self, task: str) -> int:
        return self.tasks.index(task) + 1

    def address(self, task: str) -> str:
        """IP address of a task."""
        return f"{NET}.{self._number(task)}"

    def namespace(self, task: str) -> str:
        """Name of a task's namespace."""
        return f"{self.name}{self._number(task)}"

    def _in(self, task: str, *command: str) -> None:
        _run("ip", "netns", "exec", self.namespace(task), *command)

    @contextlib.contextmanager
    def deaf(self, task: str, peers: Sequence[str]) -> Iterator[None]:
        """Nothing from these peers reaches the task."""
        with self._told(task, peers, "-j", "DROP"):
            yield

    @contextlib.contextmanager
    def resetting(self, task: str, peers: Sequence[str]) -> Iterator[None]:
        """Whatever these peers send the task by TCP is answered with a reset, in old and in new connections."""
        with self._told(task, peers, "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"):
            yield

    @contextlib.contextmanager
    def _told(self, task: str, peers: Sequence[str], *what: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for peer in peers:
                rule = ("INPUT", "-s", self.address(peer), *what)
                self._in(task, "iptables", "-w", "-A", *rule)
                stack.callback(self._in, task, "iptables", "-w", "-D", *rule)
            yield

    @contextlib.contextmanager
    def slow(self, task: str) -> Iterator[None]:
        """What the task sends goes at 1 Mbit/s."""
        self._in(task, "tc", "qdisc", "add", "dev", "eth0", "root", *SLOW)
        try:
            yield
        finally:
            self._in(task, "tc", "qdisc", "del", "dev", "eth0", "root")

"""Where contenders run: a network namespace with cubic for loopback, and hosts with shaped links (netns-lab)."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process import HERE, ROOT, Child, ContenderError, Prefix, environment

CUBIC = "cubic"
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
CURRENT = Path("/proc/sys/net/ipv4/tcp_congestion_control")
LAB_NET = "10.88.0"
"""Not netns-lab's own default, so that a lab somebody else has up is not disturbed."""
INTERFACE = "eth0"
"""Of each host."""


@dataclass(frozen=True, kw_only=True)
class Loopback:
    """Where loopback contenders run."""

    prefix: Prefix
    congestion_control: str
    namespace: str
    """Empty = the machine's own."""


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise ContenderError(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def allow(control: str, allowed: Path = ALLOWED) -> None:
    """Let namespaces choose a congestion control: adds it to what the machine allows, and takes nothing away."""
    words = allowed.read_text(encoding="ascii").split()
    if control not in words:
        allowed.write_text(" ".join([*words, control]) + "\n", encoding="ascii")


@contextmanager
def loopback() -> Iterator[Loopback]:
    """A namespace of its own with loopback under cubic; the machine's own where that can't be had (not root)."""
    name = f"shardline-bench-{os.getpid()}"
    own = Loopback(prefix=HERE, congestion_control=CURRENT.read_text(encoding="ascii").strip(), namespace="")
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield own
        return
    try:
        allow(CUBIC)
        _ip("netns", "add", name)
    except (OSError, ContenderError):
        yield own
        return
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        prefix = ("ip", "netns", "exec", name)
        command = [*prefix, "sh", "-c", f"echo {CUBIC} > {CURRENT} && cat {CURRENT}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        if done.stdout.strip() != CUBIC:
            yield own
            return
        yield Loopback(prefix=prefix, congestion_control=CUBIC, namespace=name)
    finally:
        _ip("netns", "delete", name)


def find_lab_tool() -> Path | None:
    """netns-lab: on PATH, or beside the repository."""
    found = shutil.which("netns-lab")
    beside = ROOT.parent / "shared" / "tools" / "netns-lab"
    return Path(found) if found else beside if beside.is_file() else None


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Hosts 1, 2, ... with a link of their own each."""

    tool: Path
    hosts: int
    name: str

    def prefix(self, host: int) -> Prefix:
        """What stands before a command to run it on a host."""
        return ("ip", "netns", "exec", f"{self.name}{host}")

    def address(self, host: int) -> str:
        """IP address of a host."""
        return f"{LAB_NET}.{host}"


@contextmanager
def lab(hosts: int, rate: str) -> Iterator[Lab]:
    """Hosts on one switch, each link shaped to `rate` (as tc writes it) both ways. Raises ContenderError.

    rate: "4gbit,1gbit" = 4 Gbit/s for host 1, 1 Gbit/s for the others.
    """
    tool = find_lab_tool()
    if tool is None:
        raise ContenderError("netns-lab is neither on PATH nor at ../shared/tools/netns-lab")
    if os.geteuid() != 0:
        raise ContenderError("hosts with links of their own need root")
    name = f"slb{os.getpid()}"
    settings = {**os.environ, "NETNS_LAB": name, "NETNS_LAB_NET": LAB_NET}
    made = subprocess.run(
        [str(tool), "up", str(hosts), rate, "0"], env=settings, capture_output=True, text=True, timeout=60, check=False
    )
    try:
        if made.returncode:
            raise ContenderError(f"netns-lab up: {made.stderr.strip() or made.returncode}")
        yield Lab(tool=tool, hosts=hosts, name=name)
    finally:
        subprocess.run([str(tool), "down"], env=settings, capture_output=True, timeout=60, check=False)


IPERF3_PORT = 5201


def iperf3(
    lab_hosts: Lab, sender: int, receiver: int, seconds: float, *, both: bool = False, port: int = IPERF3_PORT
) -> float:
    """Bytes per second of TCP goodput from one host to another, as iperf3 measures it. Raises ContenderError.

    both: of both directions at once, together. port: of the receiver, one for each measurement at a time.
    """
    if shutil.which("iperf3") is None:
        raise ContenderError("iperf3 is not installed")
    server = ["iperf3", "-s", "-1", "-J", "-p", str(port)]
    with Child(server, prefix=lab_hosts.prefix(receiver), what="iperf3 -s", env=environment(tuned=False)):
        # Whole seconds: it reads 0.5 as 0, which is for ever.
        whole = str(max(1, math.ceil(seconds)))
        command = [*lab_hosts.prefix(sender), "iperf3", "-c", lab_hosts.address(receiver), "-J", "-t", whole]
        command += ["-p", str(port), *(["--bidir"] if both else [])]
        end_s = time.monotonic() + 10.0
        while True:
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 30, check=False)
            except subprocess.TimeoutExpired:
                raise ContenderError(f"iperf3 did not end within {seconds + 30:.0f} s") from None
            found = json.loads(done.stdout or "{}")
            if "error" not in found:
                ways = ("sum_received", "sum_received_bidir_reverse") if both else ("sum_received",)
                return sum(float(found["end"][way]["bits_per_second"]) for way in ways) / 8
            # The server has no way to say that it listens now.
            if "refused" not in found["error"] or time.monotonic() > end_s:
                raise ContenderError(f"iperf3: {found['error']}")
            time.sleep(0.05)

"""shardline bench net: throughput of a link, of push and pull over it, and their ratio."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.cli import options
from shardline.cluster import ClusterSpec, format_address, locate, parse_address, parse_task
from shardline.config import RoleConfig
from shardline.core.timeouts import Timeouts
from shardline.errors import ClusterSpecError, InternalError, UnreachableError, UsageError
from shardline.host.allocator import ALLOCATOR
from shardline.host.ports import on_this_host
from shardline.lanes import AUTO, CHOICES
from shardline.security import Security
from shardline_lab.bench.codecs import codecs
from shardline_lab.bench.link import MAX_SECONDS, LinkClient, LinkFigures, LinkServer
from shardline_lab.bench.mesh import mesh

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.table import Table

    from shardline_lab.bench.lane import LaneFigures

START_S = 60.0
"""Seconds that a server started by this command may take to import torch on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class BenchFigures:
    """Results of one measurement, for people and for --json."""

    sender: str
    server: str
    address: str
    link: LinkFigures
    lane: LaneFigures

    @property
    def push_ratio(self) -> float:
        """Throughput of a push relative to plain TCP."""
        return self.lane.push_bytes_per_s / self.link.up_bytes_per_s

    @property
    def pull_ratio(self) -> float:
        """Throughput of a pull relative to plain TCP."""
        return self.lane.pull_bytes_per_s / self.link.down_bytes_per_s

    def to_json(self) -> dict[str, Any]:
        """Plain values: bytes per second, seconds, bytes."""
        return {
            "from": self.sender,
            "to": self.server,
            "address": self.address,
            "link": asdict(self.link),
            "lane": asdict(self.lane),
            "push_ratio": self.push_ratio,
            "pull_ratio": self.pull_ratio,
        }


@dataclass(frozen=True, kw_only=True)
class Measurement:
    spec: ClusterSpec
    sender: str
    server: str
    address: str
    timeouts: Timeouts
    security: Security
    flags: Mapping[str, Any]
    """Of the command: lane, run_dir, megabytes, seconds, wait_s, insecure_bind."""


@click.group(short_help="Measure a cluster's network, and codecs.")
def bench() -> None:
    """Measure network throughput, how much of it Shardline reaches, and what codecs make of gradients."""


bench.add_command(codecs)
bench.add_command(mesh)


@bench.command()
@options.cluster
@click.option("--from", "sender", metavar="TASK", default="worker/0", show_default=True, help="Task that pushes.")
@click.option("--to", "server", metavar="TASK", default="ps/0", show_default=True, help="Task that serves.")
@click.option("--serve", is_flag=True, help="Serve as --to; start this side first, on its machine.")
@click.option("--port", type=click.IntRange(1, 65_535), help="Port to use instead of that of --to in the cluster spec.")
@options.option("--lane", default=AUTO, type=click.Choice(CHOICES), help="Lane to measure.")
@options.option(
    "--run-dir", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR", help="As of the tasks."
)
@click.option("--megabytes", type=click.FloatRange(0.01, 4096), default=64.0, show_default=True, help="Of one push.")
@click.option(
    "--seconds", type=click.FloatRange(0.2, MAX_SECONDS), default=5.0, show_default=True, help="Of each figure."
)
@click.option("--wait", "wait_s", type=click.FloatRange(1.0), default=600.0, show_default=True, help="With --serve.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures here.")
@options.timeout
@options.secured
@options.admin
@options.insecure_bind
@click.option("--ready-fd", type=int, hidden=True)
def net(**flags: Any) -> int:
    """Measure between two tasks of a cluster: plain TCP each way, push and pull, and their ratio.

    No job may be running on the port of --to. On the machine of --to, run:

    \b
        shardline bench net --cluster cluster.json --from worker/0 --to ps/0 --serve

    and then the same without --serve on the machine of --from. If the address of --to belongs to this machine, the
    serving side is started automatically.
    """
    sender, server, port, json_path = (flags[name] for name in ("sender", "server", "port", "json_path"))
    spec = locate(None, cluster=flags["cluster"], task=server, tf_config=os.environ.get("TF_CONFIG") or None).spec
    spec.address(sender)
    if sender == server:
        raise UsageError(f"--from and --to are both {server}; name two tasks")
    host, spec_port = parse_address(spec.address(server))
    asked = Measurement(
        spec=spec,
        sender=sender,
        server=server,
        address=format_address(host, spec_port if port is None else port),
        timeouts=Timeouts(total_s=flags["timeout"]),
        security=options.security(flags),
        flags=flags,
    )
    if flags["serve"]:
        return _serve(asked)
    # Against a server started here, unless one is already running on the task's own port.
    here = on_this_host(host) and (parse_address(asked.address)[1] == 0 or not _answers(asked.address))
    with _child(asked) if here else nullcontext(asked.address) as address:
        found = _measure(asked, address)
    if json_path is not None:
        json_path.write_text(json.dumps(found.to_json(), indent=2) + "\n", encoding="utf-8")
    from shardline.cli.terminal import PlainConsole

    console = PlainConsole(width=None if sys.stdout.isatty() else 160)
    for text in headline(found):
        console.say(text)
    console.print(table(found))
    return 0


# The serving side


def _serve(asked: Measurement) -> int:
    """Serve one measurement: plain TCP first, then a parameter server on the same port, so that one port is enough."""
    config = RoleConfig(
        role="ps",
        index=0,
        cluster=ClusterSpec({"chief": (asked.spec.chief,), "ps": (asked.address,)}),
        timeouts=asked.timeouts,
        security=asked.security,
        insecure_bind=asked.flags["insecure_bind"],
        run_dir=asked.flags["run_dir"],
    )
    link, wait_s = LinkServer(asked.address, asked.security.token), asked.flags["wait_s"]
    if asked.flags["ready_fd"] is not None:
        with os.fdopen(asked.flags["ready_fd"], "w") as pipe:
            pipe.write(f"{link.address}\n")
    else:
        print(f"{asked.server} is waiting at {link.address} for {asked.sender}, up to {wait_s:.0f} s", flush=True)
    request = link.serve(wait_s=wait_s)
    # Imports torch, which the first part doesn't need.
    from shardline_lab.bench.lane import serve_without_chief

    process = serve_without_chief(replace(config, cluster=config.cluster.with_address("ps/0", link.address)))
    process.start()
    try:
        if not process.ended.wait(float(request["budget_s"])):
            raise UnreachableError(
                f"{asked.sender} did not finish measuring within {request['budget_s']:.0f} s; it died, or the "
                "connection was lost"
            )
    finally:
        process.close()
    return 0


# The measuring side


def _measure(asked: Measurement, address: str) -> BenchFigures:
    if parse_address(address)[1] == 0:
        raise ClusterSpecError(
            f"{asked.server} is {address} in the cluster spec: its port is known only on its own machine; set the "
            "same --port on both sides"
        )
    link = LinkClient(
        address,
        where=f"{asked.server} at {address}",
        hint=f"start the other side there first: shardline bench net --to {asked.server} --serve",
        token=asked.security.token,
    )
    given = link.measure(asked.flags["seconds"])
    slowest = min(given.up_bytes_per_s, given.down_bytes_per_s)
    # Initial values, one uncounted call and MIN_ROUNDS of each kind, at a tenth of the link's rate.
    budget_s = min(3600.0, START_S + 10 * (3 * asked.flags["seconds"] + 16 * asked.flags["megabytes"] * 1e6 / slowest))
    link.ask("lane", budget_s=budget_s)
    from shardline_lab.bench.lane import LaneProbe

    role, index = parse_task(asked.sender)
    config = RoleConfig(
        role=role,
        index=index,
        cluster=asked.spec,
        timeouts=asked.timeouts,
        security=asked.security,
        lane=asked.flags["lane"],
        run_dir=asked.flags["run_dir"],
        # It doesn't listen on any port.
        insecure_bind=True,
    )
    probe = LaneProbe(config, asked.server, address, megabytes=asked.flags["megabytes"])
    try:
        probe.prepare()
        moved = probe.measure(asked.flags["seconds"])
    finally:
        probe.close()
    return BenchFigures(sender=asked.sender, server=asked.server, address=address, link=given, lane=moved)


def _answers(address: str) -> bool:
    import socket

    try:
        socket.create_connection(parse_address(address), timeout=1.0).close()
    except OSError:
        return False
    return True


@contextmanager
def _child(asked: Measurement) -> Iterator[str]:
    """The serving side as a child process; yields its address."""
    read_fd, write_fd = os.pipe()
    host, port = parse_address(asked.address)
    spec = asked.spec.with_address(asked.server, format_address(host, port))
    command = [sys.executable, "-P", "-m", "shardline", "bench", "net", "--serve", "--cluster", spec.to_json()]
    command += ["--from", asked.sender, "--to", asked.server, "--wait", "60", "--ready-fd", str(write_fd)]
    command += ["--timeout", str(asked.timeouts.total_s)]
    if port != 0:
        command += ["--port", str(port)]
    paths = {
        name: getattr(asked.security, name)
        for name in ("tls_cert", "tls_key", "tls_ca", "token_file", "admin_token_file")
    }
    if asked.flags["insecure_bind"]:
        command.append("--insecure-bind")
    for name, path in {**paths, "run_dir": asked.flags["run_dir"]}.items():
        if path is not None:
            command += [f"--{name.replace('_', '-')}", str(path)]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    try:
        process = subprocess.Popen(
            command, env={**environment, **ALLOCATOR}, pass_fds=[write_fd], stdin=subprocess.DEVNULL
        )
    finally:
        os.close(write_fd)
    try:
        yield _read_address(read_fd, process)
        _end(process, wait_s=START_S)
    finally:
        if process.poll() is None:
            process.terminate()
            _end(process, wait_s=5.0)


def _read_address(fd: int, process: subprocess.Popen[bytes]) -> str:
    import select

    with os.fdopen(fd, "rb") as pipe:
        if not select.select([pipe], [], [], START_S)[0]:
            raise InternalError(f"the serving side did not start within {START_S:.0f} s")
        address = pipe.readline().decode().strip()
    if not address:
        code = process.wait(timeout=5.0)
        raise UsageError(f"the serving side exited with code {code} before it was ready; its own message is above")
    return address


def _end(process: subprocess.Popen[bytes], *, wait_s: float) -> None:
    try:
        process.wait(timeout=wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=5.0)


# For people


def headline(found: BenchFigures) -> list[str]:
    """The measurement, and why a lane was not used, one line each."""
    lane = found.lane
    lines = [
        f"{found.sender} -> {found.server} at {found.address}, lane {lane.lane}, {lane.nbytes / 1e6:.1f} MB per push, "
        f"round trip {found.link.round_trip_s * 1e3:.3f} ms"
    ]
    lines += [f"  lane skipped: {reason}" for reason in lane.fallbacks]
    return lines


def table(found: BenchFigures) -> Table:
    """Rates in both units, and the ratio."""
    from rich.table import Table

    rows = Table(box=None, pad_edge=False)
    for name in ("direction", "plain TCP MB/s", "Mbit/s", "through the lane MB/s", "Mbit/s", "ratio"):
        rows.add_column(name, justify="left" if name == "direction" else "right", no_wrap=True)
    link, lane = found.link, found.lane
    rows.add_row(
        f"push {found.sender} -> {found.server}",
        *_rates(link.up_bytes_per_s),
        *_rates(lane.push_bytes_per_s),
        f"{found.push_ratio:.3f}",
    )
    rows.add_row(
        f"pull {found.server} -> {found.sender}",
        *_rates(link.down_bytes_per_s),
        *_rates(lane.pull_bytes_per_s),
        f"{found.pull_ratio:.3f}",
    )
    both = 2 * lane.nbytes / lane.both_s
    rows.add_row("push + pull in parallel", "", "", *_rates(both), "")
    return rows


def _rates(bytes_per_s: float) -> tuple[str, str]:
    return f"{bytes_per_s / 1e6:.1f}", f"{bytes_per_s * 8 / 1e6:.1f}"

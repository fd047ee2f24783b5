"""shardline bench mesh: the links between all machines of a cluster, into a file that shardline advise reads."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shardline.cli import options
from shardline.cli.terminal import aligned
from shardline.cluster import ANY_HOST, ClusterSpec, format_address, locate, parse_address, parse_task
from shardline.errors import ClusterSpecError, ShardlineError, UnreachableError, UsageError
from shardline.host import files
from shardline.host.ports import on_this_host
from shardline.security import Security, check_bind
from shardline_lab.bench.link import MAX_SECONDS, LinkClient, LinkServer

FILE_BYTES = 16 << 20
COMMAND = "bench mesh"


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Machines of a cluster, by label or the host of their addresses, and what was measured between them."""

    machines: Mapping[str, Sequence[str]]
    """Tasks of each."""
    bytes_per_s: Mapping[tuple[str, str], float]
    """From one machine to another, of plain TCP."""
    round_trip_s: Mapping[tuple[str, str], float]
    racks: Mapping[str, str]
    """Of the machines that have a label."""

    @classmethod
    def read(cls, path: Path) -> Mesh:
        """Mesh from a file that write() made. Raises UsageError."""
        try:
            data = json.loads(files.read_text(path, FILE_BYTES))
            ends = [((str(link["from"]), str(link["to"])), link) for link in data["links"]]
            found = cls(
                machines={str(name): [str(task) for task in tasks] for name, tasks in data["machines"].items()},
                bytes_per_s={pair: float(link["bytes_per_s"]) for pair, link in ends},
                round_trip_s={pair: float(link["round_trip_s"]) for pair, link in ends},
                racks={str(name): str(rack) for name, rack in data.get("racks", {}).items()},
            )
        except OSError as error:
            raise UsageError(f"--mesh {path} can't be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"--mesh {path} is not a file of shardline bench mesh: {error!r}") from None
        names = found.machines
        lacking = [f"{a} to {b}" for a in names for b in names if a != b and not found.bytes_per_s.get((a, b), 0.0) > 0]
        if lacking or not all(0.0 <= trip_s < 60.0 for trip_s in found.round_trip_s.values()):
            raise UsageError(
                f"--mesh {path} lacks a link, such as {lacking[0] if lacking else 'one with a round trip'}"
            )
        return found

    def hosts(self, role: str) -> list[str]:
        """The machine of each task of a role."""
        found = {task: name for name, tasks in self.machines.items() for task in tasks if parse_task(task)[0] == role}
        return [found[task] for task in sorted(found, key=parse_task)]

    def write(self, path: Path) -> None:
        links = [
            {"from": a, "to": b, "bytes_per_s": round(rate), "round_trip_s": round(self.round_trip_s[a, b], 7)}
            for (a, b), rate in self.bytes_per_s.items()
        ]
        options.write_file(
            path, json.dumps({"machines": self.machines, "racks": self.racks, "links": links}, indent=1) + "\n"
        )

    def rows(self) -> list[str]:
        """A line for each direction of each link."""
        rows = [("from", "to", "Mbit/s", "MB/s", "round trip ms")]
        for (a, b), rate in sorted(self.bytes_per_s.items()):
            rows.append((a, b, f"{rate * 8e-6:,.0f}", f"{rate / 1e6:,.1f}", f"{self.round_trip_s[a, b] * 1e3:.3f}"))
        return aligned(rows, texts=2)


def meetings(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Rounds in which every machine meets one other, so that no link has two measurements; all pairs, once each."""
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    for _ in ring[1:]:
        met = zip(ring[: len(ring) // 2], reversed(ring), strict=False)
        yield [(a, b) for a, b in met if a is not None and b is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def addresses_of(spec: ClusterSpec, port: int | None) -> dict[str, str]:
    """Address to measure at, by machine: the port of its first task, or this one. Raises ClusterSpecError."""
    found: dict[str, str] = {}
    for task in spec.task_names():
        host, own = parse_address(spec.address(task))
        machine = spec.machine(spec.address(task))
        if host == ANY_HOST or machine in found:
            continue
        if port is None and own == 0:
            raise ClusterSpecError(
                f"{task} is {spec.address(task)} in the cluster spec: its port is known only on its own machine; set "
                "the same --port on all machines"
            )
        found[machine] = format_address(host, own if port is None else port)
    if len(found) < 2:
        where = next(iter(found), "no machine that it names")
        raise UsageError(f"there is no link to measure: all tasks of the cluster spec are on {where}")
    return found


@contextlib.contextmanager
def served_here(addresses: Mapping[str, str], flags: Mapping[str, Any], token: bytes) -> Iterator[list[Future[Any]]]:
    """Serve those of the addresses that are this machine's, until each is told to end; waits for that at the end."""
    servers, peers = [], set(addresses.values())
    for address in addresses.values():
        if on_this_host(host := parse_address(address)[0]):
            security = options.security(flags)
            check_bind(f"shardline {COMMAND}", host, "an address such as", security, insecure=flags["insecure_bind"])
            servers.append(LinkServer(address, token, peers))
    with ThreadPoolExecutor(len(servers) or 1) as pool:
        yield [pool.submit(server.serve, wait_s=flags["wait_s"]) for server in servers]


def measured(addresses: Mapping[str, str], security: Security, *, seconds: float, most: int) -> Mapping[Any, Any]:
    """The figures of each pair of machines, from the first to the second. Raises UnreachableError, ProtocolError."""
    clients = {
        name: LinkClient(
            address,
            where=address,
            hint=f"start there first: shardline {COMMAND} --serve, with the same cluster.json",
            token=security.token,
            command=COMMAND,
        )
        for name, address in addresses.items()
    }
    with ThreadPoolExecutor(len(clients)) as pool:
        try:
            answers = zip(clients, pool.map(_error_of, clients.values()), strict=True)
            absent = {name: error for name, error in answers if error}
            for name, error in absent.items():
                others = [other for other in absent if other != name]
                raise UnreachableError(error + (f"; nor can {', '.join(others)} be measured" if others else ""))
            found = {}
            for pairs in meetings(list(clients)):
                asked = [pool.submit(clients[a].towards, addresses[b], seconds, most) for a, b in pairs]
                found.update({pair: one.result() for pair, one in zip(pairs, asked, strict=True)})
            return found
        finally:
            list(pool.map(_end, clients.values()))


def _error_of(client: LinkClient) -> str:
    try:
        client.ask("echo", count=1)
    except ShardlineError as error:
        return str(error)
    return ""


def _end(client: LinkClient) -> None:
    with contextlib.suppress(ShardlineError):
        client.ask("end")


@click.command()
@options.cluster
@click.option("--serve", is_flag=True, help="Take part; start this first on all machines but the measuring one.")
@click.option("--port", type=click.IntRange(1, 65_535), help="Of all machines; default: that of each one's first task.")
@click.option(
    "--seconds", type=click.FloatRange(0.05, MAX_SECONDS), default=1.0, show_default=True, help="Of each direction."
)
@click.option(
    "--megabytes", type=click.FloatRange(0.1, 1e5), default=256.0, show_default=True, help="Most of each direction."
)
@click.option("--wait", "wait_s", type=click.FloatRange(1.0), default=600.0, show_default=True, help="With --serve.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures for shardline advise.")
@options.secured
@options.insecure_bind
def mesh(**flags: Any) -> int:
    """Measure the links between all machines of a cluster: plain TCP each way, and round trips.

    No task may be running on the ports that are used. On all machines of the cluster but one, run:

    \b
        shardline bench mesh --cluster cluster.json --serve

    and then the same without --serve on that one, or on another machine. A machine is in one measurement at a time.
    """
    security = options.security(flags)
    spec = locate(None, cluster=flags["cluster"], task="chief/0", tf_config=os.environ.get("TF_CONFIG") or None).spec
    addresses = addresses_of(spec, flags["port"])
    with served_here(addresses, flags, security.token) as serving:
        if flags["serve"]:
            if not serving:
                raise UsageError(f"no address of the cluster spec is this machine's: it has {', '.join(addresses)}")
            click.echo(f"waiting up to {flags['wait_s']:.0f} s for the measurement")
            for one in serving:
                one.result()
            return 0
        figures = measured(addresses, security, seconds=flags["seconds"], most=int(flags["megabytes"] * 1e6))
    rates: dict[tuple[str, str], float] = {}
    trips: dict[tuple[str, str], float] = {}
    for (a, b), found in figures.items():
        rates |= {(a, b): found.up_bytes_per_s, (b, a): found.down_bytes_per_s}
        trips |= {(a, b): found.round_trip_s, (b, a): found.round_trip_s}
    machine_of = {task: spec.machine(spec.address(task)) for task in spec.task_names()}
    result = Mesh(
        machines={name: [task for task in machine_of if machine_of[task] == name] for name in addresses},
        bytes_per_s=rates,
        round_trip_s=trips,
        racks={machine_of[task]: rack for task, rack in spec.racks.items()},
    )
    for line in result.rows():
        click.echo(line)
    if flags["out"] is not None:
        result.write(flags["out"])
    return 0

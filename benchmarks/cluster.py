"""A whole cluster with one ps that runs a job of ours, each task where it is put: here, or on hosts of a lab."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.network import Lab
from benchmarks.process import HERE, ROOT, Child, ContenderError, Prefix, environment, run_json
from shardline.cluster import parse_address

JOB = ROOT / "benchmarks" / "train_job.py"
RUN_S = 900.0
TIMEOUT_S = 60.0
OUT = "BENCH_OUT"
"""Where a job writes its figures."""
PORT = 2322


class Flags(Protocol):
    """What a job is given."""

    def flags(self) -> list[str]:
        """Flags of the job's file."""
        ...


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained: a stack of linear layers, and how much one step computes."""

    width: int
    layers: int
    batch: int
    steps: int
    warmup: int

    @property
    def megabytes(self) -> float:
        """Of all parameters."""
        return self.width * self.width * self.layers * 4 / 1e6

    def flags(self) -> list[str]:
        """Flags of train_job.py."""
        given = ["--width", self.width, "--layers", self.layers, "--batch", self.batch]
        given += ["--steps", self.steps, "--warmup", self.warmup]
        return [str(flag) for flag in given]


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the tasks run. The chief shares the ps's place: it sends next to nothing while training runs."""

    chief: str
    ps: str
    workers: tuple[str, ...]
    """Addresses."""
    server: Prefix
    clients: tuple[Prefix, ...]
    """Of each worker."""


def on_hosts(hosts: Lab, workers: int = 1) -> Places:
    """Chief and ps on host 1, a worker on each further host."""
    one, others = hosts.address(1), range(2, workers + 2)
    return Places(
        chief=f"{one}:{PORT}",
        ps=f"{one}:{PORT + 1}",
        workers=tuple(f"{hosts.address(host)}:{PORT}" for host in others),
        server=hosts.prefix(1),
        clients=tuple(hosts.prefix(host) for host in others),
    )


def on_one_host(prefix: Prefix) -> Places:
    """All tasks on one host, over loopback or shared memory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    free = "127.0.0.1:0"
    return Places(chief=f"127.0.0.1:{port}", ps=free, workers=(free,), server=prefix, clients=(prefix,))


def alone(model: Model, prefix: Prefix = HERE) -> dict[str, Any]:
    """The same training with no cluster. Raises ContenderError."""
    return run_json([sys.executable, str(JOB), *model.flags()], what="alone", timeout_s=RUN_S, prefix=prefix)


def train(
    model: Flags,
    places: Places,
    *,
    job: Path = JOB,
    overlap: bool = True,
    lane: str = "auto",
    codec: str = "raw",
    own: bool = False,
    served: bool = True,
) -> dict[str, Any]:
    """Train with a chief and servers; a worker's figures. Raises ContenderError.

    own: each worker is also a ps. served: there is one ps of its own.
    """
    servers = [f"{host}:{PORT + 1}" for host, _ in map(parse_address, places.workers)] if own else []
    servers += [places.ps] if served else []
    cluster = json.dumps({"chief": [places.chief], "ps": servers, "worker": places.workers})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardline-bench-")))
        figures = folder / "figures.json"
        settings = environment(more={"SHARDLINE_JOB_ARGS": shlex.join(model.flags()), OUT: str(figures)})

        def task(role: str, prefix: Prefix, *more: str) -> Child:
            command = [sys.executable, "-m", "shardline", role, "--cluster", cluster, "--timeout", str(TIMEOUT_S)]
            command += ["--lane", lane, "--overlap" if overlap else "--no-overlap", *more]
            return stack.enter_context(Child(command, prefix=prefix, what=role, env=settings))

        given = ("--job", str(job), "--codec", codec, *(["--with-ps"] if own else []))
        chief = task("chief", places.server, *given, "--out", str(folder / "out"))
        if served:
            task("ps", places.server, "--task", f"ps/{len(servers) - 1}")
        workers = [
            task("worker", prefix, *given, "--task", f"worker/{index}") for index, prefix in enumerate(places.clients)
        ]
        for child, wait_s in (*((worker, RUN_S) for worker in workers), (chief, TIMEOUT_S)):
            code = child.wait(wait_s)
            if code:
                raise ContenderError(f"{child.what} ended with code {code}{child.last_words()}")
        found: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
    return found

"""Steps per second of push + SGD (or AdamW) + pull between workers and parameter servers, each a process of its own.

    python benchmarks/push_pull.py --megabytes 64 --steps 20 --lane tcp
    python benchmarks/push_pull.py --serve 10.77.0.1:2222                       # on one host
    python benchmarks/push_pull.py --connect 10.77.0.1:2222 --megabytes 64      # on another

Prints one JSON object. No chief takes part: this measures the data plane alone. A server ends by Ctrl-C or
SIGTERM and can serve one run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import process
from benchmarks.figures import StepTimes

LANES = ("auto", "grpc", "tcp", "shm")
OPTIMIZERS = ("SGD", "AdamW")
START_S = 60.0
RUN_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one run does."""

    megabytes: float = 64.0
    tensors: int = 1
    kilobytes: tuple[float, float] | None = None
    """Sizes of tensors from, to, evenly spread; else all are alike."""
    steps: int = 20
    warmup: int = 3
    codec: str = "raw"
    codec_down: str = ""
    """Of parameters, where it is another."""
    lane: str = "auto"
    zero_copy: bool = False
    optimizer: str = "SGD"
    workers: int = 1
    ps: int = 1
    shares: tuple[float, ...] = ()
    """The part of the parameters that each ps holds; empty = equal parts."""
    tls: Path | None = None
    """Folder with cert.pem and key.pem, the certificate being its own CA."""

    def flags(self) -> list[str]:
        """The same as flags of this program."""
        flags = ["--megabytes", self.megabytes, "--tensors", self.tensors, "--steps", self.steps]
        flags += ["--warmup", self.warmup, "--codec", self.codec, "--lane", self.lane, "--workers", self.workers]
        flags += ["--ps", self.ps, "--optimizer", self.optimizer]
        if self.shares:
            flags += ["--shares", ",".join(map(str, self.shares))]
        if self.codec_down:
            flags += ["--codec-down", self.codec_down]
        if self.kilobytes is not None:
            flags += ["--kilobytes", *self.kilobytes]
        if self.zero_copy:
            flags += ["--zero-copy"]
        if self.tls is not None:
            flags += ["--tls-dir", self.tls]
        return [str(flag) for flag in flags]


def command(*more: str) -> list[str]:
    """Command line of one process of this program."""
    return [sys.executable, str(Path(__file__).resolve()), *more]


def run(work: Work, *, tls: bool = False, prefix: process.Prefix = process.HERE) -> dict[str, Any]:
    """All processes of one run on this machine; the figures. Raises process.ContenderError."""
    prefixes = [prefix] * (work.ps + work.workers)
    addresses = ["127.0.0.1:0"] * work.ps
    return run_on(work, addresses=addresses, ps=prefixes[: work.ps], workers=prefixes[work.ps :], tls=tls)


def run_on(
    work: Work,
    *,
    addresses: list[str],
    ps: list[process.Prefix],
    workers: list[process.Prefix],
    tls: bool = False,
) -> dict[str, Any]:
    """The same with a place for each process; addresses[i] is where ps i binds."""
    with ExitStack() as stack:
        flags = work.flags()
        if tls:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardline-bench-")))
            make_certificate(folder, [address.rpartition(":")[0] for address in addresses])
            flags += ["--tls-dir", str(folder)]
        servers, bound = [], []
        for index, (address, prefix) in enumerate(zip(addresses, ps, strict=True)):
            more = ["--serve", address, "--index", str(index), *flags]
            server = stack.enter_context(process.Child(command(*more), prefix=prefix, what=f"ps/{index}"))
            servers.append(server)
            bound.append(str(server.read_json(START_S)["address"]))
        clients = [
            stack.enter_context(
                process.Child(
                    command("--connect", ",".join(bound), "--index", str(index), *flags),
                    prefix=prefix,
                    what=f"worker/{index}",
                )
            )
            for index, prefix in enumerate(workers)
        ]
        # The death of any of them is seen at once: the others would wait for it.
        found = process.read_all([*clients], RUN_S)
        for server in servers:
            server.terminate()
        ends = process.read_all(servers, START_S)
    return merge(found, ends, work)


def merge(workers: list[dict[str, Any]], servers: list[dict[str, Any]], work: Work) -> dict[str, Any]:
    """One object of what all processes said. A step takes as long as its slowest worker's.

    Raises process.ContenderError where another lane was used than asked for: figures would stand under a wrong name.
    """
    used = {found["lane"] for found in workers}
    fallbacks = sorted({reason for found in workers for reason in found["fallbacks"]})
    if work.lane != "auto" and used != {work.lane}:
        raise process.ContenderError(f"lane {work.lane} was not used: {'; '.join(fallbacks) or sorted(used)}")
    times = StepTimes(tuple(max(step) for step in zip(*(found["seconds"] for found in workers), strict=True)))
    nbytes = int(workers[0]["bytes"])
    return {
        "lane": ", ".join(sorted(used)),
        "asked_lane": work.lane,
        "zero_copy": work.zero_copy,
        "codec": work.codec,
        "megabytes": round(nbytes / 1e6, 3),
        "tensors": work.tensors,
        "workers": work.workers,
        "ps": work.ps,
        **times.summary(),
        "gigabytes_per_s_both_ways": round(nbytes * 2 * work.workers / times.median_s / 1e9, 3),
        "cpu_s_per_step": {
            "workers": round(sum(found["cpu_s_per_step"] for found in workers), 6),
            "ps": round(sum(found["cpu_s"] for found in servers) / max(1, work.steps + work.warmup), 6),
        },
        "peak_mb": {
            "worker": max(found["peak_mb"] for found in workers),
            "ps": max(found["peak_mb"] for found in servers),
        },
        "idle_mb": {
            "worker": min(found["idle_mb"] for found in workers),
            "ps": min(found["idle_mb"] for found in servers),
        },
        "planned_ps_mb": max(found["planned_mb"] for found in servers),
        # Gradients in shared memory are a worker's, and seen in the memory of the ps that maps them too.
        "mapped_mb": round(nbytes * work.workers / 1e6 if used == {"shm"} else 0.0, 3),
        "fallbacks": fallbacks,
        "threads": 1,
    }


def make_certificate(folder: Path, hosts: list[str]) -> None:
    """cert.pem, its own CA, and key.pem. Raises process.ContenderError where openssl can't."""
    names = ",".join(f"IP:{host}" for host in dict.fromkeys(hosts))
    command_line = ["openssl", "req", "-x509", "-nodes", "-days", "2"]
    command_line += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command_line += ["-subj", "/CN=shardline-bench", "-addext", f"subjectAltName={names}"]
    made = subprocess.run(
        [*command_line, "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if made.returncode:
        raise process.ContenderError(f"openssl can't make a certificate: {made.stderr.strip().splitlines()[-1:]}")


def serve(address: str, index: int, tls: Path | None) -> None:
    """The process of one ps: serve until SIGTERM."""
    from benchmarks.data_plane import idle_mb, start_server, usage
    from shardline.host.process import Termination

    termination = Termination()
    termination.install()
    server = start_server(address, index, tls)
    idle, before = idle_mb(), usage()
    print(json.dumps({"address": server.address}), flush=True)
    try:
        termination.event.wait(RUN_S)
        planned_mb = server.planned_mb()
    finally:
        server.close()
    after = usage()
    # What it took to start is no part of a step.
    said = {**after, "cpu_s": after["cpu_s"] - before["cpu_s"], "idle_mb": idle, "planned_mb": planned_mb}
    print(json.dumps(said), flush=True)


@click.command(help=__doc__)
@click.option("--megabytes", type=click.FloatRange(min=0.001), default=64.0, show_default=True)
@click.option("--tensors", type=click.IntRange(1), default=1, show_default=True)
@click.option("--kilobytes", type=(float, float), help="Sizes of the tensors from, to, instead of --megabytes.")
@click.option("--shares", default="", help="The part of the parameters of each ps: 0.25,0.75. Default: equal.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True)
@click.option("--warmup", type=click.IntRange(0), default=3, show_default=True)
@click.option("--codec", default="raw", show_default=True)
@click.option("--codec-down", default="", help="Of parameters. Default: --codec.")
@click.option("--lane", type=click.Choice(LANES), default="auto", show_default=True)
@click.option("--zero-copy", is_flag=True, help="Gradients in memory that the server reads (shm).")
@click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="SGD", show_default=True)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True)
@click.option("--ps", type=click.IntRange(1), default=1, show_default=True)
@click.option("--tls", is_flag=True, help="With a certificate made for this run.")
@click.option("--tls-dir", type=click.Path(path_type=Path, exists=True), help="With cert.pem and key.pem of a folder.")
@click.option("--serve", "serve_at", metavar="HOST:PORT", help="Be one ps only.")
@click.option("--connect", metavar="HOST:PORT[,...]", help="Be one worker only, of these ps.")
@click.option("--index", type=click.IntRange(0), default=0, help="Of this ps or worker.")
def main(
    serve_at: str | None, connect: str | None, index: int, tls: bool, tls_dir: Path | None, shares: str, **flags: Any
) -> None:
    """Parse, run, print."""
    process.settle_environment()
    work = Work(**flags, tls=tls_dir, shares=tuple(float(share) for share in shares.split(",") if share))
    if serve_at is not None:
        serve(serve_at, index, tls_dir)
        # Torch takes its time to be taken to pieces, and the other side waits for the end of this process.
        sys.stdout.flush()
        os._exit(0)
    elif connect is not None:
        from benchmarks.data_plane import worker

        print(json.dumps(worker(work, connect.split(","), index)), flush=True)
    else:
        print(json.dumps(run(work, tls=tls), indent=2))


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except (process.ContenderError, click.ClickException) as error:
        sys.exit(f"push_pull: {error}")

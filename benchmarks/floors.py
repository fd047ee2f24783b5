"""What the machine takes for the least that a step must do, in Python with nothing of ours. Prints one JSON object.

`memory`: parameters and gradient are read, and parameters written, by all cores. `exchange`: 10 KB to another process
and back.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import click

from benchmarks import process
from benchmarks.figures import StepTimes
from benchmarks.process import Prefix, run_json

KINDS = ("unix", "tcp")
PIECE = 1 << 20
"""float32 elements that one call of torch goes through."""
WAIT_S = 60.0


def floor(prefix: Prefix, what: str, *flags: object) -> dict[str, Any]:
    """One run of this program. Raises process.ContenderError."""
    command = [sys.executable, "-m", "benchmarks.floors", *(str(flag) for flag in flags)]
    return run_json(command, what=what, timeout_s=600.0, prefix=prefix)


@click.group(help=__doc__)
def main() -> None:
    """Parse."""
    process.settle_environment()


def timed(step: Callable[[int], None], steps: int, warmup: int) -> None:
    """Print what steps take."""
    seconds = []
    for number in range(warmup + steps):
        start_s = time.perf_counter()
        step(number)
        if number >= warmup:
            seconds.append(time.perf_counter() - start_s)
    print(json.dumps(StepTimes(tuple(seconds)).summary()), flush=True)


@main.command()
@click.option("--megabytes", type=click.FloatRange(min=0.001), default=64.0)
@click.option("--threads", type=click.IntRange(1), default=len(os.sched_getaffinity(0)))
@click.option("--steps", type=click.IntRange(1), default=20)
@click.option("--warmup", type=click.IntRange(0), default=10)
def memory(megabytes: float, threads: int, steps: int, warmup: int) -> None:
    """Parameters and gradient read once, new parameters written elsewhere, as SGD must; each core a part of them."""
    import torch

    torch.set_num_threads(1)
    elements = int(megabytes * 1e6 / 4)
    gradient, *areas = (torch.randn(elements) for _ in range(3))
    bounds = [elements * number // threads for number in range(threads + 1)]
    barrier = threading.Barrier(threads)

    def part(number: int, step: int) -> None:
        old, new = areas[step % 2], areas[(step + 1) % 2]
        for start in range(bounds[number], bounds[number + 1], PIECE):
            chosen = slice(start, min(start + PIECE, bounds[number + 1]))
            torch.add(old[chosen], gradient[chosen], alpha=-1e-6, out=new[chosen])

    def beside(number: int) -> None:
        for step in range(warmup + steps):
            barrier.wait(WAIT_S)
            part(number, step)
            barrier.wait(WAIT_S)

    others = [threading.Thread(target=beside, args=(number,), daemon=True) for number in range(1, threads)]
    for thread in others:
        thread.start()

    def whole(step: int) -> None:
        barrier.wait(WAIT_S)
        part(0, step)
        barrier.wait(WAIT_S)

    timed(whole, steps, warmup)


@main.command()
@click.option("--kind", type=click.Choice(KINDS), default=KINDS[0])
@click.option("--kilobytes", type=click.FloatRange(min=0.001), default=10.0)
@click.option("--steps", type=click.IntRange(1), default=600)
@click.option("--warmup", type=click.IntRange(0), default=100)
def exchange(kind: str, kilobytes: float, steps: int, warmup: int) -> None:
    """A message to another process and one of the same length back, by blocking calls."""
    nbytes = int(kilobytes * 1e3)
    if kind == "unix":
        here, there = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            here = socket.create_connection(listener.getsockname())
            there, _ = listener.accept()
        for end in (here, there):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(nbytes)
    if os.fork() == 0:
        here.close()
        while _received(there, buffer):
            there.sendall(buffer)
        os._exit(0)
    there.close()
    here.settimeout(WAIT_S)

    def once(_: int) -> None:
        here.sendall(buffer)
        if not _received(here, buffer):
            raise click.ClickException("the other process is gone")

    timed(once, steps, warmup)
    here.close()
    os.wait()


def _received(source: socket.socket, into: bytearray) -> bool:
    """Whether so many bytes came before the end."""
    view, filled = memoryview(into), 0
    while filled < len(into):
        count = source.recv_into(view[filled:])
        if count == 0:
            return False
        filled += count
    return True


if __name__ == "__main__":
    main()

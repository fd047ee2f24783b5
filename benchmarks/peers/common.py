"""What all peer scripts share: the flags, the clock and the one JSON object they print. Needs only numpy.

Every script does the same work: N megabytes of float32; one step = push a gradient, apply SGD or AdamW to the
parameters on the server, pull the new parameters. At the end the parameters are checked: a peer that skipped work
fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LEARNING_RATE = 0.1
GRADIENT = 1e-3
"""Value of every element of every gradient, so that the outcome of any number of steps is known."""
WEIGHT_DECAY = 0.01
"""AdamW's default."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The flags of all peers."""
    flags = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--megabytes", type=float, default=64.0)
    flags.add_argument("--steps", type=int, default=20)
    flags.add_argument("--warmup", type=int, default=3)
    flags.add_argument("--tensors", type=int, default=1, help="pieces the parameters are in, each travelling by itself")
    return flags


def optimizer_flag(flags: argparse.ArgumentParser) -> None:
    """For peers that apply torch's optimizers."""
    flags.add_argument("--optimizer", choices=["SGD", "AdamW"], default="SGD", help="AdamW: torch's own, as it is")


def elements_of(megabytes: float, tensors: int) -> int:
    """Elements of one of `tensors` equal tensors of float32."""
    return max(1, int(megabytes * 1e6 / 4 / tensors))


def clock(step: Callable[[], None], *, steps: int, warmup: int) -> list[float]:
    """Seconds of each step after the warm-up."""
    seconds = []
    for number in range(warmup + steps):
        start_s = time.perf_counter()
        step()
        if number >= warmup:
            seconds.append(time.perf_counter() - start_s)
    return seconds


def check(found: float, applied: int, optimizer: str = "SGD") -> None:
    """Fail unless a parameter element, which began as 0, is what `applied` steps make of it."""
    expected = 0.0
    for _ in range(applied):
        if optimizer == "AdamW":  # equal gradients: each step is as long as the learning rate, after the decay
            expected = expected * (1 - LEARNING_RATE * WEIGHT_DECAY) - LEARNING_RATE
        else:
            expected -= LEARNING_RATE * GRADIENT
    if abs(found - expected) > 1e-3 * abs(expected):
        sys.exit(f"after {applied} steps a parameter is {found}, not {expected}: the peer did not do the work")


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def receive(pipe: Connection, timeout_s: float) -> Any:
    """The next message of a child; ends the program when none comes."""
    if not pipe.poll(timeout_s):
        sys.exit(f"a process of the peer said nothing within {timeout_s} s")
    return pipe.recv()


def report(peer: str, options: argparse.Namespace, seconds: list[float], **more: object) -> None:
    """Print the one JSON object, on the last line of stdout."""
    median_s = statistics.median(seconds)
    nbytes = elements_of(options.megabytes, options.tensors) * 4 * options.tensors
    figures: dict[str, object] = {
        "peer": peer,
        "megabytes": round(nbytes / 1e6, 3),
        "tensors": options.tensors,
        "steps": options.steps,
        "warmup": options.warmup,
        "median_s": median_s,
        "best_s": min(seconds),
        "worst_s": max(seconds),
        "steps_per_s": 1 / median_s,
        "seconds": [round(value, 6) for value in seconds],
        "python": platform.python_version(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        **more,
    }
    print(json.dumps(figures), flush=True)

"""64 MB of float32, 1 worker, 1 ps on one host: push + AdamW + pull, beside rivals whose server runs torch's AdamW."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import RAY, RPC_SHM, RPC_TCP, Bench, Contender, collect, rivals
from benchmarks.figures import Row, Samples, speed_row
from benchmarks.sets.data_plane import ORDINARY, TCP, ZERO_COPY

NAME = "adamw"
ABOUT = "64 MB of float32, 1 worker, 1 ps on one host, push + AdamW (torch's bits) + pull; rivals run torch.optim.AdamW"
OPTIMIZER = "AdamW"
HOST_RIVALS, BAR = (RPC_SHM, RAY), 2.0


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    contenders = [
        bench.ours(ZERO_COPY, lane="shm", zero_copy=True, optimizer=OPTIMIZER),
        bench.ours(ORDINARY, lane="shm", optimizer=OPTIMIZER),
        bench.ours(TCP, lane="tcp", optimizer=OPTIMIZER),
    ]
    if bench.scale.peers:
        contenders += [contender(bench, name) for name in (RPC_TCP, *HOST_RIVALS)]
    return collect(contenders, bench.scale.repeats, bench.say)


def contender(bench: Bench, name: str) -> Contender:
    """A rival at its best with this optimizer."""
    return rivals("--optimizer", OPTIMIZER)[name].contender(bench, bench.scale.megabytes)


def rows(samples: Samples) -> list[Row]:
    """Our lanes against the fastest rival of their kind."""
    return [
        speed_row(samples, ZERO_COPY, ZERO_COPY, HOST_RIVALS, BAR),
        speed_row(samples, ORDINARY, ORDINARY, HOST_RIVALS, BAR),
        speed_row(samples, TCP, TCP, (RPC_TCP,), None, note="reported"),
    ]

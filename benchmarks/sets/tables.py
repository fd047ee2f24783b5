"""Embedding tables: on one host beside torch.distributed.rpc, on 1 Gbit/s beside whole tables as parameters."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.cluster import RUN_S, on_hosts, on_one_host, train
from benchmarks.contenders import PEERS, Bench, Contender, collect
from benchmarks.figures import Row, Samples, speed_row
from benchmarks.network import lab
from benchmarks.process import ROOT, ContenderError, run_json

NAME = "tables"
ABOUT = (
    "26 embedding tables, Zipf ids of 100,000 each: 1 ps on one host beside torch.distributed.rpc with nn.EmbeddingBag "
    "on the server; 2 workers on 1 Gbit/s beside the same model with whole tables as parameters"
)
JOB = ROOT / "benchmarks" / "tables_job.py"
DIM, BATCH = 64, 2048
RPC_BAR = 2.0
RPC_WAYS = [(apply, transport) for apply in ("owner", "distributed") for transport in ("tcp", "shm")]
"""With one call for all tables, of which the fastest counts."""
WORKERS, CLICKS_BATCH, DENSE_STEPS = 2, 1024, 5
"""Of the click model."""
ROWS, WHOLE = "click model, rows of tables", "click model, whole tables (166 MB)"
LINK_BAR = 20.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """Flags of tables_job.py."""

    model: str
    batch: int
    steps: int
    warmup: int
    workers: int = 1

    def flags(self) -> list[str]:
        """As they are written."""
        given = {**vars(self), "dim": DIM}
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]


OURS = f"26 tables x {DIM}, batch {BATCH:,}"


def rpc(way: tuple[str, str]) -> str:
    """Name of a way of running the rival."""
    apply, transport = way
    return f"torch rpc, {'DistributedOptimizer' if apply == 'distributed' else 'the owner applies'}, {transport}"


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    scale = bench.scale
    work = Work(model="bags", batch=BATCH, steps=scale.steps, warmup=scale.warmup)
    place = on_one_host(bench.loopback.prefix)
    contenders = [Contender(name=OURS, run=partial(train, work, place, job=JOB, lane="tcp"))]
    if scale.peers:
        contenders += [Contender(name=rpc(way), run=partial(_rpc, bench, way)) for way in RPC_WAYS]
    samples, missing = collect(contenders, scale.repeats, bench.say)
    try:
        with lab(WORKERS + 1, "1gbit") as hosts:
            steps = {"clicks": scale.steps, "dense": min(DENSE_STEPS, scale.steps)}
            works = {
                name: Work(model=model, batch=CLICKS_BATCH, steps=steps[model], warmup=min(2, scale.warmup), workers=2)
                for name, model in ((ROWS, "clicks"), (WHOLE, "dense"))
            }
            linked = [
                Contender(name=name, run=partial(train, work, on_hosts(hosts, WORKERS), job=JOB, lane="tcp"))
                for name, work in works.items()
            ]
            more, lacking = collect(linked, scale.repeats, bench.say)
    except ContenderError as error:
        bench.say(f"  {error}")
        more, lacking = {}, {ROWS: str(error)}
    return {**samples, **more}, {**missing, **lacking}


def _rpc(bench: Bench, way: tuple[str, str]) -> dict[str, Any]:
    apply, transport = way
    command = [sys.executable, str(PEERS / "torch_rpc_tables.py"), "--apply", apply, "--transport", transport]
    command += ["--dim", str(DIM), "--batch", str(BATCH)]
    command += ["--steps", str(bench.scale.steps), "--warmup", str(bench.scale.warmup)]
    return run_json(command, what=rpc(way), timeout_s=RUN_S, prefix=bench.loopback.prefix)


def rows(samples: Samples) -> list[Row]:
    """Samples per second over the rival's at its best; steps per second over whole tables'."""
    row = speed_row(samples, OURS, OURS, [rpc(way) for way in RPC_WAYS], RPC_BAR)
    against = {name: value * BATCH for name, value in row.against.items()}
    value = None if row.value is None else row.value * BATCH
    return [
        replace(row, value=value, against=against, unit="samples/s"),
        speed_row(samples, ROWS, ROWS, [WHOLE], LINK_BAR),
    ]

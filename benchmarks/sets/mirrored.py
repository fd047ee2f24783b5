"""2 and 4 mirrored workers on one host beside DDP over gloo: the same model, the whole of training."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cluster import JOB, OUT, RUN_S, Model
from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import Row, Samples, speed_row
from benchmarks.process import Child, ContenderError, Prefix, environment, run_json

NAME = "mirrored"
ABOUT = "a stack of linear layers, 2 and 4 mirrored workers on one host beside DDP over gloo"
COUNTS = (2, 4)
LAYERS, BATCH = 4, 16
BAR = 1.0


def ours(workers: int) -> str:
    """Name of our contender."""
    return f"{workers} mirrored workers"


def served(workers: int) -> str:
    """Name of ours with a server in a process of its own."""
    return f"{workers} workers, 1 ps"


def ddp(workers: int) -> str:
    """Name of the rival."""
    return f"DDP over gloo, {workers} processes"


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    width = max(64, int((bench.scale.megabytes * 1e6 / 4 / LAYERS) ** 0.5) // 64 * 64)
    model = Model(width=width, layers=LAYERS, batch=BATCH, steps=bench.scale.steps, warmup=bench.scale.warmup)
    prefix = bench.loopback.prefix
    contenders: list[Contender] = []
    for count in COUNTS:
        for name, flag in ((ours(count), "--mirrored"), (served(count), "--workers")):
            run = partial(_train, name, model, [flag, str(count)], count, prefix)
            contenders.append(Contender(name=name, run=run))
        if bench.scale.peers:
            contenders.append(Contender(name=ddp(count), run=partial(_ddp, model, count, prefix)))
    return collect(contenders, bench.scale.repeats, bench.say)


def _train(name: str, model: Model, flags: list[str], replicas: int, prefix: Prefix) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="shardline-bench-") as folder:
        figures = Path(folder, "figures.json")
        command = [sys.executable, "-m", "shardline", "train", str(JOB), *flags, "--no-page"]
        command += ["--set", f"replicas={replicas}", "--out", str(Path(folder, "out"))]
        settings = environment(more={"SHARDLINE_JOB_ARGS": shlex.join(model.flags()), OUT: str(figures)})
        with Child(command, prefix=prefix, what=name, env=settings) as child:
            if code := child.wait(RUN_S):
                raise ContenderError(f"{name} ended with code {code}{child.last_words()}")
        found: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
    return found


def _ddp(model: Model, processes: int, prefix: Prefix) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    settings = environment(more={"GLOO_SOCKET_IFNAME": "lo"})
    command += [str(JOB), *model.flags()]
    return run_json(command, what=ddp(processes), timeout_s=RUN_S, prefix=prefix, env=settings)


def rows(samples: Samples) -> list[Row]:
    """Steps per second over DDP's; those with a server are reported."""
    pairs = [(count, name, bar) for count in COUNTS for name, bar in ((ours(count), BAR), (served(count), None))]
    return [speed_row(samples, name, name, [ddp(count)], bar) for count, name, bar in pairs]

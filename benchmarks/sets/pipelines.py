"""Models in stages: beside data parallelism over 1 Gbit/s, and beside torch.distributed.pipelining on one host."""

from __future__ import annotations

import socket
from typing import Any

from benchmarks.contenders import PEERS, Bench, Contender, collect, python_of
from benchmarks.figures import AT_LEAST, Row, Samples, median, speed_row
from benchmarks.network import lab
from benchmarks.process import ContenderError, run_json
from benchmarks.sets.hooks import ddp_on
from benchmarks.staged import on_hosts, on_one_host, train

NAME = "pipelines"
ABOUT = (
    "models in stages: a VGG-like one of 51 MB, and a ResNet-like one, on 4 workers and 2 ps over 1 Gbit/s, and linear "
    "layers on one host"
)
WORKERS, PS, MICROBATCHES = 4, 2, 4
MEGABYTES = 50.8
"""Of the VGG-like model."""
FEWER_BAR, FASTER_BAR, TORCH_BAR, RESNET_BAR = 0.85, 3.0, 1.0, 1.0
STAGES, WIDTH = 2, 1024
WHOLE = "data parallel"
RESNET = {"like ResNet, data parallel": ("whole-model", WORKERS), "like ResNet, flush": ("flush", 1)}
"""By name: pipeline and replicas. `shardline partition` chooses the first."""
ALL_REDUCE = "DDP's all-reduce alone"
STAGED = {
    "flush": ("flush", ()),
    "double-buffer": ("double-buffer", ()),
    "double-buffer, bf16": ("double-buffer", ("--codec-up", "bf16", "--codec-down", "bf16")),
}
"""By name: pipeline, and flags."""
SCHEDULES = {"gpipe": "GPipe", "flush": "1F1B"}
"""Ours, and torch's."""
ALONE = {
    **{f"{name}, one host": (name, "worker") for name in (*SCHEDULES, "stash")},
    "gpipe, one host, servers apply": ("gpipe", "server"),
}
"""By name: pipeline, and who has the parameters. With torch each stage has its own."""


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    samples, missing = collect(_alone(bench), bench.scale.repeats, bench.say)
    try:
        with lab(PS + WORKERS, "1gbit") as hosts:
            sites = on_hosts(hosts, ps=PS, workers=WORKERS)
            steps, warmup = bench.scale.steps, min(4, bench.scale.warmup)

            def contender(name: str, flags: list[str], more: tuple[str, ...] = (), model: str = "vgg") -> Contender:
                run = lambda: train(["--model", model, *flags], sites, steps=steps, warmup=warmup, more=more)  # noqa: E731
                return Contender(name=name, run=run)

            contenders = [contender(WHOLE, ["--replicas", str(WORKERS)])]
            for name, (pipeline, more) in STAGED.items():
                flags = ["--pipeline", pipeline, "--microbatches", str(MICROBATCHES)]
                contenders.append(contender(name, flags, more))
            for name, (pipeline, replicas) in RESNET.items():
                flags = ["--pipeline", pipeline, "--replicas", str(replicas)]
                flags += ["--microbatches", str(MICROBATCHES)] if replicas == 1 else []
                contenders.append(contender(name, flags, model="resnet"))
            if bench.scale.peers:
                work = bench.work(megabytes=MEGABYTES, tensors=WORKERS, steps=steps, warmup=warmup)
                contenders.append(Contender(name=ALL_REDUCE, run=lambda: ddp_on(work, "none", hosts, WORKERS)))
            more_samples, lacking = collect(contenders, bench.scale.repeats, bench.say)
    except ContenderError as error:
        bench.say(f"  {error}")
        more_samples, lacking = {}, dict.fromkeys((WHOLE, *STAGED, *RESNET), str(error))
    return {**samples, **more_samples}, {**missing, **lacking}


def _alone(bench: Bench) -> list[Contender]:
    """On one host, a stage for each core."""
    steps, warmup = 5 * bench.scale.steps, bench.scale.warmup
    model = ["--width", str(WIDTH), "--stages", str(STAGES), "--microbatches", "8", "--batch", "512"]

    def ours(schedule: str, apply: str) -> dict[str, Any]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        sites = on_one_host(bench.loopback.prefix, port, ps=1, workers=STAGES)
        flags, more = ["--model", "mlp", *model, "--pipeline", schedule], ("--set", f"apply={apply}")
        return train(flags, sites, steps=steps, warmup=warmup, more=more)

    def torchs(schedule: str) -> dict[str, Any]:
        command = [str(python_of("torch")), str(PEERS / "torch_pipelining.py"), "--schedule", schedule, *model]
        command += ["--steps", str(steps), "--warmup", str(warmup)]
        return run_json(command, what=f"torch {schedule}", timeout_s=600.0, prefix=bench.loopback.prefix)

    found = [Contender(name=name, run=lambda chosen=chosen: ours(*chosen)) for name, chosen in ALONE.items()]
    if bench.scale.peers:
        found += [Contender(name=f"torch {name}", run=lambda name=name: torchs(name)) for name in SCHEDULES.values()]
    return found


def rows(samples: Samples) -> list[Row]:
    """Bytes and steps per second against data parallelism, and steps per second against torch's pipelines."""
    found = [_fewer(samples, name, FEWER_BAR if name.endswith("bf16") else None) for name in STAGED]
    for name in STAGED:
        bar = FASTER_BAR if name == "double-buffer" else None
        found.append(speed_row(samples, name, name, [WHOLE], bar))
    planned, other = RESNET
    found.append(speed_row(samples, f"{planned}, as planned", planned, [other], RESNET_BAR))
    found.append(speed_row(samples, "double-buffer, beside an all-reduce", "double-buffer", [ALL_REDUCE], None))
    for ours, theirs in SCHEDULES.items():
        found.append(speed_row(samples, f"{ours}, one host", f"{ours}, one host", [f"torch {theirs}"], TORCH_BAR))
    best = [f"torch {name}" for name in SCHEDULES.values()]
    for name in list(ALONE)[len(SCHEDULES) :]:
        found.append(speed_row(samples, name, name, best, None))
    return found


def _fewer(samples: Samples, name: str, bar: float | None) -> Row:
    """The share of data parallelism's bytes that is saved."""
    ours, theirs = (median(samples, one, "bytes") for one in (name, WHOLE))
    return Row(
        work=f"{name}, bytes on all wires saved",
        value=None if ours is None else ours / 1e6,
        unit="MB/step",
        against={} if theirs is None else {WHOLE: theirs / 1e6},
        ratio=None if ours is None or not theirs else 1.0 - ours / theirs,
        bar=bar,
        sense=AT_LEAST,
    )

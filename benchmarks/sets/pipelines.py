"""Models in stages: beside data parallelism over 1 Gbit/s, and beside torch.distributed.pipelining on one host."""

from __future__ import annotations

import shlex
import socket
import sys
from typing import Any

from benchmarks.contenders import PEERS, Bench, Contender, collect, python_of
from benchmarks.figures import AT_LEAST, AT_MOST, Row, Samples, median, speed_row, steps_per_s
from benchmarks.network import lab
from benchmarks.process import ContenderError, environment, run_json
from benchmarks.sets.hooks import ddp_on
from benchmarks.staged import on_hosts, on_one_host, train

NAME = "pipelines"
ABOUT = (
    "models in stages: a VGG-like one of 51 MB, and a ResNet-like one, on 4 workers and 2 ps over 1 Gbit/s, and linear "
    "layers on one host. Beside what was predicted the ratio is the error; the worst of each kind is shown"
)
WORKERS, PS, MICROBATCHES = 4, 2, 4
MEGABYTES = 50.8
"""Of the VGG-like model."""
FEWER_BAR, FASTER_BAR, TORCH_BAR, RESNET_BAR = 0.85, 3.0, 1.0, 1.0
BYTES_BAR, MEMORY_BAR = 0.05, 0.1
LINK = "940Mbit"
"""What a TCP connection gets of 1 Gbit/s."""
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
RUNS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    WHOLE: (["--model", "vgg", "--replicas", str(WORKERS)], ()),
    **{
        name: (["--model", "vgg", "--pipeline", pipeline, "--microbatches", str(MICROBATCHES)], more)
        for name, (pipeline, more) in STAGED.items()
    },
    **{
        name: (
            ["--model", "resnet", "--pipeline", pipeline, "--replicas", str(replicas)]
            + (["--microbatches", str(MICROBATCHES)] if replicas == 1 else []),
            (),
        )
        for name, (pipeline, replicas) in RESNET.items()
    },
}
"""Over links: flags of the job, and of `shardline chief` and `worker`."""
QUICK = {"like ResNet, data parallel": 8, "like ResNet, flush": 3}
"""Of which there are so many times as many steps."""
PREDICTED = "predicted"
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

            def contender(name: str) -> Contender:
                flags, more = RUNS[name]
                # After the chief has imported what draws its curves, which takes a core for a second.
                times = QUICK.get(name, 1)
                length = {"steps": times * steps, "warmup": times * warmup}
                return Contender(name=name, run=lambda: train(flags, sites, **length, more=more))

            contenders = [contender(name) for name in RUNS]
            if bench.scale.peers:
                work = bench.work(megabytes=MEGABYTES, tensors=WORKERS, steps=steps, warmup=warmup)
                contenders.append(Contender(name=ALL_REDUCE, run=lambda: ddp_on(work, "none", hosts, WORKERS)))
            more_samples, lacking = collect(contenders, bench.scale.repeats, bench.say)
    except ContenderError as error:
        bench.say(f"  {error}")
        more_samples, lacking = {}, dict.fromkeys(RUNS, str(error))
    planned, unplanned = collect([_planned(bench, name) for name in RUNS], 1, bench.say)
    return {**samples, **more_samples, **planned}, {**missing, **lacking, **unplanned}


def _planned(bench: Bench, name: str) -> Contender:
    """What `shardline partition` says of a run."""
    flags, more = RUNS[name]
    command = [sys.executable, "-m", "benchmarks.planned", "--workers", str(WORKERS), "--ps", str(PS), "--link", LINK]
    command += ["--codec", more[more.index("--codec-up") + 1]] if more else []
    env = environment(more={"SHARDLINE_JOB_ARGS": shlex.join(flags)})
    title = f"{name}, {PREDICTED}"
    return Contender(
        name=title,
        run=lambda: run_json(command, what=title, timeout_s=300.0, prefix=bench.loopback.prefix, env=env),
    )


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
    return [*found, *(row for name in RUNS for row in _errors(samples, name))]


def _errors(samples: Samples, name: str) -> list[Row]:
    """What was measured beside what `shardline partition` predicts, and by which part of it that is wrong."""
    title = f"{name}, {PREDICTED}"
    speeds, sizes = ([read(samples, one) for one in (name, title)] for read in (steps_per_s, _megabytes))
    found = [
        _error(f"{name}: speed", "steps/s", *speeds, None),
        _error(f"{name}: bytes", "MB/step", *sizes, BYTES_BAR),
    ]
    for sample in samples.get(title, ())[:1]:
        stages = zip(sample["measured_memory"], sample["memory"], strict=True)
        worst = max(stages, key=lambda both: abs(both[0] / both[1] - 1), default=None)
        if worst is not None:
            work = f"{name}: memory"
            found.append(_error(work, "MB", worst[0] / 1e6, worst[1] / 1e6, MEMORY_BAR))
    return found


def _megabytes(samples: Samples, name: str) -> float | None:
    found = median(samples, name, "bytes")
    return None if found is None else found / 1e6


def _error(work: str, unit: str, measured: float | None, predicted: float | None, bar: float | None) -> Row:
    ratio = None if measured is None or not predicted else abs(predicted / measured - 1)
    against = {} if predicted is None else {PREDICTED: predicted}
    return Row(work=work, value=measured, unit=unit, against=against, ratio=ratio, bar=bar, sense=AT_MOST)


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

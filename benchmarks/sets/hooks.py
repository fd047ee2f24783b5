"""Compressed pushes and pulls beside torch's own compressed all-reduce: DDP's communication hooks over gloo.

Both use the same two links in the same way: a parameter server on each worker's host holds half of the model, so that a
step moves one model out of each host and one into it, as an all-reduce of two does.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from benchmarks.contenders import PEERS, Bench, Contender, collect, python_of
from benchmarks.figures import Row, Samples, speed_row
from benchmarks.network import INTERFACE, Lab, lab
from benchmarks.process import Child, ContenderError, environment, read_all
from benchmarks.push_pull import Work, run_on

NAME = "hooks"
ABOUT = "25 MB, 2 workers with a ps each on their hosts, links of 100 Mbit/s: beside DDP's communication hooks"
MEGABYTES = 25.0
HOSTS = 2
STEPS = 5
BAR = 1.5
RUN_S = 600.0
PS_PORT, RANK_PORT = 2222, 2223
HOOKS = {"DDP": "none", "DDP fp16": "fp16", "DDP bf16": "bf16", "DDP PowerSGD 1": "powersgd-1"}
OURS = {"raw": ("raw", ""), "fp16": ("fp16", "fp16"), "bf16": ("bf16", "bf16"), "int8": ("int8", "delta:by=int8")}
STRONG = {
    "powersgd 1": ("powersgd:rank=1", "delta:by=powersgd"),
    "onebit": ("onebit", "delta:by=onebit"),
    "topk 1 %": ("topk", "delta:by=topk"),
}
"""By name: codec of gradients, of parameters."""


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set on two hosts."""
    chosen = {**OURS, **STRONG}
    try:
        with lab(HOSTS, "100mbit") as hosts:
            work = bench.work(
                megabytes=MEGABYTES,
                tensors=HOSTS,
                workers=HOSTS,
                ps=HOSTS,
                steps=min(STEPS, bench.scale.steps),
                warmup=3,
            )
            contenders = [
                Contender(name=name, run=lambda up=up, down=down: ours(work, up, down, hosts))
                for name, (up, down) in chosen.items()
            ]
            if bench.scale.peers:
                contenders += [
                    Contender(name=name, run=lambda hook=hook: ddp(work, hook, hosts)) for name, hook in HOOKS.items()
                ]
            return collect(contenders, bench.scale.repeats, bench.say)
    except ContenderError as error:
        bench.say(f"  {error}")
        return {}, dict.fromkeys((*chosen, *HOOKS), str(error))


def ours(work: Work, up: str, down: str, hosts: Lab) -> dict[str, Any]:
    """One run with a ps and a worker on each host."""
    prefixes = [hosts.prefix(1 + index) for index in range(HOSTS)]
    addresses = [f"{hosts.address(1 + index)}:{PS_PORT}" for index in range(HOSTS)]
    work = replace(work, codec=up, codec_down=down)
    return run_on(work, addresses=addresses, ps=prefixes, workers=prefixes)


def ddp(work: Work, hook: str, hosts: Lab) -> dict[str, Any]:
    """One run of DistributedDataParallel with a rank on each of two hosts."""
    return ddp_on(work, hook, hosts, HOSTS)


def ddp_on(work: Work, hook: str, hosts: Lab, count: int) -> dict[str, Any]:
    """One run with a rank on each of the first `count` hosts; a step takes as long as its slowest rank's."""
    command = [str(python_of("torch")), str(PEERS / "ddp_hooks.py"), "--hook", hook, "--ranks", str(count)]
    command += ["--init", f"tcp://{hosts.address(1)}:{RANK_PORT}", "--interface", INTERFACE]
    command += ["--megabytes", str(work.megabytes), "--steps", str(work.steps), "--warmup", str(work.warmup)]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Child(
                    [*command, "--rank", str(rank)],
                    prefix=hosts.prefix(1 + rank),
                    what=f"DDP {hook}, rank {rank}",
                    env=environment(),
                )
            )
            for rank in range(count)
        ]
        return max(read_all(ranks, RUN_S), key=lambda found: float(found["median_s"]))


def rows(samples: Samples) -> list[Row]:
    """Steps per second over those of DDP with the same codec; the stronger codecs over its strongest hook."""
    alike = [speed_row(samples, name, name, [f"DDP {name}"], BAR) for name in ("fp16", "bf16")]
    first = speed_row(samples, "raw", "raw", ["DDP"], None)
    others = [speed_row(samples, name, name, ["DDP PowerSGD 1"], None) for name in ("int8", *STRONG)]
    return [first, *alike, *others]

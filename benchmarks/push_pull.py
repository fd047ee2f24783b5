"""Steps per second of push + SGD + pull between one worker and one parameter server, each a process of its own.

    python benchmarks/push_pull.py --megabytes 64 --steps 20

Prints one JSON object. No chief takes part: this measures the data plane alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection

# glibc must see these before the first allocation, as the launcher does it for real tasks.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}


def serve(pipe: Connection) -> None:
    """The ps's process."""
    from shardline.cluster import ClusterSpec
    from shardline.config import RoleConfig
    from shardline_ps.service import PsProcess

    spec = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:0",)})
    process = PsProcess(RoleConfig(role="ps", index=0, cluster=spec))
    pipe.send(process.start())
    pipe.recv()
    process.close()


def run(pipe: Connection, megabytes: float, tensors: int, steps: int, warmup: int, codec: str) -> dict[str, object]:
    """The worker's part; returns the figures."""
    import torch

    from shardline.client.trainer import Trainer
    from shardline.config import Timeouts
    from shardline.lanes.grpc import GrpcLane
    from shardline.rpc.channel import Peers
    from shardline.rpc.client import Configuration, JobView, Placement, PsControl
    from shardline.sharding import make_plan
    from shardline.spec import ConsistencySpec, JobSpec, ScheduleSpec, TensorSpec
    from shardline.update import rule

    torch.set_num_threads(1)
    address = pipe.recv()
    timeouts = Timeouts(total_s=120.0)
    rows = max(1, int(megabytes * 1e6 / 4 / 1024 / tensors))
    specs = tuple(TensorSpec(name=f"t{i}", shape=(rows, 1024), dtype="float32") for i in range(tensors))
    plan = make_plan(specs, 1)
    sgd = rule("SGD", groups=({"lr": 0.1},))
    control = PsControl("ps/0", address, timeouts, term=0, chief_uuid="")
    placement = (Placement(shard=0, task="ps/0", address=address),)
    control.configure(
        Configuration(
            job="bench",
            timeline=1,
            plan=plan,
            shards=(0,),
            rule=sgd,
            schedule=ScheduleSpec(),
            consistency=ConsistencySpec(),
            replicas=1,
            cut_every=0,
            placement=placement,
            codec=codec,
            activate=True,
        )
    )
    job = JobSpec(name="bench", tensors=specs, rule=sgd, codec=codec)
    view = JobView(job=job, plan=plan, placement=placement, timeline=1)
    values = {spec.name: torch.randn(spec.shape) for spec in specs}
    gradients = {spec.name: torch.randn(spec.shape) * 1e-3 for spec in specs}
    peers = Peers(timeouts)
    lane = GrpcLane(peers.get("ps/0", address), 0, [b.elements for b in plan.shards[0].buckets])
    trainer = Trainer(view, values, {0: lane}, timeouts, task="worker/0", incarnation=0, index=0)
    trainer.initialize()
    trainer.locate([0], 1)
    seconds = []
    for number in range(warmup + steps):
        start_s = time.perf_counter()
        trainer.contribute(0, gradients)
        trainer.finish()
        if number >= warmup:
            seconds.append(time.perf_counter() - start_s)
    trainer.close()
    control.close()
    peers.close()
    median_s = statistics.median(seconds)
    moved = plan.shards[0].nbytes * 2
    return {
        "lane": "grpc",
        "codec": codec,
        "megabytes": round(plan.shards[0].nbytes / 1e6, 2),
        "tensors": tensors,
        "steps": steps,
        "steps_per_s": round(1 / median_s, 2),
        "gigabytes_per_s_both_ways": round(moved / median_s / 1e9, 3),
        "best_s": round(min(seconds), 4),
        "median_s": round(median_s, 4),
        "worst_s": round(max(seconds), 4),
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--tensors", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--codec", default="raw")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.environ.update(ALLOCATOR)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), name="ps")
    process.start()
    try:
        figures = run(ours, options.megabytes, options.tensors, options.steps, options.warmup, options.codec)
    finally:
        ours.send("stop")
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

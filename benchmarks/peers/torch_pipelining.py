"""torch.distributed.pipelining over gloo: the same linear layers in stages, SGD in every stage.

benchmarks/.venvs/torch/bin/python benchmarks/peers/torch_pipelining.py --stages 2 --schedule 1F1B
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

sys.path.insert(0, str(Path(__file__).parent))
import common

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def work(rank: int, init_method: str, options: argparse.Namespace, pipe: Connection) -> None:
    """One stage."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=options.stages, timeout=limit)
    width = options.width
    layers = nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())))
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    stage = PipelineStage(layers, rank, options.stages, torch.device("cpu"))
    schedule = SCHEDULES[options.schedule](stage, options.microbatches, loss_fn=nn.functional.cross_entropy)
    inputs, targets = torch.randn(options.batch, width), torch.randint(0, width, (options.batch,))
    seconds = []
    for number in range(options.warmup + options.steps):
        start_s = time.perf_counter()
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        elif rank == options.stages - 1:
            schedule.step(target=targets, losses=[])
        else:
            schedule.step()
        optimizer.step()
        if number >= options.warmup:
            seconds.append(time.perf_counter() - start_s)
    pipe.send(seconds)
    dist.destroy_process_group()


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1F1B")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    options = parser.parse_args()
    init_method = f"tcp://127.0.0.1:{common.free_port()}"
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for rank in range(options.stages):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=work, args=(rank, init_method, options, theirs))
        child.start()
        pipes.append(ours)
        children.append(child)
    # Stages overlap across steps, so the mean of a stage is what a step takes.
    means = [statistics.fmean(common.receive(pipe, 600)) for pipe in pipes]
    for child in children:
        child.join(timeout=30)
    found = {"median_s": max(means), "steps": options.steps, "versions": {"torch": torch.__version__}}
    print(common.json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

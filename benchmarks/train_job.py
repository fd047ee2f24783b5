"""A stack of linear layers as a job file, and the same training with no cluster.

    python benchmarks/train_job.py --width 512 --layers 4 --batch 256 --steps 20     # alone; prints one JSON object
    torchrun --standalone --nproc-per-node 2 benchmarks/train_job.py                 # DDP over gloo; the same
    shardline train benchmarks/train_job.py -- --width 512 --layers 4 --batch 256    # writes it to $BENCH_OUT

A step is the time from one forward pass to the next, so what a step leaves to be waited for in the next one is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import shardline

RATE = 1e-3
OUT = "BENCH_OUT"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags, for both ways of running."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    return parser.parse_args(arguments)


def summary(marks: list[float], warmup: int) -> dict[str, object]:
    """Figures of the steps between marks, without the first `warmup`."""
    seconds = [after - before for before, after in pairwise(marks)][warmup:]
    return {
        "median_s": statistics.median(seconds),
        "mean_s": statistics.fmean(seconds),
        "best_s": min(seconds),
        "worst_s": max(seconds),
        "steps": len(seconds),
        "seconds": [round(value, 6) for value in seconds],
    }


class Training:
    """One process's model, inputs and clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.marks: list[float] = []
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(options.batch, options.width, generator=generator)

    def model(self) -> nn.Module:
        """The same values in every process that seeds torch alike."""
        width = self.options.width
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(self.options.layers)))

    def loss(self, model: nn.Module, batch: object) -> torch.Tensor:
        """Of the same inputs every time: fetching data is not what is measured."""
        self.marks.append(time.perf_counter())
        if len(self.marks) == self.options.warmup + self.options.steps + 1 and OUT in os.environ:
            found = json.dumps(summary(self.marks, self.options.warmup))
            # Workers end together; the file is always one worker's.
            part = Path(f"{os.environ[OUT]}.{os.getpid()}")
            part.write_text(found, encoding="utf-8")
            part.replace(os.environ[OUT])
        result: torch.Tensor = model(self.inputs).square().mean()
        return result

    def alone(self) -> dict[str, object]:
        """Train with no cluster."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = self.model()
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        forward_s, backward_s = [], []
        for _ in range(self.options.warmup + self.options.steps):
            optimizer.zero_grad()
            loss = self.loss(model, None)
            middle_s = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            forward_s.append(middle_s - self.marks[-1])
            backward_s.append(time.perf_counter() - middle_s)
            optimizer.step()
            float(loss.detach())
        self.marks.append(time.perf_counter())
        warmup = self.options.warmup
        return {
            **summary(self.marks, warmup),
            "forward_s": statistics.median(forward_s[warmup:]),
            "backward_s": statistics.median(backward_s[warmup:]),
        }


if __name__ == "__main__":
    figures = json.dumps(Training(parse(sys.argv[1:])).alone())
    if os.environ.get("RANK", "0") == "0":
        print(figures)
    if dist.is_initialized():
        dist.destroy_process_group()
else:
    training = Training(parse(shlex.split(os.environ.get("SHARDLINE_JOB_ARGS", ""))))
    job = shardline.Job(
        model=training.model,
        loss=training.loss,
        dataset=TensorDataset(torch.zeros(64)),
        optimizer="SGD",
        optimizer_args={"lr": RATE},
        batch_size=1,
        # One more, whose beginning is the end of the last one that counts.
        steps=training.options.warmup + training.options.steps + 1,
        name="bench",
    )

"""All-reduce of the gradient with gloo, then SGD in every process: what data-parallel training does with no server.

benchmarks/.venvs/torch/bin/python benchmarks/peers/gloo.py --processes 2
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import common


def work(rank: int, processes: int, init_method: str, options: common.argparse.Namespace, pipe: Connection) -> None:
    """One process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=processes, timeout=timedelta(seconds=120)
    )
    elements = common.elements_of(options.megabytes, options.tensors)
    parameters = [torch.zeros(elements) for _ in range(options.tensors)]
    gradients = [torch.full((elements,), common.GRADIENT) for _ in range(options.tensors)]
    seconds: list[float] = []
    for number in range(options.warmup + options.steps):
        # Outside of the clock: a sum in place leaves other values than a backward pass would.
        for gradient in gradients:
            gradient.fill_(common.GRADIENT)
        dist.barrier()
        (spent,) = common.clock(lambda: reduce_and_apply(parameters, gradients, processes), steps=1, warmup=0)
        if number >= options.warmup:
            seconds.append(spent)
    common.check(float(parameters[-1][-1]), options.steps + options.warmup)
    pipe.send(seconds)
    dist.destroy_process_group()


def reduce_and_apply(parameters: list[torch.Tensor], gradients: list[torch.Tensor], processes: int) -> None:
    """One step of one process."""
    pending = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
    for call, parameter, gradient in zip(pending, parameters, gradients, strict=True):
        call.wait()
        parameter.add_(gradient, alpha=-common.LEARNING_RATE / processes)


def main() -> None:
    """Parse, run, print."""
    flags = common.parser(__doc__)
    flags.add_argument("--processes", type=int, default=2)
    options = flags.parse_args()
    init_method = f"tcp://127.0.0.1:{common.free_port()}"
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for rank in range(options.processes):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=work, args=(rank, options.processes, init_method, options, theirs))
        child.start()
        pipes.append(ours)
        children.append(child)
    # The slowest process of a step is the step.
    seconds = [max(values) for values in zip(*(common.receive(pipe, 600) for pipe in pipes), strict=True)]
    for child in children:
        child.join(timeout=30)
    common.report(
        f"gloo all-reduce, {options.processes} processes",
        options,
        seconds,
        processes=options.processes,
        versions={"torch": torch.__version__},
        settings={"intra_op_threads": 1, "transport": "tcp"},
    )


if __name__ == "__main__":
    main()

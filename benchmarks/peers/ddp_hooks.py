"""DistributedDataParallel over gloo with one of torch's communication hooks: gradients compressed, no server.

One process is one rank; start each on its host:

benchmarks/.venvs/torch/bin/python benchmarks/peers/ddp_hooks.py --rank 0 --ranks 2 --init tcp://10.88.0.1:2222 \
    --interface lab0 --hook powersgd-1
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
import common

COLUMNS = 1000
PLAIN, CASTS = "none", {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
RANKS = {"powersgd-1": 1, "powersgd-2": 2}
POWERSGD_FROM = 2
"""DDP lays its buckets anew after the first step, and PowerSGD must begin after that."""


class Matrices(nn.Module):
    """Parameters as matrices, which PowerSGD can factor. The gradient of each element is common.GRADIENT."""

    def __init__(self, elements: int, count: int) -> None:
        super().__init__()
        rows = max(1, elements // COLUMNS)
        self.weights = nn.ParameterList([torch.zeros(rows, COLUMNS) for _ in range(count)])

    def forward(self) -> torch.Tensor:
        """A scalar, cheap to compute: what is measured is the exchange."""
        return torch.stack([weight.sum() * common.GRADIENT for weight in self.weights]).sum()


def choose_hook(model: DistributedDataParallel, name: str) -> None:
    """Register a hook by its name here."""
    if name in CASTS:
        model.register_comm_hook(None, CASTS[name])
    elif name in RANKS:
        state = powersgd.PowerSGDState(
            None, matrix_approximation_rank=RANKS[name], start_powerSGD_iter=POWERSGD_FROM, warm_start=True
        )
        model.register_comm_hook(state, powersgd.powerSGD_hook)


def main() -> None:
    """Parse, run, print."""
    flags = common.parser(__doc__)
    flags.add_argument("--rank", type=int, default=0)
    flags.add_argument("--ranks", type=int, default=1)
    flags.add_argument("--init", required=True, help="tcp://HOST:PORT of rank 0")
    flags.add_argument("--interface", required=True, help="of the network between the hosts")
    flags.add_argument("--hook", choices=[PLAIN, *CASTS, *RANKS], default=PLAIN)
    options = flags.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = options.interface
    torch.set_num_threads(1)
    limit = timedelta(seconds=300)
    dist.init_process_group(
        "gloo", init_method=options.init, rank=options.rank, world_size=options.ranks, timeout=limit
    )
    model = DistributedDataParallel(Matrices(common.elements_of(options.megabytes, options.tensors), options.tensors))
    choose_hook(model, options.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model().backward()  # DDP waits for the exchange here
        optimizer.step()

    warmup = max(options.warmup, POWERSGD_FROM + 1)
    seconds = common.clock(step, steps=options.steps, warmup=warmup)
    common.check(float(next(model.parameters())[-1, -1].detach()), options.steps + warmup)
    dist.barrier()
    dist.destroy_process_group()
    common.report(
        f"DDP, gloo, hook {options.hook}",
        options,
        seconds,
        processes=options.ranks,
        versions={"torch": torch.__version__},
        settings={"intra_op_threads": 1, "hook": options.hook},
    )


if __name__ == "__main__":
    main()

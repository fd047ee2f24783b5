"""torch.distributed.rpc with nn.EmbeddingBag(sparse=True) tables on the server: one trainer and one server process.

    python benchmarks/peers/torch_rpc_tables.py --calls one --apply owner --transport tcp

A step looks the bags up (one remote call for all tables, or one per table, all in flight at once), computes a linear
layer over their sum, and updates the tables: `owner`, the gradients of the bags go back and the server runs backward
and its own optimizer; `distributed`, dist_autograd and DistributedOptimizer do.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
import common
from torch_rpc import PIPES, backend, serve

OPTIMIZERS = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}
LEARNING_RATE = 0.1

tables: list[nn.EmbeddingBag] = []
optimizers: list[torch.optim.Optimizer] = []
"""One of each table, so that each call can apply its own."""
bags: dict[int, torch.Tensor] = {}
"""By first table: what the last look-up gave, for its gradient."""


def zipf(count: int, features: int, rows: int) -> torch.Tensor:
    """Ids (int64 [count, features]) from 1 to rows - 1: the logarithm of an id's rank is uniform."""
    ranks = torch.rand(count, features, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.exp(ranks * torch.log(torch.tensor(float(rows)))).long()


def create(count: int, rows: int, dim: int, optimizer: str) -> list[rpc.RRef[torch.Tensor]]:
    """On the server: make the tables."""
    tables[:] = [nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for _ in range(count)]
    optimizers[:] = [OPTIMIZERS[optimizer](table.parameters(), lr=LEARNING_RATE) for table in tables]
    return [rpc.RRef(table.weight) for table in tables]


def look_up(first: int, ids: torch.Tensor) -> torch.Tensor:
    """On the server: the bags of tables from `first` on, float32 [tables, B, dim]. ids: int64 [B, tables]."""
    return torch.stack([tables[first + i](ids[:, i : i + 1]) for i in range(ids.shape[1])])


def look_up_kept(first: int, ids: torch.Tensor) -> torch.Tensor:
    """On the server: look_up(), to be followed by apply()."""
    bags[first] = look_up(first, ids)
    return bags[first].detach()


def apply(first: int, gradient: torch.Tensor) -> None:
    """On the server: update the tables by the gradient of what look_up_kept() gave."""
    bags.pop(first).backward(gradient)
    for optimizer in optimizers[first : first + len(gradient)]:
        optimizer.step()
        optimizer.zero_grad()


def value_of(table: int, row: int) -> float:
    """On the server: one element of a table."""
    return float(tables[table].weight.detach()[row, 0])


class Trainer:
    """The trainer's part: model, batches and steps."""

    def __init__(self, features: int, dim: int, batch: int, batches: int, rows: int, optimizer: str) -> None:
        self.weights = rpc.rpc_sync("ps", create, args=(features, rows, dim, optimizer))
        self.last = nn.Linear(dim, 1)
        self.ids = zipf(batch * batches, features, rows).split(batch)
        self.labels = (torch.rand(batch) < 0.5).float()
        self.own = OPTIMIZERS[optimizer](self.last.parameters(), lr=LEARNING_RATE)
        own = [rpc.RRef(parameter) for parameter in self.last.parameters()]
        self.everywhere = DistributedOptimizer(OPTIMIZERS[optimizer], [*self.weights, *own], lr=LEARNING_RATE)
        self.number = 0

    def pieces(self, each: bool) -> list[tuple[int, torch.Tensor]]:
        """Arguments of the look-ups of the next batch."""
        ids = self.ids[self.number % len(self.ids)]
        self.number += 1
        return [(i, ids[:, i : i + 1].contiguous()) for i in range(ids.shape[1])] if each else [(0, ids)]

    def loss(self, found: torch.Tensor) -> torch.Tensor:
        """Of bags: float32 [tables, B, dim]."""
        return functional.binary_cross_entropy_with_logits(self.last(found.sum(0)).squeeze(1), self.labels)

    def owner(self, each: bool) -> None:
        """A step whose tables the server updates when it gets the bags' gradients."""
        pieces = self.pieces(each)
        calls = [rpc.rpc_async("ps", look_up_kept, args=piece) for piece in pieces]
        found = [call.wait().requires_grad_() for call in calls]
        self.own.zero_grad()
        self.loss(torch.cat(found)).backward()
        self.own.step()
        calls = [rpc.rpc_async("ps", apply, args=(p[0], f.grad)) for p, f in zip(pieces, found, strict=True)]
        for call in calls:
            call.wait()

    def distributed(self, each: bool) -> None:
        """A step by dist_autograd."""
        with dist_autograd.context() as context:
            calls = [rpc.rpc_async("ps", look_up, args=piece) for piece in self.pieces(each)]
            dist_autograd.backward(context, [self.loss(torch.cat([call.wait() for call in calls]))])
            self.everywhere.step(context)


def main() -> None:
    """Parse, run, print."""
    flags = common.parser(__doc__)
    flags.add_argument("--transport", choices=sorted(PIPES), default="tcp")
    flags.add_argument("--calls", choices=["one", "each"], default="one")
    flags.add_argument("--apply", choices=["owner", "distributed"], default="owner")
    flags.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="Adagrad")
    for name, value in (("features", 26), ("dim", 64), ("batch", 2048), ("batches", 64), ("rows", 100_000)):
        flags.add_argument(f"--{name}", type=int, default=value)
    options = flags.parse_args()
    # Both ends on loopback, whatever the machine's name resolves to.
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    warnings.filterwarnings("ignore", message="You are using a Backend")
    torch.set_num_threads(1)
    init_method = f"tcp://127.0.0.1:{common.free_port()}"
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(options.transport, init_method))
    server.start()
    rpc.init_rpc("worker", rank=1, world_size=2, rpc_backend_options=backend(options.transport, init_method))
    trainer = Trainer(options.features, options.dim, options.batch, options.batches, options.rows, options.optimizer)
    before = [rpc.rpc_sync("ps", value_of, args=(table, 1)) for table in range(options.features)]
    step = trainer.owner if options.apply == "owner" else trainer.distributed
    seconds = common.clock(lambda: step(options.calls == "each"), steps=options.steps, warmup=options.warmup)
    # Row 1 of every table is in every batch.
    if any(rpc.rpc_sync("ps", value_of, args=(table, 1)) == value for table, value in enumerate(before)):
        sys.exit("a table has not changed: the peer did not do the work")
    trainer.weights.clear()
    del trainer
    rpc.shutdown()
    server.join(timeout=30)
    common.report(
        "torch.distributed.rpc, nn.EmbeddingBag on the server", options, seconds, versions={"torch": torch.__version__}
    )


if __name__ == "__main__":
    main()

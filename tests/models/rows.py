"""Models, batches and optimizers: the rows of "What a model may be" in docs/jobs.md, as jobs or as scripts."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from shardline.job import Job
from tests.models.row import SAME, Row, Script, adamw, batch, job, mlp, mse, sgd


class Scaled(nn.Module):
    """A linear layer whose output is multiplied by a parameter that is made by a function."""

    def __init__(self, make: Callable[[], torch.Tensor], use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
        self.own = nn.Parameter(make())
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.use(torch.tanh(self.inner(x)), self.own))  # type: ignore[no-any-return]


def scaled(make: Callable[[], torch.Tensor], use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    return lambda: Scaled(make, use)


def conjugated() -> nn.Module:
    """A parameter and a gradient whose signs torch applies when they are read."""
    return Scaled(lambda: torch.randn(64, 8, dtype=torch.complex64).conj(), lambda h, own: h * own.conj().sum(0).real)


def negated() -> torch.Tensor:
    return torch.randn(64, 8, dtype=torch.complex64).conj().imag


def narrow(dtype: torch.dtype, **settings: Any) -> Callable[[], Job]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return mse(model, [batch[0].to(dtype), batch[1]])

    return job(lambda: mlp().to(dtype), loss=loss, **settings)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.repeat(1, 2).view(-1, 2, 2, 2).to(memory_format=torch.channels_last)
        return self.layers(images)  # type: ignore[no-any-return]


class Tied(nn.Module):
    def __init__(self, *, object_: bool) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.b.weight = self.a.weight if object_ else nn.Parameter(self.a.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.b(torch.tanh(self.a(x))))  # type: ignore[no-any-return]


class Sometimes(nn.Module):
    """Parameters that only some replicas use, or only later steps, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.some, self.late, self.never = (nn.Parameter(torch.full((6,), 0.1)) for _ in range(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        found = self.layers(x)
        if float(x[0, 0]) > 0:
            found = found + self.some.sum()
        return found + self.late.sum() if int(self.seen) > 2 else found  # type: ignore[no-any-return]


class Kept(nn.Module):
    """Batch norm, dropout, and buffers of several dtypes that are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, 1))
        self.register_buffer("count", torch.tensor(2**62 + 1))
        self.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("narrow", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("own", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for buffer, step in ((self.count, 1), (self.turn, 1j), (self.narrow, 0.5), (self.own, 1.0)):
                buffer += step
        return self.layers(x)  # type: ignore[no-any-return]


class Counted(nn.Linear):
    """Computes with what it has counted, which is extra state."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x) / self.count


def counted() -> nn.Module:
    return nn.Sequential(Counted(4, 8), nn.Tanh(), nn.Linear(8, 1))


def normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1))


def pruned() -> nn.Module:
    layer = nn.Linear(4, 8)
    prune.l1_unstructured(layer, "weight", amount=0.3)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(2, 5, num_layers=2, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cells(x.view(-1, 2, 2))[0][:, -1])  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2)), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(self.first, x, use_reentrant=False))  # type: ignore[no-any-return]


def penalised(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch[0].clone().requires_grad_()
    found = model(x)
    (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return nn.functional.mse_loss(found, batch[1]) + 0.1 * slope.square().mean()


def autocast(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mse(model, batch)


@torch.jit.script
def scripted(h: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return h * (own * own).mean()


POOL = ThreadPoolExecutor(1)


def in_thread(h: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return h * own.mean() + POOL.submit(lambda: float(own.detach().mean())).result()


def functional(model: nn.Module, batch: Any) -> torch.Tensor:
    found = torch.func.functional_call(model, dict(model.named_parameters()), (batch[0],))
    return nn.functional.mse_loss(found, batch[1])


def large() -> torch.Tensor:
    return torch.full((300, 1000), 0.5)


class Encoding(UserDict[str, torch.Tensor]):
    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


def batched(make: Callable[..., Any]) -> Callable[[], Job]:
    def collate(samples: list[Any]) -> Any:
        return make(x=torch.stack([x for x, _ in samples]), y=torch.stack([y for _, y in samples]))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch.x), batch.y)

    return job(mlp, collate=collate, loss=loss)


def columns() -> nn.Module:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            q, k = torch.randn(4, 8).chunk(2, dim=1)
            self.q, self.k, self.out = nn.Parameter(q), nn.Parameter(k), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(x @ self.q) * (x @ self.k))  # type: ignore[no-any-return]

    return Fused()


class Bag(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table((x * 5).long().abs() % 10).sum(1))  # type: ignore[no-any-return]


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first], "lr": 0.01, "weight_decay": 0.1}, {"params": others[:2], "momentum": 0.5}]


# Scripts


def one_cycle(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int]) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    for step in steps:
        optimizer.zero_grad()
        mse(model, batch(step)).backward()
        optimizer.param_groups[0]["weight_decay"] = 0.01 * step
        optimizer.step()
        scheduler.step()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int]) -> None:
    for step in steps:
        optimizer.zero_grad(set_to_none=False)
        for part in (0, 100):
            (mse(model, batch(step + part)) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def read_between(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int]) -> None:
    """Values read between step() and the next pass decide the next loss."""
    scale = 1.0
    for step in steps:
        optimizer.zero_grad()
        (scale * mse(model, batch(step))).backward()
        optimizer.step()
        with torch.no_grad():
            scale = 1.0 + float(sum(value.abs().sum() for value in model.state_dict().values()))


ROWS = [
    Row(
        "float64, complex, float16, bfloat16",
        f"{SAME}, see [optimizers](#optimizers)",
        {
            "float64": narrow(torch.float64),
            "bfloat16": narrow(torch.bfloat16),
            "float16": narrow(torch.float16),
            "complex": job(scaled(lambda: torch.randn(8, dtype=torch.complex64), lambda h, own: h * own.abs())),
            "conjugated": job(conjugated, replicas=1),
        },
    ),
    Row(
        "0-d and empty parameters",
        jobs={
            "0-d": job(scaled(lambda: torch.tensor(0.7), lambda h, own: h * own)),
            "empty": job(scaled(lambda: torch.zeros(0, 3), lambda h, own: h + own.sum())),
        },
    ),
    Row(
        "transposed and other strided parameters, channels_last",
        f"{SAME}, except the last elements in float16 and bfloat16 "
        "([0039](decisions/0039-tensors-end-where-torch-ends-them.md))",
        jobs={
            "transposed": job(scaled(lambda: torch.randn(8, 5).t(), lambda h, own: h * own.sum(0))),
            "strided": job(scaled(lambda: torch.randn(64)[::8], lambda h, own: h * own)),
            "negated": job(scaled(negated, lambda h, own: h * own.sum(0))),
            "channels_last": job(lambda: Convolved().to(memory_format=torch.channels_last)),
        },
    ),
    Row("views of one storage that share no element (columns of a fused matrix)", jobs={"columns": job(columns)}),
    Row(
        "an expanded parameter",
        "refused: `is an expanded view whose elements share memory; store .contiguous() of it`",
        {"expanded": job(scaled(lambda: torch.randn(1).expand(8), lambda h, own: h * own))},
    ),
    Row(
        "weights tied by one `Parameter` object",
        jobs={"tied": job(lambda: Tied(object_=True))},
    ),
    Row(
        "two parameters that share elements",
        "refused: `are different tensors that share memory; tie weights by assigning the same Parameter object`",
        {"shared": job(lambda: Tied(object_=False))},
    ),
    Row(
        "parameters that some replicas or some steps don't use",
        f"{SAME}; a replica that doesn't use one counts as a gradient of 0, if another does",
        {"SGD": job(Sometimes), "AdamW": job(Sometimes, optimizer="AdamW", optimizer_args={"lr": 0.01}, replicas=3)},
    ),
    Row("batch norm, dropout, buffers of any dtype that are written in place", jobs={"buffers": job(Kept)}),
    Row(
        "extra state (`get_extra_state`)",
        "refused: `which a job's checkpoints don't keep, so that it would begin anew after a restart`, unless the job "
        'says `extra_state="unsaved"`',
        jobs={"counted": job(counted)},
    ),
    Row(
        'extra state, with `extra_state="unsaved"`',
        f"{SAME}: each process has its own; checkpoints and exported files have none, so load these with "
        "`load_state_dict(..., strict=False)`",
        jobs={"unsaved": job(counted, extra_state="unsaved", replicas=1)},
    ),
    Row("pruning and parametrizations, made in the model function", jobs={"norm": job(normed), "pruned": job(pruned)}),
    Row(
        "recurrent layers, recomputation (`torch.utils.checkpoint`)",
        jobs={"LSTM": job(Recurrent), "recomputed": job(Recomputed)},
    ),
    Row(
        "scripted functions, threads and `torch.func` that read parameters",
        jobs={
            "scripted": job(scaled(large, scripted)),
            "thread": job(scaled(large, in_thread)),
            "functional": job(mlp, loss=functional),
        },
    ),
    Row(
        "gradient penalties, autocast",
        jobs={"penalty": job(mlp, loss=penalised), "autocast": job(mlp, loss=autocast)},
    ),
    Row(
        "parameter groups, `fused=True`, `foreach=True`",
        jobs={
            "groups": job(mlp, param_groups=grouped),
            "fused": job(mlp, optimizer="AdamW", optimizer_args={"lr": 0.01, "fused": True}),
            "foreach": job(mlp, optimizer="Adam", optimizer_args={"lr": 0.01, "foreach": True}),
        },
    ),
    Row(
        "batches of any class: a tokenizer's batch, dataclasses, mappings",
        jobs={"tokenizer": batched(Encoding), "dataclass": batched(Sample)},
    ),
    Row(
        "a lazy module that has seen no batch",
        "refused: `is not initialised yet (a lazy module); run the model once on a batch inside the model factory`",
        {"lazy": job(lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1)))},
    ),
    Row(
        "sparse gradients (`nn.Embedding(sparse=True)`)",
        "as in PyTorch with `sparse=False`; they are sent without their zeros where the job has no codec",
        {"sparse": job(lambda: Bag(sparse=True), optimizer_args={"lr": 0.05})},
    ),
    Row(
        "a script's schedules of learning rate, momentum and weight decay (`OneCycleLR`)",
        scripts={"one cycle": Script(sgd, one_cycle, overlaps=False)},
    ),
    Row("a script's accumulation and `clip_grad_norm_`", scripts={"clipped": Script(adamw, clipped, overlaps=False)}),
    Row(
        "a script that reads values between `step()` and the next pass",
        scripts={"read between": Script(sgd, read_between)},
    ),
]

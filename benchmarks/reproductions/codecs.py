"""R9: codecs beside each other: what they send, and what it costs in accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.reproductions import base, local
from benchmarks.reproductions.base import Found, Reproduction, Row, mean, spread
from shardline.codecs import coding_of, keep_whole, of
from shardline.codecs.base import MemoryKey, Turn
from shardline.codecs.coding import JobCoding, PushEncoders
from shardline.core.gradients import flat_bucket
from shardline.core.plan import BucketSpec, Plan, make_plan
from shardline.core.settings import Settings
from shardline.core.spec import TensorSpec
from shardline.core.tensor_bytes import tensor_bytes

REPLICAS, BATCH = 4, 16
LINK = 100e6
"""Bits per second of the link for which times are given."""
LARGE = TensorSpec(name="large", shape=(6400, 1024), dtype="float32")
"""A model of 26 MB, whose bytes and times are given."""
RAW = "raw"
CHOICES: Sequence[tuple[str, str]] = (
    (RAW, RAW),
    ("lossless", "lossless"),
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    *((name, RAW) for name in ("int8", "fp8", "qsgd", "terngrad", "twobit", "onebit", "ef-sign")),
    *((name, RAW) for name in ("topk", "randomk", "dgc", "powersgd")),
    *((name, f"delta:by={name}") for name in ("int8", "onebit", "topk", "powersgd")),
)
"""Codecs of gradients and of parameters, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something to learn. score: of the parameters, on what was not trained on."""

    model: Callable[[], nn.Module]
    data: Callable[[], TensorDataset]
    score: Callable[[Mapping[str, torch.Tensor]], float] = field(repr=False)
    steps: int
    lr: float
    momentum: float = 0.9


@dataclass
class Traffic:
    """Bytes of one replica's pushes and of its pulls, without messages around them, and of as many unencoded ones."""

    pushed: int = 0
    pulled: int = 0
    raw: int = 0


DIGITS = Task(model=base.perceptron, data=lambda: base.digits(train=True), score=base.accuracy, steps=1200, lr=0.05)
TEXT = Task(model=local.model, data=lambda: local.windows(train=True), score=local.test_loss, steps=1200, lr=0.1)


@dataclass
class Parameters:
    """One side's parameters in a plan of one shard, and its memory of pulls."""

    plan: Plan
    values: Mapping[str, torch.Tensor]
    memories: list[dict[MemoryKey, torch.Tensor]]

    def bucket(self, number: int) -> torch.Tensor:
        """A bucket, flat."""
        return flat_bucket(self.plan, self.buckets[number], self.values)

    @torch.no_grad()
    def load(self, number: int, flat: torch.Tensor) -> None:
        """Write a bucket's numbers into the parameters."""
        fill(self.plan, self.buckets[number], flat, self.values)

    @property
    def buckets(self) -> Sequence[BucketSpec]:
        """Of the shard."""
        return self.plan.shards[0].buckets


def coded_plan(specs: Sequence[TensorSpec], up: str, down: str) -> tuple[Plan, JobCoding]:
    """A plan of one shard that the codecs can work with, and the codecs."""
    settings = Settings(codec_up=up, codec_down=down)
    plan = make_plan(keep_whole(of(settings), specs), 1)
    return plan, coding_of(settings, plan)


def fill(plan: Plan, bucket: BucketSpec, flat: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
    """Write a flat bucket into tensors by name."""
    for piece in bucket.slices:
        tensor = plan.tensors[piece.tensor]
        start = piece.first_row * tensor.row_elements
        values[tensor.name].view(-1)[start : start + piece.elements] = flat[piece.offset : piece.end]


def train(task: Task, up: str, down: str, seed: int, traffic: Traffic | None = None) -> Mapping[str, torch.Tensor]:
    """Train as synchronous servers and workers do, with their codecs and error memory; the servers' parameters.

    traffic: is added to.
    """
    traffic = Traffic() if traffic is None else traffic
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, data = task.model(), task.data()
    own = dict(model.named_parameters())
    specs = [TensorSpec(name=name, shape=tuple(p.shape), dtype="float32") for name, p in own.items()]
    plan, coding = coded_plan(specs, up, down)
    count = len(plan.shards[0].buckets)
    held = {name: nn.Parameter(p.detach().clone()) for name, p in own.items()}
    server = Parameters(plan, {name: p.data for name, p in held.items()}, [{} for _ in range(count)])
    worker = Parameters(plan, {name: p.data for name, p in own.items()}, [{} for _ in range(count)])
    # dgc brings its own momentum.
    momentum = 0.0 if coding.push.codec.has_momentum else task.momentum
    optimizer = torch.optim.SGD(held.values(), lr=task.lr, momentum=momentum)
    encoders = PushEncoders(coding.push, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    for step in range(task.steps):
        for number in range(count):
            traffic.pulled += pull(coding.pull.bucket(0, number), server, worker, number, step)
        for p in held.values():
            p.grad = torch.zeros_like(p)
        gradients = {name: p.grad for name, p in held.items() if p.grad is not None}
        encoders.begin(0, step)
        for replica in range(REPLICAS):
            chosen = torch.randint(len(data), (BATCH,), generator=draw)
            model.zero_grad()
            base.cross_entropy(model, data[chosen]).backward()
            mine = {name: p.grad for name, p in own.items() if p.grad is not None}
            for number, bucket in enumerate(server.buckets):
                sent = encoders.encode(0, number, replica, flat_bucket(plan, bucket, mine))
                if replica == 0:
                    traffic.pushed += len(tensor_bytes_of(sent))
                    traffic.raw += bucket.nbytes
                found = coding.push.bucket(0, number).coder.decode(bytearray(sent), Turn(step))
                before = flat_bucket(plan, bucket, gradients)
                fill(plan, bucket, before + found / REPLICAS, gradients)
        encoders.settle()
        optimizer.step()
    return {name: p.data for name, p in held.items()}


def pull(coding: Any, server: Parameters, worker: Parameters, number: int, step: int) -> int:
    """One bucket from the server to the worker; its bytes."""
    turn = Turn(step, receiver="worker", base=step - 1 if step else None, changed=step, memory=server.memories[number])
    sent = bytearray(coding.coder.encode(server.bucket(number), turn))
    worker.load(number, coding.coder.decode(sent, Turn(step, memory=worker.memories[number])))
    return len(sent)


def sent_bytes(up: str, down: str) -> tuple[int, int]:
    """Bytes of a push and of a pull of LARGE after some steps, without messages around them."""
    plan, coding = coded_plan([LARGE], up, down)
    draw = torch.Generator().manual_seed(0)
    pushed = pulled = 0
    for number, bucket in enumerate(plan.shards[0].buckets):
        values = 0.01 * torch.randn(bucket.elements, generator=draw)
        one = PushEncoders(coding.push, seed=0)
        one.begin(0, 1)
        pushed += len(tensor_bytes_of(one.encode(0, number, 0, values)))
        memory: dict[MemoryKey, torch.Tensor] = {}
        encoder = coding.pull.bucket(0, number).coder
        for step in (1, 2):
            moved = values + 1e-3 * step * torch.randn(bucket.elements, generator=draw)
            found = encoder.encode(moved, Turn(step, receiver="w", base=step - 1, changed=step, memory=memory))
        pulled += len(tensor_bytes_of(found))
    return pushed, pulled


def tensor_bytes_of(data: Any) -> memoryview:
    """Any buffer's bytes."""
    return tensor_bytes(data) if isinstance(data, torch.Tensor) else memoryview(data)


def zoo(seeds: Sequence[int]) -> Found:
    """R9."""
    rows: list[Row] = []
    accuracy: dict[tuple[str, str], float] = {}
    losses: dict[tuple[str, str], float] = {}
    times: dict[tuple[str, str], float] = {}
    for up, down in CHOICES:
        chosen = (up, down)
        scores = [DIGITS.score(train(DIGITS, up, down, seed)) for seed in seeds]
        texts = [TEXT.score(train(TEXT, up, down, seed)) for seed in seeds]
        accuracy[chosen], losses[chosen] = 100.0 * mean(scores), mean(texts)
        pushed, pulled = sent_bytes(up, down)
        times[chosen] = 8.0 * (pushed + pulled) / LINK
        rows.append(
            {
                "up": f"`{up}`",
                "down": f"`{down}`",
                "MB per step": f"{pushed / 1e6:.3g} + {pulled / 1e6:.3g}",
                "digits, %": spread([100.0 * score for score in scores], 1),
                "characters, loss": spread(texts, 3),
            }
        )
    near = {
        chosen
        for chosen in CHOICES
        if accuracy[chosen] > accuracy[RAW, RAW] - 0.5 and losses[chosen] < 1.02 * losses[RAW, RAW]
    }
    both = [one for one in CHOICES if one[1].startswith("delta")]
    return Found(
        rows=rows,
        verdicts={
            "at 100 Mbit/s top-k and random-k take the least time up, then one bit, then dense": times["topk", RAW]
            <= times["onebit", RAW]
            < times["int8", RAW]
            < times[RAW, RAW],
            "with changes down, one bit and top-k take less than a tenth of the time of dense": all(
                times[one] < times[RAW, RAW] / 10 for one in both if one[0] != "int8"
            ),
            "every codec is within 0.5 points and 2 % of loss of raw": len(near) == len(CHOICES),
        },
    )


ALL = (
    Reproduction(
        number="R9",
        title="Codecs beside each other",
        source="Zhong et al., Compressed Communication for Distributed Training, 2021",
        claim="On CIFAR-100 with a link of 100 Mbit/s top-k and random-k are about 6 times, one bit 2.7 times faster "
        "than dense; the accuracy is 71.4 (dense), 70.6 (one bit), 70.4 (top-k) and 69.9 (random-k).",
        setting="Digits, 9,000 parameters, and the next character of Python's standard library, 40,000 parameters; SGD "
        "with momentum 0.9, 4 replicas, 1,200 steps, default settings. Bytes are for one worker and 26 MB of "
        "float32; times are those of the bytes alone ([measured](results.md#codecs)).",
        run=zoo,
    ),
)

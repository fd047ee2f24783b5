"""A small GPT-style character model on the Python standard library's own sources, or on any text.

    shardline train examples/charlm/job.py --ps 2 --workers 2 --evaluators 1
    shardline train examples/charlm/job.py --ps 2 --workers 2 -- --text FILE
    SHARDLINE_TEXT=FILE shardline train examples/charlm/job.py --ps 2 --workers 2

Shapes: B batch, T positions, C channels.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import shlex
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline import Job
from shardline.schedule import cosine

VOCABULARY = 256
"""Bytes: every text can be read, and the model's shape doesn't depend on which one it is."""
CONTEXT = 64
"""Characters that the model sees before the one it predicts."""
CHANNELS = 96
HEADS = 4
LAYERS = 3
MAX_BYTES = 4 << 20
TEST_WINDOWS = 512


def text_file() -> Path | None:
    """The file of `-- --text FILE` on shardline's command line, or of SHARDLINE_TEXT; None = the standard library."""
    parser = argparse.ArgumentParser(prog="examples/charlm/job.py")
    parser.add_argument("--text", type=Path, default=os.environ.get("SHARDLINE_TEXT") or None)
    # Job files run inside of every process of the cluster, so their arguments come by this variable.
    path: Path | None = parser.parse_args(shlex.split(os.environ.get("SHARDLINE_JOB_ARGS", ""))).text
    return path and Path(path)


TEXT_FILE = text_file()


def read_text() -> bytes:
    """At most MAX_BYTES, the same ones in every process on machines with the same Python."""
    if TEXT_FILE is not None:
        with TEXT_FILE.open("rb") as file:
            return file.read(MAX_BYTES)
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    return bytes(text[:MAX_BYTES])


@functools.cache
def windows() -> tuple[torch.Tensor, torch.Tensor]:
    """(training, test) windows of CONTEXT + 1 bytes, uint8; test windows are spread evenly, and not trained on."""
    text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8)
    count = len(text) // (CONTEXT + 1)
    if count < 4 * TEST_WINDOWS:
        raise ValueError(f"the text has {len(text)} bytes; give at least {4 * TEST_WINDOWS * (CONTEXT + 1)}")
    cut = text[: count * (CONTEXT + 1)].view(count, CONTEXT + 1)
    is_test = torch.zeros(count, dtype=torch.bool)
    is_test[torch.linspace(0, count - 1, TEST_WINDOWS).long()] = True
    return cut[~is_test], cut[is_test]


class Block(nn.Module):
    """Causal self-attention and an MLP, each with a residual around it (pre-norm, as in GPT-2)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(CHANNELS)
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.out = nn.Linear(CHANNELS, CHANNELS)
        self.norm2 = nn.LayerNorm(CHANNELS)
        self.mlp = nn.Sequential(nn.Linear(CHANNELS, 4 * CHANNELS), nn.GELU(), nn.Linear(4 * CHANNELS, CHANNELS))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(2, (HEADS, CHANNELS // HEADS)).transpose(1, 2)
            for part in self.qkv(self.norm1(x_BTC)).chunk(3, dim=2)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.out(attended.transpose(1, 2).flatten(2))
        return x_BTC + self.mlp(self.norm2(x_BTC))


class CharacterModel(nn.Module):
    """Logits of the next byte at every position; the output layer is the embedding itself (tied weights)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, CHANNELS)
        self.position = nn.Parameter(torch.zeros(CONTEXT, CHANNELS))
        self.dropout = nn.Dropout(0.05)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(CHANNELS)
        self.head = nn.Linear(CHANNELS, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, text_BT: torch.Tensor) -> torch.Tensor:
        x_BTC = self.dropout(self.embedding(text_BT) + self.position[: text_BT.shape[1]])
        return self.head(self.norm(self.blocks(x_BTC)))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy per byte, in nats."""
    text = batch[0].long()
    logits_BTV = model(text[:, :-1])
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), text[:, 1:].flatten())


def evaluate(model: nn.Module) -> dict[str, float]:
    text = windows()[1].to(next(model.parameters()).device)
    mean = sum(float(loss(model, [part])) * len(part) for part in text.split(64)) / len(text)
    # In UTF-8 a character may take several bytes; those after its first are 0b10xxxxxx.
    characters = ((text[:, 1:] & 0xC0) != 0x80).double().mean().item()
    return {"loss": mean, "bits_per_character": mean / math.log(2) / characters}


def param_groups(model: nn.Module) -> list[dict[str, object]]:
    """Weight decay for matrices only, as GPT-2's trainers do."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


job = Job(
    name="charlm",
    model=CharacterModel,
    loss=loss,
    dataset=lambda: TensorDataset(windows()[0]),
    evaluate=evaluate,
    optimizer="AdamW",
    optimizer_args={"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
    param_groups=param_groups,
    schedule=cosine(warmup_steps=50, final_factor=0.1),
    batch_size=16,
    replicas=2,
    steps=1000,
    clip_norm=1.0,
    checkpoint_every=250,
    best_metric="bits_per_character",
    # --set tensor_ranks=2 has two workers share each of these.
    tensor_parallel={"blocks.*.mlp": "colwise/rowwise"},
    tensor_ranks=1,
)

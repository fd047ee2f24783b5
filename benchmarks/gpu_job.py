"""GPT-2 small (124 M parameters) on random tokens, for benchmarks/gpu.py; notes when each forward pass begins.

SHARDLINE_BENCH_STAMPS names the file for the notes; SHARDLINE_BENCH_BF16=1 computes under bfloat16 autocast.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline import Job

STAMPS, BF16 = "SHARDLINE_BENCH_STAMPS", "SHARDLINE_BENCH_BF16"
VOCABULARY, CONTEXT, CHANNELS, HEADS, LAYERS, BATCH = 50_257, 256, 768, 12, 12, 8
SMALL = "SHARDLINE_BENCH_SMALL"
"""Set for tests: a model of 2 layers and 64 channels."""
if os.environ.get(SMALL):
    VOCABULARY, CONTEXT, CHANNELS, HEADS, LAYERS = 512, 32, 64, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.qkv, self.out = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.up, self.down = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, positions, channels) in and out."""
        batch, length, _ = x.shape
        query, key, value = (
            part.view(batch, length, HEADS, CHANNELS // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(CHANNELS, dim=2)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, CHANNELS))
        added: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + added


class Gpt2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, CHANNELS), nn.Embedding(CONTEXT, CHANNELS)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(CHANNELS)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch, positions, vocabulary)."""
        if STAMPS in os.environ:
            with Path(os.environ[STAMPS]).open("a", encoding="utf-8") as stamps:
                stamps.write(f"{time.perf_counter()}\n")
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bool(os.environ.get(BF16))):
            x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
            logits: torch.Tensor = nn.functional.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return logits


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    (text,) = batch
    logits = model(text[:, :-1])
    return nn.functional.cross_entropy(logits.float().reshape(-1, VOCABULARY), text[:, 1:].reshape(-1))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(VOCABULARY, (512, CONTEXT + 1), generator=generator))


job = Job(
    model=Gpt2,
    loss=loss,
    dataset=data(),
    optimizer="AdamW",
    optimizer_args={"lr": 3e-4},
    batch_size=BATCH,
    replicas=1,
    steps=100,
    seed=0,
)

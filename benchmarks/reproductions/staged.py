"""R12: pipelines without a flush, on the digits and on text."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.reproductions.base import (
    Curve,
    Found,
    Reproduction,
    Row,
    digits,
    digits_job,
    mean,
    spread,
)
from shardline.errors import NonFiniteError
from shardline.job import Job
from shardline.schedule import cosine
from shardline.testing import reference
from shardline_pipeline.model import Pipeline

WIDTH, STEPS = 64, 1800
RATES = (0.05, 0.2, 0.5)
NONE, PREDICTED = "no stashing", "weight stashing with prediction"
VARIANTS = {
    "serial": ("whole-model", 1),
    "weight stashing": ("stash", 1),
    PREDICTED: ("stash:predict=true", 1),
    "vertical sync": ("vertical-sync", 1),
    "2BW": ("double-buffer", 4),
    NONE: ("no-stash", 1),
}
"""By label: the pipeline, and the microbatches that a step's samples are divided into."""
IMAGES = ("serial", "weight stashing", "vertical sync", "2BW", NONE)
TEXT = ("serial", "weight stashing", PREDICTED, "2BW", NONE)
FOUR, EIGHT = 4, 8
DEEP = ("serial", "weight stashing", NONE)
"""What is tried with eight stages too."""
DIVERGED = 90.0
"""Error of guessing, in percent."""
TEXT_STEPS, TEXT_WARMUP, TEXT_RATE = 4000, 500, 2e-3
CHARLM = Path(__file__).parents[2] / "examples" / "charlm" / "job.py"


class Block(nn.Module):
    """Two linear layers that are added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The output for a batch, shape [batch, WIDTH] as the input's."""
        found: torch.Tensor = values + self.second(torch.relu(self.first(self.norm(values))))
        return found


def model(stages: int) -> Pipeline:
    """A deep residual classifier of the digits: two blocks, or the ends, in each stage."""
    blocks = [Block() for _ in range(2 * stages - 2)]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))
    return Pipeline([nn.Linear(64, WIDTH), *blocks, head], stages=[2 * stage for stage in range(1, stages)])


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned."""

    model: Callable[[int], Pipeline]
    """With so many stages."""
    job: Job
    """Its batch is that of a step. Without the rest of what a variant sets."""
    score: Callable[[nn.Module], float]
    """Of a trained model; less is better."""
    worst: float
    """The score of a training that diverged."""

    def variant(self, stages: int, pipeline: str, microbatches: int, rate: float, seed: int) -> Job:
        """The job of a variant."""
        return replace(
            self.job,
            model=lambda: self.model(stages),
            optimizer_args={**self.job.optimizer_args, "lr": rate},
            pipeline=pipeline,
            apply="worker",
            batch_size=self.job.batch_size // microbatches,
            accumulate=microbatches,
            seed=seed,
        )


@torch.no_grad()
def error(found: nn.Module) -> float:
    """Share of the test images that are taken for another digit, in percent; that of guessing if it diverged."""
    images, labels = digits(train=False).tensors
    guesses = found(images)
    if not bool(torch.isfinite(guesses).all()):
        return DIVERGED
    return 100.0 * float((guesses.argmax(dim=1) != labels).double().mean())


def of_digits() -> Task:
    """The digits, by a deep residual perceptron."""
    job = digits_job(schedule=cosine(warmup_steps=50), steps=STEPS)
    return Task(model=model, job=job, score=error, worst=DIVERGED)


def of_text() -> Task:
    """Python's own sources, byte by byte, by the transformer of examples/charlm, its output layer not tied."""
    example: dict[str, Any] = runpy.run_path(str(CHARLM))
    width, context, vocabulary = example["CHANNELS"], example["CONTEXT"], example["VOCABULARY"]

    class Start(nn.Module):
        """The bytes' embeddings and their positions'."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            """text: int64, shape [batch, positions]; the output's is [batch, positions, width]."""
            found: torch.Tensor = self.embedding(text) + self.position(torch.arange(text.shape[1]))
            return found

    def model(stages: int) -> Pipeline:
        blocks = [example["Block"]() for _ in range(example["LAYERS"])]
        assert len(blocks) == stages - 1
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
        return Pipeline([Start(), *blocks, head], stages=[2, 3, 4])

    @torch.no_grad()
    def loss(found: nn.Module) -> float:
        found.eval()
        return float(example["evaluate"](found)["loss"])

    job = replace(
        example["job"],
        param_groups=None,
        replicas=1,
        clip_norm=0.0,
        tensor_parallel={},
        steps=TEXT_STEPS,
        schedule=cosine(warmup_steps=TEXT_WARMUP, final_factor=0.1),
    )
    return Task(model=model, job=job, score=loss, worst=math.log(vocabulary))


def trained(task: Task, stages: int, pipeline: str, microbatches: int, rate: float, seed: int) -> float:
    """The score of a variant, after a training whose bits are those of a cluster."""
    try:
        result = reference(task.variant(stages, pipeline, microbatches, rate, seed))
    except NonFiniteError:
        return task.worst
    found = task.model(stages)
    found.load_state_dict({**result.params, **result.buffers})
    return task.score(found)


def ended(
    task: Task, stages: int, label: str, rates: Sequence[float], seeds: Sequence[int]
) -> dict[float, list[float]]:
    """Scores of a variant with every seed, by learning rate."""
    return {rate: [trained(task, stages, *VARIANTS[label], rate, seed) for seed in seeds] for rate in rates}


def pipelines(seeds: Sequence[int]) -> Found:
    """R12."""
    torch.set_num_threads(1)
    images, text = of_digits(), of_text()
    four = {label: ended(images, FOUR, label, RATES, seeds) for label in IMAGES}
    eight = {label: ended(images, EIGHT, label, RATES, seeds) for label in DEEP}
    read = {label: ended(text, FOUR, label, (TEXT_RATE,), seeds[:1])[TEXT_RATE] for label in TEXT}
    both = {
        f"{label}, {stages} stages": found
        for stages, all_ in ((FOUR, four), (EIGHT, eight))
        for label, found in all_.items()
    }
    rows: list[Row] = [
        {"training": label, **{f"error in %, rate {rate:g}": spread(found[rate], 2) for rate in RATES}}
        for label, found in both.items()
    ]
    rows += [
        {"training": f"text, {label}, 4 stages", "loss in nats": spread(found, 3)} for label, found in read.items()
    ]
    best = {label: min(mean(values) for values in found.values()) for label, found in four.items()}
    return Found(
        rows=rows,
        verdicts={
            "weight stashing in four stages is within 0.5 points of serial training, each at its best rate": best[
                "weight stashing"
            ]
            <= best["serial"] + 0.5,
            "so is 2BW": best["2BW"] <= best["serial"] + 0.5,
            "and so is vertical sync": best["vertical sync"] <= best["serial"] + 0.5,
            "vertical sync fails at a rate at which weight stashing works": any(
                mean(four["vertical sync"][rate]) >= 2 * mean(four["weight stashing"][rate]) for rate in RATES
            ),
            "in four stages no stashing is worse than stashing, by 0.5 points at some rate": any(
                mean(four[NONE][rate]) > mean(four["weight stashing"][rate]) + 0.5 for rate in RATES
            ),
            "in eight stages it is": any(
                mean(eight[NONE][rate]) > mean(eight["weight stashing"][rate]) + 0.5 for rate in RATES
            ),
            "on text the loss with weight stashing is within 2 % of serial training": mean(read["weight stashing"])
            <= 1.02 * mean(read["serial"]),
            "so is that with prediction": mean(read[PREDICTED]) <= 1.02 * mean(read["serial"]),
            "and that with 2BW": mean(read["2BW"]) <= 1.02 * mean(read["serial"]),
            "without stashing it is higher, by 2 %": mean(read[NONE]) > 1.02 * mean(read["serial"]),
        },
        curves=[Curve(label=label, x=RATES, y=[mean(found[rate]) for rate in RATES]) for label, found in both.items()],
        axes=("learning rate", "test error (%)"),
    )


ALL = (
    Reproduction(
        number="R12",
        title="Pipelines without a flush",
        source="Narayanan et al., PipeDream, 2019, and Memory-Efficient Pipeline-Parallel DNN Training, 2021",
        claim="With weight stashing, vertical sync or two versions (2BW) a pipeline that never drains trains as well "
        "as serial training; a backward pass with other parameters than its forward pass does not.",
        setting="Digits: a residual perceptron of two blocks per stage, plain SGD with a cosine schedule, "
        f"{STEPS} steps of 32 samples; 2BW in 4 microbatches. Text: the transformer of examples/charlm with an untied "
        "output layer on Python's sources, a byte at a time, AdamW, a cosine schedule from "
        f"{TEXT_RATE:g} after a warm-up of {TEXT_WARMUP} of {TEXT_STEPS} steps of 16 x 64 bytes, one seed.",
        run=pipelines,
    ),
)

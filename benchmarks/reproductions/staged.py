"""R12: pipelines without a flush, on the digits."""

from __future__ import annotations

from collections.abc import Sequence

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
from shardline.pipeline.model import Pipeline
from shardline.schedule import cosine
from shardline.testing import reference

WIDTH, STEPS = 64, 600
RATES = (0.05, 0.2, 0.5)
NONE = "no stashing"
VARIANTS = {
    "serial": ("whole-model", 1),
    "weight stashing": ("stash", 1),
    "vertical sync": ("vertical-sync", 1),
    "2BW": ("double-buffer", 4),
    NONE: ("no-stash", 1),
}
"""By label: the pipeline, and the microbatches of a step, which always has 32 samples."""
FOUR, EIGHT = 4, 8
DEEP = ("serial", "weight stashing", NONE)
"""What is tried with eight stages too."""
DIVERGED = 90.0
"""Error of guessing, in percent."""


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


def job_of(stages: int, pipeline: str, microbatches: int, rate: float, seed: int) -> Job:
    """The job of a variant."""
    return digits_job(
        model=lambda: model(stages),
        optimizer_args={"lr": rate},
        pipeline=pipeline,
        batch_size=32 // microbatches,
        accumulate=microbatches,
        schedule=cosine(warmup_steps=50),
        steps=STEPS,
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


def trained(stages: int, pipeline: str, microbatches: int, rate: float, seed: int) -> float:
    """Test error of a variant, after a training whose bits are those of a cluster."""
    try:
        result = reference(job_of(stages, pipeline, microbatches, rate, seed))
    except NonFiniteError:
        return DIVERGED
    found = model(stages)
    found.load_state_dict({**result.params, **result.buffers})
    return error(found)


def ended(stages: int, label: str, seeds: Sequence[int]) -> dict[float, list[float]]:
    """Test errors of a variant with every seed, by learning rate."""
    return {rate: [trained(stages, *VARIANTS[label], rate, seed) for seed in seeds] for rate in RATES}


def pipelines(seeds: Sequence[int]) -> Found:
    """R12."""
    torch.set_num_threads(1)
    four = {label: ended(FOUR, label, seeds) for label in VARIANTS}
    eight = {label: ended(EIGHT, label, seeds) for label in DEEP}
    both = {
        f"{label}, {stages} stages": found
        for stages, all_ in ((FOUR, four), (EIGHT, eight))
        for label, found in all_.items()
    }
    rows: list[Row] = [
        {"training": label, **{f"error in %, rate {rate:g}": spread(found[rate], 2) for rate in RATES}}
        for label, found in both.items()
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
        },
        curves=[Curve(label=label, x=RATES, y=[mean(found[rate]) for rate in RATES]) for label, found in both.items()],
        axes=("learning rate", "test error (%)"),
    )


ALL = (
    Reproduction(
        number="R12",
        title="pipelines without a flush",
        source="Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019; Memory-Efficient "
        "Pipeline-Parallel DNN Training, 2021",
        claim="With weight stashing, vertical sync or two versions (2BW) a pipeline that never drains trains as well "
        "as serial training; a backward pass with other parameters than its forward pass does not.",
        setting="A residual perceptron of two blocks per stage on the digits, plain SGD with a cosine schedule, "
        f"{STEPS} steps of 32 samples; with 2BW in 4 microbatches. Runs in one process, whose bits are those of a "
        "cluster; with a flush they are those of serial training. Without stashing forward passes have the versions of "
        "weight stashing, and backward passes the newest.",
        run=pipelines,
    ),
)

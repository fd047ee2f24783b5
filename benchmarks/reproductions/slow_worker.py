"""T1: the time to an accuracy with one slow worker, in every mode with rules that suit it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch

from benchmarks.reproductions.base import Found, Reproduction, Row, accuracy, digits_job, mean, perceptron, spread
from shardline.errors import NonFiniteError, UsageError
from shardline_lab.simulator.gradients import parameters, training_contents
from shardline_lab.simulator.simulation import Setup, Simulation
from shardline_lab.simulator.times import Gamma

WORKERS, SLOW = 4, 5.0
TARGET = 0.97
LOOK_S = 5.0
STEPS, UPDATES = 600, 4000
"""At most: synchronous steps, and updates by single workers or some of them."""
SYNC = "sync"
CHOICES: Sequence[tuple[str, str]] = (
    (SYNC, "torch"),
    ("sync:spares=1", "torch"),
    ("softsync:n=2", "torch"),
    ("ssp:slack=3", "torch"),
    ("ssp:slack=3", "staleness-aware"),
    *(
        ("async", rule)
        for rule in (
            "torch",
            "staleness-aware",
            "gap-aware",
            "dc-asgd",
            "nag-asgd",
            "multi-asgd",
            "lwp",
            "dana",
            "dana:kind=dc",
            "smega2",
        )
    ),
)
"""Consistency and update rule."""


def reached_s(mode: str, rule: str, seed: int) -> float:
    """Virtual seconds until the target; infinite if it isn't reached."""
    torch.set_num_threads(1)
    synchronous = mode.startswith(SYNC)
    job = digits_job(
        optimizer_args={"lr": 0.05, "momentum": 0.9},
        consistency=mode,
        rule=rule,
        replicas=WORKERS if synchronous else 1,
        steps=STEPS if synchronous else UPDATES,
        batch_size=16,
        seed=seed,
    )
    times = (Gamma(SLOW, 0.1), *[Gamma(1.0, 0.1)] * (WORKERS - 1))
    setup = Setup(job=job.spec(job.build_model()), workers=WORKERS, times=times, seed=seed)
    contents = training_contents(job, setup)
    run, found = Simulation(setup, contents), [math.inf]

    def look() -> None:
        if accuracy(parameters(contents.plan, run.servers, perceptron())) >= TARGET:
            found[0], run.clock.stopped = run.clock.now_s, True
        else:
            run.clock.after(LOOK_S, look)

    run.clock.at(LOOK_S, look)
    # The clock may stop before the last step, and a training may diverge.
    with contextlib.suppress(UsageError, NonFiniteError):
        run.run()
    return found[0]


def to_target(seeds: Sequence[int]) -> Found:
    """T1."""
    rows: list[Row] = []
    means: dict[tuple[str, str], float] = {}
    for choice in CHOICES:
        found = [reached_s(*choice, seed) for seed in seeds]
        means[choice] = mean(found)
        mode, rule = choice
        rows.append(
            {
                "consistency": f"`{mode}`",
                "rule": f"`{rule}`",
                "virtual seconds": spread(found, 0) if min(found) < math.inf else "not reached",
                "reached": f"{sum(map(math.isfinite, found))} of {len(seeds)}",
                "synchronous takes": f"{means[SYNC, 'torch'] / means[choice]:.2f}x" if means[choice] < math.inf else "",
            }
        )
    quick = [choice for choice in CHOICES if means[choice] <= means[SYNC, "torch"] / 2]
    return Found(
        rows=rows,
        verdicts={
            "with a spare the target comes in at most half the time of synchronous training": ("sync:spares=1", "torch")
            in quick,
            "so it does with an asynchronous rule made for momentum (dana)": ("async", "dana") in quick,
            "every one reaches the target with every seed": all(map(math.isfinite, means.values())),
        },
    )


ALL = (
    Reproduction(
        number="T1",
        title="Time to accuracy with a slow worker",
        source="No paper",
        claim="Modes that do not wait for the slowest reach an accuracy sooner than synchronous training, if their "
        "rule stands the staleness.",
        setting="Digits until 97 % of 360 test images are right, checked every 5 s; 4 workers, one 5 times slower than "
        "the others, whose pass takes 1 s (spread 0.1). SGD, rate 0.05, momentum 0.9, "
        "16 samples per gradient; links cost nothing.",
        run=to_target,
    ),
)

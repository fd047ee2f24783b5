"""Learning-rate schedules as plain values: lr of a group = its own lr * factor(schedule, step). Pure.

    schedule = cosine(warmup_steps=100)  # total_steps comes from the job

With w = warmup_steps, s = step - w and T = total_steps - w, all kinds warm up linearly and then start at 1:

    step < w    factor = (step + 1) / w              1/w at step 0, 1 at the last warm-up step
    constant    factor = 1
    step        factor = gamma ** (s // step_size)   torch's StepLR
    linear      factor = 1 + (final_factor - 1) * min(s / T, 1)                        torch's LinearLR from 1
    cosine      factor = final_factor + (1 - final_factor) * (1 + cos(pi * min(s / T, 1))) / 2
                                                     torch's CosineAnnealingLR, eta_min = final_factor * lr

`step` is the job's step in synchronous mode and the shard's version in asynchronous mode (PROTOCOL 1.1). The product is
computed in Python floats, as in torch's LambdaLR, so the learning rates are bit-equal.
"""

from __future__ import annotations

import dataclasses
import math
import sys

from shardline.core.spec import ScheduleSpec
from shardline.errors import JobError, nearest

KINDS = ("constant", "step", "linear", "cosine")
"""Kinds of schedule, by ScheduleSpec.kind."""


def constant(warmup_steps: int = 0) -> ScheduleSpec:
    """Factor 1 after the warm-up. Raises JobError for a negative or non-integer count."""
    return check(ScheduleSpec(kind="constant", warmup_steps=warmup_steps))


def step(step_size: int, gamma: float, warmup_steps: int = 0) -> ScheduleSpec:
    """Factor times gamma every step_size steps. Raises JobError unless step_size >= 1 and 0 < gamma <= 1."""
    return check(ScheduleSpec(kind="step", step_size=step_size, gamma=gamma, warmup_steps=warmup_steps))


def linear(total_steps: int = 0, final_factor: float = 0.0, warmup_steps: int = 0) -> ScheduleSpec:
    """A straight line from 1 to final_factor at total_steps, then final_factor.

    total_steps: warm-up included; 0 = the job's steps, filled in by complete().
    Raises JobError for values out of range.
    """
    return check(
        ScheduleSpec(kind="linear", total_steps=total_steps, final_factor=final_factor, warmup_steps=warmup_steps)
    )


def cosine(total_steps: int = 0, final_factor: float = 0.0, warmup_steps: int = 0) -> ScheduleSpec:
    """Half a cosine from 1 to final_factor at total_steps, then final_factor.

    total_steps: warm-up included; 0 = the job's steps, filled in by complete().
    Raises JobError for values out of range.
    """
    return check(
        ScheduleSpec(kind="cosine", total_steps=total_steps, final_factor=final_factor, warmup_steps=warmup_steps)
    )


def check(spec: ScheduleSpec) -> ScheduleSpec:
    """The same spec. Raises JobError if a field is out of range. total_steps may still be 0."""
    if spec.kind not in KINDS:
        raise JobError(f"schedule is {spec.kind!r}; it must be one of {', '.join(KINDS)}{nearest(spec.kind, KINDS)}")
    for name in ("warmup_steps", "total_steps", "step_size"):
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise JobError(f"{spec.kind} schedule: {name} is {value!r}; it must be a whole number >= 0")
    for name in ("gamma", "final_factor"):
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise JobError(f"{spec.kind} schedule: {name} is {value!r}; it must be a finite number")
    if spec.kind == "step":
        if spec.step_size < 1:
            raise JobError(
                "step schedule: step_size is 0; give the number of steps after which the learning rate falls, at "
                "least 1"
            )
        if not 0.0 < spec.gamma <= 1.0:
            raise JobError(f"step schedule: gamma is {spec.gamma}; it must be above 0 and at most 1")
    if spec.kind in ("linear", "cosine"):
        if spec.final_factor < 0.0:
            raise JobError(f"{spec.kind} schedule: final_factor is {spec.final_factor}; it must be >= 0")
        if 0 < spec.total_steps <= spec.warmup_steps:
            raise JobError(
                f"{spec.kind} schedule: {spec.warmup_steps} warm-up steps use up all {spec.total_steps} total_steps; "
                "total_steps includes the warm-up"
            )
    return spec


def complete(spec: ScheduleSpec, steps: int) -> ScheduleSpec:
    """The spec with total_steps filled in from the job's steps if the kind needs it and it is 0.

    Raises JobError if the length of the training is unknown, or the spec is out of range.
    """
    if spec.kind not in ("linear", "cosine") or spec.total_steps:
        return check(spec)
    if steps < 1:
        raise JobError(f"{spec.kind} schedule: its number of steps is not known; set total_steps, or steps of the job")
    return check(dataclasses.replace(spec, total_steps=steps))


def factor(spec: ScheduleSpec, step: int) -> float:
    """Factor for the learning rate at `step` (from 0); the formulas are at the top of this module.

    Raises JobError for a linear or cosine schedule without total_steps; see complete().
    """
    if step < spec.warmup_steps:
        return (step + 1) / spec.warmup_steps
    since = step - spec.warmup_steps
    if spec.kind == "constant":
        return 1.0
    if spec.kind == "step":
        return float(spec.gamma ** (since // spec.step_size))
    if spec.kind not in KINDS or spec.total_steps <= spec.warmup_steps:
        raise JobError(f"{spec.kind} schedule with {spec.total_steps} total_steps is incomplete; call complete() first")
    done = min(since / (spec.total_steps - spec.warmup_steps), 1.0)
    if spec.kind == "linear":
        return 1.0 + (spec.final_factor - 1.0) * done
    return spec.final_factor + (1.0 - spec.final_factor) * (1.0 + math.cos(math.pi * done)) / 2.0

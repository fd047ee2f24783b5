"""Which checkpoint to score next, and how to score one. Pure, apart from the model itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from shardline.core.orders import Orders, Phase
from shardline.errors import JobExitError, MismatchError, ShardlineError
from shardline.job import Job
from shardline.model import named_values


@dataclass(frozen=True, kw_only=True)
class Score:
    """Outcome of scoring one checkpoint. failure: why it could not be scored; empty on success."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""


def next_step(orders: Orders, scored: int) -> int | None:
    """The checkpoint to score now, or None if there is none beyond `scored`.

    Orders name only committed checkpoints. Those that are overtaken while an earlier one is being scored are skipped,
    the newest never is, so the last one of the job is always scored.
    """
    if orders.phase is Phase.ENDED or orders.checkpoint_step <= scored:
        return None
    return orders.checkpoint_step


@torch.no_grad()
def load(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load a checkpoint's parameters and buffers into a model of the same job, in place, including tied weights.

    Raises MismatchError, naming the tensor, if the model's differs; nothing is changed then.
    """
    own = named_values(model)
    for name, target in own.items():
        if name not in tensors:
            raise MismatchError(f"the checkpoint has no tensor {name!r}, but the model has; is it from another job?")
        value = tensors[name]
        if value.shape != target.shape or value.dtype != target.dtype:
            raise MismatchError(
                f"tensor {name!r} is {value.dtype} {tuple(value.shape)} in the checkpoint, {target.dtype} "
                f"{tuple(target.shape)} in the model; is it from another job?"
            )
    for name, target in own.items():
        target.copy_(tensors[name])


def score(job: Job, model: nn.Module, step: int, tensors: Mapping[str, torch.Tensor]) -> Score:
    """Score one checkpoint. An exception in `evaluate` becomes a message: it must not end the training.

    Raises JobExitError if `evaluate` exits the process, which ends this task only.
    """
    start_s = time.monotonic()
    try:
        load(model, tensors)
        metrics = job.score(model)
    except JobExitError:
        raise
    except ShardlineError as error:
        return Score(step=step, failure=str(error), seconds=time.monotonic() - start_s)
    except Exception as error:
        return Score(
            step=step,
            failure=f"evaluate(model) raised {type(error).__name__}: {error}",
            seconds=time.monotonic() - start_s,
        )
    return Score(step=step, metrics=metrics, seconds=time.monotonic() - start_s)

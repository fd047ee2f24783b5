"""A job's steps in plain PyTorch: torch.optim steps on the model's own parameters, and nothing else touches them.

With one replica this is the loop that anybody would write: zero_grad, backward, step. Of several replicas the gradients
are computed one after another and averaged, and buffers are those of replica 0, as in DistributedDataParallel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from shardline import codecs, schedule
from shardline.core.plan import Plan, make_plan
from shardline.core.reduce import clip_scale, global_norm, is_finite, mean_, tree_sum, whole_square_sums
from shardline.data import BatchSource, replica_gradients
from shardline.errors import JobError, NonFiniteError, telling
from shardline.host.process import torch_threads
from shardline.job import Job
from shardline.model import named_tensors, named_values, persistent_buffers

Gradients = dict[int, torch.Tensor | None]
"""By number of the parameter in the optimizer."""


class CheckedJob(NamedTuple):
    """A job with nothing in it that plain PyTorch has no equal for, and what was left out, such as "codec=bf16"."""

    job: Job
    replaced: tuple[str, ...]


def checked_job(job: Job, steps: int) -> CheckedJob:
    """The job with `steps` steps, as the comparison trains it: synchronous, every step, exact codecs, whole models."""
    chosen = codecs.of(job)
    exact = all(codec.exact for codec in (*chosen.ups, *chosen.downs))
    plain: dict[str, Any] = {
        "consistency": "sync",
        "rule": "torch",
        "cadence": "every-step",
        "pipeline": "whole-model",
        "codec": job.codec if exact else "raw",
        "codec_up": job.codec_up if exact else "",
        "codec_down": job.codec_down if exact else "",
        "codec_tensors": job.codec_tensors if exact else {},
        "codec_parcels": "",
        "tensor_parallel": {},
    }
    replaced = tuple(
        f"{name}={getattr(job, name)}" for name, value in plain.items() if getattr(job, name) not in (value, "", {})
    )
    return CheckedJob(
        dataclasses.replace(
            job,
            **plain,
            tensor_ranks=1,
            steps=steps,
            # The curve of the whole job.
            schedule=schedule.complete(job.schedule, job.steps),
            checkpoint_every=0,
        ),
        replaced,
    )


class PlainTraining:
    """One training in this process, alone."""

    def __init__(self, job: Job, device: torch.device) -> None:
        """Raises JobError for a job that can't be trained."""
        self._job = job
        self._model = job.build_model().to(device)
        self._optimizer = job.build_optimizer(self._model)
        factors = schedule.complete(job.schedule, job.steps)
        make = job.scheduler or functools.partial(
            torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: schedule.factor(factors, step)
        )
        self._scheduler = make(self._optimizer)
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise JobError("the job's scheduler follows the scores of an evaluator, and a comparison has none")
        self._source = BatchSource(job)
        spec = job.spec(self._model)
        if spec.has_tables:
            raise JobError(
                "the model has embedding tables, whose rows plain PyTorch can't train; compare with "
                "shardline.testing.reference(job)"
            )
        self._plan: Plan | None = make_plan(spec.tensors, 1) if job.clip_norm > 0.0 else None

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters and persistent buffers by name, on the CPU."""
        return {name: value.detach().to("cpu", copy=True) for name, value in named_tensors(self._model)}

    def run(self, steps: int) -> dict[int, dict[str, torch.Tensor]]:
        """Train; returns the values after 0, 1, 2 ... steps. Raises JobError, NonFiniteError as the job would."""
        with torch_threads(self._job.threads), telling(lambda error: None):
            found = {0: self.values()}
            for step in range(steps):
                self._step(step)
                found[step + 1] = self.values()
        return found

    def _step(self, step: int) -> None:
        kept, after = _buffers(self._model), None
        contributions: list[Gradients] = []
        finite = True
        for replica in range(self._job.replicas):
            if replica:
                _restore(kept)
            self._optimizer.zero_grad(set_to_none=True)
            loss, _ = replica_gradients(self._model, self._job, self._source, step, replica)
            contributions.append({number: value.grad for number, value in enumerate(self._parameters())})
            finite = self._check_finite(step, replica, loss) and finite
            if self._job.replicas > 1:
                after = after or _buffers(self._model)
        if after is not None:
            _restore(after)
            for number, value in enumerate(self._parameters()):
                total = tree_sum([one[number] for one in contributions])
                value.grad = None if total is None else mean_(total, len(contributions))
        if finite:
            # Scale the gradients down as the servers do: clip_grad_norm_ with the norm in float64, whatever the plan.
            if self._plan is not None:
                gradients = {name: value.grad for name, value in named_values(self._model).items()}
                scale = clip_scale(global_norm(whole_square_sums(self._plan, gradients)), self._job.clip_norm)
                if scale < 1.0:
                    for value in self._parameters():
                        if value.grad is not None:
                            value.grad.mul_(scale)
            # The ends of threads' parts may be rounded otherwise; see docs/decisions/0039.
            with torch_threads(1):
                self._optimizer.step()
        else:
            _restore(kept)
        self._scheduler.step()

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _check_finite(self, step: int, replica: int, loss: float) -> bool:
        bad = [] if is_finite(torch.tensor(loss)) else ["the loss"]
        bad += [
            f"the gradient of {name!r}"
            for name, value in named_values(self._model).items()
            # Sparse ones are refused where they would be sent.
            if value.grad is not None and value.grad.layout is torch.strided and not is_finite(value.grad)
        ]
        if bad and self._job.nan_policy == "stop":
            raise NonFiniteError(f"in step {step}, replica {replica}, {', '.join(bad[:3])} has NaN or infinity")
        return not bad


_Kept = list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, torch.Tensor]]


def _buffers(model: nn.Module) -> _Kept:
    """The persistent buffers, each as (table of its module, key in it, the tensor, a copy)."""
    return [(table, key, buffer, buffer.detach().clone()) for _, table, key, buffer in persistent_buffers(model)]


@torch.no_grad()
def _restore(kept: _Kept) -> None:
    for table, key, buffer, copy in kept:
        buffer.copy_(copy)
        table[key] = buffer

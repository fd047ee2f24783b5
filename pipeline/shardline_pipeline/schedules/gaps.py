"""Gap-aware training of a pipeline without a flush: what is computed with old parameters counts less (FTPipe, 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardline import schedule as schedules
from shardline.core.spec import DTYPES, JobSpec, TensorKind
from shardline.errors import JobError
from shardline.update.gap_aware import average_step, divided, is_decoupled

DECAY = 0.999
"""Of the running mean of squared steps, as in the update rule gap-aware."""

Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class GradientRun:
    """Gradients of some microbatches of a step, all computed with the same parameters."""

    gradients: Values
    """By name, each microbatch's divided by the number of them in a step."""
    used: Values | None
    """The parameters; None: the newest."""
    share: float
    """Of the step's microbatches."""


class Gaps:
    """How far the parameters of a job move in an average step, counted since the pipeline was empty last.

    So it is no state of the optimizer, and a worker needs nothing but the versions of its stages, which it has. Used by
    one thread.
    """

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._groups = {one.name: job.rule.groups[one.group] for one in job.tensors if one.kind is TensorKind.PARAM}
        self._means: dict[str, torch.Tensor] = {}
        self._steps: dict[str, int] = {}
        self._largest: dict[str, float] = {}
        """The largest rate so far."""

    def _rate(self, name: str, step: int) -> float:
        rate = self._groups[name]["lr"]
        assert isinstance(rate, float)
        return rate * schedules.factor(self._job.schedule, step)

    @torch.no_grad()
    def moved(self, step: int, before: Values, after: Values) -> None:
        """Take a step into the mean, from the parameters before it and after it."""
        for name in after.keys() & self._groups.keys():
            rate = self._rate(name, step)
            if not rate:
                continue  # nothing has moved, and the step by rate is unknown
            dtype = torch.promote_types(after[name].dtype, torch.float32)
            moved = (before[name] - after[name]).to(dtype).div_(rate)
            mean = self._means.setdefault(name, torch.zeros_like(moved))
            mean.mul_(DECAY).addcmul_(moved, moved, value=1 - DECAY)
            self._steps[name] = self._steps.get(name, 0) + 1
            self._largest[name] = max(self._largest.get(name, 0.0), rate)

    @torch.no_grad()
    def mitigated(self, step: int, parts: Sequence[GradientRun], newest: Values) -> dict[str, torch.Tensor]:
        """The gradients of a step: the sum of its parts, each by its gap. newest: the parameters that they change."""
        found: dict[str, torch.Tensor] = {}
        for part in parts:
            for name, gradient in part.gradients.items():
                own = gradient if part.used is None else self._divided(step, name, gradient, part, newest)
                found[name] = found[name].add_(own) if name in found else own.clone()
        return found

    def _divided(self, step: int, name: str, gradient: torch.Tensor, part: GradientRun, newest: Values) -> torch.Tensor:
        if name not in self._means:
            return gradient
        assert part.used is not None
        rate = max(self._largest[name], self._rate(name, step))
        average = average_step(self._means[name], self._steps[name], DECAY, rate)
        group, decay = self._groups[name], 0.0
        if not is_decoupled(self._job.rule.name, group):
            # The gradients are added up, and so are their shares of what the optimizer will add.
            decay = part.share * float(group.get("weight_decay", 0.0))  # type: ignore[arg-type]
        decay = -decay if group.get("maximize") else decay
        return divided(gradient, newest[name], newest[name] - part.used[name], average, weight_decay=decay)


def check_gaps(job: JobSpec) -> None:
    """Raise JobError for what no gap can be used with."""
    if job.rule.name == "Rprop":
        raise JobError(
            f"pipeline {job.pipeline} divides gradients, but Rprop takes only their signs; use another optimizer, or "
            "leave gap_aware out"
        )
    for tensor in job.tensors:
        if tensor.kind is TensorKind.PARAM and DTYPES[tensor.dtype].is_complex:
            raise JobError(
                f"{tensor.name!r} has dtype {tensor.dtype}, but pipeline {job.pipeline} divides gradients of real "
                "tensors only; leave gap_aware out"
            )

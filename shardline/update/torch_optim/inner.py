"""The job's optimizer on a worker, for cadences that train locally: torch's own class, with a state per replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardline import schedule as schedules
from shardline.core.spec import InnerSpec, TensorKind, TensorSpec
from shardline.update.arguments import torch_arguments, with_hyper
from shardline.update.own import optimizer_of

State = dict[Tensor, dict[str, Any]]
"""Of one torch optimizer, by parameter."""


class InnerOptimizers:
    """The job's optimizer on a worker: one per replica, all over the model's own tensors. Used by one thread.

    A state belongs to a step of the job: the one at whose beginning it holds. A replica without a state for the step
    that begins starts with a new optimizer: it has just come from another process, or the job has rolled back.
    """

    def __init__(self, spec: InnerSpec, tensors: Sequence[TensorSpec], model: Mapping[str, Tensor]) -> None:
        """model: tensors by name, updated in place. Raises JobError for a schedule out of range."""
        schedules.check(spec.schedule)
        self._spec = spec
        held = [tensor for tensor in tensors if tensor.kind is TensorKind.PARAM and tensor.name in model]
        self._params = {tensor.name: model[tensor.name] for tensor in held}
        self._grouped: list[list[Tensor]] = [[] for _ in spec.rule.groups]
        for tensor in held:
            self._grouped[tensor.group].append(model[tensor.name])
        self.rates: dict[int, float] = {}
        """The learning rates of the last update, by parameter group."""
        self._step: int | None = None
        self._running: dict[int, torch.optim.Optimizer] = {}
        self._states: dict[int, dict[int, State]] = {}
        """States at the beginning of a step, by step, then by replica: of the open step, of the next, and of the one
        before while its exchange runs. Not changed, since steps may start over."""

    def began(self, step: int) -> None:
        """Start a step, maybe again: every replica has the state that it had at this step's beginning."""
        self._states = {at: kept for at, kept in self._states.items() if step in self._states and at <= step + 1}
        self._states.setdefault(step, {})
        self._running.clear()
        self._step = step

    def arrived(self, step: int) -> None:
        """The exchange that ended the step before is complete: that step will not start over."""
        self._states = {at: kept for at, kept in self._states.items() if at >= step}

    def update(
        self, replica: int, gradients: Mapping[str, Tensor], hyper: Mapping[int, Mapping[str, float]], *, last: bool
    ) -> None:
        """Take one optimizer step on the model's parameters, for a replica. last: it is the replica's last of the step.

        gradients: by name; a missing one leaves its parameter and state as they are. They are not changed. Raises
        ProtocolError for a number that the optimizer doesn't have.
        """
        assert self._step is not None
        optimizer = self._running.get(replica)
        if optimizer is None:
            optimizer = self._running[replica] = self._make(self._states[self._step].get(replica))
        for number, group in enumerate(optimizer.param_groups):
            group.update(self._arguments(number, hyper.get(number, {})))
            self.rates[number] = float(group["lr"])
        lent = {name: value.grad for name, value in self._params.items()}
        try:
            for name, value in self._params.items():
                value.grad = gradients.get(name)
            if self._spec.clip_norm > 0.0:
                for name in gradients:
                    self._params[name].grad = gradients[name].clone()
                torch.nn.utils.clip_grad_norm_([self._params[name] for name in gradients], self._spec.clip_norm)
            optimizer.step()
        finally:
            for name, value in self._params.items():
                value.grad = lent[name]
        if last:
            # Not a copy: the next step makes another optimizer, from a copy of it.
            self._states.setdefault(self._step + 1, {})[replica] = dict(optimizer.state)

    def _make(self, state: State | None) -> torch.optim.Optimizer:
        optimizer = optimizer_of(self._spec.rule, self._grouped)
        if state is not None:
            optimizer.state.clear()
            optimizer.state.update(
                {
                    parameter: {key: item.clone() if isinstance(item, Tensor) else item for key, item in items.items()}
                    for parameter, items in state.items()
                }
            )
        return optimizer

    def _arguments(self, number: int, hyper: Mapping[str, float]) -> dict[str, Any]:
        """A group's arguments; a learning rate that the script has set replaces the schedule's, as on the servers."""
        assert self._step is not None
        rule = self._spec.rule
        group = rule.groups[number]
        found = with_hyper(rule.name, group, hyper) if hyper else dict(group)
        if "lr" not in hyper:
            found["lr"] = group["lr"] * schedules.factor(self._spec.schedule, self._step)  # type: ignore[operator]
        return torch_arguments(rule.name, found)

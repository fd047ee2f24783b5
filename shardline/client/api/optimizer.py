"""A torch.optim.Optimizer whose step happens on the parameter servers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from shardline.client.api.optimizer_state import KEY, TrainingPosition, check_loadable
from shardline.update import hyper_numbers

log = logging.getLogger("shardline.client")


class Steps(Protocol):
    """What an optimizer asks of its session; see Session."""

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing."""

    @property
    def standing(self) -> TrainingPosition:
        """Where the job is."""

    def finish_step(self, loss: float | None = None, hyper: Mapping[int, Mapping[str, float]] | None = None) -> bool:
        """Send the open step and hold the next parameters."""

    def check_scaler(self) -> None:
        """A gradient scaler is about to step."""

    def share_gradients(self, *, set_to_none: bool = True) -> bool:
        """zero_grad() where gradients lie in shared memory."""

    def gradients_cleared(self) -> None:
        """zero_grad() was called."""

    def resumed(self) -> None:
        """A state that was saved at this step has been loaded."""


class ShardlineOptimizer(torch.optim.Optimizer):
    """What Session.attach returns: pushes .grad, waits for the update, leaves the new parameters in the model.

    LR schedulers, param_groups, zero_grad, closures and step hooks work as in torch. The optimizer's state (momentum
    and so on) lives on the servers and in the job's checkpoints.
    """

    _step_supports_amp_scaling = True
    """Read by torch.amp.GradScaler, which then calls step() even where it found infinities: every replica makes every
    step, and the servers skip those in which one of them overflowed. For the time of the call it sets `found_inf`, and
    `grad_scale` to what .grad is to be divided by (None where unscale_() has done that)."""

    def __init__(self, session: Steps, inner: torch.optim.Optimizer, rule: str) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._session = session
        self._rule = rule
        self._told_state = False
        self._initial = [hyper_numbers(rule, group) for group in self.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push this replica's gradients as one step and pull the updated parameters; returns closure's loss.

        Raises RolledBackError where the job went back because a server without a standby was lost, unless the loop is
        `for step in session.steps(...)`. Where a standby takes over, this returns when the step is done, as ever.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if hasattr(self, "found_inf"):
            self._session.check_scaler()
            self._unscale(getattr(self, "grad_scale", None))
        self._session.finish_step(None if loss is None else float(loss), self.hyper())
        return loss

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing; see Session.skipped."""
        return self._session.skipped

    def _unscale(self, scale: torch.Tensor | None) -> None:
        """What torch.amp.GradScaler.unscale_ does, but for its look for infinities: the push has its own."""
        if scale is None:
            return
        inverse = scale.double().reciprocal().float()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With zero_copy every .grad is zeros in shared memory, which count as none until they are used.

        With overlap, outside of a loop over session.steps(), gradients of the backward pass after this one leave early.
        Raises JobError where a backward pass has sent some that no step() followed.
        """
        if not self._session.share_gradients(set_to_none=set_to_none):
            super().zero_grad(set_to_none)
        self._session.gradients_cleared()

    def hyper(self) -> dict[int, Mapping[str, float]]:
        """Numbers of the groups that differ from what the job was configured with (an LR scheduler's doing)."""
        changed: dict[int, Mapping[str, float]] = {}
        for number, (group, initial) in enumerate(zip(self.param_groups, self._initial, strict=True)):
            now = hyper_numbers(self._rule, group)
            if now != initial:
                changed[number] = now
        return changed

    def state_dict(self) -> dict[str, Any]:
        """The param groups, and under "shardline" the step of which the servers hold the rest."""
        found = super().state_dict()
        if not hasattr(self, "_session"):
            return found  # a copy, see __getstate__
        standing = self._session.standing
        found[KEY] = standing.stamp()
        if standing.step and not self._told_state:
            self._told_state = True
            log.warning(
                "state_dict() has the parameter groups of step %d only: momentum and the like are on the servers, and "
                "in the job's checkpoints",
                standing.step,
            )
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the param groups. Raises JobError where the rest is not what the servers hold.

        That is a dict with state in it, as of a plain torch optimizer, or one that was saved at another step than the
        job is at.
        """
        if hasattr(self, "_session") and check_loadable(state_dict, self._session.standing):
            self._session.resumed()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after attach: the plan is made from the groups there were."""
        if hasattr(self, "_session"):
            raise RuntimeError("parameter groups can't be added after attach(); give them to the optimizer before it")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        # The base class's, without the session: an optimizer that is copied or pickled is a plain description.
        return {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}

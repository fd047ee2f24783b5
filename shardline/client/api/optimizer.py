"""A torch.optim.Optimizer whose step happens on the parameter servers."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from shardline.client.api.step_loop import StepLoop
from shardline.client.api.stepper import TrainingPosition
from shardline.errors import JobError
from shardline.model import BEFORE
from shardline.update import fixed_settings, hyper_numbers

log = logging.getLogger("shardline.client")


KEY = "shardline"
"""Key in a state dict for the step and incarnation at which the servers hold the rest."""


def check_loadable(state_dict: Mapping[str, Any], here: TrainingPosition) -> bool:
    """Refuse a state dict that does not match the servers' state. Returns whether an earlier process saved it."""
    names = state_made(state_dict.get("state", {}).values())
    if names:
        raise JobError(
            f"this state_dict contains {names}, but the state of this optimizer is on the servers, where a script "
            "can't "
            'load it: resume from the checkpoint of the job with --resume, or load the dict without its "state"'
        )
    stamp = state_dict.get(KEY)
    if stamp is None:
        return False
    step = int(stamp["step"])
    # Asynchronous workers save at any number of updates, so only a job that starts from scratch is certain not to
    # match.
    if step != here.step if here.one_step else (step > 0 and here.step == 0):
        raise JobError(
            f"this optimizer state was saved at step {step}, but the job and the optimizer state on its servers are "
            f"at step {here.step}: resume both from the same step. --resume uses the job's newest checkpoint "
            "(checkpoint_every=N writes one every N steps), resume_from_checkpoint= or ckpt_path= that of a Trainer"
        )
    if int(stamp["incarnation"]) == here.incarnation:
        return False
    if ahead := int(stamp.get("ahead", 0)):
        raise JobError(
            f"this optimizer state is ahead of the job: its loop had called optimizer.step() {ahead} times since step "
            f"{step}, after the end of the job or within a round of its cadence, and the servers have nothing of that. "
            "Resume from a state that was saved when a step of the job was done"
        )
    return True


def check_unused(states: Iterable[Mapping[str, Any]], here: TrainingPosition) -> None:
    """Refuse an optimizer that has already stepped if the job starts at step 0. Raises JobError."""
    names = state_made(states)
    if names and here.step == 0:
        raise JobError(
            f"the optimizer passed to attach() has already made steps ({names}), but the servers start without that "
            "state: pass a new optimizer. --resume restores the state of the job"
        )


def state_made(states: Iterable[Mapping[str, Any]]) -> str:
    """Describe the state in a torch optimizer, such as "momentum_buffer of 4 parameters"; "" if there is none."""
    found = [
        {key for key, value in state.items() if value is not None}
        for state in states
        # Adagrad creates its accumulators before the first step.
        if float(state.get("step", 1.0)) > 0.0
    ]
    found = [keys for keys in found if keys]
    return f"{', '.join(sorted(set().union(*found)))} of {len(found)} parameters" if found else ""


class ShardlineOptimizer(torch.optim.Optimizer):
    """Returned by Session.attach: pushes .grad, waits for the update, leaves the new parameters in the model.

    LR schedulers, param_groups, zero_grad, closures and step hooks work as in torch. The optimizer's state (momentum
    and so on) is on the servers and in the job's checkpoints.
    """

    _step_supports_amp_scaling = True
    """Read by torch.amp.GradScaler, which then calls step() even if it found infinities: every replica makes every
    step, and the servers skip those in which any replica overflowed. During the call it sets `found_inf`, and
    `grad_scale` to the divisor for .grad (None if unscale_() has already divided)."""

    def __init__(self, loop: StepLoop, inner: torch.optim.Optimizer, rule: str) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._loop = loop
        self._rule = rule
        self._told_state = False
        self.state = defaultdict(_OnServers)
        self._initial = [hyper_numbers(rule, group) for group in self.param_groups]
        self._fixed = [fixed_settings(rule, group) for group in self.param_groups]
        self._members = self._member_ids()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push this replica's gradients as one step and pull the updated parameters; returns closure's loss.

        Raises RolledBackError if the job rolled back after losing a server without a standby, unless the loop is `for
        step in session.steps(...)`. If a standby takes over, this returns normally once the step is done. Raises
        JobStopped if the job has ended.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_groups()
        if hasattr(self, "found_inf"):
            self._loop.check_scaler()
            # Like torch.amp.GradScaler.unscale_, but without its check for infinities: the push checks.
            scale = getattr(self, "grad_scale", None)
            if scale is not None:
                inverse = scale.double().reciprocal().float()
                with torch.no_grad():
                    for group in self.param_groups:
                        for parameter in group["params"]:
                            if parameter.grad is not None:
                                parameter.grad.mul_(inverse.to(parameter.grad.device))
        self._loop.finish(None if loss is None else float(loss))
        return loss

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped; see Session.skipped."""
        return self._loop.skipped

    def _member_ids(self) -> list[list[int]]:
        """id() of each parameter, by group. A reference would count as a reader of its values, see Reach."""
        return [[*map(id, group["params"])] for group in self.param_groups]

    def _check_groups(self) -> None:
        """Raise JobError for a change of the groups that the servers can't follow."""
        when = f"step {self._loop.standing.step}"
        if self._member_ids() != self._members:
            raise JobError(
                f"{when}: the parameters in the optimizer's groups are not those that the servers train any more; "
                f"choose the groups {BEFORE}, and freeze with requires_grad_(False) what is not to train"
            )
        for number, (group, before) in enumerate(zip(self.param_groups, self._fixed, strict=True)):
            now = fixed_settings(self._rule, group)
            for key in (key for key, value in now.items() if value != before[key]):
                raise JobError(
                    f"{when}: {key} of parameter group {number} is {now[key]!r} and was {before[key]!r} when training "
                    f"began, but only numbers such as lr can change from step to step; set it {BEFORE}"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With zero_copy every .grad becomes zeros in shared memory and counts as None until it is used.

        With overlap, outside a loop over session.steps(), gradients of the next backward pass leave early. Raises
        JobError if an earlier backward pass sent gradients and no step() followed.
        """
        if not self._loop.share_gradients(set_to_none=set_to_none):
            super().zero_grad(set_to_none)
        self._loop.gradients_cleared()

    def hyper(self) -> dict[int, Mapping[str, float]]:
        """Hyper-parameters of the groups that differ from the job's configuration (an LR scheduler), by group
        number.
        """
        changed: dict[int, Mapping[str, float]] = {}
        for number, (group, initial) in enumerate(zip(self.param_groups, self._initial, strict=True)):
            now = hyper_numbers(self._rule, group)
            if now != initial:
                changed[number] = now
        return changed

    def state_dict(self) -> dict[str, Any]:
        """The param groups, and under "shardline" the step at which the servers hold the rest."""
        found = super().state_dict()
        if not hasattr(self, "_loop"):
            return found  # a copy, see __getstate__
        standing = self._loop.standing
        found[KEY] = standing.stamp()
        # A plain dict can be loaded without this class.
        found["state"] = {key: dict(value) for key, value in found["state"].items()}
        if standing.step and not self._told_state:
            self._told_state = True
            log.warning(
                "state_dict() has only the parameter groups of step %d: optimizer state such as momentum is on the "
                "servers and in the checkpoints of the job",
                standing.step,
            )
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the param groups. Raises JobError if the servers do not hold the matching state.

        This is the case for a dict that contains state, such as a plain torch optimizer's, and for one saved at another
        step than the job's current one.
        """
        if hasattr(self, "_loop") and check_loadable(state_dict, self._loop.standing):
            self._loop.resumed()
        super().load_state_dict(state_dict)
        self.state = defaultdict(_OnServers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused with JobError after attach(): the plan is made from the groups at that time."""
        if hasattr(self, "_loop"):
            raise JobError(
                f"step {self._loop.standing.step}: parameter groups can't be added after attach(); add them before "
                "it, and freeze with requires_grad_(False) what is not to train yet"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        # As in the base class, without the loop: a copied or pickled optimizer is a plain description.
        return {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}


class _OnServers(dict[str, Any]):
    """State of a parameter, as in `optimizer.state[parameter]`: here only what a script has put there itself."""

    def __missing__(self, key: str) -> Any:
        raise JobError(
            f"optimizer.state has no {key!r} in this process: the optimizer's state is on the servers and in the "
            "checkpoints of the job"
        )


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler with the same arguments, for the optimizer that Session.attach returned.

    If one replica's gradients overflow, the servers skip the step for all replicas. torch's own scaler would then lower
    the scale of that replica alone; this one lowers it in all. For any other optimizer both behave the same.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As in torch; call update() afterwards."""
        found = super().step(optimizer, *args, **kwargs)
        if self.is_enabled() and isinstance(optimizer, ShardlineOptimizer) and optimizer.skipped:
            for device_found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                device_found.fill_(1.0)
        return found

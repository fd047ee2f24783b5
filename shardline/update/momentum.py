"""Base of rules that replace SGD's momentum: one for all workers or one per worker, and pulls that look ahead along it.

Momentum has torch's form, v = momentum * v + g and theta = theta - rate * v, and weight decay is part of g, at the
parameters that the servers hold. A rule in its own file declares its states and implements update(); one that looks
ahead implements ahead() too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardline.core.spec import RuleSpec
from shardline.errors import JobError, ProtocolError
from shardline.update.base import StateSpec, UpdateRule
from shardline.update.elementwise import ElementwiseBucketRule, ElementwiseRule, Run
from shardline.update.torch_optim import sgd


def require_sgd(rule: UpdateRule, spec: RuleSpec, *, off: Sequence[str], momentum: bool = False) -> None:
    """Raise JobError unless the job's optimizer is SGD without the arguments in `off`, and with momentum if asked."""
    if spec.name != "SGD":
        raise JobError(
            f"update rule {rule} runs with SGD only, and the job's optimizer is {spec.name}; use SGD or another rule"
        )
    for number, group in enumerate(spec.groups):
        if momentum and not group["momentum"]:
            raise JobError(
                f"update rule {rule} needs momentum, and SGD's is 0 in parameter group {number}; set it, for example "
                "to 0.9, or choose another rule"
            )
        for name in off:
            if group.get(name):
                raise JobError(
                    f"update rule {rule} can't run with {name}={group[name]}, which SGD has in parameter group "
                    f"{number}; leave it out, or choose another rule"
                )


@dataclass(frozen=True)
class MomentumRule(ElementwiseRule):
    """Base of residents with a MomentumBucketRule."""

    def check(self, spec: RuleSpec) -> None:
        """See UpdateRule. The rule takes the learning rate, the momentum and the weight decay of SGD."""
        require_sgd(self, spec, off=("dampening", "nesterov", "maximize", "foreach", "fused"), momentum=True)


class MomentumBucketRule(ElementwiseBucketRule):
    """Base of bucket rules with a momentum of their own."""

    def check_hyper(self, hyper: Mapping[str, float]) -> None:
        """See BucketRule. Momentum may change, but neither to 0 nor to one with dampening."""
        super().check_hyper(hyper)
        if hyper.get("momentum", 1.0) <= 0 or hyper.get("dampening", 0.0) != 0:
            raise ProtocolError(
                f"{self.label} got momentum={hyper.get('momentum')} and dampening={hyper.get('dampening')}; keep the "
                "momentum above 0 and the dampening at 0"
            )

    def arguments(self, clock: int, hyper: Mapping[str, float] | None = None) -> dict[str, Any]:
        if hyper:
            self.check_hyper(hyper)
        return super().arguments(clock, hyper)

    def step(self, run: Run, gradient: Tensor, arguments: Mapping[str, Any], *, nesterov: bool = False) -> None:
        """SGD's step with the state "momentum_buffer"; nesterov: by g + momentum * v instead of v."""
        buffer = run.state("momentum_buffer")
        sgd.step(run.values, gradient, run.values, buffer, {**arguments, "nesterov": nesterov})


RATES = ("rate", "momentum")


def rate_states(device: torch.device) -> dict[str, StateSpec]:
    """The states in which a LookAheadBucketRule keeps the rate and the momentum of each slice's last push."""
    return {name: StateSpec(dtype=torch.float64, device=device, scalar=True) for name in RATES}


class LookAheadBucketRule(MomentumBucketRule):
    """Base of bucket rules whose pulls get the point that the momentum leads to, at the rate of the last push."""

    @abstractmethod
    def ahead(self, run: Run, rate: float, momentum: float) -> tuple[float, Tensor]:
        """(factor, direction): a pull gets the parameters minus factor * direction. run: of no push."""

    def step(self, run: Run, gradient: Tensor, arguments: Mapping[str, Any], *, nesterov: bool = False) -> None:
        """See MomentumBucketRule. Also notes the rate for later pulls."""
        super().step(run, gradient, arguments, nesterov=nesterov)
        self.note_rate(run, arguments)

    def note_rate(self, run: Run, arguments: Mapping[str, Any]) -> None:
        run.set_number("rate", arguments["lr"])
        run.set_number("momentum", arguments["momentum"])

    def answer(self, values: Tensor, worker: str) -> Tensor:
        if not self.begun:
            return values
        found = torch.empty_like(values)
        with torch.no_grad():
            for run in self.kept.runs(values):
                factor, direction = self.ahead(run, run.number("rate"), run.number("momentum"))
                torch.sub(run.values, direction, alpha=factor, out=found[run.span])
        self.clear_padding(found)
        return found

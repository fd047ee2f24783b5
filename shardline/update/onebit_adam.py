"""Adam in two phases, for the codec onebit-adam: the second moments freeze, and workers send their momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardline.core.push_context import PushContext
from shardline.core.spec import Argument, RuleSpec, TensorKind, TensorSpec
from shardline.errors import JobError
from shardline.update.arguments import momentum
from shardline.update.base import Need, Site, StateSpec
from shardline.update.elementwise import ElementwiseBucketRule, ElementwiseRule, Run

_FROZEN = "frozen"


@dataclass(frozen=True)
class OneBitAdamRule(ElementwiseRule):
    """Adam for `warmup` steps; then its second moments stay, and pushes are workers' momentum (codec onebit-adam).

    Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021,
    algorithm 1. The first phase is torch.optim.Adam or AdamW to the bit. In the second, theta moves by -lr * m /
    (sqrt(v) + eps), where m is the mean of the momenta that were pushed, with the bias corrections of Adam: that of v
    stays that of the last step of the first phase. Two things are not in the paper: an element moves by at most lr,
    about what Adam's elements do, and one whose gradients were all zero until then has no v, and stays where it is.
    """

    name: ClassVar[str] = "onebit-adam"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MOMENTUM})
    warmup: int = 100
    momentum: float = 0.9

    def check(self, spec: RuleSpec) -> None:
        """See UpdateRule. Adam or AdamW with this momentum, and weight decay as in AdamW if any."""
        if spec.name not in ("Adam", "AdamW"):
            raise JobError(f"update rule {self} runs with Adam and AdamW only, and the job's optimizer is {spec.name}")
        for number, group in enumerate(spec.groups):
            where = f"which {spec.name} has in parameter group {number}"
            if momentum(group) != self.momentum:
                raise JobError(
                    f"{self.name} has momentum={self.momentum:g}, but the first of the betas of {spec.name} is "
                    f"{momentum(group):g} in parameter group {number}; give both the same number"
                )
            for name in ("amsgrad", "maximize", "foreach", "fused"):
                if group.get(name):
                    raise JobError(f"update rule {self} can't run with {name}={group[name]}, {where}; leave it out")
            if group["weight_decay"] and not (spec.name == "AdamW" or bool(group.get("decoupled_weight_decay"))):
                raise JobError(
                    f"update rule {self} can't run with weight_decay={group['weight_decay']}, {where}: it would be "
                    "part of the gradient, of which workers keep the momentum; use AdamW"
                )

    def check_tensors(self, spec: RuleSpec, tensors: Sequence[TensorSpec]) -> None:
        """See UpdateRule. Of others the codec would send gradients where the rule takes momentum."""
        super().check_tensors(spec, tensors)
        for tensor in tensors:
            if tensor.kind is TensorKind.PARAM and tensor.dtype not in ("float32", "float64"):
                raise JobError(f"{tensor.name!r} has dtype {tensor.dtype}; {self.name} trains float32 and float64 only")

    def states(
        self, spec: RuleSpec, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
    ) -> Mapping[str, StateSpec]:
        """See UpdateRule: Adam's, and how many steps the second moments have seen."""
        tensor, number = StateSpec(dtype=dtype, device=device), StateSpec(dtype=dtype, device=device, scalar=True)
        return {"exp_avg": tensor, "exp_avg_sq": tensor, "step": number, "seen": number}

    def make(self, site: Site) -> OneBitAdamBucket:
        return OneBitAdamBucket(self, site)


class OneBitAdamBucket(ElementwiseBucketRule):
    """The two phases in one bucket."""

    def __init__(self, rule: OneBitAdamRule, site: Site) -> None:
        super().__init__(rule, site)
        self._warmup = rule.warmup

    def arguments(self, clock: int, hyper: Mapping[str, float] | None = None) -> dict[str, Any]:
        """See BucketRule; with the phase, which the step decides, as for the codec."""
        return {**super().arguments(clock, hyper), _FROZEN: clock >= self._warmup}

    def update(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> None:
        """See ElementwiseBucketRule. In the order of torch.optim's operations."""
        rate, (first, second) = arguments["lr"], arguments["betas"]
        mean, square = run.state("exp_avg"), run.state("exp_avg_sq")
        step, seen = run.number("step") + 1, run.number("seen")
        if arguments["weight_decay"]:
            run.values.mul_(1 - rate * arguments["weight_decay"])
        if arguments[_FROZEN]:
            mean.copy_(run.gradient)
        else:
            seen += 1
            mean.lerp_(run.gradient, 1 - first)
            square.mul_(second).addcmul_(run.gradient, run.gradient, value=1 - second)
        run.set_number("step", step)
        run.set_number("seen", seen)
        divisor = (square.sqrt() / math.sqrt(1 - second**seen)).add_(arguments["eps"])
        if not arguments[_FROZEN]:
            run.values.addcdiv_(mean, divisor, value=-rate / (1 - first**step))
            return
        # A bit's magnitude is that of its neighbours: without bounds, elements with small second moments would leap.
        moved = (mean / divisor).div_(1 - first**step).clamp_(-1.0, 1.0)
        run.values.sub_(moved.masked_fill_(square == 0.0, 0.0), alpha=rate)

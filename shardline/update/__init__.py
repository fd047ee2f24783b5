"""Update rules: how an admitted push changes the parameters. RULES lists them; base.py is their interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardline.core.plan import BucketSpec
from shardline.core.spec import RuleSpec, ScheduleSpec, TensorSpec
from shardline.seams import Table
from shardline.update import arguments
from shardline.update.arguments import (
    ALLOWED as ALLOWED,
    REFUSED as REFUSED,
    fixed_settings as fixed_settings,
    hyper_numbers as hyper_numbers,
    is_own as is_own,
    rule as rule,
)
from shardline.update.base import (
    BucketRule as BucketRule,
    Need as Need,
    Site as Site,
    UpdateRule as UpdateRule,
    Weighing,
    parse_state_key as parse_state_key,
    state_key as state_key,
)
from shardline.update.dana import DANA
from shardline.update.dc_asgd import DCASGD
from shardline.update.gap_aware import GapAware
from shardline.update.lwp import LWP
from shardline.update.multi_asgd import MultiASGD
from shardline.update.nag_asgd import NAGASGD
from shardline.update.onebit_adam import OneBitAdamRule
from shardline.update.own import Own, own_rule
from shardline.update.smega2 import SMEGA2
from shardline.update.staleness_aware import StalenessAware
from shardline.update.torch_optim.rule import Torch as Torch

RULES: Table[UpdateRule] = Table("rule", Torch, StalenessAware, GapAware, DCASGD, NAGASGD, MultiASGD, LWP, DANA, SMEGA2)
"""The choices for a job's `rule` and --rule."""

BROUGHT: Table[UpdateRule] = Table("rule", OneBitAdamRule, Own)
"""Rules that nobody chooses by themselves: a codec brings them along (Codec.server_rule), or the job's optimizer."""


def chosen(spec: RuleSpec) -> UpdateRule:
    """The rule that a job has chosen, or its codec. Raises JobError for an unknown one."""
    table = BROUGHT if spec.method.partition(":")[0] in BROUGHT else RULES
    return table.parse(spec.method)


def runs_on_workers(spec: RuleSpec) -> bool:
    """Whether an update is just the job's optimizer, which workers can run as well."""
    return isinstance(chosen(spec), Torch)


def weights(spec: RuleSpec) -> Callable[[int], float] | None:
    """Factor by staleness for a push in a sum of several; None if the rule weighs no pushes."""
    rule = chosen(spec)
    if not isinstance(rule, Weighing) or rule.share(spec, 0) is None:
        return None
    return lambda staleness: rule.share(spec, staleness) or 1.0


def rule_from_optimizer(optimizer: torch.optim.Optimizer, *, method: str = "torch") -> RuleSpec:
    """The rule of an optimizer with its current param_groups. Raises JobError for one that can't be kept or run."""
    if is_own(type(optimizer)):
        return own_rule(optimizer, method)
    return arguments.rule_from_optimizer(optimizer, method=method)


def check_rule(spec: RuleSpec) -> None:
    """Raise JobError for an unknown rule, or one that can't run with the job's optimizer and its arguments."""
    chosen(spec).check(spec)


def completed(spec: RuleSpec) -> RuleSpec:
    """The canonical form of a rule that was received, with every argument of every group. Raises JobError."""
    whole = spec if isinstance(chosen(spec), Own) else rule(spec.name, spec.groups, method=spec.method)
    check_rule(whole)
    return whole


def check_tensors(spec: RuleSpec, tensors: Sequence[TensorSpec]) -> None:
    """Raise JobError naming a parameter that the rule can't update."""
    chosen(spec).check_tensors(spec, tensors)


def wants_whole(spec: RuleSpec, shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape must not be cut: TensorSpec.whole."""
    return chosen(spec).wants_whole(spec, shape)


def bucket_rule(
    spec: RuleSpec, schedule: ScheduleSpec, bucket: BucketSpec, tensors: Sequence[TensorSpec], device: torch.device
) -> BucketRule:
    """The rule and its state for one bucket of parameters.

    spec: canonical and checked, see completed(). tensors: the plan's; the bucket's slices refer to them by number.
    Raises JobError naming a schedule, dtype, shape or device that can't work.
    """
    return chosen(spec).make(Site(spec=spec, schedule=schedule, bucket=bucket, tensors=tensors, device=device))

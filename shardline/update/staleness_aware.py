"""Staleness-aware SGD: the learning rate of a late push is divided by its staleness."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from shardline.core.spec import RuleSpec
from shardline.errors import JobError
from shardline.update.base import BucketRule, Need, Site, Update
from shardline.update.torch_optim.rule import TorchBucketRule
from shardline.update.wrapping import WrappingRule

_REFUSED = {
    "ASGD": "its rate of a step was set by the step before",
    "Adafactor": "it takes the smaller of the rate and one of its own",
    "Rprop": "its steps are its own, and the rate is only the first of them",
}
"""Optimizers whose step is not in proportion to the learning rate of its own push."""


@dataclass(frozen=True)
class StalenessAware(WrappingRule):
    """The job's optimizer, with the learning rate divided by the staleness of the push.

    A push that is `staleness` updates behind is applied with rate / staleness, or with the rate itself if that is 0.
    """

    name: ClassVar[str] = "staleness-aware"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.LAG})

    def check(self, spec: RuleSpec) -> None:
        if spec.name in _REFUSED:
            raise JobError(
                f"update rule {self} divides the learning rate of a late push, which does not divide the step of "
                f"{spec.name}: {_REFUSED[spec.name]}; use another optimizer, or another rule"
            )

    def share(self, spec: RuleSpec, staleness: int) -> float | None:
        """See Weighing: dividing the gradient divides the step, for SGD alone."""
        return 1.0 / max(1, staleness) if spec.name == "SGD" else None

    def make(self, site: Site) -> BucketRule:
        return StalenessAwareBucket(self, site)


class StalenessAwareBucket(TorchBucketRule):
    def carry_out(self, update: Update) -> None:
        rate = update.arguments["lr"] / max(1, update.context.staleness)
        super().carry_out(replace(update, arguments={**update.arguments, "lr": rate}))

"""UpdateRule: what an admitted gradient does to the parameters. torch.optim does the arithmetic (DESIGN 4)."""

from shardline.update.bucket import BucketRule
from shardline.update.layout import flat_elements, state_elements, state_spans
from shardline.update.rules import (
    ALLOWED,
    REFUSED,
    check_tensors,
    hyper_numbers,
    is_elementwise,
    rule,
    rule_from_optimizer,
    wants_whole,
)

__all__ = [
    "ALLOWED",
    "REFUSED",
    "BucketRule",
    "check_tensors",
    "flat_elements",
    "hyper_numbers",
    "is_elementwise",
    "rule",
    "rule_from_optimizer",
    "state_elements",
    "state_spans",
    "wants_whole",
]

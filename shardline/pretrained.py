"""How the model's own library makes it anew: for models of transformers, and for peft's adapters on one.

A job keeps it, so that `shardline export --hf` needs neither the job file nor the script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardline.core.spec import MAX_PRETRAINED


def pretrained(model: nn.Module | Mapping[str, Any]) -> str:
    """JSON with the model's class and configuration, and those of its adapters by name; "" for any other model."""
    adapters: Mapping[str, Any] = {}
    base: Any = model
    if _is_a(model, "peft.", "PeftModel"):
        adapters, base = base.peft_config, base.get_base_model()
    if not _is_a(base, "transformers.", "PreTrainedModel"):
        return ""
    found = {
        "model": type(base).__name__,
        "config": json.loads(base.config.to_json_string(use_diff=False)),
        "adapters": {name: config.to_dict() for name, config in adapters.items()},
    }
    text = json.dumps(found, sort_keys=True, default=_plain)
    return text if len(text) <= MAX_PRETRAINED else ""


def _is_a(value: object, package: str, name: str) -> bool:
    """Find the class by its name and package, which need not be installed, among those of the value."""
    return any(kind.__name__ == name and kind.__module__.startswith(package) for kind in type(value).__mro__)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)

"""Shardline: a parameter server for PyTorch.

job = shardline.Job(...)            # a job file for `shardline train JOB.py`
session = shardline.connect()       # or three lines in your own training script
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline import schedule as schedule
    from shardline.client.api.connect import connect as connect
    from shardline.client.api.optimizer import ShardlineOptimizer as ShardlineOptimizer
    from shardline.client.api.scaler import GradScaler as GradScaler
    from shardline.client.api.session import Session as Session
    from shardline.errors import RolledBackError as RolledBackError
    from shardline.errors import ShardlineError as ShardlineError
    from shardline.job import Job as Job

__all__ = [
    "GradScaler",
    "Job",
    "RolledBackError",
    "Session",
    "ShardlineError",
    "ShardlineOptimizer",
    "connect",
    "schedule",
]

# torch takes seconds to import, and `shardline --help` needs none of it: names are found when first used.
_HOMES = {
    "GradScaler": "shardline.client.api.scaler",
    "Job": "shardline.job",
    "RolledBackError": "shardline.errors",
    "Session": "shardline.client.api.session",
    "ShardlineError": "shardline.errors",
    "ShardlineOptimizer": "shardline.client.api.optimizer",
    "connect": "shardline.client.api.connect",
}


def __getattr__(name: str) -> Any:
    if name == "schedule":
        return importlib.import_module("shardline.schedule")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shardline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""Shardline: a parameter server for PyTorch.

job = shardline.Job(...)            # a job file for `shardline train JOB.py`; Job(codec=shardline.Bf16())
session = shardline.connect()       # or three lines in your own training script
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline import schedule as schedule
    from shardline.cadence.every_step import EveryStep as EveryStep
    from shardline.client.api.connect import connect as connect
    from shardline.client.api.optimizer import ShardlineOptimizer as ShardlineOptimizer
    from shardline.client.api.scaler import GradScaler as GradScaler
    from shardline.client.api.session import Session as Session
    from shardline.codecs.cast import Bf16 as Bf16
    from shardline.codecs.cast import Fp16 as Fp16
    from shardline.codecs.raw import Raw as Raw
    from shardline.consistency import Asynchronous as Async
    from shardline.consistency import Eager as Sync
    from shardline.errors import RolledBackError as RolledBackError
    from shardline.errors import ShardlineError as ShardlineError
    from shardline.job import Job as Job
    from shardline.topology.flat import Flat as Flat
    from shardline.update.torch_optim.rule import Torch as Torch

__all__ = [
    "Async",
    "Bf16",
    "EveryStep",
    "Flat",
    "Fp16",
    "GradScaler",
    "Job",
    "Raw",
    "RolledBackError",
    "Session",
    "ShardlineError",
    "ShardlineOptimizer",
    "Sync",
    "Torch",
    "connect",
    "schedule",
]

# Importing torch takes seconds, and `shardline --help` doesn't need it: names are imported on first use.
_HOMES = {
    "GradScaler": "shardline.client.api.scaler:GradScaler",
    "Job": "shardline.job:Job",
    "RolledBackError": "shardline.errors:RolledBackError",
    "Session": "shardline.client.api.session:Session",
    "ShardlineError": "shardline.errors:ShardlineError",
    "ShardlineOptimizer": "shardline.client.api.optimizer:ShardlineOptimizer",
    "connect": "shardline.client.api.connect:connect",
    # The methods of `shardline methods` as objects for a job's fields: Job(codec=shardline.Bf16()) is
    # Job(codec="bf16").
    "Async": "shardline.consistency:Asynchronous",
    "Bf16": "shardline.codecs.cast:Bf16",
    "EveryStep": "shardline.cadence.every_step:EveryStep",
    "Flat": "shardline.topology.flat:Flat",
    "Fp16": "shardline.codecs.cast:Fp16",
    "Raw": "shardline.codecs.raw:Raw",
    "Sync": "shardline.consistency:Eager",
    "Torch": "shardline.update.torch_optim.rule:Torch",
}


def __getattr__(name: str) -> Any:
    if name == "schedule":
        return importlib.import_module("shardline.schedule")
    if name in _HOMES:
        module, _, attribute = _HOMES[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'shardline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

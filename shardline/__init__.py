"""Shardline: a parameter server for PyTorch.

job = shardline.Job(...)            # a job file for `shardline train JOB.py`; Job(codec=shardline.Bf16())
session = shardline.connect()       # or three lines in your own training script
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

# Before anything imports grpc, which reads it then: its fork handlers abort children of a busy process, and no child of
# a task uses gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

if TYPE_CHECKING:
    from shardline import schedule as schedule
    from shardline.cadence.diloco import DiLoCo as DiLoCo
    from shardline.cadence.easgd import EASGD as EASGD
    from shardline.cadence.every_step import EveryStep as EveryStep
    from shardline.cadence.local_sgd import LocalSGD as LocalSGD
    from shardline.cadence.post_local_sgd import PostLocalSGD as PostLocalSGD
    from shardline.cadence.slowmo import SlowMo as SlowMo
    from shardline.cadence.streaming_diloco import StreamingDiLoCo as StreamingDiLoCo
    from shardline.client.api.connect import connect as connect
    from shardline.client.api.optimizer import ShardlineOptimizer as ShardlineOptimizer
    from shardline.client.api.scaler import GradScaler as GradScaler
    from shardline.client.api.session import Session as Session
    from shardline.codecs.auto import Auto as Auto
    from shardline.codecs.cast import Bf16 as Bf16
    from shardline.codecs.cast import Fp16 as Fp16
    from shardline.codecs.delta import Delta as Delta
    from shardline.codecs.lossless import Lossless as Lossless
    from shardline.codecs.low_rank import PowerSGD as PowerSGD
    from shardline.codecs.quantizing.fp8 import FP8 as FP8
    from shardline.codecs.quantizing.int8 import Int8 as Int8
    from shardline.codecs.quantizing.onebit import EFSign as EFSign
    from shardline.codecs.quantizing.onebit import OneBit as OneBit
    from shardline.codecs.quantizing.onebit_adam import OneBitAdam as OneBitAdam
    from shardline.codecs.quantizing.qsgd import QSGD as QSGD
    from shardline.codecs.quantizing.sign_vote import SignVote as SignVote
    from shardline.codecs.quantizing.ternary import TernGrad as TernGrad
    from shardline.codecs.quantizing.ternary import TwoBit as TwoBit
    from shardline.codecs.raw import Raw as Raw
    from shardline.codecs.sparse.dgc import DGC as DGC
    from shardline.codecs.sparse.nonzero import Sparse as Sparse
    from shardline.codecs.sparse.randomk import RandomK as RandomK
    from shardline.codecs.sparse.topk import TopK as TopK
    from shardline.consistency import SSP as SSP
    from shardline.consistency import Asynchronous as Async
    from shardline.consistency import Eager as Sync
    from shardline.consistency import SoftSync as SoftSync
    from shardline.errors import JobStopped as JobStopped
    from shardline.errors import RolledBackError as RolledBackError
    from shardline.errors import ShardlineError as ShardlineError
    from shardline.job import Job as Job
    from shardline.pipeline import DoubleBuffer as DoubleBuffer
    from shardline.pipeline import Flush as Flush
    from shardline.pipeline import GPipe as GPipe
    from shardline.pipeline import Stash as Stash
    from shardline.pipeline import VerticalSync as VerticalSync
    from shardline.pipeline import WholeModel as WholeModel
    from shardline.pipeline.model import Pipeline as Pipeline
    from shardline.topology.flat import Flat as Flat
    from shardline.update.dana import DANA as DANA
    from shardline.update.dc_asgd import DCASGD as DCASGD
    from shardline.update.gap_aware import GapAware as GapAware
    from shardline.update.lwp import LWP as LWP
    from shardline.update.multi_asgd import MultiASGD as MultiASGD
    from shardline.update.nag_asgd import NAGASGD as NAGASGD
    from shardline.update.smega2 import SMEGA2 as SMEGA2
    from shardline.update.staleness_aware import StalenessAware as StalenessAware
    from shardline.update.torch_optim.rule import Torch as Torch

__all__ = [
    "DANA",
    "DCASGD",
    "DGC",
    "EASGD",
    "FP8",
    "LWP",
    "NAGASGD",
    "QSGD",
    "SMEGA2",
    "SSP",
    "Async",
    "Auto",
    "Bf16",
    "Delta",
    "DiLoCo",
    "DoubleBuffer",
    "EFSign",
    "EveryStep",
    "FTPipe",
    "Flat",
    "Flush",
    "Fp16",
    "GPipe",
    "GapAware",
    "GradScaler",
    "Int8",
    "Job",
    "JobStopped",
    "LocalSGD",
    "Lossless",
    "MultiASGD",
    "NoStash",
    "OneBit",
    "OneBitAdam",
    "Pipeline",
    "PostLocalSGD",
    "PowerSGD",
    "RandomK",
    "Raw",
    "RolledBackError",
    "Session",
    "ShardlineError",
    "ShardlineOptimizer",
    "SignVote",
    "SlowMo",
    "SoftSync",
    "Sparse",
    "StalenessAware",
    "Stash",
    "StreamingDiLoCo",
    "Sync",
    "TernGrad",
    "TopK",
    "Torch",
    "TwoBit",
    "VerticalSync",
    "WholeModel",
    "connect",
    "schedule",
]

# Importing torch takes seconds, and `shardline --help` doesn't need it: names are imported on first use.
_HOMES = {
    "GradScaler": "shardline.client.api.scaler:GradScaler",
    "Job": "shardline.job:Job",
    "JobStopped": "shardline.errors:JobStopped",
    "Pipeline": "shardline.pipeline.model:Pipeline",
    "RolledBackError": "shardline.errors:RolledBackError",
    "Session": "shardline.client.api.session:Session",
    "ShardlineError": "shardline.errors:ShardlineError",
    "ShardlineOptimizer": "shardline.client.api.optimizer:ShardlineOptimizer",
    "connect": "shardline.client.api.connect:connect",
    # The methods of `shardline methods` as objects for a job's fields: Job(codec=shardline.Bf16()) is
    # Job(codec="bf16").
    "Async": "shardline.consistency:Asynchronous",
    "Auto": "shardline.codecs.auto:Auto",
    "Bf16": "shardline.codecs.cast:Bf16",
    "Delta": "shardline.codecs.delta:Delta",
    "Lossless": "shardline.codecs.lossless:Lossless",
    "PowerSGD": "shardline.codecs.low_rank:PowerSGD",
    "FP8": "shardline.codecs.quantizing.fp8:FP8",
    "Int8": "shardline.codecs.quantizing.int8:Int8",
    "EFSign": "shardline.codecs.quantizing.onebit:EFSign",
    "OneBit": "shardline.codecs.quantizing.onebit:OneBit",
    "OneBitAdam": "shardline.codecs.quantizing.onebit_adam:OneBitAdam",
    "QSGD": "shardline.codecs.quantizing.qsgd:QSGD",
    "SignVote": "shardline.codecs.quantizing.sign_vote:SignVote",
    "TernGrad": "shardline.codecs.quantizing.ternary:TernGrad",
    "TwoBit": "shardline.codecs.quantizing.ternary:TwoBit",
    "DGC": "shardline.codecs.sparse.dgc:DGC",
    "Sparse": "shardline.codecs.sparse.nonzero:Sparse",
    "RandomK": "shardline.codecs.sparse.randomk:RandomK",
    "TopK": "shardline.codecs.sparse.topk:TopK",
    "DANA": "shardline.update.dana:DANA",
    "DCASGD": "shardline.update.dc_asgd:DCASGD",
    "DiLoCo": "shardline.cadence.diloco:DiLoCo",
    "EASGD": "shardline.cadence.easgd:EASGD",
    "PostLocalSGD": "shardline.cadence.post_local_sgd:PostLocalSGD",
    "SlowMo": "shardline.cadence.slowmo:SlowMo",
    "EveryStep": "shardline.cadence.every_step:EveryStep",
    "Flat": "shardline.topology.flat:Flat",
    "WholeModel": "shardline.pipeline:WholeModel",
    "GPipe": "shardline.pipeline:GPipe",
    "Flush": "shardline.pipeline:Flush",
    "DoubleBuffer": "shardline.pipeline:DoubleBuffer",
    "FTPipe": "shardline.pipeline:FTPipe",
    "NoStash": "shardline.pipeline:NoStash",
    "Stash": "shardline.pipeline:Stash",
    "VerticalSync": "shardline.pipeline:VerticalSync",
    "Fp16": "shardline.codecs.cast:Fp16",
    "GapAware": "shardline.update.gap_aware:GapAware",
    "LWP": "shardline.update.lwp:LWP",
    "LocalSGD": "shardline.cadence.local_sgd:LocalSGD",
    "MultiASGD": "shardline.update.multi_asgd:MultiASGD",
    "NAGASGD": "shardline.update.nag_asgd:NAGASGD",
    "Raw": "shardline.codecs.raw:Raw",
    "SMEGA2": "shardline.update.smega2:SMEGA2",
    "SSP": "shardline.consistency:SSP",
    "SoftSync": "shardline.consistency:SoftSync",
    "StreamingDiLoCo": "shardline.cadence.streaming_diloco:StreamingDiLoCo",
    "StalenessAware": "shardline.update.staleness_aware:StalenessAware",
    "Sync": "shardline.consistency:Eager",
    "Torch": "shardline.update.torch_optim.rule:Torch",
}

if "multiprocessing.spawn" in sys.modules:
    # A child of a task, such as a worker of a DataLoader, gets objects of the job file's classes.
    from shardline.host.python_file import find_files

    find_files()


def __getattr__(name: str) -> Any:
    if name == "schedule":
        return importlib.import_module("shardline.schedule")
    if name in _HOMES:
        module, _, attribute = _HOMES[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'shardline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

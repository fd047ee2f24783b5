"""The public names. At run time each is imported on first use: importing torch takes seconds, and --help needs none."""

from . import nn as nn, schedule as schedule
from .beside import (
    DoubleBuffer as DoubleBuffer,
    Flush as Flush,
    FTPipe as FTPipe,
    GPipe as GPipe,
    NoStash as NoStash,
    Pipeline as Pipeline,
    Stash as Stash,
    VerticalSync as VerticalSync,
)
from .cadence.diloco import DiLoCo as DiLoCo
from .cadence.easgd import EASGD as EASGD
from .cadence.every_step import EveryStep as EveryStep
from .cadence.local_sgd import LocalSGD as LocalSGD
from .cadence.post_local_sgd import PostLocalSGD as PostLocalSGD
from .cadence.slowmo import SlowMo as SlowMo
from .cadence.streaming_diloco import StreamingDiLoCo as StreamingDiLoCo
from .client.api.connect import connect as connect
from .client.api.optimizer import GradScaler as GradScaler, ShardlineOptimizer as ShardlineOptimizer
from .client.api.reader import Reader as Reader
from .client.api.session import Session as Session
from .codecs.auto import Auto as Auto
from .codecs.cast import Bf16 as Bf16, Fp16 as Fp16
from .codecs.delta import Delta as Delta
from .codecs.lossless import Lossless as Lossless
from .codecs.low_rank import PowerSGD as PowerSGD
from .codecs.quantizing.fp8 import FP8 as FP8
from .codecs.quantizing.int8 import Int8 as Int8
from .codecs.quantizing.onebit import EFSign as EFSign, OneBit as OneBit
from .codecs.quantizing.onebit_adam import OneBitAdam as OneBitAdam
from .codecs.quantizing.qsgd import QSGD as QSGD
from .codecs.quantizing.sign_vote import SignVote as SignVote
from .codecs.quantizing.ternary import TernGrad as TernGrad, TwoBit as TwoBit
from .codecs.raw import Raw as Raw
from .codecs.sparse.dgc import DGC as DGC
from .codecs.sparse.nonzero import Sparse as Sparse
from .codecs.sparse.randomk import RandomK as RandomK
from .codecs.sparse.topk import TopK as TopK
from .consistency import SSP as SSP, Async as Async, SoftSync as SoftSync, Sync as Sync
from .division import WholeModel as WholeModel
from .ensemble import Ensemble as Ensemble
from .errors import JobStopped as JobStopped, RolledBackError as RolledBackError, ShardlineError as ShardlineError
from .integrations.distributed import (
    DistributedModel as DistributedModel,
    DistributedOptimizer as DistributedOptimizer,
    init_process_group as init_process_group,
)
from .integrations.notebook import launch as launch
from .job import Job as Job
from .nn import EmbeddingTable as EmbeddingTable
from .topology.aggregators import Aggregators as Aggregators
from .topology.flat import Flat as Flat
from .topology.local_sum import LocalSum as LocalSum
from .update.dana import DANA as DANA
from .update.dc_asgd import DCASGD as DCASGD
from .update.gap_aware import GapAware as GapAware
from .update.lwp import LWP as LWP
from .update.multi_asgd import MultiASGD as MultiASGD
from .update.nag_asgd import NAGASGD as NAGASGD
from .update.smega2 import SMEGA2 as SMEGA2
from .update.staleness_aware import StalenessAware as StalenessAware
from .update.torch_optim.rule import Torch as Torch

"""Cadences: when a worker exchanges with the servers, and what it sends. One file per cadence, listed in CADENCES."""

from __future__ import annotations

from shardline.cadence.base import (
    Cadence,
    Held,
    InnerOptimizer,
    LocalTraining,
    Outgoing,
    Rounds,
    Sends,
    Ticks,
    Told,
    fragmented,
)
from shardline.cadence.diloco import DiLoCo
from shardline.cadence.easgd import EASGD
from shardline.cadence.every_step import EveryStep
from shardline.cadence.local_sgd import LocalSGD
from shardline.cadence.post_local_sgd import PostLocalSGD
from shardline.cadence.slowmo import SlowMo
from shardline.cadence.streaming_diloco import StreamingDiLoCo
from shardline.core.spec import JobSpec
from shardline.seams import Table

CADENCES: Table[Cadence] = Table("cadence", EveryStep, LocalSGD, PostLocalSGD, EASGD, SlowMo, DiLoCo, StreamingDiLoCo)


def of(job: JobSpec) -> Cadence:
    """The cadence that a job names. Raises JobError for an unknown one."""
    return CADENCES.parse(job.cadence)


__all__ = [
    "CADENCES",
    "EASGD",
    "Cadence",
    "DiLoCo",
    "EveryStep",
    "Held",
    "InnerOptimizer",
    "LocalSGD",
    "LocalTraining",
    "Outgoing",
    "PostLocalSGD",
    "Rounds",
    "Sends",
    "SlowMo",
    "StreamingDiLoCo",
    "Ticks",
    "Told",
    "fragmented",
    "of",
]

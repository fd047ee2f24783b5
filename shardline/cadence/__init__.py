"""Cadences: when a worker exchanges with the servers, and what it sends. One file per cadence, listed in CADENCES."""

from __future__ import annotations

from shardline.cadence.base import (
    Cadence as Cadence,
    Held as Held,
    LocalTraining as LocalTraining,
    Outgoing as Outgoing,
    Rounds as Rounds,
    Sends as Sends,
    Ticks as Ticks,
    Told as Told,
    fragmented as fragmented,
)
from shardline.cadence.diloco import DiLoCo as DiLoCo
from shardline.cadence.easgd import EASGD as EASGD
from shardline.cadence.every_step import EveryStep as EveryStep
from shardline.cadence.local_sgd import LocalSGD as LocalSGD
from shardline.cadence.post_local_sgd import PostLocalSGD as PostLocalSGD
from shardline.cadence.slowmo import SlowMo as SlowMo
from shardline.cadence.streaming_diloco import StreamingDiLoCo as StreamingDiLoCo
from shardline.core.spec import JobSpec
from shardline.seams import Table

CADENCES: Table[Cadence] = Table("cadence", EveryStep, LocalSGD, PostLocalSGD, EASGD, SlowMo, DiLoCo, StreamingDiLoCo)


def of(job: JobSpec) -> Cadence:
    """The cadence that a job names. Raises JobError for an unknown one."""
    return CADENCES.parse(job.cadence)

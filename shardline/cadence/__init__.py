"""Cadences: when a worker exchanges with the servers, and what it sends. One file per cadence, listed in CADENCES."""

from __future__ import annotations

from shardline.cadence.base import Cadence, Held, LocalTraining, Outgoing, Ticks
from shardline.cadence.every_step import EveryStep
from shardline.core.spec import JobSpec
from shardline.seams import Table

CADENCES: Table[Cadence] = Table("cadence", EveryStep)


def of(job: JobSpec) -> Cadence:
    """The cadence that a job names. Raises JobError for an unknown one."""
    return CADENCES.parse(job.cadence)


__all__ = ["CADENCES", "Cadence", "EveryStep", "Held", "LocalTraining", "Outgoing", "Ticks", "of"]

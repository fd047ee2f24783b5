"""Topologies: which task a worker talks to for each shard. One file per topology, listed in TOPOLOGIES."""

from __future__ import annotations

from shardline.core.spec import JobSpec
from shardline.seams import Table
from shardline.topology.aggregators import Aggregators
from shardline.topology.base import Hop, Surroundings, Topology
from shardline.topology.flat import Flat
from shardline.topology.local_sum import LocalSum

TOPOLOGIES: Table[Topology] = Table("topology", Flat, Aggregators, LocalSum)


def of(job: JobSpec) -> Topology:
    """The topology that a job names. Raises JobError for an unknown one."""
    return TOPOLOGIES.parse(job.topology)


__all__ = ["TOPOLOGIES", "Aggregators", "Flat", "Hop", "LocalSum", "Surroundings", "Topology", "of"]

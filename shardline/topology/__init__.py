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


def unused(job: JobSpec, aggregators: int) -> str:
    """Say that a job's topology lacks aggregators, or doesn't use those of the cluster; empty if all is well."""
    chosen = of(job)
    if chosen.meets and not chosen.speaks:
        lack = f"topology {chosen}, but the cluster has no aggregator, so workers go to the servers"
        return "" if aggregators else f"{lack}; add --tasks aggregator=2, or aggregators in cluster.json"
    spare = f"no worker goes to the cluster's aggregators, since the topology is {chosen}"
    return f"{spare}; use --topology aggregators" if aggregators else ""


__all__ = ["TOPOLOGIES", "Aggregators", "Flat", "Hop", "LocalSum", "Surroundings", "Topology", "of", "unused"]

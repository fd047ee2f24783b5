"""Divisions: how the workers of a job share the computation of its steps.

The plain one is data parallelism, in which every worker computes whole replicas. Others come from packages beside the
library, which add to PIPELINES: pipelines, whose workers compute stages of a replica, and tensor parallelism, whose
workers compute parts of layers. Whoever needs to know what a worker computes, pulls or pushes asks the division.
"""

from shardline.division.base import (
    Division as Division,
    DivisionChoice as DivisionChoice,
    Gradients as Gradients,
    numbered as numbered,
)
from shardline.division.share import Key as Key, Share as Share
from shardline.division.whole import (
    PIPELINES as PIPELINES,
    WholeModel as WholeModel,
    of as of,
    of_parts as of_parts,
)

"""The table of divisions, and the choice that computes whole models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from shardline import plugins
from shardline.division.base import Division, DivisionChoice
from shardline.seams import Table


@dataclass(frozen=True)
class WholeModel(DivisionChoice):
    """Every worker computes the whole model."""

    name: ClassVar[str] = "whole-model"

    def division(self, job: Any) -> Division:
        return of_parts(job) if job.shares_layers else Division(job)


def of_parts(job: Any) -> Division:
    """That of a Job or JobSpec whose workers compute parts of a replica, from the package that has it."""
    found: Division = plugins.installed("shardline.divisions", "parts", "pipelines and tensor_parallel")(job)
    return found


PIPELINES: Table[DivisionChoice] = Table("pipeline", WholeModel)


def of(job: Any) -> Division:
    """The division of a Job or a JobSpec. Raises JobError if its pipeline does not exist."""
    return PIPELINES.parse(job.pipeline).division(job)

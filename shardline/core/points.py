"""Values of a run's curves, for the services that show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Point(NamedTuple):
    """One value of a curve."""

    name: str
    """Such as "train/loss"."""
    value: float
    step: int
    """The job's; a rollback makes some steps occur twice."""
    time_s: float
    """Unix time."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows."""

    out: Path
    """Its folder. A chief that takes over, or resumes, has it again."""
    job: str
    """Name of the job."""
    settings: Mapping[str, Any]
    """Of the job, by name."""

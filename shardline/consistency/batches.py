"""Batches: who says which batch a worker trains on. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from shardline.core.spec import JobSpec


class BatchChoice:
    """The chief assigns replicas to workers; the batch of a replica follows from the step."""

    why_no_lease: ClassVar[str] = "synchronous: batches follow from the step"

    def leased(self, job: JobSpec) -> int:
        """Number of batches that the chief leases one by one, and again if a worker dies; 0 = none."""
        return 0

    def stored(self, cursor: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of a checkpoint's manifest. cursor: which leases were done."""
        return {}

    def next(self, step: int, batches: Iterator[int]) -> int:
        """Number of the batch, or of the step with one batch per replica, that a worker computes next."""
        return step


class LeasedBatches(BatchChoice):
    """The chief leases batches one by one. A script's workers choose their own."""

    why_no_lease = "a script, which chooses batches"

    def leased(self, job: JobSpec) -> int:
        return 0 if job.script else job.steps

    def stored(self, cursor: Mapping[str, Any]) -> dict[str, Any]:
        done = sum(end - first for first, end in cursor.get("done", []))
        return {"leases": dict(cursor), "cursor": {"batch": done}}

    def next(self, step: int, batches: Iterator[int]) -> int:
        return next(batches)


OF_REPLICAS, LEASED = BatchChoice(), LeasedBatches()

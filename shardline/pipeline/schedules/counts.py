"""Versions, staleness and stashes of a stream of passes, checked while it runs. Pure."""

from __future__ import annotations

from collections.abc import Collection

from shardline.errors import InternalError
from shardline.pipeline.base import PipelineSchedule
from shardline.pipeline.schedules.unbroken import ahead


class StageCounts:
    """What stages do, beside what their schedule says: nothing depends on how fast anything is.

    With one microbatch per step, stage s of n under weight stashing computes step t with version
    max(0, t - (n - 1 - s)), keeps n - s versions, and holds n - s microbatches (Narayanan et al.: PipeDream, 2019,
    section 3.3); other schedules, and more microbatches: see their version().
    """

    def __init__(self, schedule: PipelineSchedule, stages: int, microbatches: int, first: int) -> None:
        """first: the step at which the pipeline is empty."""
        self._schedule = schedule
        self._stages = stages
        self._microbatches = microbatches
        self._first = first
        self._newest: dict[int, int] = {}
        """By stage."""

    def arrived(self, stage: int, version: int, kept: Collection[int]) -> None:
        """A stage has got a version, and keeps these. Raises InternalError if it should have others.

        Those from the first pass of the step on, which is the next one to go back: t - version(t * m) + 1 when
        version t arrives.
        """
        after = self._newest.get(stage, self._first - 1) + 1
        oldest = self._version(version * self._microbatches, stage)
        expected = {version} if self._schedule.keeps_one else set(range(oldest, version + 1))
        if version != after or set(kept) != expected:
            raise InternalError(
                f"stage {stage} has got version {version} and keeps {sorted(kept)}, where pipeline {self._schedule} of "
                f"{self._stages} stages and {self._microbatches} microbatches, empty at step {self._first}, has "
                f"version {after} next and keeps {sorted(expected)}"
            )
        self._newest[stage] = version

    def passed(self, stage: int, number: int, version: int, held: int, *, back: bool) -> None:
        """A stage has computed a pass with a version, holding so many microbatches of a replica. Raises InternalError.

        number: the microbatch, counted from the job's first one.
        """
        expected, most = self._version(number, stage, back=back), ahead(stage, self._stages) + 1
        if self._schedule.flushes:
            most = self._schedule.held(stage, self._stages, self._microbatches)
        if version != expected or version > self._newest.get(stage, -1) or held > most:
            raise InternalError(
                f"stage {stage} has computed microbatch {number % self._microbatches} of step "
                f"{number // self._microbatches} {'backward' if back else 'forward'} with version {version} of "
                f"{self._newest.get(stage)}, holding {held} microbatches, where pipeline {self._schedule} of "
                f"{self._stages} stages has version {expected} and holds {most} at most"
            )

    def _version(self, number: int, stage: int, *, back: bool = False) -> int:
        version = self._schedule.back_version if back else self._schedule.version
        return version(number, stage, self._stages, self._microbatches, first=self._first)

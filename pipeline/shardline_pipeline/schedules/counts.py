"""Versions, staleness and stashes of a stream of passes, checked while it runs. Pure."""

from __future__ import annotations

from collections.abc import Collection

from shardline.errors import InternalError
from shardline_pipeline.base import PipelineSchedule
from shardline_pipeline.layout import StageLayout


class StageCounts:
    """What stages do, beside what their schedule says: nothing depends on how fast anything is.

    With one microbatch per step, and one worker for each stage, stage s of n under weight stashing computes step t with
    version max(0, t - (n - 1 - s)), keeps n - s versions, and holds n - s microbatches (Narayanan et al.: PipeDream,
    2019, section 3.3); other schedules, layouts, and more microbatches: see their version() and StageLayout.ahead().
    """

    def __init__(self, schedule: PipelineSchedule, layout: StageLayout, first: int) -> None:
        """first: the step at which the pipeline is empty."""
        self._schedule = schedule
        self._layout = layout
        self._first = first
        self._newest: dict[int, int] = {}
        """By stage."""

    def arrived(self, stage: int, version: int, kept: Collection[int]) -> None:
        """A stage has got a version, and keeps these. Raises InternalError if it should have others.

        Those from the first pass of the step on, which is the next one to go back: t - version(first microbatch of t)
        + 1 when version t arrives.
        """
        after = self._newest.get(stage, self._first - 1) + 1
        oldest = self._version(self._layout.first(version), stage)
        expected = {version} if self._schedule.keeps_one else set(range(oldest, version + 1))
        if version != after or set(kept) != expected:
            raise InternalError(
                f"stage {stage} has got version {version} and keeps {sorted(kept)}, where pipeline {self._named} and "
                f"{self._layout.microbatches} microbatches, empty at step {self._first}, has version {after} next and "
                f"keeps {sorted(expected)}"
            )
        self._newest[stage] = version

    def passed(self, stage: int, number: int, version: int, held: int, together: int, *, back: bool) -> None:
        """A stage has computed a pass with a version. Raises InternalError.

        number: see StageLayout. held: microbatches of the pass's replica that the stage holds; together: of all those
        that the layout's same worker has.
        """
        layout = self._layout
        expected, most, all_ = self._version(number, stage, back=back), layout.held(stage), layout.ahead(stage) + 1
        if self._schedule.flushes:
            most = self._schedule.held(stage, layout.stages, layout.microbatches)
            all_ = most * layout.replicas // layout.workers[stage]
        if version != expected or version > self._newest.get(stage, -1) or held > most or together > all_:
            microbatch, replica = divmod(number, layout.replicas)
            raise InternalError(
                f"stage {stage} has computed microbatch {microbatch % layout.microbatches} of step "
                f"{layout.step(number)} {'backward' if back else 'forward'}, of replica {replica}, with version "
                f"{version} of {self._newest.get(stage)}, holding {held} microbatches, {together} with other replicas, "
                f"where pipeline {self._named} has version {expected} and holds {most} and {all_} at most"
            )

    @property
    def _named(self) -> str:
        workers = ", ".join(map(str, self._layout.workers))
        return f"{self._schedule} of stages with {workers} workers for {self._layout.replicas} replicas"

    def _version(self, number: int, stage: int, *, back: bool = False) -> int:
        version = self._schedule.back_version if back else self._schedule.version
        return version(number, stage, self._layout, first=self._first)

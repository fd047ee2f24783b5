"""Barriers of a script: who has been where, and who may go on. Pure.

Workers tell with each heartbeat where they are, so a chief that comes back knows it again without notes.
"""

from __future__ import annotations

from shardline.core.orders import BarrierPlace, BarrierState
from shardline_chief.rules.state.state import State


class Barriers:
    """Where the workers of a script have come to."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._at: dict[str, BarrierPlace] = {}
        """By task, the barrier that it told last."""
        self._reached: dict[str, BarrierPlace] = {}
        """By task, the furthest that any of its lives has been at."""

    def told(self, task: str, place: BarrierPlace) -> None:
        """A worker is at a barrier, or was there last."""
        self._at[task] = place
        self._reached[task] = max(place, self._reached.get(task, place))

    def state_of(self, task: str) -> BarrierState | None:
        """How it stands with the barrier that a worker told last; None where it told of none."""
        place = self._at.get(task)
        if place is None:
            return None
        missing = () if self._met_before(place) else self._missing(place)
        ended = tuple(task for task in missing if task in self.state.tasks.finished)
        return BarrierState(
            place=place, passed=not missing, hopeless=bool(ended), waits_for=ended if ended else missing
        )

    def _missing(self, place: BarrierPlace) -> tuple[str, ...]:
        workers = [f"worker/{index}" for index in range(self.state.settings.workers)]
        return tuple(task for task in workers if task not in self._reached or self._reached[task] < place)

    def _met_before(self, place: BarrierPlace) -> bool:
        """Whether all have met at this barrier in a life of this worker before: one that comes before its first step.

        A step needs all workers, so all of them were past it when the run's first step was closed. (Asynchronous ones
        always say that they have begun.)
        """
        return not place.begun and place.step > self.state.progress.first_step

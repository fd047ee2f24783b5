"""Barriers of a script: which workers have arrived, and which may continue. Pure.

Workers report their barrier with each heartbeat, so a restarted chief needs no journal entries for it.
"""

from __future__ import annotations

from dataclasses import replace

from shardline.core.orders import BarrierPlace, BarrierState
from shardline_chief.rules.state.state import State

VALUES = 16
"""Values of worker/0 that are kept: for workers that were restarted, and pass the barriers before their loop again."""


class Barriers:
    """The barriers that a script's workers have reached."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._at: dict[str, BarrierPlace] = {}
        """Last reported barrier, by task."""
        self._reached: dict[str, BarrierPlace] = {}
        """Furthest barrier that any life of a task has reached, by task."""
        self._values: dict[BarrierPlace, str] = {}
        """Values that worker/0 has handed to all, by barrier; the newest."""

    def told(self, task: str, place: BarrierPlace) -> None:
        """Note that a worker is at a barrier, or last was."""
        self._at[task] = place
        self._reached[task] = max(place, self._reached.get(task, place))
        if place.value and task == "worker/0":
            self._values[place] = place.value
            for old in list(self._values)[:-VALUES]:
                del self._values[old]

    def states(self) -> dict[str, BarrierState]:
        """State of the barrier that each worker last reported, by worker, without those that reported none."""
        at = {place: self._state_at(place) for place in set(self._at.values())}
        return {task: at[place] for task, place in self._at.items()}

    def _state_at(self, place: BarrierPlace) -> BarrierState:
        # A step needs all workers, so all passed what comes before the first step, in an earlier life of this worker,
        # when the first step of the run was closed. (Asynchronous workers always report that they have begun.)
        met_before = not place.begun and place.step > self.state.progress.first_step
        workers = () if met_before else tuple(f"worker/{index}" for index in range(self.state.settings.workers))
        missing = tuple(task for task in workers if task not in self._reached or self._reached[task] < place)
        ended = tuple(task for task in missing if task in self.state.tasks.finished)
        return BarrierState(
            place=replace(place, value=self._values.get(place, "")),
            passed=not missing,
            hopeless=bool(ended),
            waits_for=ended if ended else missing,
        )

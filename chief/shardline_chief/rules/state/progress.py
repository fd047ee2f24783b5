"""How far the job is: what the shards last reported, where it began, where it stops, whose gradients made its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shardline.consistency import Clock, Consistency
from shardline.core.choices import Choices
from shardline.core.status import ShardStatus
from shardline_chief.rules.state.layout import JobLayout


class Progress:
    def __init__(self, layout: JobLayout, mode: Consistency) -> None:
        self._layout = layout
        self.mode = mode
        """The job's mode; only valid once the job is known."""
        self.shards: dict[int, ShardStatus] = {}
        """Last reports of this timeline, by shard."""
        self.first_step = 0
        """Step at which this run began."""
        self.base_step = 0
        """Step at which the current timeline began: first_step, or the step of the last rollback."""
        self.stop_step = 0
        """No shard goes past this step; 0 = not decided."""

    @property
    def all_told(self) -> bool:
        """Whether every shard that is not empty has reported in this timeline."""
        return self._layout.plan is not None and len(self.shards) >= self._layout.filled

    def of(self, shard: ShardStatus) -> int:
        """How far one shard is: steps closed, or updates applied, depending on the mode's clock."""
        return shard.step_min if self.mode.clock is Clock.STEP else shard.version

    @property
    def step(self) -> int:
        """Steps that every shard has closed, or updates that every shard has applied."""
        return min(map(self.of, self.shards.values())) if self.all_told else self.base_step

    @property
    def told_step(self) -> int:
        """The same, of the shards that have reported: after a takeover some are lost before they do."""
        return min(map(self.of, self.shards.values()), default=self.base_step)

    @property
    def step_max(self) -> int:
        """Highest step that any bucket has reached."""
        return max((shard.step_max for shard in self.shards.values()), default=self.base_step)

    def common_step(self) -> int | None:
        """The step that every bucket of every shard is at; None if they differ or are not known."""
        if not self.all_told:
            return None
        steps = {step for shard in self.shards.values() for step in (shard.step_min, shard.step_max)}
        return steps.pop() if len(steps) == 1 else None


class ChoiceLog:
    """Which steps of the surviving history have noted choices, which the journal has, and counts for people."""

    def __init__(self) -> None:
        self._first = 0
        self.end = 0
        """The first step that is not noted yet."""
        self.used: Counter[str] = Counter()
        """Gradients that made a step, by task that had the replica when the chief noted the step."""
        self.dropped: Counter[str] = Counter()
        """The same for those that came too late."""

    def news(self, told: Choices) -> Choices:
        """What the lead has told and the log lacks."""
        return told.since(self.end)

    def add(self, news: Choices, assignment: Mapping[int, str]) -> None:
        """Note the next steps. After a gap the log begins anew."""
        if news.first > self.end:
            self._first = news.first
        self.end = news.end
        for choice in news.made:
            for replica, task in assignment.items():
                (self.used if choice >> replica & 1 else self.dropped)[task] += 1

    def back_to(self, step: int) -> None:
        """The job goes back to a step, or begins at it."""
        self.end = min(self.end, max(self._first, step))
        if self.end == self._first:
            self._first = self.end = step

    def recall(self, known: Choices) -> None:
        """Continue where an earlier chief was."""
        self._first, self.end = known.first, known.end

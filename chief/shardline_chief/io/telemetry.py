"""What the chief publishes about the job besides events: logs of steps, metrics, Prometheus targets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from shardline import codecs
from shardline.consistency import Clock
from shardline.core.orders import Phase
from shardline.core.status import Traffic
from shardline.observability.metrics import Metrics
from shardline_chief.io.reporter import Reporter, for_people
from shardline_chief.io.targets import Targets
from shardline_chief.rules.actions import Saved
from shardline_chief.rules.program import Program
from shardline_chief.rules.state.membership import Life
from shardline_chief.rules.state.state import State

RATES_S = 0.5
"""Seconds between two readings of the rates."""


class Telemetry:
    """Keeps logs, metrics and targets up to date."""

    def __init__(self, program: Program, reporter: Reporter, metrics: Metrics, out: Path) -> None:
        self._program = program
        self._reporter = reporter
        self._metrics = metrics
        self._out = out
        self._next_rates_s = 0.0
        self._reported = 0
        """Timeline whose training the reporter has been informed of."""
        self._targets: Targets | None = None
        self._codecs = ("", "")
        """Those of gradients and of parameters that the metrics show."""
        self._contributions = Counter[tuple[str, str]]()
        """Contributions counted in the metrics, by (task, outcome)."""
        # Set now, so that a first checkpoint that never comes also shows as overdue.
        metrics.gauge("shardline_checkpoint_timestamp_seconds").set(time.time())

    @for_people
    def tick(self, now_s: float) -> bool:
        """Publish what is new; returns whether to refresh the page's status."""
        state = self._program.state
        self._begin(state)
        if now_s < self._next_rates_s:
            return False
        self._next_rates_s = now_s + RATES_S
        if state.figures.running_s is not None and not state.ended:
            self._reporter.rates(state.progress.step, _wire(state.figures.traffic), now_s)
            self._reporter.links.add(state.figures.links, now_s)
        if state.ended:
            return True
        if self._targets is None:
            chief = state.settings.chief_address
            self._targets = Targets(self._out, chief=chief, chief_metrics=self._metrics.address)
        self._targets.show(state.tasks.members)
        self._count(state)
        self._reporter.stages()
        if state.job is not None:
            found = codecs.of(state.job)
            chosen = (str(found.ups[0]), str(found.downs[0]))
            if chosen != self._codecs:
                for (up, down), flag in ((self._codecs, 0), (chosen, 1)):
                    if up:
                        self._metrics.gauge("shardline_codec_chosen", up=up, down=down).set(flag)
                self._codecs = chosen
        return True

    def _begin(self, state: State) -> None:
        """Inform the reporter when a timeline begins to train."""
        under_way = state.phase in (Phase.RUNNING, Phase.STOPPING) and not state.returning
        if not under_way or state.job is None:
            return
        if state.mode.cuts.undone(state.layout.timeline, self._reported):
            self._reported = state.layout.timeline
            # The timeline of an earlier chief, whose logs continue: nothing in them was undone.
            taken_over = state.layout.timeline >> 32 != state.settings.term
            self._reporter.begin(
                replicas=state.mode.needed(state.job.replicas),
                joined=state.mode.clock is Clock.STEP,
                timeline=state.layout.timeline,
                first_step=state.progress.step if taken_over else state.progress.base_step,
                job=state.job,
            )

    def _count(self, state: State) -> None:
        counts: dict[tuple[str, str], int] = {}
        for member in state.tasks.members:
            for life in Life:
                key = (member.role, life.value)
                counts[key] = counts.get(key, 0) + (member.state is life)
        for (role, life_name), count in counts.items():
            self._metrics.gauge("shardline_tasks", role=role, state=life_name).set(count)
        for outcome, tally in (("used", state.choices.used), ("dropped", state.choices.dropped)):
            for task, total in tally.items():
                counter = self._metrics.counter("shardline_contributions_total", peer=task, outcome=outcome)
                counter.inc(total - self._contributions[task, outcome])
                self._contributions[task, outcome] = total

    @for_people
    def saved(self, saved: Saved) -> None:
        """A checkpoint was committed, or could not be written."""
        self._reporter.checkpoint(saved.step, saved.seconds, saved.nbytes, failed=bool(saved.error))
        if not saved.error:
            self._metrics.gauge("shardline_checkpoint_timestamp_seconds").set(time.time())

    @for_people
    def interval(self) -> None:
        """Publish the smallest workable checkpoint interval, once known."""
        if least := self._program.state.saves.least_interval:
            self._metrics.gauge("shardline_checkpoint_interval_steps").set(least)

    @for_people
    def close(self) -> None:
        """The job has ended: remove the Prometheus targets."""
        if self._targets is not None:
            self._targets.clear()


def _wire(traffic: Mapping[str, Traffic]) -> dict[str, tuple[int, int]]:
    # Within one host nothing is on the wire; show the rate of what moved through memory instead.
    return {
        task: (both.push_wire_bytes or both.push_raw_bytes, both.pull_wire_bytes or both.pull_raw_bytes)
        for task, both in traffic.items()
    }

"""Cuts become checkpoints: when a cut is ordered, when it is complete, and what follows once saved (PROTOCOL 1.7).

For shards cut one by one: note which batches are done, have every shard copy itself, fetch the copies, commit them,
note the checkpoint, release the copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shardline.core.orders import Phase
from shardline_chief.rules.actions import Cut, Release, Save
from shardline_chief.rules.events import CheckpointSaved, OrderAnswered, ShardsTold, Stage
from shardline_chief.rules.state.state import State

SHARE = 0.04
"""Share of a link's rate that fetching cuts may take in the long run."""


class StepClock:
    """Mean duration of a step since the first one observed."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def observe(self, step: int, now_s: float) -> None:
        """Note the job's current step; a rollback restarts the measurement."""
        if self._last is not None and step < self._last[0]:
            self._first = None
        if self._last is None or step != self._last[0]:
            self._last = (step, now_s)
        if self._first is None and step > 0:
            self._first = self._last

    @property
    def seconds(self) -> float:
        """Mean seconds per step; 0 until two different steps have been observed."""
        if self._first is None or self._last is None or self._last[0] == self._first[0]:
            return 0.0
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The smallest checkpoint interval, in steps, with which writing keeps up."""

    steps: int
    sentence: str
    too_small: bool
    """Whether checkpoint_every is below `steps`."""


def least_interval(
    nbytes: int, least_s: float, link_rate: float, step_s: float, every: int, *, share: float = SHARE
) -> Interval:
    """The smallest interval for checkpoints of nbytes bytes that take least_s seconds, at step_s seconds per step.

    link_rate: bytes per second, 0 if no link is throttled. every: the job's checkpoint_every, in steps.
    """
    steps = max(1, math.ceil(least_s / step_s))
    of_link = f" at {share * 100:g} % of the link's {link_rate / 1e6:.0f} MB/s" if link_rate else ""
    sentence = (
        f"a checkpoint of {nbytes / 1e6:.1f} MB takes {_seconds(least_s)}{of_link}, and a step {_seconds(step_s)}: "
        f"with an interval below {steps} steps checkpoints can't keep up"
    )
    if every < steps:
        sentence += f", so with checkpoint_every={every} some are skipped"
    return Interval(steps=steps, sentence=sentence, too_small=every < steps)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


class Checkpointing:
    def __init__(self, state: State) -> None:
        self.state = state
        self._last_cut = 0
        self._order = 0
        """Number of the order of the cut that shards make one by one."""
        self._cursor: dict[str, Any] = {}
        """Of that cut."""
        self._clock = StepClock()
        self._advised = False
        self._warned = False

    def forget(self) -> None:
        """The timeline is over: cuts ordered in it will not arrive."""
        self.state.saves.cutting = False
        self._last_cut = 0

    def remember(self, last_cut: int) -> None:
        """Resume where an earlier chief was. last_cut: step of its newest checkpoint, -1 = none."""
        self._last_cut = max(0, last_cut)

    # Cuts

    def observe(self, told: ShardsTold, now_s: float) -> None:
        if self.state.phase is Phase.RUNNING:
            self._clock.observe(self.state.progress.step, now_s)

    def told(self, told: ShardsTold, now_s: float) -> None:
        """A ps reported its shards: save complete cuts, discard those that can't become complete."""
        state, saves = self.state, self.state.saves
        if saves.saving is not None:
            return
        ready = state.mode.cuts.reported(saves.ledger.complete())
        if ready:
            self.save(ready[0])
            return
        for step in state.mode.cuts.reported(saves.ledger.lost()):
            saves.ledger.close(step)
            state.say("cut", f"the cut at step {step} is incomplete on some shards and was discarded", "warning")
            state.command(Release(timeline=state.layout.timeline, step=step, noted=state.choices.end))
        self._maybe_cut()

    def _maybe_cut(self) -> None:
        """Order a cut, if shards don't make it by themselves."""
        state = self.state
        every = state.job.checkpoint_every if state.job is not None else 0
        if state.stage is not Stage.TRAINING or every <= 0 or state.saves.cutting:
            return
        step, leases = state.progress.step, state.work.leases
        # At the last batch the final cut is near, and by then all leases are done.
        at_end = leases is not None and step >= leases.steps
        start = max(self._last_cut, state.progress.base_step)
        if not at_end and state.mode.cuts.due(step, start, every):
            self.cut_now(stop=False)

    def cut_now(self, *, stop: bool) -> int:
        """Have every shard copy itself now; returns the cut's number, the lowest version of any shard.

        The number is one higher if the lowest version already has a checkpoint and other shards have advanced since.
        """
        state = self.state
        assert not state.saves.cutting
        state.saves.cutting = True
        step = state.progress.step
        shards = state.progress.shards.values()
        if step == state.saves.checkpoint_step and any(shard.version > step for shard in shards):
            # One shard was restored from that checkpoint and others have advanced: this is a different state.
            step += 1
        self._last_cut = step
        # Noted first, so that every update of a finished lease is in the copies (PROTOCOL 1.7).
        self._cursor = state.work.leases.cursor() if state.work.leases is not None else {}
        self._order = state.command(Cut(timeline=state.layout.timeline, step=step, stop=stop))
        return step

    def taken(self, event: OrderAnswered, now_s: float) -> None:
        """Every shard has copied itself."""
        if event.number == self._order and isinstance(event.order, Cut) and event.done:
            self.state.saves.cutting = False
            self.save(event.order.step, self._cursor)

    # Saving

    def save(self, step: int, cursor: dict[str, Any] | None = None, *, urgent: bool = False) -> None:
        """Fetch a cut that all shards hold, and commit it. urgent: nothing is training meanwhile."""
        state, layout = self.state, self.state.layout
        assert layout.plan is not None
        assert state.job is not None
        if step == state.saves.checkpoint_step and not urgent:
            # Nothing was applied since: the checkpoint exists already.
            self._release(step)
            return
        state.saves.saving = step
        state.outbox.actions.append(
            Save(
                step=step,
                timeline=layout.timeline,
                plan=layout.plan,
                job=state.job,
                placement=layout.placement,
                cursor=cursor or {},
                urgent=urgent or state.phase is Phase.STOPPING or step == state.progress.stop_step,
            )
        )

    def saved(self, event: CheckpointSaved, now_s: float) -> None:
        """A checkpoint was committed, or could not be written."""
        state, saved, saves = self.state, event.saved, self.state.saves
        faults = state.figures.faults
        saves.saving = None
        self._release(saved.step)
        if saved.error:
            step, _ = saves.newest()
            rest = f"the last one is kept: step {step}" if step >= 0 else "there is none"
            state.say("checkpoint_failed", f"no checkpoint at step {saved.step}: {saved.error}; {rest}", "error")
            saves.failed_saves += 1
            many = f" ({saves.failed_saves} in a row failed)" if saves.failed_saves > 1 else ""
            faults["checkpoint"] = f"no checkpoint at step {saved.step}{many}: {saved.error}; {saves.last_good()}"
            return
        saves.failed_saves = 0
        faults.pop("checkpoint", None)
        state.record("cut", step=saved.step, path=saved.path, timeline=state.layout.timeline)
        saves.committed(saved.step, saved.path)
        state.say(
            "checkpoint",
            f"checkpoint of step {saved.step}: {saved.nbytes / 1e6:.1f} MB in {saved.seconds:.2f} s, {saved.path}",
            step=saved.step,
            seconds=saved.seconds,
            bytes=saved.nbytes,
        )
        self._advise(event)

    def _advise(self, event: CheckpointSaved) -> None:
        """Report the smallest workable checkpoint interval once, and again if checkpoint_every falls below it."""
        state, saved = self.state, event.saved
        every = state.job.checkpoint_every if state.job is not None else 0
        if state.phase is not Phase.RUNNING or not every or not saved.step or not self._clock.seconds:
            return
        least = least_interval(saved.nbytes, saved.least_s, saved.link_rate, self._clock.seconds, every)
        state.saves.least_interval = least.steps
        if self._advised and (self._warned or not least.too_small):
            return
        self._advised, self._warned = True, least.too_small
        level = "warning" if least.too_small else "info"
        state.say("checkpoint_interval", least.sentence, level, steps=least.steps, seconds=saved.least_s)

    def _release(self, step: int) -> None:
        state = self.state
        state.saves.ledger.close(step)
        state.command(Release(timeline=state.layout.timeline, step=step, noted=state.choices.end))

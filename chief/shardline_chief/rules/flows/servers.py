"""Reports of the servers, and what follows when an order fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from shardline.core.orders import Phase
from shardline.core.status import PsStatus, ShardStatus
from shardline.errors import FencedError, InternalError, ShardlineError, UnreachableError
from shardline_chief.rules.actions import AskStatus, Lead, Release
from shardline_chief.rules.events import UNHEARD, EndAsked, OrderRefused, ServerLost, ShardsTold, Stage, Tick
from shardline_chief.rules.state.outbox import Pending
from shardline_chief.rules.state.state import State

log = logging.getLogger("shardline_chief.rules.servers")

REPEATED_CHOICES = 4096
"""Most choices that the lead may repeat in every heartbeat between two checkpoints."""


class Servers:
    def __init__(self, state: State) -> None:
        self.state = state
        self._failed: set[str] = set()
        """Servers that reported a fatal failure."""

    def told(self, task: str, status: PsStatus, *, asked: bool) -> None:
        """A server reported its status, in a heartbeat or as an answer.

        Answers come in the order of the commands; a heartbeat may be older than a command that changed everything.
        """
        state, layout = self.state, self.state.layout
        if layout.plan is None or state.ended:
            return
        state.figures.traffic[task] = status.traffic
        if status.timeline == layout.timeline:
            filled = [number for number, shard in enumerate(layout.plan.shards) if shard.buckets]
            shards = tuple(shard for shard in status.shards if shard.shard in filled)
            state.progress.shards.update({shard.shard: shard for shard in shards})
            state.saves.ledger.observe(shards)
            self._note_choices(shards)
            state.emit(ShardsTold(task, shards))
        elif state.stage in UNHEARD:
            # Decided once all servers have been heard.
            return
        elif state.phase in (Phase.RUNNING, Phase.STOPPING) and any(p.task == task for p in layout.placement):
            if asked:
                at = f"timeline {status.timeline:#x}" if status.timeline else "nothing"
                state.emit(ServerLost(task, f"{task} has {at} instead of timeline {layout.timeline:#x}"))
            else:
                state.outbox.ask_status()
        if status.failure and task not in self._failed:
            self._failed.add(task)
            state.emit(EndAsked(status.failure, InternalError.exit_code))

    def _note_choices(self, shards: Sequence[ShardStatus]) -> None:
        """Record whose gradients made the steps that the lead has closed since it last reported."""
        state = self.state
        for shard in shards:
            news = state.choices.news(shard.choices)
            if news.made:
                state.choices.add(news, state.work.assignment)
                state.record("chosen", first=news.first, width=news.width, made=news.packed(news.width).hex())
            if len(shard.choices.made) > REPEATED_CHOICES:
                # Checkpoints are rare, or there are none: have the lead stop repeating what is noted.
                state.command(Release(timeline=state.layout.timeline, step=0, noted=state.choices.end))

    def failed(self, pending: Pending, errors: Mapping[str, ShardlineError]) -> None:
        """An order failed on some servers. One that doesn't answer is lost."""
        state, order = self.state, pending.order
        if isinstance(order, (AskStatus, Release)):
            return
        if pending.timeline != state.layout.timeline or state.ended:
            # The servers were lost since then; their new processes have nothing to do with this order.
            log.debug("%s of timeline %#x: %s", type(order).__name__, pending.timeline, errors)
            return
        fenced = [str(error) for _, error in sorted(errors.items()) if isinstance(error, FencedError)]
        if fenced and isinstance(order, Lead):
            state.resign(f"{fenced[0]}. Another chief leads this job, so this one ends")
            return
        silent = {task: error for task, error in errors.items() if isinstance(error, UnreachableError)}
        for task, why in sorted(silent.items()):
            state.emit(ServerLost(task, f"{task} did not answer: {why}"))
        if not silent:
            state.emit(OrderRefused(order, errors))

    def refused(self, event: OrderRefused, now_s: float) -> None:
        """End the job: after a refused order for which no rule knew another way, nothing is certain."""
        _, error = sorted(event.errors.items())[0]
        self.state.end(error.exit_code, str(error), now_s)

    def poll(self, event: Tick, now_s: float) -> None:
        """Ask for the status instead of waiting for heartbeats, where the job waits for what servers report."""
        state, progress = self.state, self.state.progress
        last = state.phase is Phase.RUNNING and progress.stop_step > 0
        if (
            state.stage in (Stage.FIRST_CUT, Stage.REACHING, Stage.CUTTING)
            or (state.stage is Stage.INITIALIZING and state.work.initializer)
            or (last and progress.stop_step <= progress.step_max + 1)
        ):
            state.outbox.ask_status()

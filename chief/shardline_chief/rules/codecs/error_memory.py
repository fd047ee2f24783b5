"""What follows when what a worker keeps is lost with it: the error memory of a codec, or the optimizer's state.

With error_memory="exact", no replica has any at a checkpoint, so the job goes back to one and ends in the same bits. A
replica that moves because of a join costs as much. With "reset" the job goes on without it, and this is counted
(docs/codecs.md, error feedback). Where workers run the optimizer (apply="worker"), its state is in checkpoints.
"""

from __future__ import annotations

from shardline_chief.rules.events import Progressed, TrainerLost
from shardline_chief.rules.flows.recovery import Recovery
from shardline_chief.rules.state.state import State


class ErrorMemory:
    """Rules for lost error memory."""

    def __init__(self, state: State, recovery: Recovery) -> None:
        self.state = state
        self.recovery = recovery

    def worker_lost(self, event: TrainerLost, now_s: float) -> None:
        """Where workers push for themselves, a worker's memory goes with it."""
        if self.state.remembers and not self.state.mode.assigns_replicas:
            self._dropped(event.member.task, 1)

    def moved(self, event: Progressed, now_s: float) -> bool:
        """Other processes have taken over replicas. True: the job goes back."""
        state, moved = self.state, sorted(self.state.work.moved)
        state.work.moved.clear()
        if not moved or not (state.remembers or state.applied):
            return False
        which = f"replica{'s' if len(moved) > 1 else ''} {', '.join(map(str, moved))}"
        if not state.returns or self.recovery.hopeless() or state.saves.checkpoint_step < 0:
            if state.remembers:
                self._dropped(which, len(moved))
            return False
        if state.applied:
            why = f"{which} moved to a worker that does not have the optimizer's state (apply is 'worker')"
        else:
            why = f"the error memory of {which} is lost (error_memory is 'exact')"
        self.recovery.again(why, now_s)
        return True

    def _dropped(self, whose: str, count: int) -> None:
        self.state.figures.dropped_memories += count
        self.state.record("memory_dropped", count=count)
        self.state.say(
            "memory_dropped",
            f"the error memory of {whose} is dropped: what it still owed is not sent",
            "warning",
        )

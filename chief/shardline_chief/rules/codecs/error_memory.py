"""What follows when what a worker keeps is lost with it: a codec's error memory, the optimizer's state, a pipeline.

With error_memory="exact", no replica has any at a checkpoint, so the job goes back to one and ends in the same bits. A
replica that moves because of a join costs as much. With "reset" the job goes on without it, and this is counted
(docs/codecs.md, error feedback). Where workers run the optimizer (apply="worker"), its state is in checkpoints. Where a
pipeline has no flush, stages are at different steps, which only a checkpoint brings together.
"""

from __future__ import annotations

from shardline import division
from shardline.core.settings import WORKER
from shardline.errors import TaskLostError
from shardline_chief.rules.events import EndAsked, Progressed, Stage, TrainerLost
from shardline_chief.rules.flows.ending import Ending
from shardline_chief.rules.flows.recovery import Recovery
from shardline_chief.rules.state.state import State


def applied(state: State) -> bool:
    """Whether workers run the optimizer on what the servers sum, so that only checkpoints have its state."""
    return state.job is not None and state.job.apply == WORKER


def unbroken(state: State) -> bool:
    """Whether the job has a pipeline of which no stage can begin a step again."""
    return state.job is not None and division.of(state.job).goes_back


def goes_back(state: State) -> bool:
    """Whether the job may have to go back to a checkpoint when replicas have moved."""
    return applied(state) or unbroken(state) or state.exact_memory


class ErrorMemory:
    def __init__(self, state: State, recovery: Recovery, ending: Ending) -> None:
        self.state = state
        self.recovery = recovery
        self.ending = ending

    def worker_lost(self, event: TrainerLost, now_s: float) -> None:
        """Where workers push for themselves, a worker's memory goes with it."""
        if self.state.remembers and not self.state.mode.assigns_replicas:
            self._dropped(event.member.task, 1)

    def moved(self, event: Progressed, now_s: float) -> bool:
        """Other processes have taken over replicas. True: the job goes back."""
        state = self.state
        moved, unready = sorted(state.work.moved), sorted(state.work.unready)
        state.work.moved.clear()
        hopeless = self.recovery.hopeless()
        can = not hopeless and state.saves.checkpoint_step >= 0
        if moved and unbroken(state):
            assert state.job is not None
            self._again_or_end(
                f"{division.of(state.job).named(moved)} moved, and what was in the pipeline is lost", now_s
            )
            return True
        if moved and state.exact_memory and can:
            assert state.job is not None
            whose = division.of(state.job).named(moved)
            self.recovery.again(f"the error memory of {whose} is lost (error_memory is 'exact')", now_s)
            return True
        self._drop(moved)
        if not unready or not applied(state):
            return False
        assert state.job is not None
        named = division.of(state.job).named(unready)
        why = f"the worker that takes {named} over lacks the optimizer's state (apply is 'worker')"
        if not can and not hopeless:
            # Without a checkpoint yet it waits for the first one.
            return False
        self._again_or_end(why, now_s)
        return True

    def moved_at_end(self, event: Progressed, now_s: float) -> bool:
        """The same while the job goes to its last step, which it would never reach, or with other bits.

        It ends once it trains again. A job that fails ends where it is.
        """
        state, work, ending = self.state, self.state.work, self.ending
        lacking = ((unbroken(state) or state.exact_memory) and work.moved) or (applied(state) and work.unready)
        if not lacking or ending.scoring.exit_code or state.saves.checkpoint_step < 0:
            if state.remembers:
                self._drop(sorted(work.moved))
                work.moved.clear()
            return False
        again = EndAsked(state.reason)
        ending.reopen()
        ending.early, state.stage = again, Stage.TRAINING
        return self.moved(event, now_s)

    def _again_or_end(self, why: str, now_s: float) -> None:
        """Go back; where that is not possible, end the job: the others would wait for ever."""
        state, hopeless = self.state, self.recovery.hopeless()
        if not hopeless:
            self.recovery.again(why, now_s)
            return
        advice = state.saves.how_to_go_on()
        state.end(TaskLostError.exit_code, f"{why}, so the job ends{hopeless}. {advice}", now_s)

    def _drop(self, moved: list[int]) -> None:
        """Count the error memory of replicas that have moved, if they had any."""
        if moved and self.state.remembers:
            assert self.state.job is not None
            self._dropped(division.of(self.state.job).named(moved), len(moved))

    def _dropped(self, whose: str, count: int) -> None:
        self.state.figures.dropped_memories += count
        self.state.record("memory_dropped", count=count)
        self.state.say(
            "memory_dropped", f"the error memory of {whose} is dropped: what it still owed is not sent", "warning"
        )

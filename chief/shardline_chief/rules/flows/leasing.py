"""Hand out batches as leases, if the mode uses them, and notice when the job is done."""

from __future__ import annotations

from shardline.core.orders import Phase
from shardline_chief.rules.events import EndAsked, Progressed, Stage
from shardline_chief.rules.messages import LeaseAnswer
from shardline_chief.rules.state.leases import Lease, Leases
from shardline_chief.rules.state.state import State

RETRY_S = 0.2
"""Seconds until a worker without a lease asks again: a dead worker's leases may have been returned."""


class Leasing:
    """Rules for handing out the remaining work."""

    def __init__(self, state: State) -> None:
        self.state = state

    def lease(self, task: str, incarnation: int, done: tuple[int, ...]) -> LeaseAnswer:
        """Note finished leases and hand out the next batches."""
        state, leases = self.state, self.state.work.leases
        if not state.tasks.members.current(task, incarnation, lambda role: role.trains):
            return LeaseAnswer(
                outcome="FENCED", reason=f"{task} incarnation {incarnation:#x} is not a live task that trains"
            )
        if leases is None:
            return LeaseAnswer(outcome="REFUSED", reason=f"this job is {state.mode.batches.why_no_lease}")
        noted = [number for number in done if leases.finish(number, incarnation)]
        answer, issued = self._next(leases, incarnation)
        if noted or issued is not None:
            # Journalled before the answer is sent: the next chief neither takes the lease back nor gives it to another
            # worker.
            batches = [issued.number, issued.first, issued.count] if issued is not None else None
            state.record("lease", incarnation=incarnation, done=noted, issued=batches)
        return answer

    def _next(self, leases: Leases, incarnation: int) -> tuple[LeaseAnswer, Lease | None]:
        """The answer, and the lease if it is a new one."""
        state = self.state
        if leases.all_done or state.phase in (Phase.STOPPING, Phase.ENDED):
            return LeaseAnswer(outcome="STOPPED", reason=state.reason or "all batches are done"), None
        there = leases.held_by(incarnation)
        lease = there
        if state.stage is not Stage.TRAINING or state.tasks.too_few():
            lease = None
        elif lease is None:
            lease = leases.take(incarnation, workers=len(state.tasks.trainers()))
        if lease is None:
            return LeaseAnswer(outcome="WAITING", reason="every remaining batch is leased", retry_after_s=RETRY_S), None
        answer = LeaseAnswer(outcome="SERVED", lease=lease.number, first=lease.first, count=lease.count)
        return answer, lease if lease is not there else None

    def end_if_complete(self, event: Progressed, now_s: float) -> None:
        if self._complete():
            self.state.emit(EndAsked("done", done=True))

    def _complete(self) -> bool:
        state, progress, leases = self.state, self.state.progress, self.state.work.leases
        if state.script:
            return len(state.tasks.finished) >= state.settings.trainers
        if leases is not None:
            return leases.all_done
        return progress.all_told and progress.stop_step > 0 and progress.step >= progress.stop_step

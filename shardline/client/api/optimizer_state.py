"""State dicts of an optimizer with its state on the parameter servers: their contents and which ones can be loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardline.client.step.worker_methods import WorkerMethods
from shardline.errors import JobError

KEY = "shardline"
"""Key in a state dict for the step and incarnation at which the servers hold the rest."""


@dataclass(frozen=True, kw_only=True)
class TrainingPosition:
    """A job's position as one worker sees it."""

    step: int
    """Steps done; in asynchronous mode, the fewest updates of any shard."""
    ahead: int = 0
    """Calls of optimizer.step() since then that the servers' state does not contain: those of an unfinished round, and
    those after the end of the job."""
    incarnation: int
    """The worker's incarnation."""
    one_step: bool
    """All servers are at the same step of the job."""

    def stamp(self) -> dict[str, int]:
        """The entry for a state dict made now."""
        return {"step": self.step, "ahead": self.ahead, "incarnation": self.incarnation}


def position_of(methods: WorkerMethods, incarnation: int, *, lost: int) -> TrainingPosition:
    """A worker's current position. lost: steps that its loop has taken since the job ended."""
    one_step = methods.half.shares_steps
    return TrainingPosition(
        step=methods.half.job_step,
        ahead=lost + (methods.ticks.tick if one_step else 0),
        incarnation=incarnation,
        one_step=one_step,
    )


def check_loadable(state_dict: Mapping[str, Any], here: TrainingPosition) -> bool:
    """Refuse a state dict that does not match the servers' state. Returns whether an earlier process saved it."""
    names = state_made(state_dict.get("state", {}).values())
    if names:
        raise JobError(
            f"this state_dict contains {names}, but the state of this optimizer is on the servers, where a script "
            "can't "
            'load it: resume from the checkpoint of the job with --resume, or load the dict without its "state"'
        )
    stamp = state_dict.get(KEY)
    if stamp is None:
        return False
    step = int(stamp["step"])
    # Asynchronous workers save at any number of updates, so only a job that starts from scratch is certain not to
    # match.
    if step != here.step if here.one_step else (step > 0 and here.step == 0):
        raise JobError(
            f"this optimizer state was saved at step {step}, but the job and the optimizer state on its servers are "
            f"at step {here.step}: resume both from the same step. --resume uses the job's newest checkpoint "
            "(checkpoint_every=N writes one every N steps), resume_from_checkpoint= or ckpt_path= that of a Trainer"
        )
    if int(stamp["incarnation"]) == here.incarnation:
        return False
    if ahead := int(stamp.get("ahead", 0)):
        raise JobError(
            f"this optimizer state is ahead of the job: its loop had called optimizer.step() {ahead} times since step "
            f"{step}, after the end of the job or within a round of its cadence, and the servers have nothing of that. "
            "Resume from a state that was saved when a step of the job was done"
        )
    return True


def check_unused(states: Iterable[Mapping[str, Any]], here: TrainingPosition) -> None:
    """Refuse an optimizer that has already stepped if the job starts at step 0. Raises JobError."""
    names = state_made(states)
    if names and here.step == 0:
        raise JobError(
            f"the optimizer passed to attach() has already made steps ({names}), but the servers start without that "
            "state: pass a new optimizer. --resume restores the state of the job"
        )


def state_made(states: Iterable[Mapping[str, Any]]) -> str:
    """Describe the state in a torch optimizer, such as "momentum_buffer of 4 parameters"; "" if there is none."""
    found = [
        {key for key, value in state.items() if value is not None}
        for state in states
        # Adagrad creates its accumulators before the first step.
        if float(state.get("step", 1.0)) > 0.0
    ]
    found = [keys for keys in found if keys]
    return f"{', '.join(sorted(set().union(*found)))} of {len(found)} parameters" if found else ""

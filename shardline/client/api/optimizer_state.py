"""State dicts of an optimizer whose state lies on the parameter servers: what they say, and which ones fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardline.errors import JobError

KEY = "shardline"
"""Where a state dict says who holds the rest."""


@dataclass(frozen=True, kw_only=True)
class TrainingPosition:
    """Where a job is, for whom."""

    step: int
    """Steps made; in asynchronous mode updates of the shard that has the fewest."""
    incarnation: int
    """Of the worker that says so."""
    one_step: bool
    """All servers are at the same step of the job."""

    def stamp(self) -> dict[str, int]:
        """For a state dict that is made here and now."""
        return {"step": self.step, "incarnation": self.incarnation}


def check_loadable(state_dict: Mapping[str, Any], here: TrainingPosition) -> bool:
    """Refuse what does not fit the state that the servers hold. Returns whether an earlier process saved it.

    Raises JobError.
    """
    names = state_made(state_dict.get("state", {}).values())
    if names:
        raise JobError(
            f"this state_dict holds {names}, and this optimizer's state is on the servers, where a script can't put "
            'it: go on with the job\'s own checkpoint by --resume, or load the dict without its "state"'
        )
    stamp = state_dict.get(KEY)
    if stamp is None:
        return False
    step = int(stamp["step"])
    # Asynchronous workers save at any number of updates; only a job that begins anew can't be meant.
    if step != here.step if here.one_step else (step > 0 and here.step == 0):
        raise JobError(
            f"this optimizer state was saved at step {step}, and the job is at step {here.step}, of which the servers "
            "hold momentum and the like: go on from one step in both. --resume takes the job's newest checkpoint "
            "(checkpoint_every=N makes one at each N steps), resume_from_checkpoint= or ckpt_path= that of a Trainer"
        )
    return int(stamp["incarnation"]) != here.incarnation


def check_unused(states: Iterable[Mapping[str, Any]], here: TrainingPosition) -> None:
    """Refuse an optimizer that has made steps where the servers begin. Raises JobError."""
    names = state_made(states)
    if names and here.step == 0:
        raise JobError(
            f"the optimizer given to attach() has made steps already ({names}), and the servers begin without that "
            "state: give it a new one. A job goes on with its own state by --resume"
        )


def state_made(states: Iterable[Mapping[str, Any]]) -> str:
    """What steps have left in a torch optimizer's state, such as "momentum_buffer of 4 parameters"; "" for nothing."""
    found = [
        {key for key, value in state.items() if value is not None}
        for state in states
        # Adagrad makes its accumulators before the first step.
        if float(state.get("step", 1.0)) > 0.0
    ]
    found = [keys for keys in found if keys]
    return f"{', '.join(sorted(set().union(*found)))} of {len(found)} parameters" if found else ""

"""What was saved, what is being saved, and what the job can go back to."""

from __future__ import annotations

from shardline_chief.rules.actions import Resume
from shardline_chief.rules.state.cuts import CutLedger


class Checkpoints:
    """Cuts and checkpoints."""

    def __init__(self, resume: Resume | None) -> None:
        self.resume = resume
        """The checkpoint that the timeline in force began with."""
        self.ledger = CutLedger(0)
        self.saving: int | None = None
        """Step that is being saved."""
        self.checkpoint_step = -1
        """Of the newest checkpoint; -1 = none of this run."""
        self.checkpoint_path = ""
        self.failed_saves = 0
        """Checkpoints that could not be written since the last good one."""
        self.least_interval = 0
        """Steps that must lie between checkpoints at least, see intervals.py; 0 while that isn't known."""
        self.final_step = -1
        """Of the last checkpoint of the run, once that is decided."""
        self.cutting = False
        """Servers are copying their shards, each at its own instant."""

    def newest(self) -> tuple[int, str]:
        """Step and folder of the newest checkpoint; (-1, "") where there is none yet."""
        if self.checkpoint_step < 0 and self.resume is not None:
            return self.resume.step, self.resume.path
        return self.checkpoint_step, self.checkpoint_path

    def last_good(self) -> str:
        """The newest checkpoint, as a phrase."""
        step, path = self.newest()
        return f"the last good checkpoint is of step {step}: {path}" if step >= 0 else "there is no checkpoint yet"

    def how_to_go_on(self) -> str:
        """Where to go on from after a loss."""
        step, path = self.newest()
        if step <= 0:
            return "No checkpoint holds a step yet; start the job again."
        return f"Go on with --resume from step {step}: {path}"

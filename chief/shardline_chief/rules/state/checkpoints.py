"""What has been saved, what is being saved, and what the job can roll back to."""

from __future__ import annotations

from shardline_chief.rules.actions import Resume
from shardline_chief.rules.state.cuts import CutLedger


class Checkpoints:
    def __init__(self, resume: Resume | None) -> None:
        self.resume = resume
        """The checkpoint that the current timeline began with."""
        self.ledger = CutLedger(0)
        self.saving: int | None = None
        """Step being saved; None if none is."""
        self.checkpoint_step = -1
        """Step of the newest checkpoint; -1 = none in this run."""
        self.checkpoint_path = ""
        self.failed_saves = 0
        """Saves that failed since the last successful one."""
        self.least_interval = 0
        """Smallest workable number of steps between checkpoints, see intervals.py; 0 until known."""
        self.final_step = -1
        """Step of the last checkpoint of the run, once decided; -1 = none."""
        self.cutting = False
        """Servers are copying their shards one by one."""
        self.furthest_step = -1
        """Highest step of a checkpoint so far, also of one that the job has gone back behind; -1 = none."""
        self.commits = 0
        """How many checkpoints there have been."""
        self.scores = 0
        """How many scores of them were taken."""

    def committed(self, step: int, path: str) -> None:
        self.checkpoint_step, self.checkpoint_path = step, path
        self.furthest_step = max(self.furthest_step, step)
        self.commits += 1

    def newest(self) -> tuple[int, str]:
        """Step and folder of the newest checkpoint; (-1, "") if there is none yet."""
        if self.checkpoint_step < 0 and self.resume is not None:
            return self.resume.step, self.resume.path
        return self.checkpoint_step, self.checkpoint_path

    def last_good(self) -> str:
        """The newest checkpoint, as a phrase for messages."""
        step, path = self.newest()
        return f"the last good checkpoint is of step {step}: {path}" if step >= 0 else "there is no checkpoint yet"

    def how_to_go_on(self) -> str:
        """How to resume after a loss, as a sentence for messages."""
        step, path = self.newest()
        if step <= 0:
            return "No checkpoint after step 0 exists yet; start the job again."
        return f"Continue with --resume from step {step}: {path}"

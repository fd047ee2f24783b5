"""The run that `--replay` repeats: its job, and whose gradients made each of its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shardline import cadence, consistency
from shardline.consistency import Gives
from shardline.core.choices import Choices
from shardline.core.spec import JobSpec, differences
from shardline.errors import UsageError
from shardline_chief.io.journal import read_entries
from shardline_chief.rules.replay import replay

FREE = ("name", "checkpoint_every", "checkpoint_keep", "best_metric", "best_is_lowest")
"""Settings that change no step."""


@dataclass(frozen=True)
class ReplayedRun:
    path: str
    job: JobSpec
    choices: Choices
    earlier: tuple[JobSpec, ...] = ()
    """Jobs from which it was resumed."""

    def check(self, job: JobSpec) -> None:
        """Raise UsageError if this job can't repeat the run."""
        mode = consistency.of(job.consistency)
        Gives.SAME_BITS.need(mode, "--replay repeats synchronous runs only", "leave out --replay", UsageError)
        if cadence.of(job).outer_rule is not None:
            raise UsageError(
                f"--replay {self.path}: with cadence {job.cadence} the bits depend on what workers keep from step to "
                "step, and so on who died, which no journal has. Leave out --replay"
            )
        for part in (self.job, *self.earlier):
            # More or fewer steps of the same training are no other job; what the schedule makes of them is compared.
            same = {name: getattr(part, name) for name in (*FREE, "steps")}
            if found := differences(replace(job, **same), part, where="there"):
                which = "that run" if part is self.job else "a part of that run, from which it was resumed,"
                raise UsageError(
                    f"--replay {self.path}: {which} was of another job ({'; '.join(found)}); start the job as it was "
                    "then"
                )
        if Gives.EVERY_GRADIENT in mode.gives:
            return
        if job.script:
            raise UsageError(
                f"--replay {self.path}: a script can't repeat choices, since it may make more steps than the run did; "
                "use a job file"
            )
        if self.choices.first > 0 or self.choices.end < job.steps:
            raise UsageError(
                f"--replay {self.path}: its journal has the choices of steps {self.choices.first} to "
                f"{self.choices.end - 1}, but the job needs those of steps 0 to {job.steps - 1}; set --steps to what "
                "the run has done, or replay another run"
            )


def run_to_replay(folder: Path) -> ReplayedRun:
    """The newest run in an output folder. Raises UsageError if there is none."""
    known = replay(read_entries(folder / "chief", remedy="give --replay the --out of another run"))
    if known.job is None:
        raise UsageError(f"--replay {folder}: there is no run in it; give the --out of a run")
    return ReplayedRun(str(folder), known.job, known.choices, known.earlier)

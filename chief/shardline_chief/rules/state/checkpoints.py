"""What is saved, what is being saved, what the job can roll back to, and which cuts shards hold (1.7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardline import codecs
from shardline.checkpoint.compat import resume_changes
from shardline.core.image import WorkerSequence
from shardline.core.spec import JobSpec
from shardline.core.status import ShardStatus

if TYPE_CHECKING:
    from shardline.checkpoint import Checkpoint

UNREMARKABLE = ("name", "steps", "checkpoint_every", "checkpoint_keep", "best_metric", "best_is_lowest")
"""Settings that don't affect what a step computes: a resumed job may change them without a warning."""


@dataclass(frozen=True)
class Resume:
    """A checkpoint to resume from."""

    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        """Step (sync) or applied updates (async) it was taken at."""
        return self.checkpoint.step

    @property
    def path(self) -> str:
        """Path of its folder, for messages."""
        return str(self.checkpoint.path)

    @property
    def cursor(self) -> Mapping[str, Any]:
        """Finished leases, as the chief has handed out batches; those of as many updates where it has not."""
        leases = self.checkpoint.manifest.extra.get("leases")
        if isinstance(leases, dict):
            return leases
        return {"done": [[0, self.step]]} if self.step else {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Version of each shard of the plan that the checkpoint was written with."""
        return tuple(self.checkpoint.manifest.versions)

    @property
    def sequences(self) -> Sequence[Mapping[str, WorkerSequence]]:
        """For each shard of that plan: each worker's last push that it includes; empty where pushes have no numbers."""
        plan = self.checkpoint.plan
        return [self.checkpoint.sequences(plan, shard) for shard in range(len(plan.shards))]

    @property
    def owes(self) -> bool:
        """Whether replicas may have owed the servers something then, which is gone with their workers."""
        return codecs.owes_at(self.checkpoint.job, self.step)

    def check(self, job: JobSpec) -> Sequence[str]:
        """Settings in which the job differs from the checkpoint's job, one phrase each.

        Raises CheckpointError, naming the difference, if the checkpoint belongs to another job.
        """
        self.checkpoint.compatible(job)
        changes = resume_changes(self.checkpoint.job, job)
        return [phrase for path, phrase in changes.items() if path not in UNREMARKABLE]


class CutLedger:
    """Cuts held by the shards, as last reported: all shards can be fetched at a step, or none can."""

    def __init__(self, num_shards: int) -> None:
        """num_shards: number of shards that are not empty."""
        self._num_shards = num_shards
        self._shards: dict[int, ShardStatus] = {}
        self._passed: dict[int, int] = {}
        """step_min of each shard in the report before the last."""
        self._closed = -1
        """Highest step dealt with: its Release drops all cuts up to it."""
        self._reopened: set[int] = set()

    def observe(self, shards: Iterable[ShardStatus]) -> None:
        for shard in shards:
            if shard.shard in self._shards:
                self._passed[shard.shard] = self._shards[shard.shard].step_min
            self._shards[shard.shard] = shard

    def complete(self) -> list[int]:
        """Steps that all shards hold completely and that are still open, ascending."""
        if len(self._shards) < self._num_shards:
            return []
        held = [{cut.step for cut in shard.cuts if cut.complete and not cut.skipped} for shard in self._shards.values()]
        return sorted(step for step in set.intersection(*held) if self._open(step)) if held else []

    def lost(self) -> list[int]:
        """Steps that some shard holds or has begun and another has skipped: they can never become complete."""
        named = {cut.step for shard in self._shards.values() for cut in shard.cuts}
        return sorted(
            step
            for step in named
            if self._open(step) and any(self._left_out(shard, step) for shard in self._shards.values())
        )

    def _left_out(self, shard: ShardStatus, step: int) -> bool:
        mine = [cut for cut in shard.cuts if cut.step == step]
        if mine:
            return any(cut.skipped for cut in mine)
        # A bucket copies itself before it passes the step. Compared with the previous report, since a report isn't made
        # at one instant: the copy may have been made after its list of cuts was read and before its step was.
        return self._passed.get(shard.shard, 0) > step

    def _open(self, step: int) -> bool:
        return step > self._closed or step in self._reopened

    def close(self, step: int) -> None:
        """Committed or discarded: ignore later reports of it and earlier ones, sent before the Release arrived."""
        self._closed = max(self._closed, step)
        self._reopened = {again for again in self._reopened if again > step}

    def reopen(self, step: int) -> None:
        self._reopened.add(step)


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
        """Smallest workable number of steps between checkpoints, see least_interval(); 0 until known."""
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

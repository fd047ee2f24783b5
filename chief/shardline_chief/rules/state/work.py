"""Which task does which part of the training: replicas or leases of batches, and the first values."""

from __future__ import annotations

from collections.abc import Mapping

from shardline import division
from shardline.core.orders import StepReport
from shardline.core.spec import JobSpec
from shardline_chief.rules.state.leases import Leases


class Work:
    """Work assigned to the tasks that train."""

    def __init__(self) -> None:
        self.assignment: dict[int, str] = {}
        """Unit -> task: replicas, or parts of them that workers share; see shardline.division."""
        self.homes: dict[int, str] = {}
        """The first task of each unit that this chief has known."""
        self.given: dict[int, set[int]] = {}
        """Units that each living incarnation has or had."""
        self.leases: Leases | None = None
        """None unless the chief hands out batches."""
        self.postings = 0
        """Changes of who has which unit."""
        self.holders: dict[int, int] = {}
        """Incarnation that has each unit, or had it last."""
        self.moved: set[int] = set()
        """Units that another life has taken over since the state of all of them was last restored."""
        self.unready: set[int] = set()
        """Those of them whose new life had none of the same stage, so it has not followed the training."""
        self.initializer = ""
        """Task that sets the first values; empty if none is chosen."""
        self.most_trainers = 0
        """Highest number of tasks that trained at the same time."""

    def has_given(self, incarnation: int) -> bool:
        """Whether this incarnation has, or had, replicas or leases."""
        return bool(self.given.get(incarnation)) or (self.leases is not None and self.leases.has_given(incarnation))

    def covers(self, incarnation: int, report: StepReport, replicas: int) -> bool:
        """Whether a reported step belongs to the work that this incarnation was given. replicas: of the job."""
        if self.leases is not None:
            return self.leases.has_given_batch(incarnation, report.step)
        return any(unit % replicas == report.replica for unit in self.given.get(incarnation, ()))

    def reassign(self, lives: Mapping[str, int], job: JobSpec, *, machines: Mapping[str, str], own: bool) -> list[str]:
        """Assign the job's units to these tasks; returns a phrase for each task that gained some.

        lives: incarnation by task. machines: host by task. own: each worker keeps the replica of its own index.
        """
        before, had = self.assignment, dict(self.holders)
        if own:
            self.assignment = {int(task.rpartition("/")[2]): task for task in lives}
        else:
            self.assignment = division.of(job).assign(before, machines, self.homes)
        self.homes = {**self.assignment, **self.homes}
        self.given = {life: self.given.get(life, set()) for life in lives.values()}
        # Who has the optimizer's state, where workers have it: those that have, or had last, a replica of the stage.
        ready = {(unit // max(1, job.replicas), life) for unit, life in self.holders.items()}
        gained: dict[str, list[int]] = {}
        for replica, task in sorted(self.assignment.items()):
            self.given[lives[task]].add(replica)
            if self.holders.setdefault(replica, lives[task]) != lives[task]:
                self.holders[replica] = lives[task]
                self.moved.add(replica)
                if (replica // max(1, job.replicas), lives[task]) not in ready:
                    self.unready.add(replica)
            if before.get(replica) != task:
                gained.setdefault(task, []).append(replica)
        self.postings += self.holders != had
        named = division.of(job).named
        return [f"{named(numbers)} to {task}" for task, numbers in gained.items()]

"""Who does which part of the training: replicas or leases of batches, and the first values."""

from __future__ import annotations

from collections.abc import Sequence

from shardline_chief.rules.state.assignment import assign
from shardline_chief.rules.state.leases import Leases


class Work:
    """What is given out to those that train."""

    def __init__(self) -> None:
        self.assignment: dict[int, str] = {}
        """Replica -> task."""
        self.leases: Leases | None = None
        """Where the chief hands out batches."""
        self.initializer = ""
        """Task that sets the first values."""
        self.most_trainers = 0
        """Most tasks that trained at a time."""

    def reassign(self, tasks: Sequence[str], replicas: int, *, own: bool) -> list[str]:
        """Give the replicas to these tasks; returns a phrase for each whose replicas grew. own: each has its own."""
        before = self.assignment
        if own:
            self.assignment = {int(task.rpartition("/")[2]): task for task in tasks}
        else:
            self.assignment = assign(before, tasks, replicas)
        gained: dict[str, list[int]] = {}
        for replica, task in sorted(self.assignment.items()):
            if before.get(replica) != task:
                gained.setdefault(task, []).append(replica)
        return [f"{_replicas(numbers)} to {task}" for task, numbers in gained.items()]


def _replicas(numbers: list[int]) -> str:
    return f"replica{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"

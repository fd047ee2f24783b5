"""The roles of a cluster's tasks: one row each, from which commands, rights, metrics and the chief's rules are made.

A role from outside the library is one row too, in a file that `--plugin` names:

    ROLES.add(Role(name="probe", about="Read what the servers hold.", sends=True, run=run))

It then has the command `shardline probe`, a place in cluster.json and in `shardline train --tasks probe=2`, a row in
the status, and whatever its traits say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardline import plugins
from shardline.errors import UsageError, nearest

ENTRY_POINTS = "shardline.roles"
"""Entry points of the packages that run the roles declared here."""
_WORD = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Role:
    """What a task of this role does, and what it may do. A job runs without tasks that neither train nor hold."""

    name: str
    about: str
    """For --help."""
    leads: bool = False
    """Commands the servers; one task, whose address all others know."""
    holds: bool = False
    """Holds shards of the parameters, as commanded by the chief."""
    trains: bool = False
    """Runs replicas of the job."""
    scores: bool = False
    """Scores checkpoints."""
    sends: bool = False
    """May push to and pull from tasks that hold shards. Who trains may."""
    computes: bool = False
    """Reads the job file and settings of the job."""
    spare: int = 0
    """Number of tasks that may join although the cluster spec has fewer."""
    metrics: tuple[str, ...] = ()
    """Metrics that its tasks have beside those of all roles; the library's roles are named in the table of metrics."""
    run: Callable[[Any], int] | None = None
    """Runs one task with a RoleConfig; returns its exit code. None: that of an installed package."""

    @property
    def commands(self) -> bool:
        """Whether its tasks give or obey the chief's commands, and have the admin token."""
        return self.leads or self.holds

    @property
    def exchanges(self) -> bool:
        """Whether its tasks send pushes or answer them, over lanes."""
        return self.holds or self.trains or self.sends

    @property
    def needed(self) -> bool:
        """Whether a job needs its tasks."""
        return self.commands or self.trains

    @property
    def talks(self) -> bool:
        """Whether its tasks push to and pull from those that hold shards, which must know their lives."""
        return self.trains or self.sends

    @property
    def optional(self) -> bool:
        """Whether its tasks are started with `--tasks`, and nobody waits for them."""
        return not (self.needed or self.scores)

    def runner(self) -> Callable[[Any], int]:
        """The function that runs a task. Raises UsageError if no installed package has it."""
        run: Callable[[Any], int] = self.run or plugins.installed(ENTRY_POINTS, self.name, f"the role {self.name!r}")
        return run


class Roles:
    """The roles by name, in the order in which they were added; those of plugins are loaded when they are asked for."""

    def __init__(self, *rows: Role) -> None:
        self._rows = {row.name: row for row in rows}
        self.declared = tuple(self._rows)
        """Names of the library's own."""

    def add(self, row: Role) -> Role:
        """Add a role. Raises UsageError for a name that is taken or invalid."""
        if not _WORD.fullmatch(row.name):
            raise UsageError(f"the role {row.name!r} has no name for a command; use lower-case letters")
        if self._rows.setdefault(row.name, row) is not row:
            raise UsageError(f"the role {row.name!r} already exists")
        return row

    def __iter__(self) -> Iterator[str]:
        plugins.load()
        return iter(tuple(self._rows))

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in tuple(self)

    def __getitem__(self, name: str) -> Role:
        """The row of a role. Raises UsageError listing the existing ones."""
        if name not in self:
            raise UsageError(f"role {name!r} is unknown; it must be one of {', '.join(self)}{nearest(name, self)}")
        return self._rows[name]

    def having(self, trait: Callable[[Role], bool]) -> tuple[str, ...]:
        return tuple(name for name in self if trait(self._rows[name]))


ROLES = Roles(
    Role(
        name="chief",
        about="Coordinate the job: admit tasks, write checkpoints and logs.",
        leads=True,
        trains=True,
        computes=True,
    ),
    Role(name="ps", about="Hold shards of the parameters and apply all updates.", holds=True, spare=64),
    Role(name="worker", about="Train replicas of the job.", trains=True, computes=True),
    Role(
        name="aggregator",
        about="Sum the pushes of the workers of a rack, and pull once for all of them.",
        sends=True,
    ),
    # With TF_CONFIG an evaluator may be missing from the cluster spec.
    Role(name="evaluator", about="Score every checkpoint.", scores=True, computes=True, spare=8),
)


def trainers() -> tuple[str, ...]:
    """Roles that run replicas: workers, and a chief that trains."""
    return ROLES.having(lambda role: role.trains)

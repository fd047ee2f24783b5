"""Which tasks take part: living tasks, what they run on, which have finished."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.roles import trainers
from shardline_chief.rules.actions import Members
from shardline_chief.rules.state.membership import Member, Membership
from shardline_chief.rules.state.settings import ChiefSettings


class Tasks:
    def __init__(self, settings: ChiefSettings) -> None:
        self.settings = settings
        timeouts = settings.timeouts
        self.members = Membership(settings.term, suspect_s=timeouts.suspect_s, dead_s=timeouts.dead_s)
        self.machine: Mapping[str, str] = {}
        """Fingerprint of the first machine that trains; the others must equal it if results are bit-exact."""
        self.finished: set[str] = set()
        self.suspects: dict[str, tuple[str, ...]] = {}
        """Servers that a task can't reach, by task."""
        self.steps: dict[str, int] = {}
        """Last reported step, by task."""
        self.alone_since_s: float | None = None
        """Since when too few tasks train; None if enough do."""

    def trainers(self) -> list[Member]:
        """Living tasks that run replicas."""
        return self.members.living(*trainers())

    def working(self) -> list[Member]:
        """Living trainers that have not finished."""
        return [member for member in self.trainers() if member.task not in self.finished]

    def too_few(self) -> bool:
        """Whether fewer tasks train than the job's minimum; it then pauses."""
        return len(self.trainers()) < self.settings.min_workers

    def table(self, timeline: int) -> Members:
        """The order that sends the living trainers to every server."""
        trainers = self.trainers()
        return Members(
            timeline=timeline,
            members={member.task: member.incarnation for member in trainers},
            keys={member.task: member.key for member in trainers},
        )

    def missing_ps(self) -> list[int]:
        """Indices of parameter servers that are missing."""
        there = {member.index for member in self.members.living("ps")}
        return [index for index in range(len(self.settings.ps)) if index not in there]

    def expected(self) -> dict[str, int]:
        """Number of tasks in the cluster spec, by role."""
        settings = self.settings
        return {
            "ps": len(settings.ps),
            "worker": settings.workers,
            "chief": int(settings.chief_trains),
            "evaluator": settings.evaluators,
            **settings.others,
        }

    def to_come(self) -> str:
        """Tasks of this cluster that have never joined, as a phrase; empty if all have."""
        # Used when the job needs no tasks: one that came and left is not awaited.
        came = [member.role for member in self.members]
        lacking = {role: count - came.count(role) for role, count in self.expected().items()}
        return ", ".join(f"{count} {role}" for role, count in lacking.items() if count > 0)

    def awaited(self) -> list[str]:
        """Missing tasks of the cluster spec, except evaluators, which nothing waits for."""
        return [ps_at(index, self.settings.ps[index]) for index in self.missing_ps()] + self.missing_trainers()

    def missing_trainers(self) -> list[str]:
        settings = self.settings
        trainers = {member.task for member in self.trainers()}
        names = [*(["chief/0"] if settings.chief_trains else []), *(f"worker/{n}" for n in range(settings.workers))]
        # A worker beyond the cluster spec may have replaced one that is in it.
        lacking = max(0, settings.trainers - len(trainers))
        return [name for name in names if name not in trainers][:lacking]


def ps_at(index: int, address: str) -> str:
    """A ps that never joined, for messages. Port 0: it would have sent its address with its Join."""
    return f"ps/{index} (address not known yet)" if address.endswith(":0") else f"ps/{index} at {address}"

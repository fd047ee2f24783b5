"""Who takes part: living tasks, what they run on, who has finished."""

from __future__ import annotations

from collections.abc import Mapping

from shardline_chief.rules.actions import Members
from shardline_chief.rules.messages import TRAINERS
from shardline_chief.rules.state.membership import Member, Membership
from shardline_chief.rules.state.settings import ChiefSettings


class Tasks:
    """The tasks of the job."""

    def __init__(self, settings: ChiefSettings) -> None:
        self.settings = settings
        timeouts = settings.timeouts
        self.members = Membership(settings.term, suspect_s=timeouts.suspect_s, dead_s=timeouts.dead_s)
        self.machine: Mapping[str, str] = {}
        """Fingerprint of the first task that trains; the others' must be equal where results are bit-exact."""
        self.finished: set[str] = set()
        self.suspects: dict[str, tuple[str, ...]] = {}
        """By task, those that it does not hear."""
        self.steps: dict[str, int] = {}
        """By task, the step that it told last."""
        self.alone_since_s: float | None = None
        """Since when too few train."""

    def trainers(self) -> list[Member]:
        """Living tasks that run replicas."""
        return self.members.living(*TRAINERS)

    def working(self) -> list[Member]:
        """Those of them that have not finished their part."""
        return [member for member in self.trainers() if member.task not in self.finished]

    def too_few(self) -> bool:
        """Whether fewer tasks train than the job wants at least; it then stands still."""
        return len(self.trainers()) < self.settings.min_workers

    def table(self, timeline: int) -> Members:
        """The order that tells every server which lives train."""
        trainers = self.trainers()
        return Members(
            timeline=timeline,
            members={member.task: member.incarnation for member in trainers},
            keys={member.task: member.key for member in trainers},
        )

    def missing_ps(self) -> list[int]:
        """Indices of parameter servers that are not there."""
        there = {member.index for member in self.members.living("ps")}
        return [index for index in range(len(self.settings.ps)) if index not in there]

    def expected(self) -> dict[str, int]:
        """How many tasks of each role the cluster spec has."""
        settings = self.settings
        return {
            "ps": len(settings.ps),
            "worker": settings.workers,
            "chief": int(settings.chief_trains),
            "evaluator": settings.evaluators,
        }

    def to_come(self) -> str:
        """Tasks of this cluster that have not joined, as a phrase; empty where all have."""
        # Used when the job needs nobody: whoever has come and gone again is not waited for.
        came = [member.role for member in self.members]
        lacking = {role: count - came.count(role) for role, count in self.expected().items()}
        return ", ".join(f"{count} {role}" for role, count in lacking.items() if count > 0)

    def awaited(self) -> list[str]:
        """Tasks of the cluster spec that are not there, evaluators aside: nothing waits for those."""
        settings = self.settings
        found = [ps_at(index, settings.ps[index]) for index in self.missing_ps()]
        trainers = {member.task for member in self.trainers()}
        names = [*(["chief/0"] if settings.chief_trains else []), *(f"worker/{n}" for n in range(settings.workers))]
        # A worker beyond the cluster spec may have come in the place of one that is in it.
        lacking = max(0, settings.trainers - len(trainers))
        return found + [name for name in names if name not in trainers][:lacking]


def ps_at(index: int, address: str) -> str:
    """A ps that never joined, for sentences. Port 0: it would have told its address at its Join."""
    return f"ps/{index} (address not known yet)" if address.endswith(":0") else f"ps/{index} at {address}"

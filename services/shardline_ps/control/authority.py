"""Which chief a ps obeys and which tasks it admits: terms, timelines, incarnations. Pure; PROTOCOL 1.3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardline.core.identity import Identity
from shardline.core.outcome import SERVED, Decision, Outcome
from shardline.security import holds


@dataclass(frozen=True, order=True)
class Term:
    """One start of a chief; number 0 = no chief yet."""

    number: int = 0
    chief_uuid: str = ""


@dataclass
class Authority:
    """The chief, timeline and members that a ps accepts. Changed only on the server's loop."""

    term: Term = field(default_factory=Term)
    timeline: int = 0
    active: bool = False
    configured: bool = False
    job: str = ""
    plan_id: str = ""
    members: Mapping[str, int] | None = None
    """Living incarnations by task; None = admit everyone (no chief)."""
    keys: Mapping[str, bytes] = field(default_factory=dict)
    """SHA-256 of each living incarnation's secret, by task; a task without a key needs no secret."""

    def lead(self, term: Term) -> bool:
        """Accept a higher term, or the current one again; False if a newer chief (or another of this term) commands."""
        if term.number > self.term.number or term == self.term:
            self.term = term
            return True
        return False

    def obeys(self, term: Term) -> Decision:
        """Whether to carry out a command of this term."""
        if term == self.term:
            return Decision(Outcome.SERVED)
        return Decision(
            Outcome.REFUSED, f"this ps obeys the chief of term {self.term.number}; the command is of term {term.number}"
        )

    def admit(self, *, job: str, timeline: int, plan_id: str, who: Identity, init: bool) -> Decision:
        """Whether a data message belongs to the current timeline and comes from a living task.

        Another job's worker may call: this ps may have the port of a server of that job that has died. It is to go on
        waiting for its own, so it gets an outcome after which it asks again, never REFUSED.
        """
        if not self.configured:
            return Decision(Outcome.NOT_CONFIGURED, "this ps has no configuration yet")
        if job != self.job:
            return Decision(Outcome.NOT_CONFIGURED, f"this ps has job {self.job!r}; the message is for {job!r}")
        if timeline != self.timeline:
            return Decision(
                Outcome.WRONG_TIMELINE, f"the timeline is {self.timeline:#x}; the message says {timeline:#x}"
            )
        if plan_id != self.plan_id:
            return Decision(Outcome.NOT_CONFIGURED, f"the plan is {self.plan_id}; the message follows plan {plan_id}")
        fenced = self.fenced(who.task, who.incarnation)
        if fenced is not None:
            return fenced
        if not holds(who.secret, self.keys.get(who.task, b"")):
            return Decision(
                Outcome.FENCED,
                f"the message is not from {who.task}: it lacks the secret that the chief gave to incarnation "
                f"{who.incarnation:#x} of that task when it joined",
            )
        if not self.active and not init:
            return Decision(Outcome.NOT_CONFIGURED, "this ps is still being prepared and doesn't accept pushes yet")
        return SERVED

    def fenced(self, task: str, incarnation: int) -> Decision | None:
        """Why this life of a task is refused; None if it is not. Thread-safe."""
        members = self.members
        if members is None or members.get(task) == incarnation:
            return None
        known = members.get(task)
        return Decision(
            Outcome.FENCED,
            f"{task} incarnation {incarnation:#x} is not admitted"
            + (f", {known:#x} is" if known is not None else "; the chief has not listed it, or no longer does"),
        )

"""Whom a ps obeys and whom it admits."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.core.identity import Identity
from shardline.core.outcome import Decision, Outcome
from shardline_ps.control.authority import Authority, Term


@pytest.mark.parametrize(
    ("held", "asked", "taken"),
    [
        (Term(), Term(1, "a"), True),
        (Term(), Term(), True),
        (Term(3, "a"), Term(3, "a"), True),
        (Term(3, "a"), Term(3, "b"), False),
        (Term(3, "b"), Term(3, "a"), False),
        (Term(3, "a"), Term(2, "a"), False),
        (Term(3, "a"), Term(4, "b"), True),
        (Term(3, "a"), Term(), False),
    ],
)
def test_the_highest_term_leads_and_a_tie_stays_with_the_first(held: Term, asked: Term, taken: bool) -> None:
    authority = Authority(term=held)
    assert authority.lead(asked) is taken
    assert authority.term == (asked if taken else held)


def test_commands_of_another_term_are_not_obeyed() -> None:
    authority = Authority(term=Term(3, "a"))
    assert authority.obeys(Term(3, "a")).outcome is Outcome.SERVED
    for term in (Term(2, "a"), Term(4, "a"), Term(3, "b"), Term()):
        decision = authority.obeys(term)
        assert decision.outcome is Outcome.REFUSED
        assert decision.reason == f"this ps obeys the chief of term 3; the command is of term {term.number}"


def ready(**changes: Any) -> Authority:
    settings: dict[str, Any] = {
        "timeline": 5,
        "active": True,
        "configured": True,
        "job": "j",
        "plan_id": "p",
        "members": {"worker/0": 2},
    }
    return Authority(**{**settings, **changes})


def ask(authority: Authority, **changes: Any) -> Decision:
    settings: dict[str, Any] = {
        "job": "j",
        "timeline": 5,
        "plan_id": "p",
        "task": "worker/0",
        "incarnation": 2,
        "init": False,
    }
    message = {**settings, **changes}
    who = Identity(message.pop("task"), message.pop("incarnation"))
    return authority.admit(**message, who=who)


@pytest.mark.parametrize(
    ("state", "message", "outcome", "reason"),
    [
        ({}, {}, Outcome.SERVED, ""),
        ({"members": None}, {"task": "anybody", "incarnation": 9}, Outcome.SERVED, ""),
        ({"configured": False}, {}, Outcome.NOT_CONFIGURED, "this ps has no configuration yet"),
        ({}, {"job": "k"}, Outcome.NOT_CONFIGURED, "this ps has job 'j'; the message is for 'k'"),
        ({}, {"timeline": 4}, Outcome.WRONG_TIMELINE, "the timeline is 0x5; the message says 0x4"),
        ({}, {"plan_id": "q"}, Outcome.NOT_CONFIGURED, "the plan is p; the message follows plan q"),
        ({}, {"incarnation": 1}, Outcome.FENCED, "worker/0 incarnation 0x1 is not admitted, 0x2 is"),
        ({}, {"incarnation": 3}, Outcome.FENCED, "worker/0 incarnation 0x3 is not admitted, 0x2 is"),
        (
            {},
            {"task": "worker/1"},
            Outcome.FENCED,
            "worker/1 incarnation 0x2 is not admitted; the chief has not listed it, or no longer does",
        ),
        (
            {"members": {}},
            {},
            Outcome.FENCED,
            "worker/0 incarnation 0x2 is not admitted; the chief has not listed it, or no longer does",
        ),
        (
            {"active": False},
            {},
            Outcome.NOT_CONFIGURED,
            "this ps is still being prepared and doesn't accept pushes yet",
        ),
        ({"active": False}, {"init": True}, Outcome.SERVED, ""),
        ({"active": False}, {"init": True, "incarnation": 1}, Outcome.FENCED, "worker/0 incarnation 0x1 is not"),
        # The history is asked about before the life: a fenced task of another timeline has to join again anyway.
        ({}, {"timeline": 4, "incarnation": 1}, Outcome.WRONG_TIMELINE, "the timeline is 0x5"),
    ],
)
def test_what_is_admitted(state: dict[str, Any], message: dict[str, Any], outcome: Outcome, reason: str) -> None:
    decision = ask(ready(**state), **message)
    assert decision.outcome is outcome
    assert decision.reason.startswith(reason) and bool(decision.reason) is bool(reason)

"""May this task take part? Pure: answers a Join, given the state, with a reason if it is refused."""

from __future__ import annotations

from shardline.consistency import Gives
from shardline.core.outcome import FEATURES
from shardline.core.spec import differences
from shardline.roles import ROLES
from shardline_chief.rules.messages import Join
from shardline_chief.rules.state.membership import Refused
from shardline_chief.rules.state.settings import as_chosen, as_in_cluster
from shardline_chief.rules.state.state import State

REFUSED_AGAIN_S = 60.0
MOST_REFUSALS = 32
"""Refusals logged in one period, at most."""


class Refusals:
    """Decides which refusals to log: a waiting task retries twice a second, a stranger as often as it likes. Pure."""

    def __init__(self) -> None:
        self._told_s: dict[tuple[str, bool], float] = {}

    def fresh(self, name: str, refused: Refused, now_s: float) -> bool:
        """Whether to log this refusal: once a minute per task and kind, and at most MOST_REFUSALS in all."""
        self._told_s = {kind: at_s for kind, at_s in self._told_s.items() if now_s - at_s < REFUSED_AGAIN_S}
        kind = (name, refused.retry)
        if kind in self._told_s or len(self._told_s) >= MOST_REFUSALS:
            return False
        self._told_s[kind] = now_s
        return True


def limit(state: State, role: str, *, named: bool) -> int:
    """Number of indices of a role: valid ones are [0, limit). named: the task names its own.

    A server beyond the cluster spec does: one whose address has changed is to wait for its place, not to take another.
    """
    settings = state.settings
    listed = state.tasks.expected().get(role, 0)
    if role == "worker":
        # A script has one replica per worker: one more worker would have nothing to do.
        return listed if state.script else max(listed, settings.max_workers)
    return listed if ROLES[role].holds and not named else max(listed, ROLES[role].spare)


def refusal(state: State, join: Join) -> Refused | None:
    """Why the task may not join, or None if it may."""
    if join.role not in ROLES:
        return Refused(reason=f"role {join.role!r} is unknown; it must be one of {', '.join(ROLES)}")
    unknown = sorted(set(join.required_features) - set(FEATURES))
    if unknown:
        return Refused(
            reason=f"{join.name} needs {', '.join(unknown)}, which this chief does not support; use the same version "
            "on both"
        )
    row = ROLES[join.role]
    wrong = _job_refusal(state, join) if row.computes else None
    return wrong or (_machine_refusal(state, join) if row.trains else None)


def place_refusal(role: str) -> Refused | None:
    """Why the chief assigns no index in this role, or None if it does."""
    placed = ROLES.having(lambda row: not row.leads)
    if role in placed:
        return None
    return Refused(reason=f"the chief assigns no index to role {role!r}; it does for {', '.join(placed)}")


def _job_refusal(state: State, join: Join) -> Refused | None:
    if join.job is None or state.job is None:
        return None
    phrases = differences(as_chosen(as_in_cluster(join.job, state.settings), state.job), state.job)
    if not phrases:
        return None
    return Refused(
        reason=f"the job of {join.name} differs from that of this cluster ({'; '.join(phrases)}); start it with the "
        "same job"
    )


def _machine_refusal(state: State, join: Join) -> Refused | None:
    if state.settings.inexact or Gives.SAME_BITS not in state.mode.gives or not state.tasks.machine or not join.machine:
        return None
    # The facts that differ between two machines, one phrase each.
    other = [
        f"{name}: {join.machine.get(name, 'unknown')} here, {state.tasks.machine.get(name, 'unknown')} in the cluster"
        for name in sorted({*join.machine, *state.tasks.machine})
        if join.machine.get(name) != state.tasks.machine.get(name)
    ]
    if not other:
        return None
    return Refused(
        reason=f"{join.name} runs on a different kind of machine, so its gradients may differ in the last bits "
        f"({'; '.join(other)}); use equal machines, or --inexact to train without bit-identical results"
    )

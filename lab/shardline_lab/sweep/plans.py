"""The rounds of a sweep: which models train, and how far. Each is chosen when the one before has ended."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardline_lab.sweep.member import SweepMember
from shardline_lab.sweep.report import ranked
from shardline_lab.sweep.space import Point, Range

Plan = Iterator[tuple[list[SweepMember], float]]
"""Models, and the share of their steps that they are to have made."""


def halved(members: Sequence[SweepMember], rounds: Sequence[tuple[int, float]]) -> Plan:
    """Successive halving. rounds: from space.halves()."""
    for count, share in rounds:
        yield [member for member in ranked(members) if not member.found.failure][:count], share


def suggested(
    fields: Mapping[str, Range | tuple[str, ...]],
    count: int,
    seed: int,
    together: int,
    make: Callable[[list[Point]], list[SweepMember]],
) -> Plan:
    """Points that Optuna's sampler suggests, so many at a time, by the results of those before."""
    optuna: Any = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    known: dict[Point, SweepMember] = {}
    for first in range(0, count, together):
        trials = [study.ask() for _ in range(min(together, count - first))]
        points = [tuple((name, _suggest(trial, name, one)) for name, one in fields.items()) for trial in trials]
        new = [point for point in dict.fromkeys(points) if point not in known]
        known.update(zip(new, make(new), strict=True))
        yield [known[point] for point in new], 1.0
        for trial, point in zip(trials, points, strict=True):
            failed, unknown, value = known[point].found.rank
            if failed or unknown:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, value)


def _suggest(trial: Any, name: str, one: Range | tuple[str, ...]) -> str:
    if not isinstance(one, Range):
        return str(trial.suggest_categorical(name, one))
    if one.whole:
        return str(trial.suggest_int(name, int(one.low), int(one.high), log=one.log))
    return one.shown(trial.suggest_float(name, one.low, one.high, log=one.log))

"""Products of parameters; `make test` tries a part of them and `make test-long` the rest."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import pytest
from _pytest.mark import MarkDecorator, ParameterSet


def covering(first: Collection[Any], *others: Collection[Any]) -> list[ParameterSet]:
    """Every combination; just enough are short to cover each value of `first` and each combination of `others`.

    The combinations of `others` appear once each, with the values of `first` in rotation.
    """
    rest = list(itertools.product(*others))
    short = {(number % len(first), number % len(rest)) for number in range(max(len(first), len(rest)))}
    return [
        pytest.param(value, *combination, marks=[] if (i, j) in short else [pytest.mark.long])
        for i, value in enumerate(first)
        for j, combination in enumerate(rest)
    ]


def number_of_schedules(short: int, whole: int) -> MarkDecorator:
    """The first `short` schedules of a test that is given their number, and all of them in `make test-long`."""
    return pytest.mark.parametrize("schedules", [short, pytest.param(whole, marks=pytest.mark.long)])

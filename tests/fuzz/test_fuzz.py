"""The fixed part of `make fuzz`: some seconds of it, always the same."""

from __future__ import annotations

import pytest

from tests.fuzz import loading, payloads, reports, runs
from tests.fuzz.calls import HOSTS, SERVED_BY, methods


def test_every_call_of_every_service_is_made_by_some_run() -> None:
    assert {path.lstrip("/").rpartition("/")[0] for path in methods()} == set(SERVED_BY)
    assert {kind for kinds in SERVED_BY.values() for kind in kinds} == set(HOSTS)


@pytest.mark.parametrize("count", [20, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", list(HOSTS))
def test_calls_end_with_a_status_and_change_nothing_that_they_may_not(kind: str, count: int) -> None:
    assert runs.calls(kind, count, 1)["calls"] >= count


@pytest.mark.parametrize("count", [300, pytest.param(3_000, marks=pytest.mark.long)])
def test_what_tasks_say_of_themselves_ends_no_job_and_changes_no_summary(count: int) -> None:
    assert reports.lies(count, 1)["codes"]["INVALID_ARGUMENT"] > count // 10


def test_strangers_at_the_doors_of_lanes_get_nowhere() -> None:
    assert runs.visits(25, 1)["visits"] == 25


@pytest.mark.parametrize("count", [15, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", list(loading.LOADERS))
def test_what_can_not_be_loaded_ends_in_a_sentence(kind: str, count: int) -> None:
    assert runs.loads(kind, count, 1)["loads"] == count


@pytest.mark.parametrize("count", [300, pytest.param(3_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", payloads.NAMES)
def test_payloads_with_bytes_changed_are_decoded_or_refused(name: str, count: int) -> None:
    assert runs.payloads_of(name, count, 1)["payloads"] == count

from __future__ import annotations

import itertools
import math

import pytest

from shardline_chief.page.history import TIME, Curve, History


def points(curve: Curve, cursor: int = 0) -> list[tuple[float, float]]:
    part = curve.since(cursor)
    return [] if part is None else [(x, y) for _, x, y in part["points"]]


def test_a_curve_of_any_length_has_at_most_its_limit_of_points_and_keeps_its_course() -> None:
    curve = Curve("step", limit=100)
    for step in range(100_000):
        curve.add(step, 2.0 * step, step + 1)
        assert len(curve.bins) <= 100
    found = points(curve)
    assert 50 <= len(found) <= 100
    # The mean of a straight line's pieces lies on it; early parts are as fine as late ones.
    assert [y for _, y in found] == pytest.approx([2.0 * x for x, _ in found])
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(found)]
    assert max(gaps) <= curve.width + 1e-6


def test_far_apart_points_of_a_long_run_are_joined_until_they_fit() -> None:
    curve = Curve("time", width=0.5, limit=4)
    for second in (0.0, 1e3, 1e6, 1e9, 2e9):
        curve.add(second, 1.0, 1)
    assert len(curve.bins) <= 4
    assert sum(item.count for item in curve.bins.values()) == 5


def test_points_in_one_bin_are_their_mean_in_whatever_order_they_come() -> None:
    curve = Curve("step", width=10.0)
    for x, y in ((17.0, 4.0), (3.0, 1.0), (11.0, 2.0)):
        curve.add(x, y, 1)
    assert points(curve) == [(3.0, 1.0), (14.0, 3.0)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_left_out(value: float) -> None:
    curve = Curve("step")
    curve.add(1.0, value, 1)
    curve.add(value, 1.0, 2)
    assert curve.since(0) is None


def test_a_reader_gets_what_changed_since_its_cursor_and_nothing_twice() -> None:
    history = History()
    history.add("loss", 0, 3.0)
    first = history.since()
    assert first["curves"]["loss"] == {"axis": "step", "reset": True, "points": [[0, 0, 3.0]]}
    assert history.since(first["cursor"])["curves"] == {}
    history.add("loss", 1, 2.0)
    history.add("push", 100.0, 5.0, axis=TIME)
    second = history.since(first["cursor"])
    assert not second["reset"]
    assert second["curves"]["loss"] == {"axis": "step", "reset": False, "points": [[1, 1, 2.0]]}
    assert second["curves"]["push"]["axis"] == "time"


def test_a_reader_takes_a_curve_anew_when_its_points_were_joined_meanwhile() -> None:
    history = History(points=4)
    for step in range(4):
        history.add("loss", step, float(step))
    cursor = history.since()["cursor"]
    history.add("loss", 4, 4.0)
    part = history.since(cursor)["curves"]["loss"]
    assert part["reset"]
    assert part["points"] == [[0, 0.5, 0.5], [1, 2.5, 2.5], [2, 4, 4.0]]


def test_a_new_timeline_takes_away_what_an_earlier_one_drew_beyond_its_first_step() -> None:
    history = History()
    for step in range(10):
        history.add("loss", step, 1.0)
    history.add("push", 1e9, 7.0, axis=TIME)
    cursor = history.since()["cursor"]
    history.forget(4)
    news = history.since(cursor)["curves"]
    assert news["loss"]["reset"]
    assert [x for _, x, _ in news["loss"]["points"]] == [0, 1, 2, 3, 4]
    assert "push" not in news


@pytest.mark.parametrize("cursor", ["", "0", "x-5", "-", "٣", "f" * 64, "-99999999999999999999"])
def test_a_cursor_that_is_none_or_of_another_process_gets_everything(cursor: str) -> None:
    history = History()
    history.add("loss", 0, 3.0)
    news = history.since(cursor)
    assert news["reset"]
    assert news["curves"]["loss"]["reset"]
    other = History().since(history.since()["cursor"])
    assert other["reset"]


def test_more_curves_than_the_limit_are_left_out() -> None:
    history = History(curves=2)
    for name in ("loss", "evaluation/a", "evaluation/b"):
        history.add(name, 0, 1.0)
    assert history.names() == ("loss", "evaluation/a")

"""Bars for the house as a whole: its size, and signs of special cases in the middle. The numbers only fall."""

from __future__ import annotations

from pathlib import Path

from tests.support import house, way

LINES, LINES_WITH_PACKAGES = 71_081, 88_418
MEMBERS_FOR_ONE, TRAITS_ASKED_OUTSIDE, CIRCLES = 0, 12, 0
"""The 12 ask whether replicas are assigned to workers (`assigns_replicas`)."""
FILES_OF_A_GRADIENT = 83


def test_the_house_does_not_grow() -> None:
    own, everything = house.lines()
    assert own <= LINES and everything <= LINES_WITH_PACKAGES, f"{own} lines, {everything} with the packages beside"


def test_no_more_members_of_bases_are_there_for_one_class() -> None:
    found = house.members_for_one()
    assert len(found) <= MEMBERS_FOR_ONE, found


def test_modes_are_not_asked_for_traits_in_more_places() -> None:
    found = house.traits_asked_outside()
    assert len(found) <= TRAITS_ASKED_OUTSIDE, found


def test_no_more_modules_import_each_other_for_types() -> None:
    found = house.circles()
    assert len(found) <= CIRCLES, found


def test_a_gradient_passes_no_more_files(tmp_path: Path) -> None:
    found = way.trace(tmp_path)
    assert len(found.files) <= FILES_OF_A_GRADIENT, found.files

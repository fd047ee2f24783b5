"""Choices from a table: written, read back, refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

import shardline
from shardline import methods
from shardline.errors import JobError, UsageError
from shardline.seams import Resident, Table


@dataclass(frozen=True)
class Plain(Resident):
    """As it is.

    More.
    """

    name: ClassVar[str] = "plain"


@dataclass(frozen=True)
class Sized(Resident):
    """With settings."""

    name: ClassVar[str] = "sized"
    ratio: float = 0.01
    count: int = 1
    exact: bool = False
    kind: str = "a"

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise JobError(f"ratio is {self.ratio}; give a number in (0, 1]")


def table() -> Table[Resident]:
    return Table("toy", Plain, Sized)


@pytest.mark.parametrize(
    ("text", "made", "canonical"),
    [
        ("plain", Plain(), "plain"),
        ("sized", Sized(), "sized"),
        ("sized:ratio=0.5", Sized(ratio=0.5), "sized:ratio=0.5"),
        ("sized:exact=true,count=3,ratio=0.01", Sized(count=3, exact=True), "sized:count=3,exact=true"),
        ("sized:ratio=1e-3,kind=b", Sized(ratio=0.001, kind="b"), "sized:ratio=0.001,kind=b"),
    ],
)
def test_a_choice_is_read_and_written_in_one_way(text: str, made: Resident, canonical: str) -> None:
    assert table().parse(text) == made
    assert str(made) == canonical
    assert table().parse(canonical) == made
    assert table().parse(made) is made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("plane", "toy 'plane' does not exist; choose from plain, sized; did you mean 'plain'?"),
        ("", "choose from plain, sized"),
        ("sized:", "reads KEY=VALUE; its settings: ratio=float, count=int, exact=bool, kind=str"),
        ("plain:x=1", "plain has no setting 'x'; its settings: none"),
        ("sized:count=1,count=2", "is given twice"),
        ("sized:count=1.5", "count is '1.5'; give a whole number"),
        ("sized:exact=1", "give true or false"),
        ("sized:ratio=nan", "give a finite number"),
        ("sized:ratio=2.0", "give a number in (0, 1]"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(text: str, says: str) -> None:
    with pytest.raises(JobError) as refused:
        table().parse(text)
    assert says in str(refused.value)


def test_a_table_describes_what_it_lists() -> None:
    assert table().describe() == [
        ("plain", "As it is."),
        ("sized:ratio=0.01,count=1,exact=false,kind=a", "With settings."),
    ]


def test_a_name_is_given_once() -> None:
    @dataclass(frozen=True)
    class Other(Resident):
        name: ClassVar[str] = "plain"

    class Loose(Resident):
        name: ClassVar[str] = "loose"

    with pytest.raises(UsageError, match="already exists"):
        table().add(Other)
    with pytest.raises(UsageError, match="frozen dataclass"):
        table().add(Loose)


@pytest.mark.parametrize("seam", methods.SEAMS)
def test_a_job_file_finds_every_method_as_a_class_of_its_name(seam: str) -> None:
    by_name = {name.lower(): getattr(shardline, name) for name in shardline.__all__}
    own = [kind for kind in methods.table(seam) if kind.__module__.startswith("shardline.")]
    assert own
    assert [by_name.get(kind.name.replace("-", "")) for kind in own] == own


def test_a_class_instead_of_its_object_is_named() -> None:
    with pytest.raises(JobError, match=r"toy is the class Plain; give an instance: Plain\(\)"):
        table().parse(Plain)  # type: ignore[arg-type]

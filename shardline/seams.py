"""Seams, the places where methods differ: one table per seam, and one text form for a choice from it.

A resident of a seam is a frozen dataclass. Its fields are its settings, the first line of its docstring describes it in
help texts and in the docs, and `name` is what users write:

    @dataclass(frozen=True)
    class TopK(Codec):
        \"""Send the largest entries only.\"""

        name: ClassVar[str] = "topk"
        ratio: float = 0.01

    CODECS.add(TopK)
    CODECS.parse("topk:ratio=0.05") == TopK(ratio=0.05)
    str(TopK(ratio=0.05)) == "topk:ratio=0.05"

The text `NAME` or `NAME:KEY=VALUE,KEY=VALUE` is the same on the command line, in a job, on the wire, in the summary and
on the page. Settings with default values are left out, so equal choices have equal texts. Residents from outside the
package come from shardline.plugins.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

from shardline import plugins
from shardline.errors import JobError, UsageError, nearest

_WORD = re.compile(r"[a-z][a-z0-9_-]*")
_PLAIN = re.compile(r"[^,:=\s]*")


class Resident:
    """Base of a table's entries.

    A frozen dataclass with fields of type bool, int, float or str, all with defaults or checked in __post_init__, which
    raises JobError.
    """

    name: ClassVar[str] = ""

    def __str__(self) -> str:
        # The text from which parse() makes an equal resident.
        parts = []
        for item in _fields(self):
            value = getattr(self, item.name)
            if item.default is dataclasses.MISSING or value != item.default:
                parts.append(f"{item.name}={_text(value)}")
        return f"{self.name}:{','.join(parts)}" if parts else self.name


R = TypeVar("R", bound=Resident)


class Table(Generic[R]):
    """The residents of one seam, by name, in the order in which they were added."""

    def __init__(self, seam: str, *residents: type[R]) -> None:
        """seam: the name of the job's field, such as "codec"."""
        self.seam = seam
        self._classes: dict[str, type[R]] = {}
        self.declared = residents
        """The package's own, without those of plugins; for modules to read while they are imported."""
        for resident in residents:
            self.add(resident)

    def __iter__(self) -> Iterator[type[R]]:
        return (self._classes[name] for name in self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> type[R]:
        """The class with this name. Raises JobError listing the existing names."""
        return self._named(name, self.seam, ())

    def _named(self, name: str, field: str, fitting: Sequence[str]) -> type[R]:
        names = self.names
        if name in names:
            return self._classes[name]
        offered = fitting or names
        raise JobError(f"{field} {name!r} does not exist; choose from {', '.join(offered)}{nearest(name, offered)}")

    @property
    def names(self) -> tuple[str, ...]:
        plugins.packages()
        plugins.load()
        return tuple(self._classes)

    def add(self, resident: type[R]) -> type[R]:
        """Add a class; usable as a decorator. Raises UsageError for a name that is taken or invalid."""
        if not dataclasses.is_dataclass(resident) or not resident.__dataclass_params__.frozen:
            raise UsageError(
                f"{self.seam} {resident.__name__} is not a frozen dataclass; decorate it with @dataclass(frozen=True)"
            )
        if not _WORD.fullmatch(resident.name):
            raise UsageError(f"{self.seam} {resident.__name__} has the name {resident.name!r}; use lower-case letters")
        there = self._classes.setdefault(resident.name, resident)
        if there is not resident:
            raise UsageError(f"{self.seam} {resident.name!r} already exists: {there.__module__}.{there.__qualname__}")
        return resident

    def parse(self, choice: str | Resident, field: str = "", fitting: Sequence[str] = ()) -> R:
        """The resident for a text; a resident is returned unchanged.

        field: the job's, where it is not the seam's own. fitting: the names that it may have, where not all. Raises
        JobError naming the field, the unknown or invalid name or setting, and the valid ones. Whether what exists fits
        is not looked at.
        """
        what = field or self.seam
        if not isinstance(choice, str):
            if isinstance(choice, type) and issubclass(choice, Resident):
                raise JobError(f"{what} is the class {choice.__name__}; give an instance: {choice.__name__}()")
            if type(choice) not in self._classes.values():
                raise JobError(f"{what} is {choice!r}; choose from {', '.join(fitting or self.names)}")
            return cast(R, choice)
        name, colon, rest = choice.partition(":")
        resident = self._named(name, what, fitting)
        given: dict[str, Any] = {}
        for item in rest.split(",") if colon else ():
            key, equals, value = item.partition("=")
            types = settings_of(resident)
            if not equals or key not in types or key in given:
                why = "is given twice" if key in given else f"has no setting {key!r}" if equals else "reads KEY=VALUE"
                known = ", ".join(f"{known}={kind.__name__}" for known, kind in types.items()) or "none"
                raise JobError(f"{what} {choice!r}: {name} {why}; its settings: {known}{nearest(key, types)}")
            given[key] = _value(what, choice, key, types[key], value)
        try:
            return resident(**given)
        except TypeError as error:
            raise JobError(f"{what} {choice!r}: {error}; settings: {', '.join(settings_of(resident))}") from None

    def canonical(self, choice: str | Resident, field: str = "", fitting: Sequence[str] = ()) -> str:
        """The canonical text of a choice. Raises JobError, see parse()."""
        return str(self.parse(choice, field, fitting))

    def describe(self) -> list[tuple[str, str]]:
        """(usage, description) of each resident, for help texts and docs."""
        return [(usage(resident), doc_line(resident)) for resident in self]


def settings_of(resident: type[Resident]) -> dict[str, type]:
    hints = typing.get_type_hints(resident)
    return {item.name: hints[item.name] for item in _fields(resident)}


def _fields(resident: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(resident)


def doc_line(resident: type[Resident]) -> str:
    return (resident.__doc__ or "").strip().split("\n")[0]


def usage(resident: type[Resident]) -> str:
    """A resident's text with all its settings: "topk:ratio=0.01"."""
    parts = []
    for item in _fields(resident):
        default = item.default
        shown = settings_of(resident)[item.name].__name__.upper() if default is dataclasses.MISSING else _text(default)
        parts.append(f"{item.name}={shown}")
    return f"{resident.name}:{','.join(parts)}" if parts else resident.name


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value) if isinstance(value, float) else str(value)
    if not _PLAIN.fullmatch(text):
        raise JobError(f"the setting {text!r} can't be written: leave out commas, colons, equals signs and spaces")
    return text


def _value(field: str, choice: str, key: str, kind: type, text: str) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text]
        value = kind(text)
    except (KeyError, ValueError):
        what = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "text")
        raise JobError(f"{field} {choice!r}: {key} is {text!r}; give {what}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise JobError(f"{field} {choice!r}: {key} is {text}; give a finite number")
    return value

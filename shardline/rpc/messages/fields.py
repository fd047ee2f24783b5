"""Conversion between values and messages with equal field names: callers give only the fields that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

ValueT = TypeVar("ValueT")
MessageT = TypeVar("MessageT", bound=Message)
_known: dict[type[Any], tuple[str, ...]] = {}
"""Names of the fields, by class."""


def to_message(kind: type[MessageT], value: Any, /, **differing: Any) -> MessageT:
    """A message with every field of a dataclass value; those in `differing` are taken from there.

    Raises ValueError if the message lacks a field.
    """
    same = {name: getattr(value, name) for name in _names(type(value)) if name not in differing}
    return kind(**same, **differing)


def from_message(kind: type[ValueT], message: Message, /, **differing: Any) -> ValueT:
    """A dataclass value from the message's fields of the same names; those in `differing` are taken from there.

    A repeated field becomes a tuple and a map a dict. Fields that contain messages must be in `differing`. Raises
    AttributeError if the message lacks a field.
    """
    same = {name: _plain(getattr(message, name)) for name in _names(kind) if name not in differing}
    return kind(**same, **differing)


def _names(kind: type[Any]) -> tuple[str, ...]:
    """Of the fields of a dataclass, found once: a heartbeat has hundreds of passes."""
    found = _known.get(kind)
    if found is None:
        found = _known[kind] = tuple(field.name for field in fields(kind))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, bytes)):
        return value
    return dict(value) if isinstance(value, Mapping) else tuple(value)

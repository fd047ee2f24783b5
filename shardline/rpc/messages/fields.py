"""Conversion between values and messages with equal field names: callers give only the fields that differ.

Fields that hold other dataclasses, alone or in a tuple, are converted too: by name, or as converts() says.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Container, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

ValueT = TypeVar("ValueT")
MessageT = TypeVar("MessageT", bound=Message)
_known: dict[type[Any], tuple[_Part, ...]] = {}
"""Fields by class, found once: a heartbeat has hundreds of passes."""
_special: dict[type[Any], tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {}


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    kind: type[Any] | None
    """The dataclass that it holds; None = a number, text, or a tuple or mapping of these."""
    many: bool
    required: bool


def converts(kind: type[ValueT], to: Callable[[ValueT], Any], back: Callable[[Any], ValueT]) -> None:
    """Have values of a dataclass, where they are parts of others, converted to messages and back by these functions."""
    _special[kind] = to, back


def to_message(kind: type[MessageT], value: Any, /, without: Container[str] = (), **differing: Any) -> MessageT:
    """A message with every field of a dataclass value; those in `differing` are taken from there.

    Fields in `without` are left out. Raises ValueError if the message lacks another one.
    """
    return kind(**_named(value, differing, without))


def from_message(kind: type[ValueT], message: Message, /, without: Container[str] = (), **differing: Any) -> ValueT:
    """A dataclass value from the message's fields of the same names; those in `differing` are taken from there.

    A repeated field becomes a tuple and a map a dict; a message that is not there the field's default, as do fields in
    `without`. Raises AttributeError if the message lacks a field.
    """
    found = differing
    for part in _parts(kind):
        if part.name in differing or part.name in without:
            continue
        if part.kind is None:
            found[part.name] = _plain(getattr(message, part.name))
        elif part.many:
            found[part.name] = tuple(_back(part.kind, item) for item in getattr(message, part.name))
        elif part.required or message.HasField(part.name):
            found[part.name] = _back(part.kind, getattr(message, part.name))
    return kind(**found)


def _named(value: Any, differing: Mapping[str, Any], without: Container[str] = ()) -> dict[str, Any]:
    found = dict(differing)
    for part in _parts(type(value)):
        if part.name not in differing and part.name not in without:
            held = getattr(value, part.name)
            if part.kind is not None and held is not None:
                held = [_to(item) for item in held] if part.many else _to(held)
            found[part.name] = held
    return found


def _to(value: Any) -> Any:
    special = _special.get(type(value))
    # A message takes its parts as dicts too.
    return special[0](value) if special is not None else _named(value, {})


def _back(kind: type[Any], message: Any) -> Any:
    special = _special.get(kind)
    return special[1](message) if special is not None else from_message(kind, message)


def _parts(kind: type[Any]) -> tuple[_Part, ...]:
    found = _known.get(kind)
    if found is None:
        hints = typing.get_type_hints(kind)
        found = _known[kind] = tuple(_part(item, hints[item.name]) for item in fields(kind))
    return found


def _part(item: Field[Any], hint: Any) -> _Part:
    many = typing.get_origin(hint) is tuple
    inner = typing.get_args(hint) if many or isinstance(hint, types.UnionType) else (hint,)
    kind = next((one for one in inner if isinstance(one, type) and is_dataclass(one)), None)
    return _Part(item.name, kind, many, item.default is MISSING and item.default_factory is MISSING)


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, bytes)):
        return value
    return dict(value) if isinstance(value, Mapping) else tuple(value)

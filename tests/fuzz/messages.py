"""Messages made from what their descriptors say: whole ones, ones with some fields changed, and bytes that are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

DEEPEST = 4
MANY = 3000
"""Items of a repeated field that is drawn long."""
TEXTS = (
    "",
    "w",
    "worker/0",
    "worker/1",
    "ps/0",
    "evaluator/0",
    "worker/" + "9" * 5000,
    "plain",
    "raw",
    "bf16",
    "SGD",
    "sync",
    "async",
    "127.0.0.1:0",
    "127.0.0.1:1",
    "[::1]:65536",
    "\x00",
    "../../etc/passwd",
    "%s%n{0}\n\r\x1b[31m",
    "\u202ek\u0308\U0001f4a5",
    "x" * 300,
    "y" * 70_000,
)
UNSIGNED = (0, 1, 2, 3, 63, 64, 127, 128, 1 << 31, (1 << 32) - 1, 1 << 32, 5 << 32 | 1, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
CPP = FieldDescriptor

_BITS = {
    CPP.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    CPP.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    CPP.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    CPP.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def pick(draw: Draw, items: Sequence[Any]) -> Any:
    """One of the items, of which there may be more or fewer the next time: Hypothesis takes no other limits then."""
    return items[draw(_PLACES) % len(items)]


_PLACES = st.integers(0, (1 << 16) - 1)


def _integers(cpp_type: int) -> st.SearchStrategy[int]:
    low, high = _BITS[cpp_type]
    edges = sorted({min(max(value, low), high) for value in (*UNSIGNED, low, -1)})
    return st.sampled_from(edges) | st.integers(0, 8) | st.integers(low, high)


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in _BITS:
        return _integers(kind)
    if kind in (CPP.CPPTYPE_DOUBLE, CPP.CPPTYPE_FLOAT):
        return st.sampled_from(FLOATS) | st.floats(width=64 if kind == CPP.CPPTYPE_DOUBLE else 32)
    if kind == CPP.CPPTYPE_BOOL:
        return st.booleans()
    if kind == CPP.CPPTYPE_ENUM:
        return st.sampled_from([*(value.number for value in field.enum_type.values), 99, -1, (1 << 31) - 1])
    if field.type == CPP.TYPE_BYTES:
        return st.binary(max_size=64) | st.sampled_from([b"", b"\x00" * 256, b"\xff" * 5000])
    return st.sampled_from(TEXTS) | st.text(max_size=20)


_SCALARS: dict[FieldDescriptor, st.SearchStrategy[Any]] = {}


def scalar(draw: Draw, field: FieldDescriptor) -> Any:
    """A value for one field, at an edge more often than not."""
    # Building a strategy costs more than drawing from it.
    if field not in _SCALARS:
        _SCALARS[field] = _scalars(field)
    return draw(_SCALARS[field])


def any_message(draw: Draw, descriptor: Descriptor, depth: int = 0) -> Message:
    """A message with some fields set, whatever they are."""
    message = message_factory.GetMessageClass(descriptor)()
    if descriptor.fields:
        for field in draw(st.lists(st.sampled_from(list(descriptor.fields)), max_size=4)):
            change(draw, message, field, depth)
    return message


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def change(draw: Draw, message: Any, field: FieldDescriptor, depth: int = 0) -> None:
    """Give one field another value, or take it away."""
    if draw(st.integers(0, 7)) == 0:
        message.ClearField(field.name)
    elif _is_map(field):
        _change_map(draw, getattr(message, field.name), field, depth)
    elif field.is_repeated:
        _change_list(draw, getattr(message, field.name), field, depth)
    elif field.message_type is not None:
        target = getattr(message, field.name)
        target.SetInParent()
        if depth < DEEPEST:
            _change_within(draw, target, depth)
    else:
        setattr(message, field.name, scalar(draw, field))


def _change_within(draw: Draw, message: Message, depth: int) -> None:
    """Change one of the fields of a message that is part of another, or make it anew."""
    if draw(st.integers(0, 3)) == 0:
        message.CopyFrom(any_message(draw, message.DESCRIPTOR, depth + 1))
    elif message.DESCRIPTOR.fields:
        change(draw, message, draw(st.sampled_from(list(message.DESCRIPTOR.fields))), depth + 1)


def _change_map(draw: Draw, target: Any, field: FieldDescriptor, depth: int) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(draw(st.integers(1, 3))):
        name = scalar(draw, key)
        if value.message_type is not None:
            target[name].CopyFrom(any_message(draw, value.message_type, depth + 1))
        else:
            target[name] = scalar(draw, value)


def _change_list(draw: Draw, target: Any, field: FieldDescriptor, depth: int) -> None:
    act = draw(st.sampled_from(("change", "add", "add", "again", "remove", "many")))
    if act in ("change", "again", "remove") and not target:
        act = "add"
    at = draw(_PLACES) % max(1, len(target))
    if act == "remove":
        del target[at]
    elif act == "again":
        target.append(target[at])
    elif act == "many":
        item = _item(draw, field, depth)
        if field.message_type is None or item.ByteSize() < 100:
            target.extend([item] * MANY)
    elif act == "change" and field.message_type is not None and depth < DEEPEST:
        _change_within(draw, target[at], depth)
    elif act == "change":
        target[at:] = [*target[at + 1 :], _item(draw, field, depth)]
    else:
        target.append(_item(draw, field, depth))


def _item(draw: Draw, field: FieldDescriptor, depth: int) -> Any:
    if field.message_type is None:
        return scalar(draw, field)
    return any_message(draw, field.message_type, depth + 1) if depth < DEEPEST else field.message_type._concrete_class()


def mutate(draw: Draw, message: Message) -> None:
    """Change some fields of a message, at any depth."""
    for _ in range(draw(st.integers(1, 3))):
        target, depth = pick(draw, list(parts(message)))
        if target.DESCRIPTOR.fields:
            change(draw, target, draw(st.sampled_from(list(target.DESCRIPTOR.fields))), depth)


def parts(message: Any, depth: int = 0) -> Iterator[tuple[Any, int]]:
    """A message and every message within it, with how deep it lies."""
    yield message, depth
    for field, value in message.ListFields():
        if field.message_type is None or _is_map(field):
            continue
        for item in value if field.is_repeated else [value]:
            yield from parts(item, depth + 1)


def _nest(count: int) -> bytes:
    data = b""
    for _ in range(count):
        size, head = len(data), bytearray(b"\x0a")
        while size >= 0x80:
            head.append(size & 0x7F | 0x80)
            size >>= 7
        head.append(size)
        data = bytes(head) + data
    return data


RAW_BYTES = (
    st.binary(max_size=40)
    | st.sampled_from([b"", b"\xff" * 20, b"\x0a\xff\xff\xff\xff\x07", b"\x0b" * 200, b"\x0a\x02\x1a\x7f"])
    # A thousand messages within one another, and a hundred thousand fields that nobody knows.
    | st.sampled_from([_nest(1000), b"\xf8\x3f\x01" * 100_000])
)


def damaged(draw: Draw, data: bytes) -> bytes:
    """The bytes of a message with some of them changed, cut off, doubled or put in."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(_PLACES) % (len(found) + 1)
        act = draw(st.sampled_from(("flip", "cut", "insert", "double", "drop")))
        if act == "cut":
            del found[at:]
        elif act == "insert":
            found[at:at] = draw(st.binary(min_size=1, max_size=12))
        elif act == "double":
            found[at:at] = found[: at + 1]
        elif act == "drop":
            del found[at : at + 1]
        elif found:
            found[at % len(found)] ^= 1 << draw(st.integers(0, 7))
    return bytes(found[: 1 << 20])


def wire_form(draw: Draw, messages: Sequence[Message], request: Descriptor) -> list[bytes]:
    """What is sent in place of a call's messages: as they are, changed, in another order, or no messages at all."""
    messages = list(messages)
    how = draw(st.sampled_from(("whole", "changed", "changed", "changed", "any", "order", "damaged", "raw")))
    if how == "any":
        messages = [any_message(draw, request) for _ in range(draw(st.integers(0, 4)))]
    elif how == "changed" and messages:
        at = draw(_PLACES) % len(messages)
        copy = type(messages[at])()
        copy.CopyFrom(messages[at])
        mutate(draw, copy)
        messages[at] = copy
    elif how == "order" and messages:
        messages = [messages[at % len(messages)] for at in draw(st.lists(_PLACES, max_size=12))]
    data = [message.SerializeToString() for message in messages]
    if how == "damaged" and data:
        at = draw(_PLACES) % len(data)
        data[at] = damaged(draw, data[at])
    elif how == "raw":
        data[draw(_PLACES) % (len(data) + 1) :] = [draw(RAW_BYTES)]
    return data

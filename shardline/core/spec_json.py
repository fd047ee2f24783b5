"""A JobSpec as plain JSON values and back, exactly: ints stay ints, floats keep every bit, sequences become tuples.

NaN and infinities, which JSON does not have, are written as {"float": "nan" | "inf" | "-inf"}.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import math
import sys
import types
import typing
from typing import Any

from shardline.core.spec import Argument, JobSpec
from shardline.errors import JobError

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def job_to_json(job: JobSpec) -> dict[str, Any]:
    """The job as dicts, lists, strings, numbers, booleans and None. Raises JobError naming an unsupported value."""
    encoded = _encode(job, "job")
    assert isinstance(encoded, dict)
    return encoded


def job_from_json(value: Any) -> JobSpec:
    """The job that job_to_json wrote, equal to the original.

    A missing field gets its default, so that a field added later needs no new format. Raises JobError naming the place
    of an unknown or missing required field, a wrong type or an unknown enum value.
    """
    return typing.cast(JobSpec, _decode(JobSpec, value, "job"))


def _encode(value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encode(getattr(value, f.name), f"{path}.{f.name}") for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, collections.abc.Mapping):
        return {str(key): _encode(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise JobError(
        f"{path} is {value!r} ({type(value).__name__}), which can't be stored; use a number, text or a tuple"
    )


def _non_finite(value: Any) -> float | None:
    """The float for {"float": "inf"} and the like, or None if value is something else."""
    if isinstance(value, dict) and set(value) == {"float"} and isinstance(value["float"], str):
        return _NON_FINITE.get(value["float"])
    return None


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(hint: Any, value: Any, path: str) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise JobError(f"{path} is {value!r}; it must be an object")
        fields = {f.name: f for f in dataclasses.fields(hint)}
        for name in value:
            if name not in fields:
                raise JobError(f"{path} has an unknown field {name!r}")
        for name, spec in fields.items():
            required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
            if required and name not in value:
                raise JobError(f"{path} has no field {name!r}")
        hints = _hints(hint)
        return hint(**{name: _decode(hints[name], item, f"{path}.{name}") for name, item in value.items()})
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value not in [member.value for member in hint]:
            raise JobError(f"{path} is {value!r}; it must be one of {', '.join(repr(m.value) for m in hint)}")
        return hint(value)
    if hint == Argument:
        special = _non_finite(value)
        if special is not None:
            return special
        if isinstance(value, list):
            return tuple(_decode_scalar(float, item, f"{path}[{index}]") for index, item in enumerate(value))
        if value is None or type(value) in (bool, int, float, str):
            return typing.cast(Argument, value)
        raise JobError(
            f"{path} is {value!r}; an argument must be a number, text, true, false, null or a list of numbers"
        )
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        (present,) = [item for item in typing.get_args(hint) if item is not types.NoneType]
        return None if value is None else _decode(present, value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise JobError(f"{path} is {value!r}; it must be a list")
        item_hint = typing.get_args(hint)[0]
        return tuple(_decode(item_hint, item, f"{path}[{index}]") for index, item in enumerate(value))
    if origin is collections.abc.Mapping:
        if not isinstance(value, dict):
            raise JobError(f"{path} is {value!r}; it must be an object")
        item_hint = typing.get_args(hint)[1]
        return {key: _decode(item_hint, item, f"{path}.{key}") for key, item in value.items()}
    return _decode_scalar(hint, value, path)


def _decode_scalar(hint: Any, value: Any, path: str) -> Any:
    # type(), not isinstance(): True is an int in Python, and a flag read as a number would go unnoticed.
    if hint is float:
        special = _non_finite(value)
        if special is not None:
            return special
        if type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max):
            return value
    elif type(value) is hint:
        return value
    raise JobError(f"{path} is {value!r}; it must be of type {getattr(hint, '__name__', hint)}")

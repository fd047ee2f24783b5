"""A JobSpec as plain JSON values and back, exactly: ints stay ints, floats keep every bit, sequences become tuples.

NaN and infinities, which JSON does not have, are written as {"float": "nan" | "inf" | "-inf"}.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import json
import math
import re
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from shardline.core.settings import short
from shardline.core.spec import ConsistencySpec, InnerSpec, JobSpec, RuleSpec, ScheduleSpec, TensorSpec
from shardline.errors import JobError

_NON_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_SPECIAL = re.compile(r'\{"float": "(nan|inf|-inf)"\}')
for _spec in (TensorSpec, RuleSpec, ScheduleSpec, ConsistencySpec, InnerSpec, JobSpec):
    # Strict: True is no number, and "7" none either.
    _spec.__pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[union-attr]
_JOB = TypeAdapter(JobSpec)
_OF_SOME = ("rule", "init", "admit", "evict", "max_rows", "memory_rows", "place", "follows_scores", "pretrained")
"""Fields that are not written where they are empty, so that the version before, which lacks them, reads the rest."""


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
    try:
        # In a text of JSON this can be nothing else: within a string its quotes have backslashes.
        text = _SPECIAL.sub(lambda match: _NON_FINITE[match[1]], json.dumps(value))
        return _JOB.validate_json(text)
    except ValidationError as error:
        raise JobError(_sentence(error)) from None
    except (ValueError, RecursionError) as error:
        raise JobError(f"the job can't be read: {error}") from None


def _sentence(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    *parents, name = problem["loc"] or ("",)
    parent = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parents)
    if problem["type"] == "unexpected_keyword_argument":
        return f"job{parent} has an unknown field {name!r}"
    if problem["type"] == "missing":
        return f"job{parent} has no field {name!r}"
    place = f"{parent}[{name}]" if isinstance(name, int) else f"{parent}.{name}"
    return f"job{place} is {short(problem['input'])}; {problem['msg'].replace('Input', 'it')}"


def _encode(value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {name: _encode(item, f"{path}.{name}") for name, item in fields.items() if name not in _OF_SOME or item}
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

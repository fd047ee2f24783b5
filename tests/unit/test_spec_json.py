"""A job as JSON comes back equal, and what is no job is refused by place."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from shardline.core.spec import Argument, RuleSpec
from shardline.core.spec_json import job_from_json, job_to_json
from shardline.errors import JobError
from tests.support.checkpoints import (
    EVERY_KIND,
    job_of,
)

# The job as JSON.


def test_job_comes_back_equal_and_with_the_same_types() -> None:
    groups: tuple[dict[str, Argument], ...] = (
        {"lr": 0.1, "steps": 3, "betas": (0.9, 0.999), "nesterov": True, "momentum": 1e-323, "fused": None},
        {"lr": math.inf, "etas": (-math.inf, 1.0), "kind": "x", "zero": -0.0, "one": 1.0},
    )
    job = dataclasses.replace(
        job_of(EVERY_KIND, seed=-(2**62), script=True), rule=RuleSpec(name="Rprop", groups=groups)
    )
    text = json.dumps(job_to_json(job), allow_nan=False)
    back = job_from_json(json.loads(text))
    assert back == job
    for ours, theirs in zip(back.rule.groups, groups, strict=True):
        assert {k: (type(v), repr(v)) for k, v in ours.items()} == {k: (type(v), repr(v)) for k, v in theirs.items()}
    nan = dataclasses.replace(job, rule=RuleSpec(name="SGD", groups=({"lr": math.nan},)))
    assert math.isnan(job_from_json(job_to_json(nan)).rule.groups[0]["lr"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("seed",), "7", "job.seed is '7'"),
        (("seed",), True, "job.seed is True"),
        (("replicas",), 1.0, "it should be a valid integer"),
        (("tensors", 0, "kind"), "weights", "it should be 'param'"),
        (("tensors", 0, "kind"), {"x": 1}, "it should be 'param'"),
        (("tensors", 0, "shape"), [1, "2"], "job.tensors[0].shape[1] is '2'"),
        (("tensors", 0, "size"), 1, "job.tensors[0] has an unknown field 'size'"),
        (("tensors", 0), {"name": "x"}, "has no field 'shape'"),
        (("rule", "groups", 0, "lr"), {"code": "x"}, "it should be a valid number"),
        (("consistency", "nan_policy"), "both", "nan_policy is 'both'"),
    ],
)
def test_job_of_a_wrong_shape_is_refused_with_the_place_named(path: tuple[Any, ...], value: Any, sentence: str) -> None:
    fields: Any = job_to_json(job_of())
    place = fields
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(JobError) as caught:
        job_from_json(fields)
    assert sentence in str(caught.value)

"""Whatever dies, pipelines go on and end in the bits of one process; without any one of the rules they don't."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from shardline_pipeline import PIPELINES, schedule_named
from tests.protocol_model.numbers import Broken
from tests.protocol_model.pipelines import PipelineModel
from tests.protocol_model.pipelines_chief import PipelineCounts, PipelineSetup

STAGED = [one.name for one in PIPELINES if schedule_named(one.name).staged]
EACH = pytest.mark.parametrize(
    ("pipeline", "apply"), [(name, apply) for name in STAGED for apply in ("server", "worker")]
)


def played(seeds: range, pipeline: str, apply: str = "server", **changes: Any) -> PipelineCounts:
    """One to two replicas, on two to four workers."""
    total = PipelineCounts()
    for seed in seeds:
        shape = {"replicas": 1 + seed % 2, "workers": 2 + seed % 3, "microbatches": 2 + seed % 2}
        setup = PipelineSetup(seed=seed, pipeline=pipeline, apply=apply, **{**shape, **changes})
        counts = PipelineModel(setup).play()
        for one in fields(counts):
            setattr(total, one.name, getattr(total, one.name) + getattr(counts, one.name))
    return total


@pytest.mark.part(of=3)
@EACH
def test_no_schedule_of_deaths_changes_a_bit_or_stops_the_job(pipeline: str, apply: str) -> None:
    counts = played(range(4), pipeline, apply, steps=6)
    # Otherwise the schedules would show nothing.
    assert counts.kills > 8 and counts.zombies > 2 and counts.moves > 10 and counts.chiefs > 1
    assert counts.duplicates > 50 and counts.hosted > 5
    goes_back = apply == "worker" or not schedule_named(pipeline).flushes
    assert counts.rollbacks > 10 if goes_back else counts.rollbacks <= 4


@pytest.mark.parametrize(
    ("pipeline", "apply"), [("stash", "server"), ("ftpipe", "worker"), ("double-buffer", "server")]
)
def test_nor_where_two_workers_feed_one(pipeline: str, apply: str) -> None:
    shape = {"replicas": 2, "workers": 4, "hosts": ((0, 1), (2,), (3,)), "microbatches": 2}
    counts = played(range(4), pipeline, apply, steps=6, **shape)
    assert counts.kills > 8 and counts.moves > 10 and counts.rollbacks > 10


@pytest.mark.long
@EACH
def test_no_schedule_of_hundreds_changes_a_bit_or_stops_the_job(pipeline: str, apply: str) -> None:
    counts = played(range(1000, 1100), pipeline, apply, steps=10, kills=8, losses=2, chiefs=2)
    assert counts.late > 30 and counts.kills > 500
    # A step that is closed while its parcels are waited for is rare where everything goes back anyway.
    assert counts.looked > 2 or apply == "worker" or not schedule_named(pipeline).flushes


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_no_schedule_of_thousands_stops_workers_that_have_several_replicas(part: int) -> None:
    # Where nothing goes back, nothing else ends a wait.
    seeds = range(2000 + 100 * part, 2100 + 100 * part)
    counts = played(seeds, "flush", replicas=2 + part % 2, steps=10, kills=8, losses=2, chiefs=2)
    assert counts.kills > 500 and counts.looked > 5


def test_a_step_that_replica_0_repeats_is_computed_with_the_parameters_of_that_step() -> None:
    # Its worker has closed the step, another's stage moves before all have, and all begin it again.
    played(range(1067, 1068), "flush", "worker", steps=10, kills=8, losses=2, chiefs=2)


@pytest.mark.parametrize(
    ("rule", "pipeline", "apply", "seeds"),
    [
        pytest.param("decides", "stash", "server", range(3), id="going back when a stage moves"),
        pytest.param("decides", "flush", "worker", range(6), id="going back for the optimizer's state"),
        pytest.param("starts_over", "flush", "server", range(12), id="all workers beginning the step again"),
        pytest.param("alike", "flush", "server", range(129, 130), id="all workers computing all they have of a step"),
        pytest.param("ends", "no-stash", "server", range(1, 2), id="one version until no forward pass needs it"),
        pytest.param("looks", "flush", "server", range(1), id="asking whether the step is closed"),
        pytest.param("waits", "flush", "server", range(115, 116), id="parcels of newer orders waiting"),
        pytest.param("fences", "double-buffer", "server", range(3), id="telling timelines apart"),
    ],
)
def test_each_rule_is_needed(
    monkeypatch: pytest.MonkeyPatch, rule: str, pipeline: str, apply: str, seeds: range
) -> None:
    monkeypatch.setattr("tests.protocol_model.pipelines.LIMIT", 8000)
    with pytest.raises((AssertionError, Broken), match=r"stuck|has another|is used in|in the cut of"):
        played(seeds, pipeline, apply, **{rule: False})

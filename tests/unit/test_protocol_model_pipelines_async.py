"""Whatever dies, replicas that don't wait for each other train on with exact gradients, each of which counts once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from shardline_pipeline import PIPELINES, schedule_named
from tests.protocol_model.pipelines_async import AsyncPipelineModel
from tests.protocol_model.pipelines_chief import PipelineSetup

PACED = "ssp:slack=1,in_stages=true"
STAGED = [one.name for one in PIPELINES if schedule_named(one.name).staged]


def played(seeds: range, pipeline: str, **changes: Any) -> Counter[str]:
    """One to three replicas, on two to four workers."""
    total: Counter[str] = Counter()
    for seed in seeds:
        shape = {"replicas": 1 + seed % 3, "workers": 2 + seed % 3, "microbatches": 2 + seed % 2, "steps": 12}
        fields = {"consistency": "async:in_stages=true", **shape, **changes}
        model = AsyncPipelineModel(PipelineSetup(seed=seed, pipeline=pipeline, **fields))
        total.update(vars(model.play()))
        total["checked"] += model.checked
        total["held"] += model.held
        total["failovers"] += model.failovers
    return total


@pytest.mark.part(of=3, first=1)
@pytest.mark.parametrize("pipeline", STAGED)
def test_no_schedule_of_deaths_changes_a_gradient_or_stops_the_job(pipeline: str) -> None:
    counts = played(range(6), pipeline)
    # Otherwise the schedules would show nothing.
    assert counts["kills"] > 12 and counts["zombies"] > 4 and counts["moves"] > 20 and counts["chiefs"] > 1
    assert counts["rollbacks"] > 15 and counts["duplicates"] > 100 and counts["hosted"] > 5
    assert counts["checked"] > 400


@pytest.mark.parametrize("pipeline", ["flush", "stash"])
def test_replicas_that_may_be_a_step_ahead_never_wait_for_each_other_for_ever(pipeline: str) -> None:
    # Each with workers of its own: those that have stages of several replicas bind these to each other.
    counts = played(range(9), pipeline, consistency=PACED, replicas=2, workers=6)
    assert counts["held"] > 20 and counts["kills"] > 12 and counts["checked"] > 400


@pytest.mark.part(of=3)
@pytest.mark.parametrize("pipeline", STAGED)
def test_standbys_take_over_while_stages_are_at_different_steps(pipeline: str) -> None:
    # Without deaths of workers and chiefs nothing goes back.
    fields = {"standbys": True, "losses": 4, "kills": 0, "chiefs": 0}
    counts = played(range(6), pipeline, **fields)
    assert counts["failovers"] > 10 and counts["checked"] > 400
    counts = played(range(6, 10), pipeline, **{**fields, "kills": 3, "chiefs": 1})
    assert counts["failovers"] > 4 and counts["rollbacks"] > 4
    counts = played(range(10, 13), pipeline, **fields, consistency=PACED)
    assert counts["failovers"] > 4


@pytest.mark.long
@pytest.mark.parametrize("pipeline", STAGED)
def test_no_schedule_of_hundreds_with_standbys_changes_a_gradient_or_stops_the_job(pipeline: str) -> None:
    fields = {"standbys": True, "losses": 6, "kills": 4, "chiefs": 1, "steps": 16, "every": 2}
    counts = played(range(1000, 1080), pipeline, **fields)
    counts.update(played(range(1080, 1100), pipeline, **fields, consistency=PACED))
    assert counts["failovers"] > 150 and counts["kills"] > 200


@pytest.mark.long
@pytest.mark.parametrize("pipeline", STAGED)
def test_no_schedule_of_hundreds_changes_a_gradient_or_stops_the_job(pipeline: str) -> None:
    counts = played(range(1000, 1100), pipeline, steps=16, every=1, kills=8, losses=2, chiefs=2)
    assert counts["late"] > 30 and counts["kills"] > 500


@pytest.mark.long
@pytest.mark.parametrize("pipeline", STAGED)
def test_no_schedule_of_hundreds_holds_a_replica_up_that_may_be_a_step_ahead(pipeline: str) -> None:
    shape = {"consistency": PACED, "replicas": 2, "workers": 6}
    counts = played(range(1000, 1100), pipeline, steps=16, every=1, kills=8, losses=2, chiefs=2, **shape)
    assert counts["held"] > 300 and counts["late"] > 30 and counts["kills"] > 500


@pytest.mark.parametrize(
    ("rule", "pipeline", "seeds", "found"),
    [
        pytest.param("decides", "flush", range(12), "stuck", id="going back when a stage moves"),
        pytest.param("withholds", "stash", range(10), "gradient|weights", id="telling nobody who has it until then"),
    ],
)
def test_each_rule_is_needed(
    monkeypatch: pytest.MonkeyPatch, rule: str, pipeline: str, seeds: range, found: str
) -> None:
    monkeypatch.setattr("tests.protocol_model.pipelines.LIMIT", 8000)
    with pytest.raises(AssertionError, match=found):
        played(seeds, pipeline, **{rule: False})


def test_replicas_that_share_workers_begin_a_timeline_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.protocol_model.pipelines.LIMIT", 8000)
    fields = {"standbys": True, "losses": 20, "kills": 0, "chiefs": 0, "steps": 8, "replicas": 3, "workers": 5}
    played(range(3, 4), "stash", microbatches=1, **fields)
    monkeypatch.setattr("shardline_pipeline.bound", lambda job, posts, replicas: sorted(replicas))
    with pytest.raises(AssertionError, match="stuck"):
        played(range(3, 4), "stash", microbatches=1, **fields)

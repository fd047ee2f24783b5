"""What a script's job is made of: connect()'s arguments before the environment, in the texts that all tasks compare."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardline.cadence import EveryStep
from shardline.client.api.script_job import ScriptSettings, choose_settings, script_spec
from shardline.core.spec import ConsistencySpec
from shardline.errors import JobError, UsageError


class Counted(torch.nn.Linear):
    def get_extra_state(self) -> int:
        return 3


def nothing(name: str) -> str | None:
    return None


def test_what_is_given_comes_before_the_environment() -> None:
    environ = {"seed": "3", "checkpoint_every": "20", "batch_size": "9"}
    assert choose_settings({"seed": 5}, environ.get) == {"seed": 5, "checkpoint_every": 20}
    assert choose_settings({"seed": None, "cadence": EveryStep()}, nothing) == {"cadence": "every-step"}


@pytest.mark.parametrize(
    ("given", "environ", "error", "says"),
    [
        ({"batch_size": 3}, {}, UsageError, "no setting 'batch_size'; the settings are seed, checkpoint_every"),
        ({"seed": -1}, {}, JobError, r"connect\(\)\.seed is -1; give a whole number >= 0"),
        ({}, {"seed": "x"}, JobError, "seed is set to 'x'; it must be a whole number"),
        ({"topology": "ring"}, {}, JobError, "topology 'ring' does not exist; choose from flat"),
    ],
)
def test_what_can_not_be_is_refused(
    given: dict[str, object], environ: dict[str, str], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        choose_settings(given, environ.get)


def test_a_scripts_model_with_extra_state_is_refused_unless_the_script_accepts_it() -> None:
    model = torch.nn.Sequential(Counted(2, 2), Counted(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    script = ScriptSettings(name="s")
    with pytest.raises(JobError, match=r"module '0' and 1 more have extra state .* choose extra_state='unsaved'"):
        script_spec(script, 1, model, optimizer)
    assert (
        script_spec(replace(script, settings={"extra_state": "unsaved"}), 1, model, optimizer).extra_state == "unsaved"
    )


@pytest.mark.parametrize(("mode", "replicas"), [("sync", 3), ("async", 1)])
def test_workers_are_replicas_where_they_make_updates_together(mode: str, replicas: int) -> None:
    model = torch.nn.Linear(2, 2)
    script = ScriptSettings(name="s", consistency=ConsistencySpec(mode=mode), settings={"seed": 4})
    job = script_spec(script, 3, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert (job.name, job.replicas, job.seed, job.script, job.rule.method) == ("s", replicas, 4, True, "torch")

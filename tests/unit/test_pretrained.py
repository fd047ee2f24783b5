"""A model's own configuration in its job. tests/scripts has the real libraries."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from shardline import model as module
from shardline.checkpoint import CheckpointStore
from shardline.cli.main import main
from shardline.core.spec import JobSpec, differences
from shardline.core.spec_json import job_from_json, job_to_json
from shardline.model import pretrained
from shardline.rpc.messages.convert import job_from_proto, job_to_proto
from tests.support.checkpoints import cut_of
from tests.support.chief_cluster import make_job


class Config:
    def __init__(self, **values: object) -> None:
        self.values = values

    def to_json_string(self, *, use_diff: bool) -> str:
        assert not use_diff
        return json.dumps(self.values)

    def to_dict(self) -> dict[str, object]:
        return self.values


class PreTrainedModel(torch.nn.Module):
    config = Config(model_type="tiny", layers=2)


class PeftModel(torch.nn.Module):
    @property
    def peft_config(self) -> dict[str, Config]:
        return {"default": Config(r=2, target_modules={"b", "a"})}

    def get_base_model(self) -> torch.nn.Module:
        return Tiny()


class Tiny(PreTrainedModel):
    """A model of transformers, as far as it is looked at."""


PreTrainedModel.__module__ = "transformers.modeling_utils"
PeftModel.__module__ = "peft.peft_model"


def test_class_and_configuration_of_a_model_and_of_its_adapters_are_kept() -> None:
    tiny = {"model": "Tiny", "config": {"model_type": "tiny", "layers": 2}, "adapters": {}}
    assert json.loads(pretrained(Tiny())) == tiny
    adapters = {"default": {"r": 2, "target_modules": ["a", "b"]}}
    assert json.loads(pretrained(PeftModel())) == {**tiny, "adapters": adapters}
    assert pretrained(torch.nn.Linear(1, 1)) == pretrained({"w": torch.zeros(1)}) == ""


def test_of_a_huge_configuration_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PRETRAINED", 10)
    assert pretrained(Tiny()) == ""


def test_it_travels_with_the_job_and_is_not_part_of_its_identity() -> None:
    job = make_job()
    kept = dataclasses.replace(job, pretrained=pretrained(Tiny()))
    for back in (job_from_proto(job_to_proto(kept)), job_from_json(json.loads(json.dumps(job_to_json(kept))))):
        assert isinstance(back, JobSpec) and back.pretrained == kept.pretrained != ""
    assert kept == job and not differences(kept, job)


def test_a_checkpoint_of_another_model_is_refused_with_what_else_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CheckpointStore(tmp_path / "run", keep=1).commit(cut_of())
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf"), "--hf"]) == 2
    assert "it is no PreTrainedModel of transformers and no PeftModel on one" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()

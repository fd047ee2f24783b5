"""What people get wrong at the edges: each is refused in a sentence that names it and says what to do instead."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardline.checkpoint.export import find_checkpoint
from shardline.cli import options
from shardline.client.api.workplace import credit_bytes
from shardline.cluster import ClusterSpec
from shardline.core.spec import ConsistencySpec, JobSpec, RuleSpec, TensorSpec
from shardline.core.spec_json import job_to_json
from shardline.core.timeouts import Timeouts
from shardline.errors import CheckpointError, ClusterSpecError, JobError, ShardlineError, UsageError
from shardline.host.process import resolve_device
from shardline.job import Job
from shardline.model import model_tensors
from shardline.rpc.index_request import assigned_place
from shardline.security import PLAIN
from shardline_chief.io.journal import Journal
from shardline_chief.rules.state.leases import Leases
from shardline_chief.service import _job_spec
from shardline_evaluator.service import run as evaluate

SPEC: dict[str, object] = {"chief": ["a:1"], "ps": ["b:1"]}


def spec(**more: object) -> ClusterSpec:
    return ClusterSpec.from_json(json.dumps(SPEC | more), "cluster.json")


def job_spec(**argument: Any) -> JobSpec:
    tensor = TensorSpec(name="w", shape=(2,), dtype="float32")
    rule = RuleSpec(name="SGD", groups=(argument,))
    return JobSpec(name="j", tensors=(tensor,), rule=rule, consistency=ConsistencySpec(), replicas=1, steps=1)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: spec(boss=["e:1"]), ClusterSpecError, "cluster.json has a role 'boss'; the roles are"),
        (lambda: spec(chief=["a:1", "e:1"]), ClusterSpecError, 'has 2 addresses for "chief"'),
        (
            lambda: spec(worker={"0": "c:1", "2": "d:1"}),
            ClusterSpecError,
            '"worker" has 2 numbered tasks, but no \'1\'; number them from "0"',
        ),
        (lambda: spec(evaluator=[]), ClusterSpecError, '"evaluator" is an empty list; give its addresses'),
        (
            lambda: options.overrides(
                {**dict.fromkeys(options.JOB_FIELDS), "steps": 10, "settings": (("steps", "20"),)}
            ),
            UsageError,
            "job field 'steps' is set 2 times; set it once",
        ),
        (lambda: resolve_device("meta"), UsageError, "--device meta: use cpu, cuda or cuda:N"),
        (
            lambda: job_to_json(job_spec(lr={1})),
            JobError,
            "lr is {1} (set), which can't be stored; use a number, text or a tuple",
        ),
        (
            lambda: find_checkpoint(Path("/nowhere")),
            CheckpointError,
            "/nowhere does not exist; give the folder of a step (step-00000100), or the folder that contains the "
            "checkpoints",
        ),
        (
            lambda: assigned_place("worker/any", None, address=None, timeouts=Timeouts(), security=PLAIN),
            ClusterSpecError,
            "--task worker/any needs --cluster FILE or SHARDLINE_CLUSTER",
        ),
        (
            lambda: Leases.resumed({"done": [[5, 5]]}, 10),
            CheckpointError,
            "an impossible range of batches: [(5, 5)]",
        ),
        (
            lambda: _job_spec(SimpleNamespace(job=None, chief_trains=True)),  # type: ignore[arg-type]
            UsageError,
            "--chief-trains needs --job: the chief builds the model itself",
        ),
    ],
)
def test_it_is_refused_in_a_sentence_that_names_it(
    call: Callable[[], object], error: type[ShardlineError], sentence: str
) -> None:
    with pytest.raises(error, match=re.escape(sentence)):
        call()


@pytest.mark.parametrize("text", ["much", "-1", "nan", "1e7"])
def test_a_credit_that_is_no_number_of_megabytes_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SHARDLINE_CREDIT_MB", text)
    with pytest.raises(UsageError, match=rf"SHARDLINE_CREDIT_MB is '{text}'; give a number of megabytes, such as 4"):
        credit_bytes()


def test_an_evaluator_without_a_job_file_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardline_evaluator.service.Termination.install", lambda self: None)
    with pytest.raises(UsageError, match=r"an evaluator needs --job JOB\.py"):
        evaluate(SimpleNamespace(job=None))  # type: ignore[arg-type]


def test_a_folder_that_the_chief_may_not_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    sentence = rf"the chief can't write to {re.escape(str(tmp_path))}: Permission denied"
    with Journal(tmp_path) as journal, monkeypatch.context() as patch:
        patch.setattr("shardline_chief.io.journal.os.open", refuse)
        with pytest.raises(UsageError, match=sentence):
            journal.begin_term()


class Holds(nn.Module):
    """A trainable weight, and a buffer that nobody can train."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("odd", buffer)


@pytest.mark.parametrize(
    ("buffer", "sentence"),
    [
        (lambda: torch.eye(2).to_sparse(), r"'odd' has layout torch\.sparse_coo; Shardline supports dense"),
        (lambda: torch.zeros(1).expand(3), r"'odd' is an expanded view .* store \.contiguous\(\) of it"),
        (lambda: torch.zeros(2, device="meta"), r"'odd' is on the meta device and has no values"),
    ],
    ids=["sparse", "expanded", "meta"],
)
def test_a_tensor_that_can_not_be_held_is_named(buffer: Callable[[], torch.Tensor], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        model_tensors(Holds(buffer()))


def test_what_torch_says_of_a_jobs_parameter_groups_is_passed_on() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(model.parameters())}] * 2

    fields: dict[str, Any] = {"loss": lambda m, b: m(b).sum(), "dataset": [1], "batch_size": 1, "steps": 1}
    job = Job(model=lambda: nn.Linear(2, 2), optimizer="SGD", param_groups=groups, **fields)
    with pytest.raises(
        JobError,
        match=r"torch\.optim\.SGD does not accept optimizer_args or param_groups: .*more "
        r"than one",
    ):
        job.build_optimizer(nn.Linear(2, 2))

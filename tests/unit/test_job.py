"""Job files load or say why not; a model becomes the plan's tensors."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

from shardline import consistency, methods, schedule
from shardline.cadence import DiLoCo
from shardline.client.api.script_job import TensorHolder
from shardline.consistency.intake import VOTED_TREE
from shardline.core.plan import make_plan
from shardline.core.spec import TensorKind
from shardline.core.spec_json import job_from_json, job_to_json
from shardline.data import checked_loss
from shardline.errors import JobError
from shardline.host.python_file import installed_imports
from shardline.job import MAX_METRIC_NAME, MAX_METRICS, Job, load_job, model_tensors
from shardline.rpc import limits
from shardline.update import rule

EXAMPLES = Path(__file__).parents[2] / "examples"

JOB = """
import torch
from torch import nn
from shardline.job import Job

job = Job(
    model=lambda: nn.Linear(2, 2),
    loss=lambda model, batch: model(batch).mean(),
    dataset=[torch.zeros(2)] * 8,
    optimizer="SGD",
    batch_size=2,
    steps=10,
)
"""


@pytest.fixture(autouse=True)
def _leave_imports_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("shardline_job_") or name in ("worker", "sizes_of_the_job"):
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


ELSEWHERE = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def with_another_group(optimizer: torch.optim.Optimizer) -> StepLR:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    return StepLR(optimizer, 2)


def score(model: nn.Module) -> dict[str, float]:
    return {"loss": 0.0}


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def make_job(**changes: Any) -> Job:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 2),
        "loss": lambda model, batch: model(batch[0]).mean(),
        "dataset": TensorDataset(torch.zeros(8, 2)),
        "optimizer": "SGD",
        "batch_size": 2,
        "steps": 10,
    }
    return Job(**{**settings, **changes})


# Loading


def test_a_job_file_loads_and_is_named_after_itself_or_its_folder(tmp_path: Path) -> None:
    assert load_job(write(tmp_path / "wide.py", JOB)).name == "wide"
    assert load_job(write(tmp_path / "job.py", JOB)).name == tmp_path.name
    assert load_job(write(tmp_path / "named.py", JOB.replace("steps=10", "steps=10, name='x'"))).name == "x"


def test_a_job_file_imports_its_siblings_also_one_called_worker(tmp_path: Path) -> None:
    write(tmp_path / "sizes_of_the_job.py", "BATCH = 4\n")
    write(tmp_path / "worker.py", "import sizes_of_the_job\n" + JOB.replace("size=2", "size=sizes_of_the_job.BATCH"))
    assert load_job(tmp_path / "worker.py").batch_size == 4
    assert "worker" not in sys.modules


def test_mirrored_workers_get_a_replica_each_unless_the_job_says_how_many(tmp_path: Path) -> None:
    job = write(tmp_path / "job.py", JOB)
    assert load_job(job, workers=4, mirrored=True).replicas == 4
    assert load_job(job, workers=4).replicas == 1
    assert load_job(job, [("consistency", "async")], workers=4, mirrored=True).contributors == 1
    more = write(tmp_path / "more.py", JOB.replace("steps=10", "steps=10, replicas=4"))
    assert load_job(more, workers=2, mirrored=True).replicas == 4
    with pytest.raises(JobError, match=r"5 workers are mirrored, but the job has 4 replicas, .*at most --mirrored 4"):
        load_job(more, workers=5, mirrored=True)
    with pytest.raises(JobError, match="compute whole replicas, but this job has pipeline flush"):
        load_job(more, [("pipeline", "flush")], workers=2, mirrored=True)


def test_two_job_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first = load_job(write(tmp_path / "job.py", JOB))
    second = load_job(write(tmp_path / "a" / "job.py", JOB.replace("steps=10", "steps=11")))
    assert (first.steps, second.steps) == (10, 11)
    assert first.model.__module__ != second.model.__module__
    assert first.model.__module__ in sys.modules


def test_a_missing_job_file_is_named_with_near_names(tmp_path: Path) -> None:
    write(tmp_path / "digits.py", JOB)
    with pytest.raises(JobError, match=r"no job file .*digit\.py; did you mean digits\.py\?"):
        load_job(tmp_path / "digit.py")
    with pytest.raises(JobError, match=r"no job file .*: folder .*nowhere does not exist"):
        load_job(tmp_path / "nowhere" / "job.py")
    with pytest.raises(JobError, match=r"is a folder; name the job file in it \(it holds digits\.py\)"):
        load_job(tmp_path)
    with pytest.raises(JobError, match=r"is not a \.py file"):
        load_job(write(tmp_path / "job.yaml", ""))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (JOB + "\n1 / 0\n", r"job\.py, line 15: ZeroDivisionError: division by zero"),
        ("job = (\n", r"job\.py, line 1: SyntaxError"),
        ("import no_such_module\njob = 1\n", r"job\.py, line 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f():\n    int('x')\nf()\njob = 1\n", r"job\.py, line 2: ValueError: invalid literal"),
        ("import sys\njob = sys.exit(3)\n", r"job\.py, line 2: the file ends the process \(SystemExit: 3\)"),
        (JOB.replace("steps=10", "steps=0"), r"job\.py, line 6: Job\.steps is 0; give a whole number >= 1"),
        ("job = 3\n", r"`job` is 3; it must be a shardline\.Job"),
        ("def job():\n    pass\n", r"`job` is <function job .*; it must be a shardline\.Job"),
        ("if False:\n    job = 3\n", r"ended without defining `job`"),
    ],
)
def test_a_job_file_that_cannot_be_used_says_why_and_where(tmp_path: Path, text: str, sentence: str) -> None:
    before = {name for name in sys.modules if name.startswith("shardline_job_")}
    with pytest.raises(JobError, match=sentence):
        load_job(write(tmp_path / "job.py", text))
    if "it must be" not in sentence and "ended without" not in sentence:
        assert {name for name in sys.modules if name.startswith("shardline_job_")} == before


def test_a_plain_training_script_is_not_run_when_given_as_a_job(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "def main():\n    job = 3\nraise SystemExit('it was run')\n")
    with pytest.raises(JobError, match=r"does not define `job`, so it was not run; .* `shardline train --script"):
        load_job(script)


def test_overrides_are_read_as_their_fields_types(tmp_path: Path) -> None:
    texts = [("steps", "200"), ("batch-size", "1"), ("consistency", "async"), ("clip_norm", "0.5"), ("seed", "3")]
    job = load_job(write(tmp_path / "job.py", JOB), texts)
    assert (job.steps, job.batch_size, job.consistency, job.clip_norm, job.seed) == (200, 1, "async", 0.5, 3)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("steps", "ten", "steps is set to 'ten'; it must be a whole number"),
        ("clip_norm", "nan", "clip_norm is set to 'nan'; it must be a number"),
        ("replicas", "0", r"Job\.replicas is 0; give a whole number >= 1"),
        ("consistency", "eventual", "consistency 'eventual' does not exist; choose from sync, async"),
        ("model", "x", "job field 'model' can't be set from the command line; these can: replicas, batch_size"),
    ],
)
def test_an_override_that_cannot_be_is_refused(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        load_job(write(tmp_path / "job.py", JOB), [(name, text)])


# Fields


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": lambda: nn.Linear(2, 2), "loss": None}, r"Job\.loss is None; give a function"),
        (
            {"model": nn.Linear(2, 2)},
            r"Job\.model is Linear\(.*; give a function that returns it, such as lambda: Net\(\)",
        ),
        ({"evaluate": 3}, r"Job\.evaluate is 3; give a function, or None"),
        ({"batch_size": 2.0}, r"Job\.batch_size is 2\.0; give a whole number >= 1"),
        ({"replicas": True}, r"Job\.replicas is True"),
        ({"loaders": 10_000}, r"Job\.loaders is 10000; give a whole number from 0 to 256"),
        ({"loaders": -1}, r"Job\.loaders is -1; give a whole number from 0 to 256"),
        ({"prefetch": 10_000}, r"Job\.prefetch is 10000; give a whole number from 1 to 64"),
        ({"seed": -1}, r"Job\.seed is -1; give a whole number >= 0"),
        ({"seed": 2**63}, r"Job\.seed is 9223372036854775808"),
        ({"clip_norm": -1.0}, r"clip_norm is -1\.0"),
        ({"nan_policy": "ignore"}, r"nan_policy is 'ignore'"),
        ({"best_mode": "best"}, r"Job\.best_mode is 'best'; it must be max or min"),
        ({"error_memory": "kept"}, r"Job\.error_memory is 'kept'; it must be reset or exact"),
        ({"schedule": "cosine"}, r"Job\.schedule is 'cosine'; use shardline\.schedule\.constant"),
        ({"schedule": schedule.cosine(warmup_steps=10)}, r"10 warm-up steps use up all 10"),
        ({"optimizer": "LBFGS"}, r"optimizer LBFGS can't run on parameter servers"),
        ({"optimizer": "Adm"}, r"optimizer 'Adm' is not a torch\.optim class"),
        ({"optimizer_args": {"learning_rate": 1}}, r"unknown argument 'learning_rate'"),
        ({"optimizer_args": {"lr": -1.0}}, r"Invalid learning rate"),
        ({"dataset": 3}, r"Job\.dataset is 3; give an object with len\(\) and \[index\]"),
        ({"dataset": iter([1])}, r"can be read only once; give a function that returns it"),
        ({"dataset": DataLoader([1, 2])}, r"Job\.batch_size is 2, and that of the DataLoader 1; leave one out"),
        (
            {"dataset": DataLoader([1, 2], sampler=WeightedRandomSampler([1.0, 2.0], 2)), "batch_size": 0},
            r"Job\.dataset is a DataLoader with a WeightedRandomSampler, but the job has an order of its own",
        ),
        (
            {"dataset": DataLoader([1, 2], sampler=RandomSampler([1, 2], replacement=True)), "batch_size": 0},
            r"a DataLoader with a RandomSampler, but the job has an order of its own",
        ),
        (
            {"dataset": DataLoader([1, 2], num_workers=1, worker_init_fn=print), "batch_size": 0},
            r"a DataLoader with a worker_init_fn, which a job's loaders would not call; leave it out",
        ),
        (
            {"dataset": DataLoader([1, 2], batch_size=None), "batch_size": 0},
            r"Job\.dataset is a DataLoader without a batch_size",
        ),
        ({"batch_size": 0}, r"Job\.batch_size is 0; give a whole number >= 1"),
        ({"steps": 0}, r"Job\.steps is 0; give a whole number >= 1"),
        (
            {"dataset": Endless, "epochs": 2, "steps": 0},
            r"Job\.epochs is 2, but the data set has no len\(\); give steps instead",
        ),
        ({"scheduler": StepLR}, r"scheduler\(optimizer\) raised TypeError: .*step_size"),
        ({"scheduler": ReduceLROnPlateau, "evaluate": None}, r"follows the scores of `evaluate` every .*: set both"),
        ({"scheduler": ReduceLROnPlateau, "checkpoint_every": 0}, r"set both, and start an evaluator"),
        (
            {"scheduler": ReduceLROnPlateau, "checkpoint_every": 5, "evaluate": score, "consistency": "async"},
            r"consistency async with cadence every-step has none of that all workers share",
        ),
        (
            {"scheduler": ReduceLROnPlateau, "checkpoint_every": 5, "evaluate": score, "cadence": "diloco:every=4"},
            r"with cadence diloco:every=4 has none",
        ),
        (
            {"scheduler": ReduceLROnPlateau, "checkpoint_every": 1, "evaluate": score, "steps": 9000},
            r"9000 steps with checkpoint_every=1 are 9000 scores, and 4096 are the limit; set .* at least 3",
        ),
        ({"scheduler": lambda optimizer: None}, r"scheduler\(optimizer\) returned None; it must return a scheduler"),
        (
            {"scheduler": lambda _: StepLR(ELSEWHERE, 2)},
            r"returned a StepLR of another optimizer, which changes nothing",
        ),
        ({"scheduler": with_another_group}, r"scheduler\(optimizer\) made 1 parameter groups into 2"),
        ({"epochs": -1, "steps": 0}, r"Job\.epochs is -1; give a whole number >= 0"),
        ({"epochs": "3", "steps": 0}, r"Job\.epochs is '3'; give a whole number >= 0"),
        ({"epochs": 3, "steps": 0, "batch_size": 0}, r"Job\.batch_size is 0; give a whole number >= 1"),
        ({"scheduler": ConstantLR, "schedule": schedule.linear()}, r"leave it out where the job has a scheduler"),
        (
            {"codec_parcels": "bf8"},
            "codec_parcels 'bf8' does not exist; choose from raw, bf16, fp16, lossless, sparse, int8, fp8, qsgd, te",
        ),
        (
            {"codec_down": "tops"},
            "codec_down 'tops' does not exist; choose from raw, auto, bf16, fp16, delta, lossless",
        ),
        ({"steps": 10**20}, r"Job\.steps is 100000000000000000000; give a whole number from 1 to 9223372036854775807"),
        ({"codec_parcels": "int8:x=1"}, "codec_parcels 'int8:x=1': int8 has no setting 'x'"),
        ({"codec": "bf8"}, "codec 'bf8' does not exist; choose from raw, auto, "),
    ],
)
def test_a_field_that_cannot_be_is_named_with_value_and_remedy(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        make_job(**changes)


def test_a_data_loader_stands_for_its_data_set_batch_size_collate_function_and_processes() -> None:
    data = TensorDataset(torch.zeros(8, 2))
    loader = DataLoader(data, batch_size=2, shuffle=True, collate_fn=torch.stack, num_workers=2)
    job = make_job(dataset=loader, batch_size=0)
    assert (job.dataset, job.batch_size, job.collate, job.loaders) == (data, 2, torch.stack, 2)
    assert make_job(dataset=DataLoader(Endless(), batch_size=4), batch_size=0).batch_size == 4


def test_epochs_are_whole_steps_counted_with_the_batch_that_the_job_has_at_last(tmp_path: Path) -> None:
    data = TensorDataset(torch.zeros(50, 2))
    assert make_job(dataset=data, epochs=3, steps=0, replicas=2).steps == 3 * (50 // (2 * 2))
    assert make_job(dataset=data, epochs=3, steps=7).steps == 7
    counted = make_job(dataset=data, epochs=3, steps=0, replicas=2)
    assert dataclasses.replace(counted, batch_size=5).steps == 3 * (50 // (2 * 5))
    assert dataclasses.replace(counted, batch_size=5, steps=8).steps == 8
    # Of rounds, as many as it takes: 24 passes, of 1 each until step 4.
    for cadence, steps in (("local-sgd:every=4", 9), (DiLoCo(every=6), 6), ("post-local-sgd:start=4,every=8", 8)):
        assert make_job(dataset=data, epochs=3, steps=0, replicas=2, cadence=cadence).steps == steps, cadence
    text = JOB.replace("steps=10", "epochs=2")
    samples = load_job(write(tmp_path / "job.py", text)).samples
    for overrides, steps in (
        ([], 2 * (samples // 2)),
        ([("batch_size", "4")], 2 * (samples // 4)),
        ([("steps", "5")], 5),
        ([("epochs", "3"), ("batch_size", "1")], 3 * samples),
    ):
        assert load_job(tmp_path / "job.py", overrides).steps == steps, overrides
    assert load_job(write(tmp_path / "other.py", JOB), [("epochs", "1")]).steps == samples // 2


def test_a_loss_may_come_in_a_mapping_or_an_output_of_a_model() -> None:
    loss = torch.zeros((), requires_grad=True)
    assert all(checked_loss(found) is loss for found in (loss, {"loss": loss, "n": 3}, SimpleNamespace(loss=loss)))
    with pytest.raises(JobError, match=r"returned a mapping without \"loss\"; it has 'los', 'n'"):
        checked_loss({"los": loss, "n": 3})
    for found in (SimpleNamespace(los=loss), None):
        with pytest.raises(JobError, match=f"returned {type(found).__name__}; it must return a scalar tensor"):
            checked_loss(found)


def test_settings_of_groups_follow_from_the_step_alone() -> None:
    job = make_job(scheduler=lambda optimizer: StepLR(optimizer, 2, 0.5), optimizer_args={"lr": 1.0})
    settings = job.group_settings(job.build_optimizer(job.build_model()))
    assert settings is not None
    assert [settings.at(step)[0]["lr"] for step in (0, 5, 1, 2, 0)] == [1.0, 0.25, 1.0, 0.5, 1.0]


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=1, cooldown=1, threshold=0.1, min_lr=0.01)


def test_reduce_lr_on_plateau_follows_the_scores_as_in_torch() -> None:
    job = make_job(
        **{"scheduler": plateau, "optimizer_args": {"lr": 1.0}, "steps": 60, "checkpoint_every": 3, "evaluate": score}
    )
    model = job.build_model()
    settings, optimizer = job.group_settings(job.build_optimizer(model)), job.build_optimizer(model)
    assert settings is not None and job.spec(model).follows_scores
    told: list[tuple[int, float | None]] = []
    settings.scores = lambda: told
    theirs, expected, found = plateau(optimizer), [], []
    for number, value in enumerate(
        [1.0, 0.99, 0.98, None, 0.97, 0.5, 0.5, math.nan, 0.5, 0.5, 0.5, 0.2, 0.2, 0.2, 0.2]
    ):
        told.append((3 * (number + 1), value))
        if value is not None:
            theirs.step(value)
        expected.append(optimizer.param_groups[0]["lr"])
        found.append(settings.at(3 * (number + 2))[0]["lr"])
    assert found == expected and len(set(expected)) >= 4
    # Until its step comes, a score that is known changes nothing; a loop that goes back finds the same rates.
    for step in (0, 5, 50, 5, 14, 20):
        due = [number for number, (at, _) in enumerate(told) if at + 3 <= step]
        assert settings.at(step)[0]["lr"] == ([1.0, *expected][len(due)])


def test_a_learning_rate_that_is_a_tensor_stays_the_jobs() -> None:
    rate = torch.tensor(1.0)
    job = make_job(optimizer="Adam", scheduler=lambda optimizer: StepLR(optimizer, 2, 0.5), optimizer_args={"lr": rate})
    settings = job.group_settings(job.build_optimizer(job.build_model()))
    assert settings is not None
    assert [float(settings.at(step)[0]["lr"]) for step in (0, 5, 1, 2, 0)] == [1.0, 0.25, 1.0, 0.5, 1.0]
    assert rate == 1.0


def test_the_stand_in_of_a_scheduler_suits_an_optimizer_of_matrices() -> None:
    job = make_job(optimizer="Muon", scheduler=lambda optimizer: StepLR(optimizer, 1, 0.5), optimizer_args={"lr": 1.0})
    assert job.steps


def test_a_data_set_factory_is_called_once_and_seeded() -> None:
    calls = []

    def make() -> TensorDataset:
        calls.append(torch.rand(()).item())
        return TensorDataset(torch.zeros(8, 2))

    job = make_job(dataset=make, seed=3)
    assert job.samples == 8 and job.data is job.data and len(calls) == 1
    assert make_job(dataset=make, seed=3).samples == 8 and calls[0] == calls[1]
    with pytest.raises(JobError, match=r"Job\.dataset\(\) is 3; give an object"):
        _ = make_job(dataset=lambda: 3).data
    with pytest.raises(JobError, match=r"dataset\(\) raised FileNotFoundError: .*nowhere"):
        _ = make_job(dataset=lambda: Path("/nowhere").read_text()).data
    with pytest.raises(JobError, match="has no samples"):
        _ = make_job(dataset=[]).samples


def test_build_model_is_a_function_of_the_seed() -> None:
    first, again, other = (make_job(seed=seed).build_model().state_dict() for seed in (1, 1, 2))
    assert torch.equal(first["weight"], again["weight"])
    assert not torch.equal(first["weight"], other["weight"])
    with pytest.raises(JobError, match=r"model\(\) returned 3; it must return a torch\.nn\.Module"):
        make_job(model=lambda: 3).build_model()


def test_spec_holds_all_that_two_tasks_must_agree_on() -> None:
    job = make_job(replicas=2, optimizer="AdamW", schedule=schedule.cosine(), clip_norm=1.0, best_metric="val_loss")
    spec = job.spec(job.build_model())
    assert (spec.replicas, spec.batch_size, spec.steps, spec.samples, spec.threads) == (2, 2, 10, 8, 1)
    assert spec.rule.name == "AdamW" and spec.rule.groups[0]["lr"] == 0.001
    assert spec.schedule.total_steps == 10 and spec.best_is_lowest
    assert consistency.of(spec.consistency).intake is VOTED_TREE
    assert [tensor.name for tensor in spec.tensors] == ["weight", "bias"]
    assert job.spec(job.build_model()) == spec


def test_an_asynchronous_job_has_one_contributor() -> None:
    job = make_job(replicas=4, consistency="async")
    assert job.spec(job.build_model()).replicas == 1
    with pytest.raises(JobError, match="8 samples; one step needs 16"):
        make_job(replicas=8).spec(nn.Linear(2, 2))


def test_parameter_groups_reach_the_rule_and_the_tensors() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [model.bias], "lr": 0.5}, {"params": model.weight, "weight_decay": 0.1}]

    spec = make_job(param_groups=groups, optimizer_args={"lr": 0.1, "momentum": 0.9}).spec(nn.Linear(2, 2))
    assert [(t.name, t.group) for t in spec.tensors] == [("weight", 1), ("bias", 0)]
    assert [(g["lr"], g["momentum"], g["weight_decay"]) for g in spec.rule.groups] == [(0.5, 0.9, 0.0), (0.1, 0.9, 0.1)]
    with pytest.raises(JobError, match=r"torch\.optim\.SGD does not accept .*more than one parameter group"):
        make_job(param_groups=lambda m: [{"params": m.bias}, {"params": m.bias}]).spec(nn.Linear(2, 2))


def test_a_rule_for_matrices_refuses_a_vector() -> None:
    with pytest.raises(JobError, match=r"torch\.optim\.Muon does not accept .* size: torch\.Size\(\[2\]\)"):
        make_job(optimizer="Muon").spec(nn.Linear(2, 2))
    assert model_tensors(nn.Linear(2, 2, bias=False), rule=rule("Muon"))[0].whole


def test_score_evaluates_without_gradients_and_leaves_modes_alone() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
    seen = []

    def evaluate(model: nn.Module) -> dict[str, torch.Tensor]:
        seen.append((model.training, torch.is_grad_enabled()))
        return {"accuracy": torch.tensor(0.5)}

    job = make_job(evaluate=evaluate)
    assert job.score(model) == {"accuracy": 0.5}
    assert seen == [(False, False)]
    assert [m.training for m in model] == [True, False]
    assert make_job().score(model) == {}
    for bad, sentence in [
        (lambda m: 3, "returned 3; it must return a dict"),
        (lambda m: {"a": "b"}, "not a number"),
        (lambda m: 1 / 0, r"evaluate\(model\) raised ZeroDivisionError"),
    ]:
        with pytest.raises(JobError, match=sentence):
            make_job(evaluate=bad).score(model)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({f"m{number}": 1.0 for number in range(5000)}, "returned 5000 metrics; the limit is 1024"),
        ({"mse": 1.0, "x" * 5000: 2.0}, "whose name has 5000 characters, 'xxx.*; the limit is 1024"),
        ({"mse": torch.ones(3)}, "a metric that is not a number"),
    ],
    ids=["many", "long", "vector"],
)
def test_metrics_that_can_not_be_reported_are_an_error_of_the_job(found: dict[str, Any], sentence: str) -> None:
    job = make_job(evaluate=lambda model: found)
    with pytest.raises(JobError, match=sentence):
        job.score(job.build_model())
    assert (MAX_METRICS, MAX_METRIC_NAME) == (limits.MAX_FIGURES, limits.MAX_NAME)


def test_a_job_file_may_lie_in_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9") / "job.py"
    path.parent.mkdir()
    path.write_text(JOB)
    assert load_job(path).name == "caf?"


def test_the_best_metric_is_the_first_one_and_low_is_best_for_losses() -> None:
    assert make_job().best({"accuracy": 1.0, "loss": 0.1}) == ("accuracy", False)
    assert make_job().best({"Perplexity": 1.0}) == ("Perplexity", True)
    assert make_job(best_metric="loss").best({"accuracy": 1.0, "loss": 0.1}) == ("loss", True)
    assert make_job(best_mode="max").best({"log_loss_gain": 1.0}) == ("log_loss_gain", False)


# The model's tensors


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_parameters_come_first_then_buffers_with_tied_names_as_aliases() -> None:
    tensors = model_tensors(Tied())
    assert [(t.name, t.kind.value, t.dtype, t.shape, t.aliases) for t in tensors] == [
        ("scale", "frozen", "float32", (), ()),
        ("embedding.weight", "param", "float32", (6, 4), ("head.weight",)),
        ("norm.weight", "param", "float32", (4,), ()),
        ("norm.bias", "param", "float32", (4,), ()),
        ("mask", "buffer", "bool", (2,), ()),
        ("norm.running_mean", "buffer", "float32", (4,), ()),
        ("norm.running_var", "buffer", "float32", (4,), ()),
        ("norm.num_batches_tracked", "buffer", "int64", (), ()),
    ]
    assert {name for t in tensors for name in (t.name, *t.aliases)} == set(Tied().state_dict())
    make_plan(tensors, 2)


def test_a_module_used_twice_is_stored_once() -> None:
    norm = nn.BatchNorm1d(2)
    tensors = model_tensors(nn.Sequential(norm, nn.Linear(2, 2), norm))
    by_name = {t.name: t.aliases for t in tensors}
    assert by_name["0.weight"] == ("2.weight",) and by_name["0.running_var"] == ("2.running_var",)


def test_a_trainable_parameter_in_no_group_is_frozen() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    kinds = {t.name: t.kind for t in model_tensors(model, optimizer.param_groups)}
    assert kinds == {"weight": TensorKind.PARAM, "bias": TensorKind.FROZEN}


def with_parameter(**values: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    for name, value in values.items():
        model.register_parameter(name, value if isinstance(value, nn.Parameter) else nn.Parameter(value))
    return model


def of_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


def test_different_tensors_over_one_memory_are_refused_by_both_names() -> None:
    memory = torch.zeros(12)
    with pytest.raises(JobError, match="'all' and 'part' are different tensors that share memory"):
        model_tensors(with_parameter(part=memory[4:6], all=memory))
    side_by_side = with_parameter(a=memory[:6], b=memory[6:].view(2, 3), empty=memory[3:3])
    assert [t.name for t in model_tensors(side_by_side)] == ["weight", "bias", "a", "b", "empty"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (nn.ReLU, "no parameters that require a gradient, so there is nothing to train"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), r"\(2 parameters are frozen or in no parameter group\)"),
        (lambda: nn.LazyLinear(2), "'weight' is not initialised yet"),
        (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
        (lambda: with_parameter(w=torch.eye(2).to_sparse()), "'w' has layout torch.sparse_coo"),
        (lambda: with_parameter(w=torch.ones(1).expand(3)), "'w' is an expanded view"),
        (lambda: nn.Sequential(nn.Linear(2, 2), of_inference()), r"'1\.weight' was made under torch\.inference_mode"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_by_name(make: Any, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        model_tensors(make())
    with pytest.raises(JobError):
        make_job(model=make).spec(make())


# The examples


@pytest.mark.parametrize("name", ["digits", "charlm"])
def test_an_example_has_a_job_that_can_be_planned_and_scored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    monkeypatch.delenv("SHARDLINE_JOB_ARGS", raising=False)
    monkeypatch.delenv("SHARDLINE_TEXT", raising=False)
    job = load_job(EXAMPLES / name / "job.py")
    model = job.build_model()
    spec = job.spec(model)
    assert spec.name == name and spec.samples > 1000
    make_plan(spec.tensors, 2)
    assert all(math.isfinite(value) for value in job.score(model).values())


def test_the_character_model_takes_a_text_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write(tmp_path / "my text.txt", "abcd" * 50_000)
    monkeypatch.setenv("SHARDLINE_JOB_ARGS", f"--text '{text}'")
    job = load_job(EXAMPLES / "charlm" / "job.py")
    assert job.samples == 200_000 // 65 - 512
    monkeypatch.setenv("SHARDLINE_JOB_ARGS", "--txt x")
    with pytest.raises(JobError, match=r"the file ends the process \(SystemExit: 2\)"):
        load_job(EXAMPLES / "charlm" / "job.py")


def test_an_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(JobError, match="codec 'zip' does not exist; choose from raw, auto, bf16, fp16"):
        make_job(codec="zip")


def test_every_choice_of_a_method_can_be_an_object_and_be_set_from_outside(tmp_path: Path) -> None:
    momentum = JOB.replace('optimizer="SGD"', 'optimizer="SGD", optimizer_args={"momentum": 0.9}')
    for seam in methods.SEAMS:
        for name, _ in methods.written()[seam]:
            chosen = methods.table(seam).parse(name)
            # Some rules need momentum.
            assert getattr(make_job(**{seam: chosen}, optimizer_args={"momentum": 0.9}), seam) == str(chosen)
            assert getattr(load_job(write(tmp_path / "job.py", momentum), [(seam, name)]), seam) == str(chosen)


def test_the_codec_is_part_of_the_job() -> None:
    job = make_job(codec="bf16")
    assert job.spec(job.build_model()).codec == "bf16"


def test_bare_tensors_are_trained_like_parameters() -> None:
    tensors = {"w": torch.zeros(3, requires_grad=True), "table.0": torch.zeros(2, 2, requires_grad=True)}
    optimizer = torch.optim.SGD(tensors.values(), lr=0.1)
    specs = model_tensors(TensorHolder(tensors), optimizer.param_groups)
    assert [(spec.name, spec.kind) for spec in specs] == [("w", TensorKind.PARAM), ("table.0", TensorKind.PARAM)]


def test_installed_imports_are_those_at_the_top_that_no_file_beside_the_job_hides(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").touch()
    (tmp_path / "model").mkdir()
    job = tmp_path / "job.py"
    job.write_text(
        "import json\nimport yaml\nimport torch.utils.data as data, click\nimport model\nimport gone\n"
        "from sklearn.datasets import load_digits\nfrom . import other\ndef late():\n    import numpy\n"
    )
    assert installed_imports(job) == ["torch.utils.data", "click", "sklearn.datasets"]
    job.write_text("import torch\ndef broken(")
    assert installed_imports(job) == []
    assert installed_imports(tmp_path / "gone.py") == []


def test_a_job_of_epochs_can_be_stored() -> None:
    job = make_job(epochs=2, steps=0)
    spec = job.spec(job.build_model())
    assert job_from_json(job_to_json(spec)) == spec and spec.steps > 0

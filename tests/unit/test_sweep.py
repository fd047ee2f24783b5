"""A sweep's settings, rounds and refusals, and that each of its models is the one that training alone gives."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from shardline import EmbeddingTable, Ensemble
from shardline.checkpoint import Checkpoint, committed_steps
from shardline.errors import JobError, UsageError
from shardline.job import Job, changed
from shardline.nn import EmbeddingBag, FetchedRows
from shardline.testing import reference
from shardline_lab.sweep.command import sweep
from shardline_lab.sweep.ensemble import EnsembleMember
from shardline_lab.sweep.member import LOSS, MemberHistory, SweepMember, checked
from shardline_lab.sweep.plans import halved, suggested
from shardline_lab.sweep.space import Point, Range, drawn, grid, halves, product, ranges
from tests.unit.test_reference import data, make_job, mse, rich


class Momentum(torch.optim.Optimizer):
    """An optimizer from outside torch."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                kept = self.state[parameter].setdefault("kept", torch.zeros_like(parameter))
                kept.mul_(0.9).add_(parameter.grad)
                parameter.data.sub_(group["lr"] * kept)


def score(model: nn.Module) -> dict[str, float]:
    """Draws a number, as an evaluation may: it must not change the training."""
    torch.rand(1)
    return {"error": mse(model, data()[:]).item()}


def member(job: Job, folder: Path) -> SweepMember:
    return SweepMember(point=(("seed", str(job.seed)),), settings={"seed": str(job.seed)}, job=job, folder=folder)


def trained(job: Job, folder: Path, *shares: float) -> MemberHistory:
    for share in shares or (1.0,):
        member(job, folder).train("cpu", share)
    return member(job, folder).history()


JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buffers and dropout": {"model": rich, "evaluate": score, "checkpoint_every": 4},
    "adam": {"optimizer": "AdamW", "optimizer_args": {"lr": 0.01}, "clip_norm": 0.1, "accumulate": 2},
    "whole tensors": {"optimizer": "Adafactor", "optimizer_args": {"lr": 0.01}},
    "a scheduler": {"scheduler": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=12)},
    "scores": {"scheduler": lambda o: ReduceLROnPlateau(o, patience=0), "evaluate": score, "checkpoint_every": 2},
    "another rule": {"consistency": "async", "rule": "lwp:lag=2", "replicas": 1, "evaluate": score},
    "an own optimizer": {"optimizer": Momentum, "optimizer_args": {"lr": 0.05}, "apply": "worker"},
}


@pytest.mark.parametrize("name", JOBS)
def test_a_model_is_the_one_that_training_alone_gives_also_in_three_parts(tmp_path: Path, name: str) -> None:
    job = make_job(**JOBS[name])
    at_once, in_parts = trained(job, tmp_path / "a"), trained(job, tmp_path / "b", 0.25, 0.5, 1.0)
    assert at_once.failure == in_parts.failure == ""
    assert at_once.step == in_parts.step == job.steps
    assert at_once.sha256 == in_parts.sha256 == reference(job).sha256
    stored = [Checkpoint(tmp_path / run / "checkpoints" / "step-00000012").manifest.content_sha256 for run in "ab"]
    assert stored[0] == stored[1], "the state of the optimizer, too"


def test_scores_are_those_of_the_parameters_and_name_the_best(tmp_path: Path) -> None:
    job = make_job(evaluate=score, checkpoint_every=3, checkpoint_keep=1)
    found = trained(job, tmp_path)
    expected = {}
    for step in (3, 6, 9, 12):
        model = job.build_model()
        model.load_state_dict({**reference(job, step).params})
        expected[step] = score(model)["error"]
    assert {step: metrics["error"] for step, metrics in found.scores} == expected
    assert (found.metric, found.lowest) == ("error", True)
    best = min(expected, key=lambda step: expected[step])
    assert found.best == (best, expected[best])
    assert {best, 12} == {*committed_steps(tmp_path / "checkpoints")}


def test_without_an_evaluation_the_loss_of_the_last_steps_counts(tmp_path: Path) -> None:
    found = trained(make_job(), tmp_path)
    losses = reference(make_job()).losses
    assert found.scores == [[12, {LOSS: sum(losses) / 12}]]
    assert found.best == (12, sum(losses) / 12)


def test_a_job_with_patience_stops(tmp_path: Path) -> None:
    def worse(_: nn.Module) -> dict[str, float]:
        scores.append(1.0)
        return {"error": float(len(scores))}

    scores: list[float] = []
    found = trained(make_job(evaluate=worse, checkpoint_every=2, patience=2), tmp_path)
    assert (found.step, found.stopped, found.best) == (6, True, (2, 1.0))


def test_a_model_that_fails_says_why_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def breaks(model: nn.Module) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no room")
        return score(model)

    calls: list[int] = []
    job = make_job(evaluate=breaks, checkpoint_every=4)
    found = trained(job, tmp_path)
    assert "evaluate(model) raised ValueError: no room" in found.failure
    assert (found.step, found.sha256) == (4, "")
    assert trained(job, tmp_path).sha256 == reference(job).sha256
    assert [step for step, _ in member(job, tmp_path).history().scores] == [4, 8, 12]
    bad = trained(make_job(optimizer_args={"lr": 1e30}), tmp_path / "bad")
    assert "is not finite" in bad.failure or "the loss of replica" in bad.failure
    missing = trained(make_job(evaluate=score, best_metric="accuracy"), tmp_path / "missing")
    assert "best_metric is 'accuracy', but evaluate(model) returns error" in missing.failure


# Ensembles


class Tied(nn.Module):
    """Has a weight of two names, a buffer, and rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = EmbeddingBag(EmbeddingTable("signs", 5, rule="adam:lr=0.5"))
        self.norm, self.first, self.second = nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.last = nn.Linear(5, 1)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.second(self.first(self.norm(points + self.bag((points * 3).long())))))
        return found


def averaged(job: Job, folder: Path) -> EnsembleMember:
    """The ensemble of three models of a job, by their seeds."""
    members = [member(dataclasses.replace(job, seed=seed), folder / "models" / str(seed)) for seed in range(3)]
    for one in members:
        one.train("cpu", 1.0)
        one.found = one.history()
    at = {"point": (("seed", "mean of 3"),), "settings": {"average": "outputs"}, "folder": folder / "ensemble"}
    found = EnsembleMember(job=job, members=members, **at)
    found.train("cpu", 1.0)
    found.found = found.history()
    return found


def test_an_ensemble_is_the_average_of_the_best_checkpoints_and_loads_as_one_module(tmp_path: Path) -> None:
    found = averaged(make_job(model=Tied, evaluate=score, checkpoint_every=4), tmp_path)
    models, rows = [], {}
    for number, one in enumerate(found.members):
        stored = Checkpoint(one.best_checkpoint)
        assert stored.step == one.found.best[0]
        model = Tied()
        model.load_state_dict(stored.state_dict())
        model.bag.table.source = FetchedRows(stored.rows)
        models.append(model)
        rows |= {f"members.{number}.{name}": torch.cat([*parts]) for name, parts in stored.flat_tables().items()}
    assert found.found.failure == ""
    assert found.found.scores == [[0, score(Ensemble(models).eval())]]
    loaded = load_file(tmp_path / "ensemble.safetensors")
    assert loaded.keys() == {*Ensemble(models).state_dict(), *rows} and len(rows) == 6
    again = Ensemble([Tied() for _ in range(3)])
    again.load_state_dict({name: value for name, value in loaded.items() if name not in rows})
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in Ensemble(models).state_dict().items())


@pytest.mark.parametrize(
    ("widths", "sentence"),
    [
        (lambda drawn: (drawn, 1), ""),
        (lambda drawn: (3, drawn), r"members return torch.float32 \[96, \d+\], .*; it averages tensors"),
    ],
)
def test_members_of_other_shapes_are_averaged_if_their_outputs_agree(
    tmp_path: Path, widths: Callable[[int], tuple[int, int]], sentence: str
) -> None:
    def model() -> nn.Module:
        width, outputs = widths(int(torch.randint(2, 9999, ())))
        return nn.Sequential(nn.Linear(5, width), nn.Linear(width, outputs))

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def error(model: nn.Module) -> dict[str, float]:
        return {"error": loss(model, list(data()[:])).item()}

    found = averaged(make_job(model=model, loss=loss, evaluate=error, steps=1), tmp_path).found
    assert re.search(sentence, found.failure) if sentence else not found.failure
    assert (tmp_path / "ensemble.safetensors").exists() == (not sentence)


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    trained(make_job(), tmp_path)
    with pytest.raises(UsageError, match=r"was trained with seed=7, and this sweep sets seed=8; choose another --out"):
        member(make_job(seed=8), tmp_path).history()


def test_arguments_of_the_optimizer_can_be_set_like_fields() -> None:
    job = changed(make_job(), [("lr", "0.5"), ("weight_decay", "0.1"), ("steps", "3")])
    assert job.optimizer_args == {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}
    assert job.steps == 3
    with pytest.raises(JobError, match="unknown argument 'momentum'; Adam takes lr"):
        changed(make_job(optimizer="Adam", optimizer_args={}), [("momentum", "0.5")])
    assert changed(make_job(epochs=2, steps=0), [("batch_size", "8")]).steps == 2 * (96 // 24)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"codec": "bf16"}, "codec (bf16) rounds, but a model that trains alone sends nothing"),
        ({"codec_tensors": {"0.*": "int8"}}, "others for single tensors) rounds"),
        ({"cadence": "local-sgd:every=2"}, "makes steps of one pass each"),
    ],
)
def test_a_job_that_trains_otherwise_on_a_cluster_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(JobError) as refused:
        checked(make_job(**changes))
    assert sentence in str(refused.value)


# Settings


def test_a_grid_is_all_combinations() -> None:
    found = grid(["lr=0.1,0.01", "batch-size=8,16", "consistency=sync,async"])
    assert found == {"lr": ("0.1", "0.01"), "batch_size": ("8", "16"), "consistency": ("sync", "async")}
    points = product(found)
    assert len(points) == len({*points}) == 8
    assert points[0] == (("lr", "0.1"), ("batch_size", "8"), ("consistency", "sync"))
    assert product({}) == [()]


def test_draws_follow_from_the_seed_and_lie_in_their_ranges() -> None:
    over = ranges(["lr=1e-4..0.1:log", "batch_size=2..4", "seed=1..1000:log", "momentum=0.1..0.2"])
    points = [dict(point) for point in drawn(over, 400, 3)]
    assert points == [dict(point) for point in drawn(over, 400, 3)] != [dict(point) for point in drawn(over, 400, 4)]
    assert {point["batch_size"] for point in points} == {"2", "3", "4"}
    rates = [float(point["lr"]) for point in points]
    assert all(1e-4 <= rate <= 0.1 for rate in rates)
    assert 0.4 < sum(rate < math.sqrt(1e-5) for rate in rates) / 400 < 0.6, "half of them below the geometric mean"
    assert sum(int(point["seed"]) <= 31 for point in points) > 150
    assert all(0.1 <= float(point["momentum"]) <= 0.2 for point in points)
    assert len(drawn({"seed": Range(0, 2, whole=True)}, 50, 0)) == 3, "no model twice"


@pytest.mark.parametrize(
    ("given", "over", "sentence"),
    [
        (["lrr=0.1"], [], "job field 'lrr' can't be set from the command line; .*did you mean 'lr'"),
        (["lr"], [], "--grid lr is not of the form KEY=VALUES"),
        (["lr="], [], "--grid lr= has an empty value"),
        (["lr=0.1,,1"], [], "has an empty value"),
        (["lr=0.1,0.1"], [], "has 0.1 2 times"),
        (["lr=x"], [], "lr is set to 'x'; it must be a number"),
        (["batch_size=0"], [], "Job.batch_size is 0; give a whole number >= 1"),
        (["consistency=snyc"], [], "did you mean 'sync'"),
        (["codec=raw,bf16"], [], "codec changes nothing here"),
        (["lr=1", "lr=2"], [], "lr is given twice"),
        (["lr=1"], ["lr=1..2"], "lr is given twice"),
        ([], ["lr=1"], "--over lr=1 is no range"),
        ([], ["lr=2..1"], "the first number must be below the second"),
        ([], ["lr=0..1:log"], "a logarithmic range begins above 0"),
        ([], ["lr=1..inf"], "both finite"),
        ([], ["lr=nan..1"], "it must be a number"),
        ([], ["batch_size=1.5..2"], "batch_size is set to '1.5'; it must be a whole number"),
        ([], ["name=1..2"], "name is no number"),
        ([], ["lrr=1..2"], "did you mean 'lr'"),
    ],
)
def test_bad_settings_are_refused(given: Sequence[str], over: Sequence[str], sentence: str) -> None:
    with pytest.raises((UsageError, JobError), match=sentence):
        ranges(over, grid(given))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "a sweep has settings to compare"),
        (["--random", "3"], "add --over KEY=LOW..HIGH"),
        (["--over", "lr=1..2"], "add --random N"),
        (["--grid", "seed=1,2", "--seed", "3"], "seed is set for all models, and swept as well"),
        (["--grid", "seed=1,2", "--set", "batch_size=3", "--grid", "batch-size=4"], "batch_size is set for all models"),
        (["--grid", "seed=1,2", "--ensemble", "--halving"], "--ensemble averages several; leave one out"),
        (["--grid", "seed=1,2", "--sampler", "optuna"], "give it --random N, without --halving"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        sweep.main(["job.py", *arguments], standalone_mode=False)


def test_a_job_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("from tests.unit.test_reference import make_job\njob = make_job()")
    arguments = [str(tmp_path / "job.py"), "--grid", "lr=0.1,0.2", "--out", str(tmp_path / "out")]
    for flags, sentence in (
        (["--codec", "bf16"], "rounds, but a model that trains alone sends nothing"),
        (["--grid", "seed=1,2,3,4,5,6,7,8", "--halving"], "has 12 steps; give it at least 16"),
        (["--grid", "seed=1,2", "--ensemble", "2"], "scores the average of the models with `evaluate`, which the job"),
        (["--grid", "weight_decay=-1,0"], "Invalid weight_decay value: -1"),
    ):
        with pytest.raises((JobError, UsageError), match=sentence):
            sweep.main([*arguments, *flags], standalone_mode=False)
    assert not (tmp_path / "out").exists()


def test_an_ensemble_of_one_is_refused(tmp_path: Path) -> None:
    text = "from tests.unit.test_sweep import make_job, score\njob = make_job(evaluate=score)"
    (tmp_path / "job.py").write_text(text)
    arguments = [str(tmp_path / "job.py"), "--grid", "seed=1", "--ensemble", "--out", str(tmp_path / "out")]
    with pytest.raises(UsageError, match="--ensemble averages 2 models or more, and this sweep has 1; give more"):
        sweep.main(arguments, standalone_mode=False)
    assert not (tmp_path / "out").exists()


# Halving


def test_halving_takes_the_better_half_twice_as_far() -> None:
    assert halves(8, 100) == [(8, 0.125), (4, 0.25), (2, 0.5), (1, 1.0)]
    assert halves(5, 4) == [(5, 0.25), (2, 0.5), (1, 1.0)]
    with pytest.raises(UsageError, match="--halving compares models, and this sweep has 1"):
        halves(1, 100)
    with pytest.raises(UsageError, match=r"takes 4 rounds, .* has 7 steps; give it at least 8, or fewer models"):
        halves(8, 7)


def test_models_that_fail_or_are_worse_do_not_go_on(tmp_path: Path) -> None:
    members = [member(make_job(seed=seed), tmp_path / str(seed)) for seed in range(6)]
    values: list[float | None] = [0.5, 0.1, None, 0.3, 0.2, 0.9]
    rounds = halved(members, halves(6, 100))
    assert next(rounds) == (members, 0.25)
    for one, value in zip(members, values, strict=True):
        one.found = MemberHistory(metric="accuracy", lowest=False, scores=[(25, {"accuracy": value})])
    members[5].found.failure = "it was killed"
    going, share = next(rounds)
    assert ([one.job.seed for one in going], share) == ([0, 3, 4], 0.5)
    members[0].found.failure = "it was killed"
    going, share = next(rounds)
    assert ([one.job.seed for one in going], share) == ([3], 1.0)
    assert next(rounds, None) is None


def test_a_result_that_can_be_read_again_is_the_same(tmp_path: Path) -> None:
    found = MemberHistory(scores=[(3, {LOSS: None})], seconds=1.5, followed=[(1, None)])
    one = member(make_job(), tmp_path)
    one.write(found)
    again = one.history()
    assert json.dumps(dataclasses.asdict(again)) == json.dumps({**dataclasses.asdict(found), "settings": {"seed": "7"}})
    assert math.isnan(again.best[1])
    assert again.until(2).scores == []


def test_optuna_draws_by_the_results_so_far_and_repeats_itself() -> None:
    pytest.importorskip("optuna")
    fields: dict[str, Range | tuple[str, ...]] = {**ranges(["lr=1e-4..1:log", "seed=0..1"]), "rule": ("torch", "lwp")}

    def make(points: Sequence[Point]) -> list[SweepMember]:
        return [SweepMember(point=point, settings={}, job=make_job(), folder=Path()) for point in points]

    def run(seed: int) -> list[Point]:
        asked = []
        for going, share in suggested(fields, 14, seed, 3, make):
            assert share == 1.0 and len(going) <= 3
            for one in going:
                asked.append(one.point)
                rate = dict(one.point)["lr"]
                one.found = MemberHistory(scores=[(12, {LOSS: abs(math.log(float(rate) / 0.01))})])
            going[0].found.failure = "it was killed" if len(asked) == 3 else ""
        return asked

    points = run(1)
    assert points == run(1) != run(2)
    assert len(points) == len({*points}) == 14
    assert {name for name, _ in points[0]} == {*fields}
    rates = [float(dict(point)["lr"]) for point in points]
    assert all(1e-4 <= rate <= 1 for rate in rates)
    assert {dict(point)["rule"] for point in points} <= {"torch", "lwp"}
    assert {dict(point)["seed"] for point in points} <= {"0", "1"}

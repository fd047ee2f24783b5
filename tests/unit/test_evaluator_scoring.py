from __future__ import annotations

import pytest
import torch
from torch import nn

from shardline.core.orders import Orders, Phase
from shardline.errors import MismatchError
from shardline.job import Job
from shardline.model import load_values, named_values
from shardline_evaluator.service import next_step, score


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)


def no_rows(table: str, ids: torch.Tensor) -> torch.Tensor:
    raise AssertionError(f"the model has no table {table!r}")


def make_job(**fields: object) -> Job:
    settings = {
        "model": Tied,
        "loss": lambda model, batch: batch.sum(),
        "dataset": [0.0],
        "optimizer": "SGD",
        "optimizer_args": {"lr": 0.1},
        "batch_size": 1,
        "steps": 1,
        **fields,
    }
    return Job(**settings)  # type: ignore[arg-type]


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 2) for name, tensor in named_values(model).items()}


def test_only_committed_checkpoints_newer_than_the_last_are_scored() -> None:
    assert next_step(Orders(phase=Phase.RUNNING, checkpoint_step=-1), -1) is None
    assert next_step(Orders(phase=Phase.RUNNING, checkpoint_step=0), -1) == 0
    assert next_step(Orders(phase=Phase.STOPPING, checkpoint_step=20), 10) == 20
    assert next_step(Orders(phase=Phase.STOPPING, checkpoint_step=20), 20) is None
    assert next_step(Orders(phase=Phase.ENDED, checkpoint_step=30), 20) is None


def test_parameters_and_buffers_are_loaded_and_tied_weights_stay_tied() -> None:
    model = Tied()
    load_values(model, values_of(model), no_rows)
    assert torch.equal(model.head.weight, torch.full((4, 3), 2.0))
    assert model.head.weight is model.embedding.weight
    assert model.norm.running_mean is not None
    assert torch.equal(model.norm.running_mean, torch.full((3,), 2.0))
    assert model.norm.num_batches_tracked is not None
    assert model.norm.num_batches_tracked.item() == 2


@pytest.mark.parametrize("what", ["missing", "shape", "dtype"])
def test_a_checkpoint_of_another_model_is_named_and_changes_nothing(what: str) -> None:
    model = Tied()
    before = {name: tensor.clone() for name, tensor in named_values(model).items()}
    tensors = values_of(model)
    if what == "missing":
        del tensors["norm.bias"]
    elif what == "shape":
        tensors["norm.bias"] = torch.zeros(5)
    else:
        tensors["norm.bias"] = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(MismatchError, match=r"norm\.bias"):
        load_values(model, tensors, no_rows)
    assert all(torch.equal(tensor, before[name]) for name, tensor in named_values(model).items())


def test_evaluate_runs_in_evaluation_mode_without_gradients() -> None:
    seen = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append((model.training, torch.is_grad_enabled()))
        return {"accuracy": 0.5}

    model = Tied()
    result = score(make_job(evaluate=evaluate), model, 7, values_of(model), no_rows)
    assert (result.step, dict(result.metrics), result.failure) == (7, {"accuracy": 0.5}, "")
    assert seen == [(False, False)]
    assert model.training


def test_what_evaluate_raises_becomes_a_sentence() -> None:
    def evaluate(model: nn.Module) -> dict[str, float]:
        raise KeyError("missing")

    model = Tied()
    result = score(make_job(evaluate=evaluate), model, 7, values_of(model), no_rows)
    assert "KeyError" in result.failure
    assert not result.metrics

"""Parameters as they will be when a pipeline's gradient is applied, as far as the optimizer's state tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from shardline.client.applied.worker_optimizer import OptimizerBuckets, ServerStates
from shardline.client.layout import ModelLayout
from shardline.core.plan import make_plan
from shardline.core.spec import RuleSpec, ScheduleSpec, TensorSpec
from shardline.schedule import complete, cosine
from shardline.update import rule
from shardline.waist import Sender
from shardline_pipeline.worker.side import predicted
from tests.support.builders import make_job_spec

TENSORS = tuple(TensorSpec(name=f"w{stage}", shape=(3, 5), dtype="float32", fragment=stage) for stage in (0, 1))
PLAN = make_plan(TENSORS, 2)
KEYS = [(number, at) for number, shard in enumerate(PLAN.shards) for at in range(len(shard.buckets))]
STEPS = 4
"""Of training before the prediction."""
OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.05},
    "AdamW": {"lr": 0.05},
}


class Nowhere(ServerStates):
    def __init__(self) -> None:
        super().__init__(self, self.nobody)  # type: ignore[arg-type]

    def nobody(self) -> Sender:
        raise AssertionError("no server is asked")


def trained(optimizer: RuleSpec, schedule: ScheduleSpec) -> tuple[OptimizerBuckets, Any]:
    torch.manual_seed(1)
    model = {spec.name: torch.randn(spec.shape) for spec in TENSORS}
    layout = ModelLayout(PLAN, model)
    ground = OptimizerBuckets(plan=PLAN, model=layout, pulled=layout, states=Nowhere(), rules={})
    job = make_job_spec(tensors=TENSORS, rule=optimizer, schedule=schedule, steps=20)
    assert not ground.own(job, KEYS) and ground.own(job, KEYS)
    for step in range(STEPS):
        go_on(ground, step, [torch.randn(spec.shape) for spec in TENSORS])
    return ground, job


def go_on(ground: OptimizerBuckets, step: int, gradients: Sequence[torch.Tensor]) -> None:
    for key, updater in ground.rules.items():
        gradient, present = ground.gathered(key, dict(enumerate(gradients)))
        values = ground.values(key)
        updater.apply(values, gradient, clock=step, present=present)
        ground.model.load(*key, values)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("schedule", [ScheduleSpec(), complete(cosine(), 20)], ids=["constant", "cosine"])
def test_a_prediction_is_where_the_optimizer_goes_without_a_gradient(name: str, schedule: ScheduleSpec) -> None:
    kind = name if name in ("Adam", "AdamW") else "SGD"
    ground, job = trained(rule(kind, (OPTIMIZERS[name],)), schedule)
    before = {spec.name: ground.model.tensors[number].clone() for number, spec in enumerate(TENSORS)}
    found = [[predicted(ground, job, stage, late, clock=STEPS) for stage in (0, 1)] for late in range(6)]
    for number, spec in enumerate(TENSORS):
        assert list(found[0][number]) == [spec.name]
        assert torch.equal(found[0][number][spec.name], before[spec.name])
        assert torch.equal(ground.model.tensors[number], before[spec.name]), "predicting changes nothing"
    for late in range(1, 6):
        go_on(ground, STEPS + late - 1, [torch.zeros(spec.shape) for spec in TENSORS])
        for number, spec in enumerate(TENSORS):
            assert torch.equal(found[late][number][spec.name], ground.model.tensors[number])
    assert all(torch.equal(before[spec.name], ground.model.tensors[n]) for n, spec in enumerate(TENSORS)) is (
        name == "SGD"
    )


def states(ground: OptimizerBuckets) -> Mapping[str, torch.Tensor]:
    (key,) = [key for key in KEYS if ground.plan.shards[key[0]].buckets[key[1]].slices[0].tensor == 0]
    return {name: values[:15].view(3, 5) for name, values in ground.rules[key].export()[0].items()}


def test_under_momentum_it_is_the_closed_form() -> None:
    """FTPipe: w - lr * (m - m^(s+1)) / (1 - m) * v."""
    ground, job = trained(rule("SGD", ({"lr": 0.1, "momentum": 0.9},)), ScheduleSpec())
    values, velocity = ground.model.tensors[0], states(ground)["momentum_buffer"]
    for late in range(6):
        expected = values - 0.1 * (0.9 - 0.9 ** (late + 1)) / (1 - 0.9) * velocity
        assert torch.allclose(predicted(ground, job, 0, late, clock=STEPS)["w0"], expected, rtol=0, atol=1e-6)


def test_under_adam_both_moments_decay() -> None:
    ground, job = trained(rule("Adam", ({"lr": 0.05},)), ScheduleSpec())
    expected, found = ground.model.tensors[0].clone(), states(ground)
    for late in range(1, 6):
        m, v = found["exp_avg"] * 0.9**late, found["exp_avg_sq"] * 0.999**late
        step = STEPS + late
        expected -= 0.05 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        assert torch.allclose(predicted(ground, job, 0, late, clock=STEPS)["w0"], expected, rtol=0, atol=1e-6)

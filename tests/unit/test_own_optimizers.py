"""Optimizers from outside torch: which of them workers can run, and why not the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardline.core.spec import RuleSpec
from shardline.errors import JobError
from shardline.update import chosen, completed, rule_from_optimizer
from tests.support.jobs import make_job


class Own(torch.optim.Optimizer):
    """An optimizer whose step is a function of its own, a parameter, and its group."""

    def __init__(self, params: Any, update: Callable[..., Any], **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.1, **defaults})
        self._update = update
        self.begun = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(self, parameter, group)
        self.begun = True


def counts_in_group(_: Own, parameter: torch.Tensor, group: dict[str, Any]) -> None:
    group["k"] = group.get("k", 0) + 1


def blocks(optimizer: Own, parameter: torch.Tensor, _: dict[str, Any]) -> None:
    optimizer.state[parameter]["absmax"] = torch.zeros(2)


def keeps_text(optimizer: Own, parameter: torch.Tensor, _: dict[str, Any]) -> None:
    optimizer.state[parameter]["phase"] = "warm"


def counts_on_itself(optimizer: Own, _: torch.Tensor, __: dict[str, Any]) -> None:
    optimizer.__dict__["count"] = getattr(optimizer, "count", 0) + 1


def remembers_on_itself(optimizer: Own, parameter: torch.Tensor, _: dict[str, Any]) -> None:
    optimizer.__dict__.setdefault("memory", {}).setdefault(parameter, torch.zeros_like(parameter)).add_(parameter.grad)


def by_others(optimizer: Own, parameter: torch.Tensor, group: dict[str, Any]) -> None:
    parameter.sub_(sum(one.grad.norm() for one in group["params"]))


def at_random(_: Own, parameter: torch.Tensor, __: dict[str, Any]) -> None:
    parameter.add_(torch.rand_like(parameter))


def begins_otherwise(optimizer: Own, parameter: torch.Tensor, _: dict[str, Any]) -> None:
    parameter.add_(parameter.grad, alpha=-0.1 if optimizer.begun else -0.2)


def fails(*_: Any) -> None:
    raise RuntimeError("closure is missing")


def kept(optimizer: Own, parameter: torch.Tensor, _: dict[str, Any]) -> None:
    state = optimizer.state[parameter]
    state["mean"], state["step"], state["count"] = torch.zeros_like(parameter), torch.tensor(1.0), 3
    state["scale"], state["exact"] = 0.5, torch.zeros_like(parameter, dtype=torch.float64)


def spec_of(update: Callable[..., Any], **defaults: Any) -> RuleSpec:
    return rule_from_optimizer(Own([torch.nn.Parameter(torch.zeros(2))], update, **defaults))


@pytest.mark.parametrize(
    ("update", "says"),
    [
        (counts_in_group, "keeps 'k' in its parameter group from step to step"),
        (
            blocks,
            r"keeps a state 'absmax' of shape \(2,\) in float32 for a parameter of shape \(4, 3\); a job's",
        ),
        (keeps_text, "keeps a state 'phase' 'warm'"),
        (by_others, "by what other parameters have, or at random"),
        (at_random, "by what other parameters have, or at random"),
        (begins_otherwise, "goes on otherwise when it begins again with the states it has kept"),
        (counts_on_itself, "keeps 'count' as an attribute from step to step, which checkpoints can't"),
        (remembers_on_itself, "keeps 'memory' as an attribute"),
        (fails, "can't step with gradients alone: RuntimeError: closure is missing"),
    ],
)
def test_an_optimizer_that_workers_could_not_run_is_refused(update: Callable[..., Any], says: str) -> None:
    with torch.no_grad(), pytest.raises(JobError, match=says):
        spec_of(update)


@pytest.mark.parametrize(
    ("defaults", "says"),
    [
        ({"hook": print}, "hook is <built-in function print>; only flags, texts, numbers and tuples of numbers"),
        ({"lr": None}, "has no lr"),
        ({"lr": "high"}, "lr is 'high'; it must be a number"),
    ],
)
def test_arguments_that_cannot_be_sent_are_refused(defaults: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        spec_of(lambda *_: None, **defaults)


def test_the_rule_names_each_state_and_its_kind() -> None:
    spec = spec_of(kept, betas=(0.9, 1), nesterov=True, block=256, mode="x", eps=None)
    assert spec.name == "tests.Own"
    assert spec.method == "own:keeps=count-int+exact-float64+mean-same+scale-float+step-0d.float32"
    assert spec.groups == ({"lr": 0.1, "betas": (0.9, 1.0), "nesterov": True, "block": 256, "mode": "x"},)
    assert completed(spec) == spec
    found = chosen(spec).states(spec, spec.groups[0], torch.bfloat16, torch.device("cpu"))
    assert {name: (state.dtype, state.scalar) for name, state in found.items()} == {
        "count": (torch.int64, True),
        "exact": (torch.float64, False),
        "mean": (torch.bfloat16, False),
        "scale": (torch.float64, True),
        "step": (torch.float32, True),
    }


def test_servers_refuse_a_rule_that_no_worker_sends() -> None:
    group = {"lr": 0.1}
    for name, method, groups, says in (
        ("own.Lion", "own:keeps=exp_avg-nonsense", (group,), "names no state"),
        ("own.Lion", "own:keeps=../x-same", (group,), "names no state"),
        ("own.Lion", "own", ({"lr": True},), "lr is True; it must be a number"),
        ("SGD", "own", (group,), "SGD is torch's"),
        ("own.Lion", "torch", (group,), "not a torch.optim class"),
    ):
        with pytest.raises(JobError, match=says):
            completed(RuleSpec(name=name, groups=groups, method=method))


def test_the_refusal_on_servers_names_the_remedy() -> None:
    with pytest.raises(JobError, match=r"optimizer tests\.Lion is not a class of torch.*apply='worker'"):
        make_job("lion")
    with pytest.raises(JobError, match=r"these can't run tests.Lion.*leave `rule` out"):
        make_job("lion", apply="worker", rule="gap-aware")
    with pytest.raises(JobError, match=r"Lion does not accept optimizer_args or param_groups.*'momentum'"):
        make_job("lion", apply="worker", optimizer_args={"momentum": 0.9})
    assert make_job("lion", cadence="local-sgd:every=2").cadence == "local-sgd:every=2"

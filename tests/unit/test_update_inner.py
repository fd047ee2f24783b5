"""The optimizer that workers run: which state a replica has when a step begins, begins again, or is another one."""

from __future__ import annotations

import pytest
import torch

from shardline.core.spec import Argument, InnerSpec, TensorKind, TensorSpec
from shardline.errors import ProtocolError
from shardline.update import ALLOWED, rule
from shardline.update.torch_optim.inner import InnerOptimizers

SPECS = (
    TensorSpec(name="w", shape=(3, 2), dtype="float32"),
    TensorSpec(name="b", shape=(4, 2), dtype="float32", group=1),
    TensorSpec(name="frozen", shape=(2,), dtype="float32", kind=TensorKind.FROZEN),
)
NAMES = ("w", "b")


class Bench:
    """An optimizer over tensors that each step starts from the same values."""

    def __init__(self, name: str = "AdamW", **arguments: Argument) -> None:
        group = {"lr": 0.1, **arguments}
        spec = InnerSpec(rule=rule(name, (group, {**group, "lr": 0.01})))
        self.model = {tensor.name: torch.zeros(tensor.shape) for tensor in SPECS}
        self.inner = InnerOptimizers(spec, SPECS, self.model)

    def begin(self, step: int) -> None:
        self.inner.began(step)

    def take(self, replica: int = 0, *, seed: int = 1, last: bool = True) -> torch.Tensor:
        """What one step makes of ones, all in a row."""
        generator = torch.Generator().manual_seed(seed)
        for value in self.model.values():
            value.fill_(1.0)
        gradients = {name: torch.randn(self.model[name].shape, generator=generator) for name in NAMES}
        self.inner.update(replica, gradients, {}, last=last)
        assert torch.equal(self.model["frozen"], torch.ones(2))
        return torch.cat([self.model[name].reshape(-1) for name in NAMES])

    def third_step(self) -> torch.Tensor:
        """What step 2 makes, after steps 0 and 1."""
        for step in range(2):
            self.begin(step)
            self.take(seed=step)
        self.begin(2)
        return self.take(seed=2)


@pytest.mark.parametrize("name", ALLOWED)
def test_every_optimizer_goes_on_from_step_to_step_as_torchs_own(name: str) -> None:
    parameters = {key: torch.nn.Parameter(torch.ones(SPECS[number].shape)) for number, key in enumerate(NAMES)}
    groups = [{"params": [parameters["w"]]}, {"params": [parameters["b"]], "lr": 0.01}]
    optimizer = getattr(torch.optim, name)(groups, lr=0.1)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for value in parameters.values():
            value.data.fill_(1.0)
            value.grad = torch.randn(value.shape, generator=generator)
        optimizer.step()
    expected = torch.cat([value.detach().reshape(-1) for value in parameters.values()])
    assert torch.equal(Bench(name).third_step(), expected)


def test_a_step_that_begins_again_begins_with_the_same_state() -> None:
    bench, undisturbed = Bench(), Bench().third_step()
    for step in range(2):
        bench.begin(step)
        bench.take(seed=step)
    for _ in range(2):
        bench.begin(2)
        bench.take(seed=77, last=False)
        bench.begin(2)
        assert torch.equal(bench.take(seed=2), undisturbed)


def test_a_step_that_was_sent_again_without_being_computed_again_counts_once() -> None:
    bench, undisturbed = Bench(), Bench().third_step()
    for step in range(2):
        bench.begin(step)
        bench.take(seed=step)
        # The answer was lost with its server: what was sent is sent again to the standby.
        bench.begin(step)
    bench.begin(2)
    assert torch.equal(bench.take(seed=2), undisturbed)


@pytest.mark.parametrize("steps", [(0, 1, 5), (4, 5, 2)], ids=["moved away and back", "rolled back"])
def test_a_state_of_another_step_is_dropped(steps: tuple[int, ...]) -> None:
    bench, fresh = Bench(), Bench()
    for step in steps[:-1]:
        bench.begin(step)
        bench.take(seed=step)
    bench.begin(steps[-1])
    fresh.begin(steps[-1])
    assert torch.equal(bench.take(seed=9), fresh.take(seed=9))


def test_a_replica_that_took_no_part_in_a_step_starts_anew() -> None:
    bench, fresh = Bench(), Bench()
    for step in range(2):
        bench.begin(step)
        bench.take(0)
        if step == 0:
            bench.take(1)
    bench.begin(2)
    fresh.begin(2)
    assert torch.equal(bench.take(1), fresh.take(1))
    assert not torch.equal(bench.take(0), fresh.take(0))


def test_a_parameter_without_a_gradient_keeps_its_value_and_the_models_gradients_stay_whose_they_are() -> None:
    bench = Bench(weight_decay=0.5)
    bench.begin(0)
    mine = bench.model["b"].grad = torch.full((4, 2), 7.0)
    bench.inner.update(0, {"w": torch.ones(3, 2)}, {}, last=True)
    assert bench.model["b"].grad is mine and bool((mine == 7.0).all()) and bench.model["w"].grad is None
    assert not bool(bench.model["b"].any()) and bool(bench.model["w"].any())


def test_a_number_that_a_script_sets_is_for_that_pass() -> None:
    bench = Bench("SGD")
    bench.begin(0)
    for rate in (0.5, 0.1):
        bench.model["w"].zero_()
        hyper = {0: {"lr": rate}} if rate == 0.5 else {}
        bench.inner.update(0, {"w": torch.ones(3, 2)}, hyper, last=False)
        assert torch.equal(bench.model["w"], torch.full((3, 2), -rate))
    with pytest.raises(ProtocolError, match="'betas' is not a setting of SGD"):
        bench.inner.update(0, {"w": torch.ones(3, 2)}, {0: {"betas": 1.0}}, last=False)

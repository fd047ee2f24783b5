"""Who reads a tensor of the model waits for it: in its module, outside it, through a view or a container."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardline.client.overlap.early_push import why_not_early
from shardline.client.overlap.gate import Gate, reads_values, why_not
from shardline.client.overlap.hooks import FireCount, GradientHooks
from shardline.client.step.expected import Expected as Expectation
from shardline.client.step.layout import homes, keys_of
from shardline.core.plan import make_plan
from shardline.core.spec import ConsistencySpec, JobSpec
from shardline.model import model_tensors
from tests.support.builders import make_job_spec


class Tied(nn.Module):
    """Weights read where they are not owned, a bare parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.bias = nn.Parameter(torch.zeros(7))
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(x))
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return nn.functional.linear(hidden, self.embed.weight, self.bias)


class Watched:
    """A gate over a model; notes who was waited for."""

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
        tensors = [tensor for _, tensor in [*model.named_parameters(), *model.named_buffers()]]
        self.waited: list[str] = []
        self.waiting = True
        self.gate = Gate(
            model,
            {id(tensor): number for number, tensor in enumerate(tensors)},
            wait_for=self._wait_for,
            waiting=lambda: self.waiting,
        )

    def _wait_for(self, numbers: Iterable[int]) -> None:
        self.waited += [self.names[number] for number in numbers]

    def reads(self, function: Callable[[], Any]) -> set[str]:
        """Tensors that a function waits for."""
        self.waited.clear()
        with self.gate.open():
            function()
        return set(self.waited)


def test_a_forward_pass_waits_for_what_it_reads_in_the_order_of_its_first_use() -> None:
    model = Tied()
    watched = Watched(model)
    uses: dict[int, None] = {}
    with watched.gate.open(uses):
        model(torch.tensor([1, 2, 3]))
    order = [watched.names[number] for number in uses]
    assert order[0] == "embed.weight"
    assert set(order[1:6]) == {f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")} | {
        "norm.num_batches_tracked"
    }
    assert [name for name in order[6:] if not name.startswith("blocks")] == ["bias"]
    # The tied weight is asked for again where it is read outside its module.
    assert watched.waited.count("embed.weight") >= 2
    assert not [name for name in watched.waited if name.startswith("unused")]


def test_reading_outside_of_modules_waits_too() -> None:
    model = Tied()
    watched = Watched(model)
    weight = model.embed.weight
    reads: dict[str, Callable[[], Any]] = {
        "a regulariser": lambda: weight.pow(2).sum(),
        "a list of tensors": lambda: torch.stack([weight, torch.ones(7, 4)]),
        "a keyword": lambda: torch.add(torch.ones(7, 4), other=weight),
        "an operator": lambda: 2.0 * weight,
        "a view": weight.t,
        "data": lambda: weight.data,
        "detach": weight.detach,
        "its numbers": weight.tolist,
        "a write": lambda: torch.no_grad()(weight.add_)(0.0),
    }
    for what, read in reads.items():
        assert watched.reads(read) == {"embed.weight"}, what
    assert watched.reads(model.state_dict) == set(watched.names)
    assert watched.reads(model.zero_grad) == set()
    assert watched.reads(lambda: [weight.shape, weight.dtype, weight.grad, weight.size(0)]) == set()


def test_nobody_is_asked_where_nothing_is_on_its_way_nor_outside_of_the_gate() -> None:
    model = Tied()
    watched = Watched(model)
    model.embed.weight.pow(2)
    assert watched.waited == []
    # A module without children waits wherever it is called: on another thread, no function is watched.
    model.blocks[0](torch.ones(1, 4))
    assert set(watched.waited) == {"blocks.0.weight", "blocks.0.bias"}
    watched.waiting = False
    assert watched.reads(lambda: model(torch.tensor([1, 2]))) == set()
    watched.waiting = True
    watched.gate.close()
    watched.waited.clear()
    model(torch.tensor([1, 2]))
    assert watched.waited == []


def test_the_gate_changes_no_bit_of_a_pass() -> None:
    class Gru(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.attend = nn.GRU(4, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
            self.drop = nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.drop(self.rnn(x)[0])
            return cast(torch.Tensor, self.attend(hidden, hidden, hidden)[0])

    torch.manual_seed(0)
    model = Gru()
    x = torch.randn(3, 5, 4)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        model(x).pow(2).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    watched = Watched(model)
    with watched.gate.open():
        found = gradients()
    assert set(watched.waited) == set(watched.names)
    assert len(found) == len(plain) == len(watched.names)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_what_only_describes_a_tensor_does_not_read_it() -> None:
    attributes = cast(Any, torch.Tensor)
    for harmless in (torch.Tensor.size, torch.Tensor.dim, attributes.grad.__get__, attributes.shape.__get__):
        assert not reads_values(harmless)
    for reading in (torch.add, torch.Tensor.item, attributes.data.__get__, attributes.T.__get__, torch.equal):
        assert reads_values(reading)


def test_models_whose_reads_nobody_sees_are_named() -> None:
    assert why_not(Tied()) == ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(2, 2))
    assert "'1' is a ScriptModule" in why_not(nn.Sequential(nn.Linear(2, 2), scripted))
    compiled = nn.Sequential(nn.Linear(2, 2))
    compiled[0].compile(backend="eager")
    assert "'0' is compiled" in why_not(compiled)
    assert "DataParallel" in why_not(nn.DataParallel(nn.Linear(2, 2)))


# Hooks


def test_gradients_that_are_completed_twice_in_one_pass_are_not_whole_at_their_first_hook() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    plan = make_plan(model_tensors(model), 1)
    hooks = GradientHooks(plan, list(model.parameters()))
    count = FireCount()
    hooks.listen(count)
    x = torch.ones(2, 3, requires_grad=True)
    # The middle layer runs twice, each time within a nested backward pass of its own.
    hidden = checkpoint(model[1], checkpoint(model[1], model[0](x), use_reentrant=True), use_reentrant=True)
    model[2](hidden).sum().backward()
    assert count.once == {0, 1, 4, 5}
    hooks.close()
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_parameter_that_is_thawed_later_is_hooked_then() -> None:
    model = nn.Linear(3, 1)
    plan = make_plan(model_tensors(model), 1)
    model.bias.requires_grad_(False)
    hooks = GradientHooks(plan, list(model.parameters()))
    for thawed, expected in ((False, {0}), (True, {0, 1})):
        model.bias.requires_grad_(thawed)
        count = FireCount()
        hooks.listen(count)
        model(torch.ones(1, 3)).sum().backward()
        assert count.once == expected
    hooks.ignore()
    model(torch.ones(1, 3)).sum().backward()
    assert count.once == {0, 1}


def test_every_bucket_of_a_tensor_is_its_home() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(3, 3))
    plan = make_plan(model_tensors(model), 2, bucket_bytes=64 << 10)
    places = homes(plan)
    for number in range(len(plan.tensors)):
        assert places[number] == sorted({(s, b) for s, b, _ in plan.pieces(number)})
    assert len(places[0]) > 2
    assert set(keys_of(places, range(len(plan.tensors)))) == {
        (s, b) for s, shard in enumerate(plan.shards) for b in range(len(shard.buckets))
    }


def job(*, replicas: int = 4, codec: str = "raw", **terms: Any) -> JobSpec:
    return make_job_spec(consistency=ConsistencySpec(**terms), replicas=replicas, codec=codec)


@pytest.mark.parametrize(
    ("spec", "owned", "replica", "reason"),
    [
        (job(), [2], 2, ""),
        (job(), [0, 1], 1, ""),
        (job(), [0, 1], 0, "more than one push"),
        (job(), [0, 2], 2, "more than one push"),
        (job(codec="bf16"), [1], 1, ""),
        (job(codec="bf16"), [0, 1], 1, "rounds"),
        (job(clip_norm=1.0, nan_policy="skip"), [0], 0, ""),
        (job(mode="async"), [0], 0, ""),
        (job(mode="async", clip_norm=1.0), [0], 0, "clipping"),
        (job(mode="async", nan_policy="skip"), [0], 0, "not finite"),
    ],
)
def test_when_gradients_may_leave_early(spec: JobSpec, owned: list[int], replica: int, reason: str) -> None:
    expected = Expectation(replica=replica, owned=owned, loss=1.0)
    found = why_not_early(spec, expected, first=False)
    assert reason in found
    assert bool(found) == bool(reason)
    assert "first step" in why_not_early(spec, expected, first=True)


def test_a_loss_that_may_skip_the_step_has_to_be_known_first() -> None:
    expected = Expectation(replica=0, owned=[0])
    assert why_not_early(job(), expected, first=False) == ""
    assert "loss" in why_not_early(job(nan_policy="skip"), expected, first=False)

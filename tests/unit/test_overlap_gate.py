"""Readers of a tensor wait for it: they get it from its module's table, or it is waited for before they run."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardline import consistency
from shardline.client.api.step_loop import StepLoop
from shardline.client.exchange.shard_exchange import Restart
from shardline.client.layout import homes, keys_of
from shardline.client.overlap.gate import Gate, Reach, StepAgain, tables_of
from shardline.client.step.early_push import Expected as Expectation, GradientHooks, once_each, why_not_early
from shardline.core.plan import make_plan
from shardline.core.spec import ConsistencySpec, JobSpec
from shardline.model import model_tensors, named_values
from tests.support.builders import make_job_spec

dynamo = importlib.import_module("torch._dynamo")


def table(module: nn.Module, name: str = "_parameters") -> dict[str, torch.Tensor]:
    """A module's own table of tensors, as C code finds it."""
    return cast(dict[str, torch.Tensor], module.__dict__[name])


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
    """A gate over a model; notes who was waited for, and on which thread."""

    def __init__(self, model: nn.Module, known: Iterable[Collection[torch.Tensor]] = ()) -> None:
        named = named_values(model)
        self.names = list(named)
        self.waited: list[str] = []
        self.threads: set[int] = set()
        self.waiting = True
        self.reach = Reach(model, named.values(), known)
        self.tensors = list(named.values())
        del named
        self.reach.rebase()
        self.gate = Gate(self.tensors, self.reach, wait_for=self._wait_for, waiting=lambda: self.waiting)

    def _wait_for(self, numbers: Iterable[int]) -> None:
        self.waited += [self.names[number] for number in numbers]
        self.threads.add(threading.get_ident())

    def reads(self, function: Callable[[], Any]) -> set[str]:
        """Tensors that a function waits for while parameters are on their way."""
        self.gate.shut()
        self.waited.clear()
        try:
            function()
            return set(self.waited)
        finally:
            self.gate.open()

    def loose(self, model: nn.Module) -> set[str]:
        """Names of the tensors that can be read unseen."""
        self.gate.look()
        return {name for name, tensor in named_values(model).items() if id(tensor) in self.reach.loose}


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier tests of this process may have compiled something."""
    monkeypatch.setattr(dynamo.eval_frame, "cached_backends", {})


def test_a_forward_pass_waits_for_what_it_reads_in_the_order_of_its_first_use() -> None:
    model = Tied()
    watched = Watched(model)
    uses: dict[int, None] = {}
    watched.waiting = False
    with watched.gate.forward(uses):
        model(torch.tensor([1, 2, 3]))
    order = [watched.names[number] for number in uses]
    assert order[0] == "embed.weight"
    assert set(order[1:6]) == {f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")} | {
        "norm.num_batches_tracked"
    }
    assert [name for name in order[6:] if not name.startswith("blocks")] == ["bias"]
    watched.waiting = True
    assert watched.reads(lambda: model(torch.tensor([1, 2, 3]))) == {watched.names[number] for number in uses}
    # The tied weight is asked for again where it is read outside its module.
    assert watched.waited.count("embed.weight") >= 2


def script(it: Any) -> Any:
    """torch.jit.script(), which is deprecated but used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(it)


def sum_of_squares(weight: torch.Tensor) -> torch.Tensor:
    return (weight * weight).sum()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return (weight * weight).sum()


def test_whoever_reads_a_parameter_has_asked_its_module_which_waits() -> None:
    model = Tied()
    watched = Watched(model)
    pool = ThreadPoolExecutor(1)
    no_grad, scripted = torch.no_grad(), script(sum_of_squares)
    reads: dict[str, Callable[[], Any]] = {
        "a regulariser": lambda: model.embed.weight.pow(2).sum(),
        "a view": lambda: model.embed.weight[1:],
        "a scripted function": lambda: scripted(model.embed.weight),
        "a scripted function without gradient": lambda: no_grad(scripted)(model.embed.weight),
        "an autograd function": lambda: Square.apply(model.embed.weight),
        "torch.func": lambda: torch.func.grad_and_value(lambda w: (w * w).sum())(model.embed.weight),
        "vmap": lambda: torch.vmap(lambda row: row.sum())(model.embed.weight),
        "numpy": lambda: model.embed.weight.detach().numpy().sum(),
        "a thread": lambda: pool.submit(lambda: 2.0 * model.embed.weight).result(),
        "its module's table": lambda: dict(table(model.embed)),
        "getattr": lambda: getattr(model.embed, "weight").sum(),  # noqa: B009
        "a copy": lambda: copy.deepcopy(model.embed),
        "its state": lambda: list(model.embed.state_dict()),
        "functional_call": lambda: torch.func.functional_call(
            model.embed, dict(model.embed.named_parameters()), (torch.tensor([1]),)
        ),
    }
    for what, read in reads.items():
        watched.threads.clear()
        assert watched.reads(read) == {"embed.weight"}, what
        assert (threading.get_ident() not in watched.threads) == (what == "a thread")
    pool.shutdown()
    assert watched.reads(model.state_dict) == set(watched.names)
    assert watched.loose(model) == set()


def test_a_copy_made_while_parameters_arrive_is_an_ordinary_module() -> None:
    model = Tied()
    watched = Watched(model)
    copies: list[nn.Module] = []
    watched.reads(lambda: copies.append(copy.deepcopy(model)))
    assert all(type(own) is dict for _, _, own in tables_of(copies[0]))
    assert all(torch.equal(a, b) for a, b in zip(copies[0].parameters(), model.parameters(), strict=True))
    assert type(table(model.embed)) is dict


def test_what_is_written_to_a_module_while_parameters_arrive_stays() -> None:
    model = Tied()
    watched = Watched(model)

    def write() -> None:
        model.blocks[0].weight = nn.Parameter(torch.ones(4, 4))
        model.register_parameter("added", nn.Parameter(torch.ones(1)))
        model.norm.running_mean = torch.full((4,), 3.0)
        del model.bias

    watched.reads(write)
    assert torch.equal(model.blocks[0].weight, torch.ones(4, 4))
    assert torch.equal(model.norm.running_mean, torch.full((4,), 3.0))
    assert [name for name, _ in model.named_parameters(recurse=False)] == ["added"]


def test_nobody_waits_where_nothing_is_on_its_way_nor_while_the_gate_is_open() -> None:
    model = Tied()
    watched = Watched(model)
    model(torch.tensor([1, 2]))
    assert watched.waited == []
    watched.waiting = False
    assert watched.reads(lambda: model(torch.tensor([1, 2]))) == set()


def test_code_that_reads_no_values_waits_for_none_and_others_do_meanwhile() -> None:
    model = Tied()
    watched = Watched(model)
    pool = ThreadPoolExecutor(1)

    def clear() -> None:
        with watched.gate.unread():
            model.zero_grad(set_to_none=True)
            pool.submit(lambda: 2.0 * model.bias).result()

    assert watched.reads(clear) == {"bias"}
    pool.shutdown()


def test_everything_has_arrived_when_a_forward_pass_is_over() -> None:
    model = Tied()
    watched = Watched(model)
    watched.gate.shut()
    with watched.gate.forward():
        watched.waited.clear()
    assert set(watched.waited) == set(watched.names)


def test_what_something_else_refers_to_is_waited_for_before_the_pass() -> None:
    model = Tied()
    watched = Watched(model)
    assert watched.loose(model) == set()
    holders: list[Any] = [model.bias]
    assert watched.loose(model) == {"bias"}
    holders.append(model.embed.weight.view(-1)[3:])
    holders.append(model.blocks[0].weight.detach().numpy())
    holders.append(script(model.blocks[1]))
    holders.append(table(model.norm, "_buffers"))
    expected = {"bias", "embed.weight", "blocks.0.weight", "blocks.1.weight", "blocks.1.bias"}
    expected |= {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert watched.loose(model) == expected
    watched.gate.shut()
    assert set(watched.waited) == expected
    watched.gate.open()
    assert watched.gate.why_not() == ""


def test_weak_references_and_tables_that_the_user_replaces_are_noticed() -> None:
    model = Tied()
    watched = Watched(model)
    reference = weakref.ref(model.bias)
    assert watched.loose(model) == {"bias"}
    del reference
    assert watched.loose(model) == set()
    model.blocks[0].__dict__["_parameters"] = OrderedDict(table(model.blocks[0]))
    assert watched.loose(model) >= {"blocks.0.weight", "blocks.0.bias"}


@pytest.mark.parametrize(
    "hold",
    [torch.Tensor.untyped_storage, torch.Tensor.storage],
    ids=["untyped", "typed"],
)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_tensor_is_loose_as_long_as_somebody_has_its_storage(hold: Callable[[torch.Tensor], Any]) -> None:
    model = Tied()
    watched = Watched(model)
    held = hold(model.bias)
    assert watched.loose(model) == {"bias"}
    del held
    assert watched.loose(model) == set()


def test_a_module_that_has_left_the_model_waits_too_and_so_does_who_took_its_table() -> None:
    model = Tied()
    watched = Watched(model)
    unused = model.unused
    del model.unused
    watched.gate.look()
    assert watched.reads(lambda: 2.0 * unused.weight) == {"unused.weight"}
    taken, unused.__dict__["_parameters"] = table(unused), {}
    watched.gate.look()
    watched.gate.shut()
    assert set(watched.waited) == {"unused.weight", "unused.bias"}
    watched.gate.open()
    assert len(taken) == 2


def test_a_pass_that_fails_since_the_exchange_did_says_so() -> None:
    """A reader on another thread is left by StepAgain, and the user's code stumbles over what is missing then."""
    model = Tied()
    watched = Watched(model)

    def fail(_numbers: Iterable[int]) -> None:
        raise StepAgain

    gate = Gate(watched.tensors, watched.reach, wait_for=fail, waiting=lambda: watched.waiting)
    gate.shut()
    results: list[torch.Tensor] = []

    def read() -> None:
        with contextlib.suppress(StepAgain):
            results.append(2.0 * model.bias)

    def loss() -> torch.Tensor:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join(timeout=20)
        return results[0].sum()

    with pytest.raises(StepAgain), gate.forward():
        loss()
    gate.open()


def test_garbage_of_each_step_does_not_cost_a_full_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    watched = Watched(model)
    collect, asked = gc.collect, []

    def counted(generation: int = 2) -> int:
        asked.append(generation)
        return collect(generation)

    monkeypatch.setattr(gc, "collect", counted)
    for _ in range(3):
        cycle: list[Any] = [model.bias]
        cycle.append(cycle)
        del cycle
        assert watched.loose(model) == set()
    assert set(asked) <= {1}


def test_a_parameter_that_moves_to_a_module_that_nobody_watches_is_waited_for() -> None:
    model = Tied()
    watched = Watched(model)
    nn.utils.parametrize.register_parametrization(model.blocks[0], "weight", nn.Identity())
    assert watched.loose(model) == {"blocks.0.parametrizations.weight.original"}


def test_who_holds_a_model_before_it_is_attached_is_noticed() -> None:
    model = Tied()
    held = [model.bias]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = [group["params"] for group in optimizer.param_groups]
    assert Watched(model, groups).loose(model) == {"bias"}
    assert Watched(model).loose(model) == {name for name, _ in model.named_parameters()}
    held.clear()
    assert Watched(model, groups).loose(model) == set()
    # nn.GRU reads a list of its own.
    assert Watched(nn.Sequential(nn.GRU(2, 2))).gate.why_not() != ""


def test_a_pass_that_is_left_in_the_middle_holds_no_tensor_afterwards() -> None:
    model = Tied()
    watched = Watched(model)
    tables = SimpleNamespace(forget=lambda: None)
    loop = SimpleNamespace(runner=SimpleNamespace(unwound=None), place=SimpleNamespace(tables=tables))

    def reads(bias: torch.Tensor) -> None:
        try:
            raise Restart("a server is gone")
        except Restart as error:
            raise StepAgain(error) from error

    with StepLoop.attempt(cast(StepLoop, loop)):
        reads(model.bias)
    assert loop.runner.unwound is not None
    assert watched.loose(model) == set()


def test_what_is_only_garbage_is_not_waited_for() -> None:
    model = Tied()
    watched = Watched(model)
    cycle: list[Any] = [model.bias]
    cycle.append(cycle)
    del cycle
    assert watched.loose(model) == set()


def test_the_gate_changes_no_bit_of_a_pass() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.attend = nn.GRU(4, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
            self.drop = nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.drop(self.rnn(x)[0])
            return cast(torch.Tensor, self.attend(hidden, hidden, hidden)[0])

    torch.manual_seed(0)
    model = Attends()
    x = torch.randn(3, 5, 4)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        model(x).pow(2).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    watched = Watched(model)
    watched.gate.shut()
    found = gradients()
    assert set(watched.waited) == set(watched.names)
    assert len(found) == len(plain) == len(watched.names)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_the_gate_opens_before_a_compiler_looks_at_a_model_and_stays_open() -> None:
    model = Tied()
    watched = Watched(model)
    tables: list[type] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        tables.append(type(table(model.embed)))
        return graph.forward

    assert watched.gate.why_not() == ""
    compiled = torch.compile(model, backend=backend)
    try:
        assert watched.reads(lambda: compiled(torch.tensor([1, 2]))) == set(watched.names)
        assert set(tables) == {dict}
        assert "torch.compile" in watched.gate.why_not()
    finally:
        dynamo.reset()
    assert "torch.compile" in watched.gate.why_not()
    assert dynamo.callback.callback_handler.start_callbacks == []


def test_the_first_pass_of_a_process_that_compiles_is_not_watched() -> None:
    model = Tied()
    watched = Watched(model)
    torch.compile(lambda x: x, backend="eager")
    uses: dict[int, None] = {}
    with watched.gate.forward(uses):
        assert type(table(model.embed)) is dict
    assert uses == {}


# Hooks


def test_gradients_that_are_completed_twice_in_one_pass_are_not_whole_at_their_first_hook() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    plan = make_plan(model_tensors(model), 1)
    hooks = GradientHooks(plan, list(model.parameters()))
    fired: list[int] = []
    hooks.listen(lambda number, _: fired.append(number))
    x = torch.ones(2, 3, requires_grad=True)
    # The middle layer runs twice, each time within a nested backward pass of its own.
    hidden = checkpoint(model[1], checkpoint(model[1], model[0](x), use_reentrant=True), use_reentrant=True)
    model[2](hidden).sum().backward()
    assert once_each(fired) == {0, 1, 4, 5}
    hooks.close()
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_gradient_leaves_after_the_users_own_hooks_even_those_that_come_later() -> None:
    model = nn.Linear(3, 1)
    plan = make_plan(model_tensors(model), 1)
    hooks = GradientHooks(plan, list(model.parameters()))
    seen: list[float] = []

    def listener(number: int, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen.append(float(parameter.grad.abs().max()))

    def clear(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.data.zero_()

    for step in range(2):
        if step == 1:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(clear)  # type: ignore[no-untyped-call]
        hooks.listen(listener)
        model(torch.ones(1, 3)).sum().backward()
    assert seen == [1.0, 1.0, 0.0, 0.0]


def test_a_parameter_that_is_thawed_later_is_hooked_then() -> None:
    model = nn.Linear(3, 1)
    plan = make_plan(model_tensors(model), 1)
    model.bias.requires_grad_(False)
    hooks = GradientHooks(plan, list(model.parameters()))
    for thawed, expected in ((False, {0}), (True, {0, 1})):
        model.bias.requires_grad_(thawed)
        fired: list[int] = []
        hooks.listen(lambda number, _, fired=fired: fired.append(number))
        model(torch.ones(1, 3)).sum().backward()
        assert once_each(fired) == expected
    hooks.ignore()
    model(torch.ones(1, 3)).sum().backward()
    assert once_each(fired) == {0, 1}


def test_every_bucket_of_a_tensor_is_its_home() -> None:
    model = nn.Sequential(nn.Linear(320, 300), nn.Linear(3, 3))
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


def early(spec: JobSpec, expected: Expectation, *, first: bool) -> str:
    return why_not_early(spec, consistency.of(spec.consistency).worker_half(spec), expected, first=first)


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
    found = early(spec, expected, first=False)
    assert reason in found
    assert bool(found) == bool(reason)
    assert "first step" in early(spec, expected, first=True)


def test_a_loss_that_may_skip_the_step_has_to_be_known_first() -> None:
    expected = Expectation(replica=0, owned=[0])
    assert early(job(), expected, first=False) == ""
    assert "loss" in early(job(nan_policy="skip"), expected, first=False)

"""Changes to the model while it is trained: the rows of that table in docs/jobs.md, as jobs or as scripts.

Most are made both by the forward() of a job's model, and by a script between backward() and step().
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.models.row import SAME, Loop, Row, Script, adamw, batch, job, mlp, mse, sgd


class Watched(nn.Module):
    """Calls `act` in each pass, with the number of the pass: `before` the layers compute, or after them."""

    act: Callable[[Watched, int], None] = staticmethod(lambda model, number: None)
    before = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 1)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(8), persistent=False)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            self.act(self, self.passes)
        hidden = torch.tanh(self.frozen(self.first(x)))
        found: torch.Tensor = self.last(hidden - self.mean)
        if not self.before:
            self.act(self, self.passes)
        self.passes += 1
        return found


@dataclass(frozen=True)
class Change:
    """A change of the model. before: made before the layers compute, since it would make the pass itself fail."""

    act: Callable[[Watched, int], None]
    before: bool = False
    finds: str = ""
    """A pattern with which the refusal begins, after the step."""
    in_scripts: bool = True

    def model(self) -> Watched:
        model = Watched()
        model.act = self.act
        model.before = self.before
        return model

    def loop(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int]) -> None:
        assert isinstance(model, Watched)
        for step in steps:
            optimizer.zero_grad()
            if self.before:
                self.act(model, step)
            mse(model, batch(step)).backward()
            if not self.before:
                self.act(model, step)
            optimizer.step()


def changes(**cases: Change) -> dict[str, Any]:
    """The cases of a row, as jobs and as scripts."""
    return {
        "jobs": {name: job(one.model, replicas=1 if one.finds else 2) for name, one in cases.items()},
        "scripts": {name: Script(sgd, one.loop, Watched) for name, one in cases.items() if one.in_scripts},
        "finds": {name: rf"step \d: {one.finds}" for name, one in cases.items() if one.finds},
    }


def script(optimizer: Callable[[nn.Module], torch.optim.Optimizer], loop: Loop, finds: str = "") -> dict[str, Any]:
    """The only case of a row, a script."""
    name = loop.__name__
    return {"scripts": {name: Script(optimizer, loop)}, "finds": {name: rf"step \d: {finds}"} if finds else {}}


def at(
    number: int, act: Callable[[Watched], Any], finds: str, *, before: bool = False, in_scripts: bool = True
) -> Change:
    """A change in one pass. finds: see Change."""

    def maybe(model: Watched, passes: int) -> None:
        if passes == number:
            act(model)

    return Change(maybe, before, finds, in_scripts)


# Buffers


def assign_buffers(model: Watched, number: int) -> None:
    model.mean = 0.9 * model.mean + 0.1 * model.first.weight.detach().mean(1)
    model.seen = model.seen + 4
    model.scratch = torch.ones(number)


def move_buffers(model: Watched, number: int) -> None:
    model.mean.data = torch.full((8,), 0.1 * number)
    model.seen = model.seen.view(())


def assign_longer(model: Watched) -> None:
    model.mean = torch.zeros(9)


def assign_graph(model: Watched) -> None:
    model.mean = model.first.bias * 2


def without_tensors(model: Watched, number: int) -> None:
    model.another = nn.Tanh()
    model.register_buffer(f"own{number}", torch.zeros(2), persistent=False)


# The memory of parameters


def clone_parameters(model: nn.Module, number: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def transpose_memory(model: Watched, number: int) -> None:
    model.first.weight.data = model.first.weight.data.t().contiguous().t()


def one_vector(model: Watched, number: int) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())


def share_memory(model: Watched) -> None:
    model.first.bias.data = model.frozen.bias.data


def to_double(model: Watched) -> None:
    model.frozen.bias.data = model.frozen.bias.data.double()


# Their values


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """As averaged weights are put into a model for an evaluation."""
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    yield
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def write_and_undo(model: nn.Module, number: int) -> None:
    with kept(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def write_late_and_undo(model: Watched, number: int) -> None:
    if number >= 4:
        write_and_undo(model, number)


def perturb_and_undo(model: nn.Module, number: int) -> None:
    for parameter in model.parameters():
        old = parameter.data.clone()
        with torch.no_grad():
            parameter.add_(1.0)
        parameter.data = old


def sharpness_aware(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int]) -> None:
    """Foret et al., "Sharpness-Aware Minimization", ICLR 2021: the gradient where the loss is highest nearby."""
    for step in steps:
        optimizer.zero_grad()
        mse(model, batch(step)).backward()
        old = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data = parameter.data + 0.05 * parameter.grad / (parameter.grad.norm() + 1e-12)
        optimizer.zero_grad()
        mse(model, batch(step)).backward()
        for parameter, value in zip(model.parameters(), old, strict=True):
            parameter.data = value
        optimizer.step()


def averaged_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int]) -> None:
    """Averaged weights are put into the model between step() and the next pass; how well they do decides its loss."""
    average, scale = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)), 1.0
    for step in steps:
        optimizer.zero_grad()
        (scale * mse(model, batch(step))).backward()
        optimizer.step()
        average.update_parameters(model)
        with kept(model), torch.no_grad():
            for parameter, mean in zip(model.parameters(), average.parameters(), strict=True):
                parameter.copy_(mean)
            scale = 1.0 + float(mse(model, batch(step)))


def write(model: Watched) -> None:
    with torch.no_grad():
        model.last.weight.mul_(0.5)


def write_through_data(model: Watched) -> None:
    model.last.weight.data.mul_(0.5)


def other_data(model: Watched) -> None:
    model.last.weight.data = model.last.weight.data * 0.5


def merge_into_frozen(model: Watched) -> None:
    """As LoRA's matrices are merged into the layers that they adapt."""
    model.frozen.weight.data += model.last.weight.data.t() @ model.last.weight.data


def load_other_values(model: Watched) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


class Limited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(10, 4, max_norm=0.5), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.table((x * 5).long().abs() % 10).sum(1))
        return found


# Which parameters train


def freeze_at_first(model: Watched, number: int) -> None:
    model.first.requires_grad_(number >= 3)


def frozen_for_a_while(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int]) -> None:
    first = next(model.parameters())
    for step in steps:
        first.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        mse(model, batch(step)).backward()
        optimizer.step()


def unfreeze(model: Watched) -> None:
    model.frozen.requires_grad_(True)


def replace_parameter(model: Watched) -> None:
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())


def tie(model: Watched) -> None:
    model.frozen.bias = model.first.bias


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def outside() -> tuple[Callable[[nn.Module, Any], torch.Tensor], nn.Parameter]:
    """A loss with a parameter that is not in the model."""
    temperature = nn.Parameter(torch.tensor(0.5))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return mse(model, batch) * temperature

    return loss, temperature


# Copies


class Averaging:
    """A loss to which averages of the weights of all passes so far contribute, and a copy of those of this pass."""

    def __init__(self) -> None:
        self._averages: WeakKeyDictionary[nn.Module, AveragedModel] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if model not in self._averages:
            self._averages[model] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        average = self._averages[model]
        average.update_parameters(model)
        with torch.no_grad():
            target = average(batch[0]) + copy.deepcopy(model)(batch[0])
        return mse(model, batch) + nn.functional.mse_loss(model(batch[0]), target)


def averaged(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int]) -> None:
    """Averages of weights are read after each step, and their values decide the next one's loss."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    for step in steps:
        optimizer.zero_grad()
        with torch.no_grad():
            target = average(batch(step)[0])
        (mse(model, batch(step)) + nn.functional.mse_loss(model(batch(step)[0]), target)).backward()
        optimizer.step()
        average.update_parameters(model)
        update_bn([batch(step)], average)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Linear(9, 1))


# Groups


def training(act: Callable[[torch.optim.Optimizer], Any]) -> Loop:
    """A script that changes its optimizer in step 2."""

    def change_in_step_2(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int]) -> None:
        for step in steps:
            optimizer.zero_grad()
            mse(model, batch(step)).backward()
            if step == 2:
                act(optimizer)
            optimizer.step()

    return change_in_step_2


def flag(name: str, value: object) -> Loop:
    return training(lambda optimizer: optimizer.param_groups[0].update({name: value}))


def take_away(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


def add(optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def read_momentum(optimizer: torch.optim.Optimizer) -> object:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"]


def with_outside(*, grouped: bool) -> Callable[[], Any]:
    loss, temperature = outside()
    if not grouped:
        return job(mlp, loss=loss)
    return job(mlp, loss=loss, param_groups=lambda model: [{"params": [*model.parameters(), temperature]}])


WRITES = changes(
    in_place=at(1, write, "'last.weight'", before=True),
    # A script that overlaps can't fetch the servers' values any more once gradients have left: it warns.
    later=at(3, write, "'last.weight'", before=True, in_scripts=False),
    data=at(1, write_through_data, "'last.weight'"),
    other_data=at(1, other_data, "'last.weight'"),
    merged=at(1, merge_into_frozen, "'frozen.weight'"),
    loaded=at(1, load_other_values, "'first.weight' and 5 more", before=True),
)
WRITES["jobs"]["max_norm"] = job(Limited, replicas=1)
WRITES["scripts"]["max_norm"] = Script(sgd, training(lambda optimizer: None), Limited)
WRITES["finds"]["max_norm"] = "step 0: 'table.weight'"

CHANGES = [
    Row(
        "a buffer is assigned anew (`self.mean = 0.9 * self.mean + ...`), or gets other memory",
        f"{SAME}: the value is the buffer's, and that of replica 0 goes into checkpoints; refused in pipelines",
        **changes(assigned=Change(assign_buffers), moved=Change(move_buffers)),
    ),
    Row(
        "a buffer is assigned a value of another shape, dtype or device",
        "refused: `was assigned a value of`",
        **changes(longer=at(1, assign_longer, r"buffer 'mean' .* shape \(9,\)")),
    ),
    Row(
        "a buffer is assigned a value with the graph of the pass",
        "refused: `was assigned a value that carries the graph of this pass`",
        **changes(graph=at(1, assign_graph, "buffer 'mean'")),
    ),
    Row(
        "a parameter gets other memory with the same values (`p.data = p.data.clone()`, `vector_to_parameters`, "
        "`to(memory_format=...)`)",
        f"{SAME}: it is followed there",
        **changes(cloned=Change(clone_parameters), strides=Change(transpose_memory, True), vector=Change(one_vector)),
    ),
    Row(
        "a parameter is written to and put back before the step ends (sharpness-aware steps)",
        **changes(
            undone=Change(write_and_undo, True),
            late=Change(write_late_and_undo, True),
            perturbed=Change(perturb_and_undo, True),
        ),
    ),
    Row(
        "a script with two passes for each step, the second with perturbed parameters (sharpness-aware steps)",
        scripts={"sharpness-aware": Script(sgd, sharpness_aware, overlaps=False)},
    ),
    Row(
        "a script that puts averaged weights into the model for an evaluation, and takes them out again",
        **script(sgd, averaged_evaluation),
    ),
    Row(
        "a parameter is written to otherwise (`max_norm`, clipping of weights, `load_state_dict`, merging LoRA)",
        "refused: `written to in this process, but the values of parameters are the servers'`. Replicas with "
        "parameters of their own, as in [cadences](cadences.md) with local passes, may",
        **WRITES,
    ),
    Row(
        'a parameter gets another shape, dtype or device (`.double()`, `.to("cuda")`)',
        "refused: `when training began (.to(), .double(), p.data = ...); convert the model before training begins`",
        **changes(double=at(1, to_double, "'frozen.bias' has .* float64")),
    ),
    Row(
        "a parameter is frozen for a while (`requires_grad_(False)`)",
        f"{SAME}: it has no gradient, so it is not updated",
        jobs={"at first": job(Change(freeze_at_first, True).model)},
        scripts={
            "at first": Script(sgd, Change(freeze_at_first, True).loop, Watched),
            "at times": Script(sgd, frozen_for_a_while),
        },
    ),
    Row(
        "a parameter that was frozen when training began requires a gradient",
        "refused: `requires a gradient now, but it did not when training began`; let it require one then, and freeze "
        "it in the loop. It takes the servers the memory of a trained one",
        **changes(unfrozen=at(1, unfreeze, "'frozen.weight'")),
    ),
    Row(
        "a parameter is replaced (`layer.weight = nn.Parameter(...)`) or tied to another",
        "refused: `the model has another object as parameter`",
        **changes(replaced=at(1, replace_parameter, ".* 'last.weight'"), tied=at(1, tie, ".* 'frozen.bias'")),
    ),
    Row(
        "a parameter gets memory of another (`p.data = q.data`)",
        "refused: `are different tensors that share memory`",
        **changes(shared=at(1, share_memory, "'(first|frozen).bias' and '(first|frozen).bias'")),
    ),
    Row(
        "pruning, parametrizations, wrapped modules",
        "refused: `(pruned, parametrized or wrapped)`; before training begins they work",
        **changes(
            pruned=at(
                1,
                lambda model: prune.l1_unstructured(model.last, "weight", 0.3),
                "'last.weight' is .* 'last.weight_orig'",
            ),
            parametrized=at(
                1,
                lambda model: parametrize.register_parametrization(model.last, "weight", Doubled()),
                "'last.weight' is now called 'last.parametrizations.weight.original'",
                before=True,
            ),
        ),
    ),
    Row(
        "modules or persistent buffers are added",
        "refused: `is new in the model`",
        **changes(
            module=at(1, lambda model: setattr(model, "head", nn.Linear(1, 1)), "'head.(weight|bias)'"),
            buffer=at(1, lambda model: model.register_buffer("more", torch.zeros(1)), "'more' .* persistent=False"),
        ),
    ),
    Row(
        "modules or persistent buffers are removed",
        "refused: `is no longer in the model`",
        **changes(
            module=at(1, lambda model: delattr(model, "frozen"), "'frozen.weight'"),
            buffer=at(1, lambda model: setattr(model, "mean", None), "'mean'"),
        ),
    ),
    Row(
        "modules without tensors, or buffers with `persistent=False`, are added",
        **changes(added=Change(without_tensors)),
    ),
    Row(
        "a copy of the model (`AveragedModel`, `deepcopy`)",
        f"{SAME}, where the values have [arrived](#overlap)",
        jobs={"averaged": job(mlp, loss=Averaging())},
        scripts={"averaged": Script(adamw, averaged, normed)},
    ),
    Row(
        "the loss uses parameters that are not in the model",
        f"{SAME}, with a warning: in no group, they are not trained",
        jobs={"outside": with_outside(grouped=False)},
    ),
    Row(
        "the loss uses parameters that are in a group, but not in the model",
        "refused, before the first step: `that is not in the model, so no server would train it`",
        jobs={"grouped": with_outside(grouped=True)},
    ),
    Row(
        "a script changes a flag of a group (`nesterov`, `maximize`), or makes a number none",
        "refused: `but only numbers such as lr can change from step to step`",
        scripts={
            "nesterov": Script(sgd, flag("nesterov", True)),
            "maximize": Script(sgd, flag("maximize", True)),
            "none": Script(sgd, flag("lr", None)),
        },
        finds={"nesterov": "step 2: nesterov of parameter group 0 is True and was False", "none": "step 2: lr of"},
    ),
    Row(
        "a script adds a group (`add_param_group`)",
        "refused: `parameter groups can't be added after attach(); add them before it`",
        **script(sgd, training(add), "parameter groups"),
    ),
    Row(
        "a script adds parameters to a group, or takes some away",
        "refused: `the parameters in the optimizer's groups are not those that the servers train any more`",
        **script(sgd, training(take_away), "the parameters"),
    ),
    Row(
        'a script reads the optimizer\'s state (`optimizer.state[p]["momentum_buffer"]`)',
        "refused: `optimizer.state has no 'momentum_buffer' in this process: the optimizer's state is on the servers`",
        scripts={"momentum": Script(sgd, training(read_momentum))},
    ),
]

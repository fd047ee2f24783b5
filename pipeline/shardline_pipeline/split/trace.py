"""A model traced and cut into stages, and which value goes from which stage to which."""

from __future__ import annotations

import linecache
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardline.errors import JobError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with: positional inputs, and those by name."""
SHARED = "tensor "
"""Begins the names of values that are a parameter or buffer of an earlier stage."""


@dataclass(frozen=True)
class TracedStage:
    module: nn.Module
    """Its operations. It has no memory of its own for `tensors`."""
    takes: tuple[Any, ...]
    """What the module is called with: names of values, as Name, or constants."""
    gives: tuple[str, ...]
    """Names of the values that it returns."""
    several: bool
    """It returns them as a tuple, which may have one element."""
    tensors: Mapping[str, str]
    """Names of the parameters and buffers that it uses: in the module, and in the model's state_dict."""


@dataclass(frozen=True)
class Traced:
    """A model in stages, as values that stages hand on."""

    parts: tuple[TracedStage, ...]
    inputs: tuple[str, ...]
    """The model's inputs, flattened."""
    outputs: tuple[Any, ...]
    """The model's outputs, flattened: names of values, as Name, or constants."""
    starts: tuple[str, ...]
    """The module with which each stage but the first begins."""
    form: pytree.TreeSpec
    """How the outputs are put together."""
    owners: Mapping[str, int]
    """The first stage that uses a parameter or buffer; only those that are used."""
    handed: tuple[tuple[str, ...], ...]
    """By stage: the values that come to it from the one before, also those that are only passed on."""


class EmptyStagesError(JobError):
    """Cuts that leave stages without anything to compute."""

    def __init__(self, cuts: Sequence[str], empty: Sequence[int]) -> None:
        ends = [*map(repr, cuts), "its end"]
        super().__init__(
            f"Pipeline.split: cuts {list(cuts)} make {len(cuts) + 1} stages, but {len(empty)} of them compute nothing: "
            f"those before {', '.join(ends[number] for number in empty)}; cut the model elsewhere"
        )
        self.needless = {cuts[min(number, len(cuts) - 1)] for number in empty}
        """The cuts without which there are no such stages."""


class Name(str):
    """The name of a value, where constants may be as well."""


def trace(model: nn.Module, inputs: Inputs, cuts: Sequence[str]) -> Traced:
    """Trace a model and cut it before these modules, which may be in any order.

    Raises JobError for a model that can't be traced, with the line, and for cuts that make no stages.
    """
    # Takes seconds and is needed for models of this kind only.
    from torch.distributed.pipelining import pipe_split, pipeline

    begun: list[str] = []
    forms: list[pytree.TreeSpec] = []

    def cutting(name: str) -> Callable[..., None]:
        def before(*_: Any) -> None:
            begun.append(name)
            pipe_split()  # type: ignore[no-untyped-call]

        return before

    def starting(*_: Any) -> None:
        begun.clear()

    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(starting).remove)
        for name in cuts:
            hooks.callback(model.get_submodule(name).register_forward_pre_hook(cutting(name)).remove)
        after = model.register_forward_hook(lambda module, given, output: forms.append(pytree.tree_structure(output)))
        hooks.callback(after.remove)
        hooks.enter_context(warnings.catch_warnings())
        # Torch's own, about the classes of its trees.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            pipe = pipeline(model, *inputs)
        except Exception as error:
            raise JobError(_untraced(model, error)) from error
    for name in cuts:
        if begun.count(name) != 1:
            raise JobError(
                f"Pipeline.split: the model calls {name!r} {begun.count(name)} times, so a stage can't begin with it; "
                "cut the model elsewhere"
            )
    # Of submod_pp_0, submod_pp_1, ..., those that would be empty are left out.
    stages = {str(node.target) for node in pipe.split_gm.graph.nodes if node.op == "call_module"}
    empty = [number for number in range(len(begun) + 1) if f"submod_pp_{number}" not in stages]
    if empty:
        raise EmptyStagesError(begun, empty)
    return _read(model, pipe, begun, forms[-1])


def _untraced(model: nn.Module, error: Exception) -> str:
    cause: BaseException = error.__cause__ or error
    frames = [f for f in traceback.extract_tb(cause.__traceback__) if "site-packages" not in f.filename]
    # The last one of theirs: this package's frames are above it.
    theirs = [f for f in frames if __file__ != f.filename]
    line = ""
    if theirs and theirs[-1].lineno is not None and frames[-1] is theirs[-1]:
        last = theirs[-1]
        source = linecache.getline(last.filename, last.lineno or 0).strip()
        line = f" at {source!r} ({last.filename}, line {last.lineno})"
    what = str(cause).strip().split("\n")[0] or type(cause).__name__
    return (
        f"Pipeline.split: torch.export can't trace the {type(model).__name__}{line}: {what}. What the model computes "
        "must not depend on the values of its tensors; change it, or list its layers: Pipeline([...], stages=...)"
    )


def _read(model: nn.Module, pipe: Any, starts: Sequence[str], form: pytree.TreeSpec) -> Traced:
    """The parts and values of a torch Pipe."""
    names = _names(model)
    parts: list[TracedStage] = []
    inputs: list[str] = []
    outputs: Sequence[Any] = ()
    made: dict[str, int] = {}
    """The stage that makes a value, in the order in which they are made."""
    for node in pipe.split_gm.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.name)
            made[node.name] = 0
        elif node.op == "call_module":
            module = pipe.split_gm.get_submodule(node.target)
            picks = sorted((user.args[1], user.name) for user in node.users if user.op == "call_function")
            gives = tuple(name for _, name in picks) if picks else (node.name,)
            if picks and [number for number, _ in picks] != list(range(len(picks))):
                # Values that nobody uses are not picked.
                gives = tuple(dict(picks).get(number, "") for number in range(picks[-1][0] + 1))
            takes = tuple(Name(arg.name) if isinstance(arg, torch.fx.Node) else arg for arg in node.args)
            own = [name for name, _ in module.named_parameters(remove_duplicate=False)]
            own += [name for name, _ in module.named_buffers(remove_duplicate=False)]
            tensors = {name: names[name] for name in own if name in names}
            made.update(dict.fromkeys(filter(None, gives), len(parts)))
            parts.append(TracedStage(_hollow(module, tensors), takes, gives, bool(picks), tensors))
        elif node.op == "output":
            outputs = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
    found = tuple(Name(one.name) if isinstance(one, torch.fx.Node) else one for one in outputs)
    owners: dict[str, int] = {}
    for stage, part in enumerate(parts):
        for name in part.tensors.values():
            made.setdefault(SHARED + name, owners.setdefault(name, stage))
    return Traced(tuple(parts), tuple(inputs), found, tuple(starts), form, owners, _handed(parts, found, made))


def _names(model: nn.Module) -> dict[str, str]:
    """Name under which the state_dict's first has a tensor, for each of its names."""
    first: dict[int, str] = {}
    found = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            found[name] = first.setdefault(id(tensor), name)
    return found


def _hollow(module: nn.Module, tensors: Mapping[str, str]) -> nn.Module:
    """Take the memory of these tensors out of a module: each call brings them along."""
    for name in tensors:
        owner, _, last = name.rpartition(".")
        home = module.get_submodule(owner)
        tensor = getattr(home, last)
        hollow = tensor.detach().to("meta")
        setattr(home, last, nn.Parameter(hollow, requires_grad=False) if isinstance(tensor, nn.Parameter) else hollow)
    return module


def _handed(
    parts: Sequence[TracedStage], outputs: Sequence[Any], made: Mapping[str, int]
) -> tuple[tuple[str, ...], ...]:
    """The values that cross each cut: made before it and used after it, in the order in which they are made."""
    last_use: dict[str, int] = {}
    for stage, part in enumerate(parts):
        used = [arg for arg in part.takes if isinstance(arg, Name)]
        for name in [*used, *(SHARED + name for name in part.tensors.values())]:
            last_use[name] = stage
    last_use.update(dict.fromkeys([one for one in outputs if isinstance(one, Name)], len(parts) - 1))
    return tuple(
        tuple(name for name, stage in made.items() if stage < cut <= last_use.get(name, -1))
        for cut in range(len(parts))
    )

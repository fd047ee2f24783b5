"""Which layers of a model workers share, and how: `tensor_parallel` of a job. Pure.

    {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
    {"blocks.*.mlp": "colwise/rowwise"}     the same, if the two are its only layers with weights

A pattern is a path of modules; `*` stands for any part of one name. The first pattern that matches a layer counts.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardline.division import PIPELINES
from shardline.errors import JobError
from shardline.job import Job
from shardline_pipeline.base import PipelineSchedule as Schedule
from shardline_pipeline.model import Pipeline
from shardline_pipeline.staged import StagedModel


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a layer is cut, as in Shoeybi et al.: Megatron-LM (2019), section 3."""

    name: str
    linear: Mapping[str, int]
    """The dimension along which each tensor of a torch.nn.Linear is cut; those that are absent, all ranks have."""
    embedding: Mapping[str, int]
    """The same for a torch.nn.Embedding; empty = it can't be."""
    takes_parts: bool = False
    """A Linear's input is a part of the last dimension, as another layer has left it."""
    leaves_parts: bool = False
    """Its output is a part of the last dimension."""


STYLES: Mapping[str, Style] = {
    style.name: style
    for style in (
        Style(name="colwise", linear={"weight": 0, "bias": 0}, embedding={}, leaves_parts=True),
        Style(name="gathered", linear={"weight": 0, "bias": 0}, embedding={"weight": 1}),
        Style(name="rowwise", linear={"weight": 1}, embedding={"weight": 0}, takes_parts=True),
    )
}
"""colwise: each rank computes some outputs. gathered: so too, and all ranks then get all of them. rowwise: each rank
has some inputs, and what the ranks make of theirs is summed."""


@dataclass(frozen=True, kw_only=True)
class SharedLayer:
    name: str
    style: Style
    embedding: bool

    @property
    def cuts(self) -> Mapping[str, int]:
        """The dimension along which each of its tensors is cut, by the tensor's name in the model."""
        own = self.style.embedding if self.embedding else self.style.linear
        return {f"{self.name}.{tensor}": dim for tensor, dim in own.items()}

    def __str__(self) -> str:
        return f"{self.name} ({'Embedding' if self.embedding else 'Linear'}, {self.style.name})"


def check_choices(choices: Mapping[str, str]) -> None:
    """Raise JobError for a style that doesn't exist."""
    for pattern, text in choices.items():
        for name in text.split("/"):
            if name not in STYLES:
                raise JobError(
                    f"tensor_parallel[{pattern!r}] is {text!r}; choose from {', '.join(STYLES)}, or for a module with "
                    "several layers one of these for each, such as 'colwise/rowwise'"
                )


def shared_layers(model: nn.Module, choices: Mapping[str, str], *, in_stages: bool = True) -> tuple[SharedLayer, ...]:
    """The layers that workers share, in the model's order. in_stages: the stages of a Pipeline have other workers.

    Raises JobError, naming pattern or layer: a pattern that matches nothing, a style that doesn't exist or doesn't fit,
    a layer that is neither Linear nor Embedding, and an output in parts that no other layer takes.
    """
    check_choices(choices)
    if choices and isinstance(model, StagedModel) and not isinstance(model, Pipeline):
        raise JobError(
            "tensor_parallel shares layers that are modules, but Pipeline.split traces those of its model; give "
            "Pipeline a list of layers, or leave tensor_parallel out"
        )
    found: dict[str, SharedLayer] = {}
    for pattern, text in choices.items():
        names = [name for name, _ in model.named_modules() if name and _matches(name, pattern)]
        if not names:
            raise JobError(
                f"tensor_parallel has the pattern {pattern!r}, which matches no module of the model; it has "
                f"{_some([name for name, module in model.named_modules() if _has_weights(module)])}"
            )
        for name in names:
            for layer, style in _layers(model, name, text.split("/"), pattern):
                found.setdefault(layer, _shared(model, layer, STYLES[style]))
    order = [name for name, _ in model.named_modules() if name in found]
    layers = tuple(found[name] for name in order)
    _check_flow(layers, _stage_of(model, in_stages))
    return layers


def layers_of(job: Job, model: nn.Module) -> tuple[SharedLayer, ...]:
    """Those of a job's model; () if tensor_ranks is 1. Raises JobError, see shared_layers()."""
    if job.tensor_ranks == 1:
        return ()
    return shared_layers(model, job.tensor_parallel, in_stages=isinstance(PIPELINES.parse(job.pipeline), Schedule))


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def _has_weights(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


def _layers(model: nn.Module, name: str, styles: Sequence[str], pattern: str) -> list[tuple[str, str]]:
    module = model.get_submodule(name)
    if _has_weights(module) and len(styles) == 1:
        return [(name, styles[0])]
    inner = [f"{name}.{sub}" if name else sub for sub, one in module.named_modules() if sub and _has_weights(one)]
    if not inner:
        raise JobError(
            f"tensor_parallel[{pattern!r}] matches {name!r}, which is a {type(module).__name__}; only torch.nn.Linear "
            "and torch.nn.Embedding, or modules with such layers in them, can be shared"
        )
    if len(inner) != len(styles):
        raise JobError(
            f"tensor_parallel[{pattern!r}] names {len(styles)} styles, but {name!r} has {len(inner)} layers with "
            f"weights, {_some(inner)}; name a style for each, or the layers themselves"
        )
    return list(zip(inner, styles, strict=True))


def _shared(model: nn.Module, name: str, style: Style) -> SharedLayer:
    shared = SharedLayer(name=name, style=style, embedding=isinstance(model.get_submodule(name), nn.Embedding))
    if not shared.cuts:
        raise JobError(f"{shared} leaves its output in parts, which an Embedding can't; choose 'gathered' or 'rowwise'")
    return shared


def _stage_of(model: nn.Module, in_stages: bool) -> Callable[[str], int]:
    def stage(layer: str) -> int:
        return model.stage_of(int(layer.partition(".")[0])) if in_stages and isinstance(model, Pipeline) else 0

    return stage


def _check_flow(layers: Sequence[SharedLayer], stage_of: Callable[[str], int]) -> None:
    """Refuse outputs in parts that no later layer of the same stage takes, and inputs in parts that none has left."""
    left: SharedLayer | None = None
    for layer in layers:
        if layer.embedding:
            continue
        if left is not None and (
            stage_of(left.name) != stage_of(layer.name) or not (layer.style.takes_parts or layer.style.leaves_parts)
        ):
            break
        if layer.style.takes_parts and left is None:
            raise JobError(
                f"{layer} takes its input in parts, but no colwise layer before it leaves its output so; make one "
                "colwise, or this one 'gathered'"
            )
        left = layer if layer.style.leaves_parts else None
    if left is not None:
        raise JobError(
            f"{left} leaves its output in parts, but no rowwise layer of the same stage follows it; make one rowwise, "
            "or this one 'gathered'"
        )


def handed_in_parts(layers: Sequence[SharedLayer]) -> list[tuple[str, str]]:
    """Layers that leave their output in parts, each with the one that takes it: no stage can end between them."""
    found = [layer for layer in layers if not layer.embedding]
    return [(left.name, right.name) for left, right in itertools.pairwise(found) if left.style.leaves_parts]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "none"

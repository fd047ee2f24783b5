"""A model's tensors for the plan: parameters, tied names, frozen parameters, buffers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shardline.core.spec import RuleSpec, TensorKind, TensorSpec, dtype_name
from shardline.errors import JobError
from shardline.update import wants_whole


def model_tensors(
    model: nn.Module, groups: Sequence[Mapping[str, Any]] | None = None, *, rule: RuleSpec | None = None
) -> tuple[TensorSpec, ...]:
    """The tensors of a model for the plan: parameters in named_parameters order, then persistent buffers.

    groups: the optimizer's param_groups; None = all trainable parameters in one group. A parameter that requires no
    gradient, or is in no group, is FROZEN: torch wouldn't update it either. Tied weights are one tensor, under their
    first name, with the others as aliases. Non-persistent buffers and extra state are not tensors of a state_dict and
    are left out: each process has its own.
    rule: decides what must not be cut; None = nothing.

    Raises JobError, naming the tensor, if the model has nothing to train, contains a sparse, quantized, meta or not yet
    initialised tensor, one made under torch.inference_mode(), or two different tensors that overlap in memory;
    TensorError for an unsupported dtype.
    """
    group_of = {
        id(parameter): number
        for number, group in enumerate(groups if groups is not None else [{"params": model.parameters()}])
        for parameter in _parameters_of(group)
    }
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    # Not by type: tensors that the user names need not be nn.Parameters.
    parameters = {id(tensor) for tensor in model.parameters()}
    specs = []
    for key, (name, *aliases) in names.items():
        tensor = tensors[key]
        _check_storable(name, tensor)
        kind = TensorKind.BUFFER
        if key in parameters:
            kind = TensorKind.PARAM if tensor.requires_grad and key in group_of else TensorKind.FROZEN
        shape = tuple(tensor.shape)
        specs.append(
            TensorSpec(
                name=name,
                shape=shape,
                dtype=dtype_name(tensor.dtype, name),
                kind=kind,
                group=group_of[key] if kind is TensorKind.PARAM else 0,
                whole=kind is TensorKind.PARAM and rule is not None and wants_whole(rule, shape),
                aliases=tuple(aliases),
            )
        )
    if not any(spec.kind is TensorKind.PARAM for spec in specs):
        raise JobError(_nothing_to_train(specs))
    _check_overlap([(names[key][0], tensor) for key, tensor in tensors.items()])
    return tuple(specs)


def named_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's own tensors by their first names, in the order of model_tensors; not copies."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_tensors(model):
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _parameters_of(group: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Parameters of one group in any form that torch accepts: tensors, or (name, tensor)."""
    params = group["params"]
    for item in [params] if isinstance(params, torch.Tensor) else params:
        yield item[1] if isinstance(item, tuple) else item


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter, then of every persistent buffer; tied ones under each of their names.

    The model's own tensors, as in its state_dict.
    """
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _check_storable(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise JobError(
            f"{name!r} is not initialised yet (a lazy module); run the model once on a batch inside the model factory"
        )
    if tensor.is_meta:
        raise JobError(f"{name!r} is on the meta device and has no values; build the model on the CPU or a GPU")
    if tensor.is_inference():
        raise JobError(
            f"{name!r} was made under torch.inference_mode(), so torch refuses to write to it; make it outside, or use "
            "torch.no_grad()"
        )
    if tensor.is_quantized:
        raise JobError(f"{name!r} is quantized ({tensor.dtype}); Shardline trains unquantized tensors")
    if tensor.layout != torch.strided:
        raise JobError(f"{name!r} has layout {tensor.layout}; Shardline supports dense (strided) tensors")
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise JobError(f"{name!r} is an expanded view whose elements share memory; store .contiguous() of it")


def _check_overlap(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse two tensor objects over the same memory: an update of one would silently change the other.

    Views side by side in one storage are fine; cuDNN's recurrent layers use this layout.
    """
    spans = []
    for name, tensor in named:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((str(tensor.device), start, start + (last + 1) * tensor.element_size(), name))
    spans.sort()
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            raise JobError(
                f"{name!r} and {other!r} are different tensors that share memory; tie weights by assigning the same "
                "Parameter object to both, or make one a copy with .clone()"
            )


def _nothing_to_train(specs: Sequence[TensorSpec]) -> str:
    frozen = sum(spec.kind is TensorKind.FROZEN for spec in specs)
    reason = f" ({frozen} parameters are frozen or in no parameter group)" if frozen else ""
    return f"the model has no parameters that require a gradient{reason}, so there is nothing to train"

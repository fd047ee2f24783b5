"""The parts of tensors that ranks have, and the fragments of the plan that they make. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardline.core.spec import TensorSpec, parts_of
from shardline.errors import JobError
from shardline_pipeline.tensor_parallel.layers import SharedLayer


def width(ranks: int) -> int:
    """Number of fragments of a stage: what all ranks have, and the part of each."""
    return ranks + 1 if ranks > 1 else 1


def fragment(stage: int, ranks: int, part: int | None) -> int:
    """Number of a fragment. part: of a rank; None = what all ranks have."""
    return stage * width(ranks) + (0 if part is None else 1 + part)


def cut(tensors: Sequence[TensorSpec], layers: Sequence[SharedLayer], ranks: int) -> tuple[TensorSpec, ...]:
    """The tensors with those of shared layers in parts, one per rank. fragment: of each, its stage.

    Raises JobError, naming the layer: a size that is no multiple of `ranks`, a tied weight, one that must stay whole.
    """
    if ranks == 1 or not layers:
        return tuple(tensors)
    cuts = {name: (layer, dim) for layer in layers for name, dim in layer.cuts.items()}
    found: list[TensorSpec] = []
    for tensor in tensors:
        tied = [name for name in (tensor.name, *tensor.aliases) if name in cuts]
        if not tied:
            found.append(replace(tensor, fragment=fragment(tensor.fragment, ranks, None)))
            continue
        layer, dim = cuts[tied[0]]
        if tensor.aliases:
            raise JobError(
                f"{layer} can't be shared: {tensor.name!r} is also {', '.join(map(repr, tensor.aliases))}, and tied "
                "weights stay whole; leave it out of tensor_parallel"
            )
        if tensor.whole:
            raise JobError(
                f"{layer} can't be shared: the job's update rule or codec needs {tensor.name!r} whole; choose another "
                "one, or leave the layer out of tensor_parallel"
            )
        if tensor.shape[dim] % ranks:
            raise JobError(
                f"{layer} can't be shared by {ranks} workers: {tensor.name!r} has shape {tensor.shape}, and {ranks} "
                f"does not divide {tensor.shape[dim]}; choose another tensor_ranks, or leave the layer out of "
                "tensor_parallel"
            )
        for part in parts_of(tensor, dim, ranks):
            found.append(replace(part, fragment=fragment(tensor.fragment, ranks, part.part)))
    return tuple(found)

"""A contribution's gradient for one bucket, and its properties: whether it is finite, its sums of squares."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from shardline.core import rows
from shardline.core.contributions import Partial, Present, dim_of
from shardline.core.fixed import fixed
from shardline.core.plan import BucketSpec, Plan
from shardline.core.reduce import Block, bucket_square_sums, is_finite, magnitude, quantum_key, stays_finite
from shardline.core.spec import DTYPES, TensorKind
from shardline.errors import NonFiniteError, TensorError


@fixed()
class Gradient:
    """One bucket's part of a contribution. values: flat tensor, None if nothing is contributed."""

    values: torch.Tensor | None
    present: Present
    fingerprint: int = 0
    """Of the encoded bytes, to detect a repetition with other bits; 0 = unknown."""
    bound: float = math.inf
    """Upper bound of the elements' magnitudes, from the sender; infinity if unknown."""
    borrowed: bool = False
    """values is in foreign memory (a worker's segment, a received message): it is read, never written, and no reference
    to it remains once the step is applied or its contributions are dropped."""


def on_device(gradient: Gradient, device: torch.device) -> tuple[torch.Tensor | None, bool]:
    """The gradient's values on a bucket's device, and whether they are still borrowed: a copy belongs to the shard."""
    values = gradient.values
    if values is None or values.device == device:
        return values, gradient.borrowed
    return values.to(device), False


def all_finite(gradients: Collection[Gradient]) -> bool:
    return all(
        gradient.values is None or stays_finite(gradient.bound, gradient.values.dtype) or is_finite(gradient.values)
        for gradient in gradients
    )


def peak(gradient: Gradient, values: torch.Tensor) -> float:
    """The largest magnitude, from the sender or computed now; not finite if an element isn't."""
    return gradient.bound if stays_finite(gradient.bound, values.dtype) else magnitude(values)


def nonfinite_names(names: Sequence[str], bucket: BucketSpec, values: torch.Tensor) -> list[str]:
    """Tensors of the bucket whose slice isn't finite, quoted. names: one per slice."""
    found = []
    for name, piece in zip(names, bucket.slices, strict=True):
        if not is_finite(values[piece.offset : piece.end]) and repr(name) not in found:
            found.append(repr(name))
    return found


def norm_parts(plan: Plan, bucket: BucketSpec, total: Partial) -> tuple[list[tuple[int, float]], set[str]]:
    """(quantum in the plan, sum of squares) of a bucket's mean gradient, and names of tensors that aren't finite."""
    values = total.values
    if values is None:
        return [], set()
    pieces = [piece for piece, present in zip(bucket.slices, total.present, strict=True) if present]
    parts = [(plan.tensors[piece.tensor], piece) for piece in pieces]
    sums = [
        (quantum_key(plan, pieces[index].tensor, quantum), value)
        for index, quantum, value in bucket_square_sums(values, parts)
    ]
    nonfinite: set[str] = set()
    if not is_finite(values):
        nonfinite = {tensor.name for tensor, piece in parts if not is_finite(values[piece.offset : piece.end])}
    return sums, nonfinite


def check_gradient(
    gradient: Gradient, *, shard: int, bucket: BucketSpec, names: Sequence[str], block: Block, refuse_nonfinite: bool
) -> float:
    """Refuse a contribution that does not fit the kind of bucket; returns an upper bound of the magnitudes.

    The bound is infinity if it was not determined. names: one per slice of the bucket. Raises TensorError or
    NonFiniteError.
    """
    values = gradient.values
    if values is None:
        return 0.0
    if bucket.kind is TensorKind.FROZEN:
        raise TensorError(f"{names[0]!r} is frozen (requires_grad is False) and can't have a gradient")
    if bucket.kind is TensorKind.BUFFER:
        return math.inf
    if bucket.kind is TensorKind.TABLE:
        return _check_rows(values, shard, bucket, names[0])
    if not refuse_nonfinite:
        return math.inf
    bound = peak(gradient, values)
    if not math.isfinite(bound):
        raise NonFiniteError(
            f"shard {shard}: gradient of {', '.join(nonfinite_names(names, bucket, values))} from replicas {block} has "
            "NaN or infinity; nothing was changed. Lower the learning rate, clip gradients, or set nan_policy='skip'"
        )
    return bound


def _check_rows(packed: torch.Tensor, shard: int, bucket: BucketSpec, table: str) -> float:
    """Refuse packed rows that are not the bucket's, or not finite; returns an upper bound of the magnitudes."""
    dim, piece = dim_of(bucket), bucket.slices[0]
    rows.check_packed(packed, dim, piece.first_row, piece.rows, table)
    bound = magnitude(rows.rows_of(packed, dim).reshape(-1))
    if not math.isfinite(bound):
        raise NonFiniteError(
            f"shard {shard}: the gradient of '{table}[{nonfinite_id(packed, dim)}]' has NaN or infinity; nothing was "
            "changed. Lower the learning rate"
        )
    return bound


def nonfinite_id(packed: torch.Tensor, dim: int) -> int:
    """The first id of packed rows whose row has NaN or infinity."""
    bad = ~rows.rows_of(packed, dim).isfinite().all(1)
    return int(rows.ids_of(packed, dim)[bad][0])


def flat_bucket(
    plan: Plan,
    bucket: BucketSpec,
    values: Mapping[str, torch.Tensor | None],
    device: torch.device | None = None,
) -> torch.Tensor:
    """A bucket of tensors by name, zero where one is missing or None; shape [elements]. device: None = the CPU."""
    found = torch.zeros(bucket.elements, dtype=DTYPES[bucket.dtype], device=device)
    for piece in bucket.slices:
        tensor = plan.tensors[piece.tensor]
        value = values.get(tensor.name)
        if value is not None:
            start = piece.first_row * tensor.row_elements
            found[piece.offset : piece.end] = value.detach().reshape(-1)[start : start + piece.elements]
    return found


@torch.no_grad()
def write_bucket(plan: Plan, bucket: BucketSpec, flat: torch.Tensor, into: Mapping[str, torch.Tensor]) -> None:
    """Write a bucket into the tensors, by name, that it has parts of: the inverse of flat_bucket()."""
    for piece in bucket.slices:
        tensor = plan.tensors[piece.tensor]
        first = piece.first_row * tensor.row_elements
        whole = into[tensor.name].reshape(-1)
        whole[first : first + piece.elements] = flat[piece.offset : piece.end]
        # reshape() may have made a copy.
        into[tensor.name].copy_(whole.view(tensor.shape))

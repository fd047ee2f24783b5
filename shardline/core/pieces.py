"""Where a bucket's slices are in the tensors that they are of. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardline.core.plan import BucketSpec, Plan, Slice


def span_of(plan: Plan, piece: Slice) -> slice:
    """The range of a slice within its flattened tensor."""
    start = piece.first_row * plan.tensors[piece.tensor].row_elements
    return slice(start, start + piece.elements)


def tensor_piece(plan: Plan, bucket: BucketSpec, tensors: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """The slice of one contiguous tensor that is the whole bucket, flat, not copied; None if there is none."""
    piece = bucket.slices[0]
    if len(bucket.slices) != 1 or piece.offset or piece.elements != bucket.elements:
        return None
    tensor = tensors.get(piece.tensor)
    if tensor is None or not tensor.is_contiguous():
        return None
    return tensor.detach().reshape(-1)[span_of(plan, piece)]

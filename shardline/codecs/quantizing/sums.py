"""Sums in float64 in an order of their own, so that processes with and without the native library write the same bits.

Value i is added to lane i mod LANES, one after another; of the lanes, the second half is added to the first until one
is left.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shardline.codecs.quantizing.base import blocks
from shardline.native import codecs

LANES = 128


def lane_sums(rows: torch.Tensor) -> npt.NDArray[np.float64]:
    """The sum of each row of a 2-d tensor, in float64."""
    count, width = rows.shape
    filled = np.zeros((count, -(-width // LANES), LANES))
    filled.reshape(count, -1)[:, :width] = rows.numpy()
    # An axis that is not the last one in memory is added row after row.
    lanes: npt.NDArray[np.float64] = filled.sum(axis=1)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def lane_sum(values: torch.Tensor) -> float:
    """The sum of a 1-d tensor."""
    return float(lane_sums(values[None])[0])


def norms(values: torch.Tensor, block: int) -> npt.NDArray[np.float32]:
    """The l2 norm of each block of finite numbers, of any magnitude; infinite if it is too large for float32."""
    found = codecs.norms(values, block)
    if found is not None and len(found):
        return found
    squares = blocks(values, block).double().square_()
    with np.errstate(over="ignore"):
        return np.sqrt(lane_sums(squares)).astype(np.float32)

"""The digest for comparing the results of two trainings: sha256 over the parameters' bytes."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in row-major order, little-endian, on the CPU; any dtype, also 0-d and empty tensors.

    A view of the tensor's own memory if it is a contiguous CPU tensor on a little-endian machine.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    # numpy has no bfloat16, so the bytes are read through the integer type of the same size.
    array: npt.NDArray[np.generic] = flat.view(_INTEGER_OF_SIZE[flat.element_size()]).numpy()
    if sys.byteorder == "big":
        array = array.byteswap()
    return array.view(np.uint8).data


def params_sha256(params: Mapping[str, torch.Tensor]) -> str:
    """sha256 in hex over the tensors' little-endian bytes, one tensor after another in the order of their names.

    params: every parameter once, under its first name (including frozen ones; no aliases of tied weights, no buffers).
    Names and shapes are not hashed, so any tool that reads the exported file can check it.
    """
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(tensor_bytes(params[name]))
    return digest.hexdigest()

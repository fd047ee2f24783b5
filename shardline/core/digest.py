"""The digest by which two trainings are compared: sha256 over the parameters' bytes."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in row-major order, little-endian, on the CPU; any dtype, 0-d and empty included.

    A view of the tensor's own memory where it is a contiguous CPU tensor on a little-endian machine.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    # numpy knows no bfloat16, so the bytes are taken through the integer of the same size.
    array: npt.NDArray[np.generic] = flat.view(_INTEGER_OF_SIZE[flat.element_size()]).numpy()
    if sys.byteorder == "big":
        array = array.byteswap()
    return array.view(np.uint8).data


def params_sha256(params: Mapping[str, torch.Tensor]) -> str:
    """sha256 in hex over the tensors' little-endian bytes, one tensor after another in the order of their names.

    params: every parameter once, under its first name (frozen ones included; aliases of tied weights and buffers not).
    Neither names nor shapes are part of it, so it can be checked with any tool that reads the exported file.
    """
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(tensor_bytes(params[name]))
    return digest.hexdigest()

"""Random numbers of codecs: functions of a seed alone. Generators of libraries may differ between two machines.

SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def splitmix(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """The first numbers of a seed from 0 to 2^64 - 1, 64 bits each."""
    state = np.arange(1, count + 1, dtype=np.uint64)
    state *= np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    return state


def uniforms(seed: int, count: int) -> torch.Tensor:
    """Float32 multiples of 2^-24 in [0, 1): of each number the lower half, then the upper one."""
    halves = splitmix(seed, -(-count // 2)).astype("<u8", copy=False).view("<u4")[:count] >> np.uint32(8)
    return torch.from_numpy(halves.astype(np.float32) * np.float32(2.0**-24))

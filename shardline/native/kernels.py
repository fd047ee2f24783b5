"""The kernels for tensors. Each says by None, or False, that torch has to do it: there is no library, or the tensor is
none for it (on a GPU, strided, of another dtype, a subclass). What they compute has torch's bits.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardline.native.library import AdamStep, Level, SgdStep, level

Buffer = bytes | bytearray | memoryview

_MAGNITUDES = {
    torch.float32: "magnitude32",
    torch.float64: "magnitude64",
    torch.bfloat16: "magnitude_bf16",
    torch.float16: "magnitude_fp16",
}
_COPIES = {torch.float32: "copies32", torch.float64: "copies64"}
_SUMS = {torch.float32: "sum32", torch.float64: "sum64"}
_SGD = {torch.float32: "sgd32", torch.float64: "sgd64"}
_MOMENTS = {torch.float32: "moments32", torch.float64: "moments64"}
_ADAM = {torch.float32: "adam32", torch.float64: "adam64"}
_CASTS = {(torch.float32, torch.bfloat16): "to_bf16", (torch.bfloat16, torch.float32): "from_bf16"}
_ORDINARY = (Tensor, torch.nn.Parameter)
CHUNK = 1 << 17
"""Elements of each of six arrays between two passes. Each pass takes Python's lock: with a quarter of it, 16 threads
took 50 to 100 ms for a bucket of 4 MB, of which one alone takes 2.
"""
MOST_CACHED = 16 << 20
"""Half of what the last caches of common processors hold."""
_SMALLEST_FACTOR = {torch.float32: 2.0**-12, torch.float64: 2.0**-27}


def is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in _ORDINARY
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        # A single element may be half of a conjugated number, whose sign is not in memory. So may several that were
        # made by as_strided or private functions of torch: nobody's gradients are.
        and tensor.numel() != 1
    )


def outgrows_cache(nbytes: int) -> bool:
    """Whether of so many bytes that are written, read and written again in turns nothing is left in the cache.

    It is faster then to write past the cache: what is written there need not be read into it first.
    """
    return nbytes > MOST_CACHED


def _memory_outgrows_cache(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and outgrows_cache(tensor.untyped_storage().nbytes())


def _takes(tensor: Tensor, like: Tensor) -> bool:
    """Whether a tensor is plain memory, of the other's length and dtype."""
    return tensor.numel() == like.numel() and tensor.dtype is like.dtype and is_plain(tensor)


def magnitude(values: Tensor) -> float | None:
    """The largest absolute value, NaN where an element is; 0 without elements. float16, bfloat16, float32, float64."""
    kernels, name = level(), _MAGNITUDES.get(values.dtype)
    if kernels is None or name is None or not is_plain(values):
        return None
    return float(kernels.call[name](values.data_ptr(), values.numel()))


class Copies:
    """Fills parts of a tensor, again and again, each from a tensor of its own. float32, float64.

    parts: (first element in the target, first one in the source, number of elements, and of the whole source).
    away: the target is written past the cache, see outgrows_cache().
    """

    def __init__(self, target: Tensor, parts: Sequence[tuple[int, int, int, int]], *, away: bool = False) -> None:
        self._target = target
        self._name = _COPIES.get(target.dtype) if is_plain(target) else None
        if self._name is None:
            return
        size, addresses = target.itemsize, ctypes.c_void_p * len(parts)
        self._targets = addresses(*(target.data_ptr() + first * size for first, _, _, _ in parts))
        self._counts = (ctypes.c_size_t * len(parts))(*(count for _, _, count, _ in parts))
        self._from = [(number, first * size, whole) for number, (_, first, _, whole) in enumerate(parts)]
        self._sources = addresses()
        self._away = away

    def fill(self, sources: Sequence[Tensor]) -> float | None:
        """Copy all parts; the largest absolute value as magnitude() has it, None: nothing was copied."""
        kernels, name = level(), self._name
        if kernels is None or name is None:
            return None
        dtype, addresses = self._target.dtype, self._sources
        for source, (number, first, whole) in zip(sources, self._from, strict=True):
            # As is_plain() has it, which would be most of the time for many small tensors. Asked for its sign, each
            # would let another thread have the interpreter first.
            if (
                type(source) not in _ORDINARY
                or source.dtype is not dtype
                or source.numel() != whole
                or not source.is_contiguous()
                or not source.is_cpu
                or (whole == 1 and source.is_neg())
            ):
                return None
            addresses[number] = source.data_ptr() + first
        return float(kernels.call[name](self._targets, addresses, self._counts, len(self._from), self._away))


def fingerprint(data: Buffer) -> int | None:
    """See shardline.core.tensor_bytes.fingerprint; data: as many bytes as are sampled, or more."""
    kernels = level()
    if kernels is None:
        return None
    array = np.frombuffer(data, np.uint8)
    return int(kernels.call["fingerprint"](array.__array_interface__["data"][0], array.nbytes))


def tree_sum(values: Sequence[Tensor | None]) -> Tensor | None:
    """See shardline.core.reduce.tree_sum, of two tensors or more. float32, float64."""
    kernels = level()
    given = [value for value in values if value is not None]
    if kernels is None or len(given) < 2 or type(given[0]) not in _ORDINARY or given[0].dtype not in _SUMS:
        return None
    if not all(_takes(v, given[0]) and v.shape == given[0].shape and not v.requires_grad for v in given):
        return None
    total = torch.empty_like(given[0])
    addresses = (ctypes.c_void_p * len(values))(*(None if value is None else value.data_ptr() for value in values))
    kernels.call[_SUMS[total.dtype]](total.data_ptr(), addresses, len(values), total.numel())
    return total


def sgd_step(
    source: Tensor,
    gradient: Tensor,
    target: Tensor,
    momentum_buffer: Tensor | None,
    arguments: Mapping[str, Any],
    *,
    first: bool,
) -> bool:
    """Write the values after one step of torch.optim.SGD to `target`, and the momentum to its buffer. float32, float64.

    momentum_buffer: None without momentum. first: nothing is in it yet. target may be source, nothing else may overlap.
    Returns whether it was done: a step that is one addition is torch's, which is as fast where the cache is written to.
    """
    several = momentum_buffer is not None or arguments["weight_decay"] or arguments["maximize"]
    if source.dtype not in _SGD or (kernels := level()) is None:
        return False
    away = _memory_outgrows_cache(target) and _memory_outgrows_cache(gradient)
    if not (several or away):
        return False
    if not all(tensor is None or _takes(tensor, source) for tensor in (source, gradient, target, momentum_buffer)):
        return False
    fused = _torch_fuses(source.dtype)
    numbers = [arguments[name] for name in ("lr", "momentum", "dampening", "weight_decay")]
    if fused is None or (fused and not kernels.fma) or not all(_fits(number, source.dtype) for number in numbers):
        return False
    rate, momentum, dampening, decay = numbers
    flags = (bool(arguments["nesterov"]), bool(arguments["maximize"]), first, fused, away)
    step = SgdStep(-rate, momentum, 1 - dampening, decay, *flags)
    kernels.call[_SGD[source.dtype]](
        target.data_ptr(),
        source.data_ptr(),
        gradient.data_ptr(),
        None if momentum_buffer is None else momentum_buffer.data_ptr(),
        source.numel(),
        ctypes.addressof(step),
    )
    return True


def adam_step(
    source: Tensor,
    gradient: Tensor,
    target: Tensor,
    state: Mapping[str, Tensor],
    step: float,
    arguments: Mapping[str, Any],
) -> bool:
    """Write the values after one step of torch.optim.Adam or AdamW to `target`, and its moments to `state`.

    float32, float64. state: torch's exp_avg and exp_avg_sq, with amsgrad also max_exp_avg_sq. step: number of this one,
    from 1. arguments: torch.optim.Adam's. target may be source, nothing else may overlap. Returns whether it was done.
    """
    dtype, amsgrad = source.dtype, arguments["amsgrad"]
    held = [state.get(name) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 2 + bool(amsgrad)]]
    tensors = (source, gradient, target, *held)
    if dtype not in _ADAM or not all(tensor is not None and _takes(tensor, source) for tensor in tensors):
        return False
    numbers = [arguments[name] for name in ("lr", "eps", "weight_decay")] + [*arguments["betas"]]
    if not all(_fits(number, dtype) for number in numbers) or not _adam_agrees(dtype, level()):
        return False
    rate, eps, decay, beta1, beta2 = numbers
    if beta1 == 0.0:
        # The sign of a zero moment depends on its place in torch's vectors then.
        return False
    added, keep = (0.0, 1 - rate * decay) if arguments["decoupled_weight_decay"] else (decay, 1.0)
    root = (1 - beta2**step) ** 0.5
    constants = (-(rate / (1 - beta1**step)), 1 - beta1, beta2, 1 - beta2, root, eps, added, keep)
    if not all(_fits(number, dtype) for number in constants):
        return False
    away = _memory_outgrows_cache(target) and _memory_outgrows_cache(gradient)
    _adam(target, source, gradient, held, AdamStep(*constants, bool(arguments["maximize"]), _torch_fuses(dtype), away))
    return True


def _adam(target: Tensor, source: Tensor, gradient: Tensor, held: Sequence[Any], step: AdamStep) -> None:
    kernels, dtype, count = level(), source.dtype, source.numel()
    assert kernels is not None
    moments, values, given = kernels.call[_MOMENTS[dtype]], kernels.call[_ADAM[dtype]], ctypes.addressof(step)
    places = [tensor.data_ptr() for tensor in (target, source, gradient, *held)]
    roots = torch.empty(min(CHUNK, count), dtype=dtype)
    for at in range(0, count, CHUNK):
        size = min(CHUNK, count - at)
        to, before, change, mean, square, *most = (place + at * source.itemsize for place in places)
        moments(mean, square, most[0] if most else None, before, change, size, given)
        torch.sqrt(held[-1][at : at + size], out=roots[:size])
        values(to, before, mean, roots.data_ptr(), size, given)


@functools.cache
def _adam_agrees(dtype: torch.dtype, kernels: Level | None) -> bool:
    """Whether this level rounds as torch does on this machine: tried once, on whole vectors and what is left over."""
    fused = _torch_fuses(dtype)
    if kernels is None or fused is None or (fused and not kernels.fma):
        return False
    for share in (0.1, 0.7):
        values, gradient, mean, square = (torch.linspace(n, -7.3, 67, dtype=dtype).sin_() for n in (1, 2, 3, 4))
        square.abs_()
        expected = mean.lerp(gradient, share), (square * 0.97).addcmul_(gradient, gradient, value=0.03)
        denominator = (expected[1].sqrt() / 0.17).add_(1e-8)
        after = (values * 0.99).addcdiv_(expected[0], denominator, value=-0.013)
        step = AdamStep(-0.013, share, 0.97, 0.03, 0.17, 1e-8, 0.0, 0.99, False, fused, False)
        _adam(values, values, gradient, (mean, square), step)
        if not all(map(torch.equal, (values, mean, square), (after, *expected))):
            return False
    return True


def _fits(number: object, dtype: torch.dtype) -> bool:
    """Whether a number is one that torch takes for this dtype: it refuses what would become infinite."""
    return isinstance(number, int | float) and math.isfinite(number) and abs(number) <= torch.finfo(dtype).max


@functools.cache
def _torch_fuses(dtype: torch.dtype) -> bool | None:
    """Whether torch.add(a, b, alpha=c) rounds once, as it does where the processor can; None = not always."""
    factor = 1 + _SMALLEST_FACTOR[dtype]
    # The square, 1 + 2 * small + small**2, loses its last term when it is rounded. Vectors and what is left over.
    ones = torch.full((67,), factor, dtype=dtype)
    rest = torch.add(torch.full_like(ones, -(1 + 2 * _SMALLEST_FACTOR[dtype])), ones, alpha=factor) != 0
    return bool(rest.all()) if bool(rest.all()) == bool(rest.any()) else None


def cast(values: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A new tensor of the other dtype: float32 to bfloat16, rounded to nearest even, and back."""
    kernels, name = level(), _CASTS.get((values.dtype, dtype))
    if kernels is None or name is None or not _takes(values, values) or values.requires_grad:
        return None
    found = torch.empty_like(values, dtype=dtype)
    kernels.call[name](found.data_ptr(), values.data_ptr(), values.numel())
    return found

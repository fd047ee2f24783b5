"""Update rules of rows: each changes the rows that have a gradient, and no other."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardline.errors import JobError, TensorError
from shardline.native import rows as native
from shardline.seams import Resident
from shardline.update.rows.turnover import TOUCHED

if TYPE_CHECKING:
    from shardline.storage.rows import RowStore

Floats = npt.NDArray[np.float32]

_SMALLEST, _LARGEST = 1e-30, 1e30
"""Of settings, which are float32 numbers when they are used."""
_LANES = 8


@dataclass(frozen=True)
class RowRule(Resident, ABC):
    """Base of rules. Arithmetic is float32, each operation rounded by itself, unless a rule says otherwise."""

    states: ClassVar[Mapping[str, int]] = {}
    """float32 elements per row by name, 0 = as many as the row has."""
    lr: float = 0.01

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, decay = getattr(self, item.name), item.name in ("beta1", "beta2")
            least = _SMALLEST if item.name in ("lr", "eps", "beta") else 0.0
            if not least <= value <= _LARGEST or (decay and value >= 1):
                valid = "at least 0 and below 1" if decay else f"from {least} to {_LARGEST}"
                raise JobError(f"row rule {self.name}: {item.name} is {value}; give a number {valid}")

    def widths(self, dim: int) -> dict[str, int]:
        """The rule's states: float32 elements per row by name, in the order in which update() has them."""
        return {name: width or dim for name, width in self.states.items()}

    @abstractmethod
    def update(self, rows: Sequence[Floats], gradients: Floats, rate: float) -> None:
        """Change rows in place. rows: values, then each state: float32 [U, dim], [U, width]. rate: instead of lr."""

    def apply(self, store: RowStore, slots: Tensor, gradients: Tensor, *, factor: float) -> None:
        """Update rows of a store that has the rule's states.

        slots: int64 [U], distinct; gradients: float32 [U, dim]; factor: the schedule's, of lr. Raises TensorError where
        they don't fit the store.
        """
        (capacity, dim), states = store.values.shape, store.states
        found = {name: state.shape[1] for name, state in states.items() if name != TOUCHED}
        if found != self.widths(dim) or gradients.shape != (len(slots), dim) or gradients.dtype is not torch.float32:
            raise TensorError(
                f"row rule {self}: {len(slots)} slots and gradients of {list(gradients.shape)} {gradients.dtype} for "
                f"rows of dim {dim} with states {found}; it keeps {self.widths(dim)}"
            )
        if not len(slots):
            return
        least, most = map(int, torch.aminmax(slots))
        if least < 0 or most >= capacity:
            raise TensorError(f"row rule {self}: slots from {least} to {most}; the store has {capacity}")
        rate, settings = self.lr * factor, [getattr(self, item.name) for item in dataclasses.fields(self)]
        arenas, index = [store.values, *(states[name] for name in self.widths(dim))], slots.numpy()
        if native.update(self.name.replace("-", "_"), arenas, slots, gradients, [rate, *settings[1:]]):
            return
        rows = [arena.numpy()[index] for arena in arenas]
        self.update(rows, gradients.numpy(), rate)
        for arena, row in zip(arenas, rows, strict=True):
            arena.numpy()[index] = row


@dataclass(frozen=True)
class SGD(RowRule):
    """Plain SGD: w -= lr * (g + weight_decay * w)."""

    name: ClassVar[str] = "sgd"
    weight_decay: float = 0.0

    def update(self, rows: Sequence[Floats], gradients: Floats, rate: float) -> None:
        (values,) = rows
        values -= (gradients + values * self.weight_decay) * rate


@dataclass(frozen=True)
class RowwiseAdagrad(RowRule):
    """Adagrad with one accumulator per row: s += mean(g * g); w -= lr / (sqrt(s) + eps) * g.

    As FBGEMM's EXACT_ROWWISE_ADAGRAD, which TorchRec uses. The mean is a float64 sum in 8 lanes, column i in lane
    i % 8, which are then added by halves.
    """

    name: ClassVar[str] = "rowwise-adagrad"
    states: ClassVar[Mapping[str, int]] = {"sum": 1}
    eps: float = 1e-8

    def update(self, rows: Sequence[Floats], gradients: Floats, rate: float) -> None:
        (values, sums), (count, dim) = rows, gradients.shape
        squares, lanes = np.square(gradients, dtype=np.float64), np.zeros((count, _LANES))
        for at in range(0, dim, _LANES):
            lanes[:, : min(_LANES, dim - at)] += squares[:, at : at + _LANES]
        for half in (4, 2, 1):
            lanes[:, :half] += lanes[:, half : 2 * half]
        sums += (lanes[:, :1] / dim).astype(np.float32)
        values -= np.float32(rate) / (np.sqrt(sums) + np.float32(self.eps)) * gradients


@dataclass(frozen=True)
class Adagrad(RowRule):
    """Adagrad (Duchi, Hazan and Singer, 2011): s += g * g; w -= lr * g / (sqrt(s) + eps)."""

    name: ClassVar[str] = "adagrad"
    states: ClassVar[Mapping[str, int]] = {"sum": 0}
    eps: float = 1e-10

    def update(self, rows: Sequence[Floats], gradients: Floats, rate: float) -> None:
        values, sums = rows
        sums += gradients * gradients
        values -= gradients * np.float32(rate) / (np.sqrt(sums) + np.float32(self.eps))


@dataclass(frozen=True)
class Adam(RowRule):
    """Adam (Kingma and Ba, 2015) that counts each row's own steps: moments of rows without a gradient do not decay.

    Powers of beta1 and beta2 are float64, by squaring.
    """

    name: ClassVar[str] = "adam"
    states: ClassVar[Mapping[str, int]] = {"step": 1, "exp_avg": 0, "exp_avg_sq": 0}
    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def update(self, rows: Sequence[Floats], gradients: Floats, rate: float) -> None:
        values, step, mean, square = rows
        step += 1
        mean *= np.float32(self.beta1)
        mean += gradients * np.float32(1 - self.beta1)
        square *= np.float32(self.beta2)
        square += gradients * gradients * np.float32(1 - self.beta2)
        rates = (rate / (1 - _power(self.beta1, step))).astype(np.float32)
        roots = (1 / np.sqrt(1 - _power(self.beta2, step))).astype(np.float32)
        values -= mean * rates / (np.sqrt(square) * roots + np.float32(self.eps))


def _power(base: float, exponents: Floats) -> npt.NDArray[np.float64]:
    """Powers by squaring. exponents: whole numbers."""
    left, found = exponents.astype(np.uint32), np.ones(exponents.shape)
    while left.any():
        found[left & 1 == 1] *= base
        base *= base
        left >>= 1
    return found


@dataclass(frozen=True)
class Ftrl(RowRule):
    """FTRL-Proximal with l1 and l2 (McMahan et al., "Ad Click Prediction", 2013, algorithm 1).

    Nothing of a row's first values is left after its first gradient. At factor 0 nothing is changed.
    """

    name: ClassVar[str] = "ftrl"
    states: ClassVar[Mapping[str, int]] = {"z": 0, "n": 0}
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0

    def apply(self, store: RowStore, slots: Tensor, gradients: Tensor, *, factor: float) -> None:
        if self.lr * factor >= _SMALLEST:
            super().apply(store, slots, gradients, factor=factor)

    def update(self, rows: Sequence[Floats], gradients: Floats, rate: float) -> None:
        (values, z, n), l1, per_rate = rows, np.float32(self.l1), np.float32(1 / rate)
        before = np.sqrt(n)
        n += gradients * gradients
        root = np.sqrt(n)
        z += gradients - (root - before) * per_rate * values
        weights = (np.copysign(l1, z) - z) / ((root + np.float32(self.beta)) * per_rate + np.float32(self.l2))
        values[:] = np.where(np.abs(z) <= l1, np.float32(0), weights)

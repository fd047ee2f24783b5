"""PowerSGD: each matrix as the product of two thin ones, found by power iteration, with error memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from shardline.codecs.base import Memory, Part, Scope, Turn
from shardline.codecs.parts import NOT_FINITE, Lossy, check_setting, check_size
from shardline.core.reduce import is_finite
from shardline.core.spec import TensorSpec
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes
from shardline.errors import ProtocolError

BASIS = "basis"
"""Name of the memory of Q, where the next power iteration begins."""
COLD_ITERATIONS = 3
"""Power iterations where there is no basis yet; one is enough from step to step."""
LEAST_SAVED = 2
"""Matrices that would become less than half as large are sent as they are."""
ABOVE_ONE = 1.001
"""Most that rounding makes of an entry of an orthonormal matrix."""


@dataclass(frozen=True)
class PowerSGD(Lossy):
    """Each matrix M (n rows, m columns) as P Q^T of rank `rank`, P orthonormal. With error memory.

    P = orthonormal(M Q'), Q = M^T P, where Q' is the Q of the push before (Vogels, Karimireddy and Jaggi, "PowerSGD:
    Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019, algorithms 1 and 2). In the
    paper workers agree on one P by an all-reduce before they compute Q; here each replica has its own, so that a push
    is one exchange, and the servers add up products. With one replica both are the same. Tensors of more dimensions
    are matrices with their first dimension as rows, and are never cut.

    A contraction, with delta = ||Q||^2 / ||M||^2, which is that of the best approximation of this rank where M changes
    little from push to push, and at least 1 / m in the mean where there is no Q' yet.
    """

    name: ClassVar[str] = "powersgd"
    scope = Scope.TENSOR
    memory = Memory.RESTORED
    rank: int = 2

    def __post_init__(self) -> None:
        check_setting(self, "rank", 1, 1024)

    def error_bound(self, elements: int) -> float:
        """1 - 1 / d, reached with rank 1 by a matrix of one row; see the class for the error of a given one."""
        return 1.0 - 1.0 / elements

    def takes(self, tensor: TensorSpec) -> bool:
        """Trained float matrices of at least 1,024 elements that become at most half as large."""
        return super().takes(tensor) and LEAST_SAVED * self._factors(tensor.shape) <= tensor.elements

    def wants_whole(self, shape: Sequence[int]) -> bool:
        """Always: a piece of a matrix has another basis."""
        return True

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        rows, columns = shape[0], math.prod(shape[1:])
        return rows, columns, min(self.rank, rows, columns)

    def _factors(self, shape: Sequence[int]) -> int:
        rows, columns, rank = self._sizes(shape)
        return rank * (rows + columns)

    def max_part_bytes(self, part: Part) -> int:
        """P and Q in the tensor's dtype."""
        return self._factors(part.tensor.shape) * part.dtype.itemsize

    def write(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        """P, then Q, each row after row."""
        rows, columns, rank = self._sizes(part.tensor.shape)
        size = float(values.abs().max())
        # A new tensor, so that its address is aligned and the bits of products don't depend on where the values lie.
        matrix = (values / size if size else values.clone()).view(rows, columns)
        basis = turn.memory.get((part.tensor.name, part.first_row, BASIS))
        iterations = COLD_ITERATIONS if basis is None else 1
        right = torch.zeros(columns, rank, dtype=part.dtype) if basis is None else basis
        right = _refilled(right, part, turn)
        for _ in range(iterations):
            # The space is what counts, not the lengths, which may differ by more than a float has digits.
            left = _orthonormal(matrix @ _orthonormal(right))
            right = matrix.T @ left
        right = right * size
        if not is_finite(right.reshape(-1).float()):
            return NOT_FINITE
        return bytes(tensor_bytes(torch.cat((left.reshape(-1), right.reshape(-1)))))

    def read(self, payload: memoryview, part: Part) -> torch.Tensor:
        left, right = self._parted(payload, part)
        return (left @ right.T).reshape(-1)

    def remembered(
        self, values: torch.Tensor, wanted: torch.Tensor, data: Buffer | None, part: Part, turn: Turn
    ) -> Mapping[str, torch.Tensor]:
        """See PartCodec: the error, and Q."""
        found = dict(super().remembered(values, wanted, data, part, turn))
        if found and data is not None:
            found.update(self.started(data, part))
        return found

    def started(self, data: Buffer, part: Part) -> Mapping[str, torch.Tensor]:
        """See PartCodec: Q."""
        payload = memoryview(data)
        return {} if payload == NOT_FINITE else {BASIS: self._parted(payload, part)[1]}

    def _parted(self, payload: memoryview, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """P and Q, new tensors. Raises ProtocolError for what no encoder makes."""
        rows, columns, rank = self._sizes(part.tensor.shape)
        check_size(payload, self.max_part_bytes(part), part)
        factors = tensor_from_bytes(bytearray(payload), part.tensor.dtype).clone()
        left, right = factors[: rows * rank].view(rows, rank), factors[rows * rank :].view(columns, rank)
        if not is_finite(factors):
            raise ProtocolError(f"part {part.tensor.name!r}: a factor is not finite")
        if float(left.abs().max()) > ABOVE_ONE:
            raise ProtocolError(f"part {part.tensor.name!r}: an entry of the orthonormal factor is above 1")
        return left, right


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns; of a column that depends on others, something orthogonal to them."""
    basis: torch.Tensor = torch.linalg.qr(matrix.double())[0]
    return basis.to(matrix.dtype)


def _refilled(basis: torch.Tensor, part: Part, turn: Turn) -> torch.Tensor:
    """The basis with random columns where it has zeros: a power iteration would never leave them."""
    empty = (basis == 0.0).all(dim=0)
    if not bool(empty.any()):
        return basis
    drawn = torch.randn(basis.shape, dtype=basis.dtype, generator=turn.generator(part))
    return torch.where(empty, drawn, basis)

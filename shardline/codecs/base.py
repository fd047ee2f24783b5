"""The codec seam."""

from __future__ import annotations

from typing import Protocol

import torch

from shardline.core.tensor_bytes import Buffer


class Codec(Protocol):
    """Writes and reads the numbers of one bucket. Stateless so far; error memory comes with sparsifying ones."""

    @property
    def name(self) -> str:
        """As in specs, headers and metrics."""
        ...

    def payload_bytes(self, dtype: str, elements: int) -> int:
        """Exact bytes that `elements` numbers of this dtype take."""
        ...

    def encode(self, values: torch.Tensor) -> Buffer:
        """Bytes of a 1-d CPU tensor; may be a view of its memory."""
        ...

    def decode(self, payload: Buffer, dtype: str, elements: int) -> torch.Tensor:
        """1-d CPU tensor of `elements` numbers of `dtype`; may share writable memory with the payload.

        Raises ProtocolError where the payload has another length.
        """
        ...

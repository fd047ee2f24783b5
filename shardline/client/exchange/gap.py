"""How far the parameters had moved when a gradient was applied."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

EVERY = 20
"""Pushes from one measurement to the next."""
SAMPLE = 1 << 20
"""Elements that are compared, of all or evenly spaced: a copy of a whole model might not fit."""


class GapMeter:
    """RMS distance of the parameters from before an exchange to after it, where workers push for themselves.

    This is the gap G = ||theta_now - theta_then||_2 / sqrt(d) of Barkai, Hakimi and Schuster, "Gap-Aware Mitigation of
    Gradient Staleness", ICLR 2020, section 4, with this worker's own update in it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = (), *, every: int = EVERY) -> None:
        """tensors: the trained ones; read in place. every: pushes from one measurement to the next, 0 = none."""
        self._tensors = tensors
        self._every = every
        self._stride = max(1, -(-sum(tensor.numel() for tensor in tensors) // SAMPLE))
        self._then: list[torch.Tensor] | None = None
        self._number = -1
        """Of the exchange; -1 is the pull that a worker begins with."""
        self.last: float | None = None
        """Of the last exchange; None if it wasn't measured."""

    def begin(self) -> None:
        """An exchange begins: from here on the tensors may change. Again if it is repeated."""
        if self._then is None and self._every and self._number >= 0 and self._number % self._every == 0:
            self._then = [one.clone() for one in self._now()]

    def end(self) -> None:
        """The exchange has ended, and the tensors have their new values."""
        self._number += 1
        then, self._then, self.last = self._then, None, None
        if then is not None:
            moved = (now - before for now, before in zip(self._now(), then, strict=True))
            squares = sum(
                float(torch.linalg.vector_norm(one if one.is_complex() else one.float())) ** 2 for one in moved
            )
            self.last = math.sqrt(squares / max(1, sum(tensor.numel() for tensor in then)))

    def _now(self) -> list[torch.Tensor]:
        return [tensor.detach().reshape(-1)[:: self._stride] for tensor in self._tensors]

    def start_over(self) -> None:
        """The exchange, if any, is given up, and the next one only pulls."""
        self._then, self._number = None, -1

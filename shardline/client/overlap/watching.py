"""A worker's step that overlaps with its communication: who is told of each pass, and what unwinds it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from shardline.client.overlap.gate import Gate
from shardline.data import Watch


class StepAgain(BaseException):
    """What the running step computes with did not come, or is not wanted any more: the loop begins it again.

    Not an Exception: it unwinds a person's loss function, whatever that catches. cause: what ended the exchange.
    """

    def __init__(self, cause: Exception | None = None) -> None:
        super().__init__(cause)
        self.cause = cause


class StepWatch(Watch):
    """Opens the gate during forward passes and tells of the last backward pass.

    uses: see Gate.open; asked before every pass. expect(loss, samples): called right before the last backward pass.
    """

    def __init__(
        self,
        gate: Gate | None,
        uses: Callable[[], dict[int, None] | None],
        expect: Callable[[Callable[[], float], int], None],
    ) -> None:
        self._gate = gate
        self._uses = uses
        self._expect = expect

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around every call of the job's loss."""
        if self._gate is None:
            yield
            return
        with self._gate.open(self._uses()):
            yield

    def backward(self, loss: Callable[[], float], samples: int) -> None:
        """Right before the last backward pass."""
        self._expect(loss, samples)

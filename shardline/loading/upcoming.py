"""Guesses which batches a worker asks for next. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Place = tuple[int, int, int]
"""(step, replica, microbatch); in asynchronous mode, (number of the batch, 0, microbatch)."""


class UpcomingBatches:
    """The next batches, on the assumption that each step asks for those of the step before.

    A wrong guess costs time only: what was read for nothing.
    """

    def __init__(self, accumulate: int) -> None:
        """accumulate: microbatches of a replica."""
        self._accumulate = accumulate
        self._step = 0
        self._asked: list[tuple[int, int]] = []
        """(replica, microbatch) of the current step so far, in order."""
        self._before: Sequence[tuple[int, int]] = ()
        """Those of the step before."""

    def ask(self, place: Place) -> None:
        step, *own = place
        one = (own[0], own[1])
        if step != self._step:
            self._before, self._asked, self._step = self._asked or self._before, [], step
        elif one in self._asked:
            # The step runs again.
            self._asked = []
        self._asked.append(one)

    def after(self, end: int | None = None) -> Iterator[Place]:
        """The batches after the newest one asked for. end: first step that this worker won't compute, if known."""
        replica, microbatch = self._asked[-1]
        order = self._before
        if (replica, microbatch) not in order:
            # The first step, or another replica than before: at least its own microbatches follow.
            order = [(replica, number) for number in range(self._accumulate)]
        step, rest = self._step, order[order.index((replica, microbatch)) + 1 :]
        while end is None or step < end:
            yield from ((step, *one) for one in rest)
            step, rest = step + 1, order

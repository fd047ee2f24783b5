"""Watching the passes of a step that overlaps with its communication, and unwinding it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from shardline.client.exchange.outcomes import Interrupted, Restart, Stopped
from shardline.client.overlap.gate import Gate
from shardline.data import Watch


class StepAgain(BaseException):
    """The running step's parameters did not come, or the step is not wanted any more: the loop begins it again.

    A BaseException, so that it unwinds the user's loss function whatever that catches. cause: the error that ended the
    exchange.
    """

    def __init__(self, cause: Exception | None = None) -> None:
        super().__init__(cause)
        self.cause = cause


class BodyWaits:
    """What the loop's body waits for the previous step."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """In the open step; set to 0 when it begins."""

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Turn a failed exchange of the previous step into StepAgain, which ends the body of this one."""
        began_s = time.monotonic()
        try:
            yield
        except (Restart, Interrupted, Stopped) as error:
            raise StepAgain(error) from error
        finally:
            self.seconds += time.monotonic() - began_s


class StepWatch(Watch):
    """Keeps the gate during forward passes and reports the last backward pass.

    uses: see Gate.forward; called before every pass. expect(loss, samples): called right before the last backward pass.
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

    def unread(self) -> AbstractContextManager[None]:
        return self._gate.unread() if self._gate is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        if self._gate is None:
            yield
            return
        with self._gate.forward(self._uses()):
            yield

    def backward(self, loss: Callable[[], float], samples: int) -> None:
        self._expect(loss, samples)

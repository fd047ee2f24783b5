"""A step that is on its way while the next one is computed, and how both begin again where something broke."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardline.client.api.workplace import Workplace
from shardline.client.exchange.outcomes import Interrupted, Restart, StepFigures, Stopped
from shardline.client.overlap.watching import StepAgain, StepWatch
from shardline.client.step.expected import Expected
from shardline.core.orders import StepReport
from shardline.data import UNWATCHED, Watch

log = logging.getLogger("shardline.client")


@dataclass(frozen=True)
class SentStep:
    """A step whose gradients have been sent."""

    reports: tuple[StepReport, ...]
    began_s: float
    batch: int
    """Asynchronous mode: number of its batch."""


class Pipeline:
    """Holds the one step that may be on its way. Used by the session's thread.

    go_on(error): after an exchange that didn't end; True = the same may be sent again, False = look for the step anew.
    still_ordered: whether the orders are those that the open step began with. closed(sent, figures): a step has ended.
    """

    def __init__(
        self,
        *,
        go_on: Callable[[Exception], bool],
        still_ordered: Callable[[], bool],
        closed: Callable[[SentStep, StepFigures], None],
    ) -> None:
        self.place: Workplace | None = None
        self._go_on = go_on
        self._still_ordered = still_ordered
        self._closed = closed
        self.sent: SentStep | None = None
        self.waited_s = 0.0
        """Seconds that the body has waited for the step before; whoever begins a step sets it to 0."""
        self._unwound: StepAgain | None = None
        """The body of the loop was left in its middle."""

    @property
    def _place(self) -> Workplace:
        assert self.place is not None
        return self.place

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """What ended the exchange of the step before ends the body of this one."""
        began_s = time.monotonic()
        try:
            yield
        except (Restart, Interrupted, Stopped) as error:
            raise StepAgain(error) from error
        finally:
            self.waited_s += time.monotonic() - began_s

    # In the body of the loop

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Around the body of the loop: leaves it quietly where it has to be run again."""
        try:
            yield
        except StepAgain as again:
            log.info("starting the step again: %s", again.cause or "orders changed")
            self._unwound = again

    def watch(self, replica: int, owned: Sequence[int], *, ask_loss: bool) -> Watch:
        """For replica_gradients. owned: replicas that still contribute to the step; ask_loss: it costs nothing."""
        if not self._place.overlaps:
            return UNWATCHED

        def expect(loss: Callable[[], float], samples: int) -> None:
            self.settle_in_body()
            trainer = self._place.trainer
            asked = ask_loss or trainer.job.consistency.nan_policy == "skip"
            trainer.expect(Expected(replica=replica, owned=owned, samples=samples, loss=loss() if asked else None))

        return StepWatch(self._place.gate, self._uses, expect)

    def _uses(self) -> dict[int, None] | None:
        return self._place.trainer.open.uses

    def wait_for(self, tensors: Iterable[int]) -> None:
        """Return when these tensors have come; StepAgain where they don't."""
        with self._waiting():
            self._place.trainer.wait_for(tensors)

    def begin(self, replica: int) -> None:
        """Before a replica's forward pass."""
        with self._waiting():
            self._place.trainer.begin(replica)

    def settle_in_body(self) -> None:
        """Everything of the step before has come, and the orders are still those of this one; else StepAgain."""
        if self.sent is None:
            return
        trainer = self._place.trainer
        with self._waiting():
            figures = trainer.settle()
        self._close(figures)
        trainer.exchange.arm()
        # Orders that came before arm() are looked at here, later ones interrupt again.
        if not self._still_ordered():
            raise StepAgain

    # Between two steps

    @property
    def healthy(self) -> bool:
        """Whether a step is on its way and nothing is known against beginning the next one."""
        return self.sent is not None and not self._place.trainer.open.failed and self._still_ordered()

    def settle(self) -> bool:
        """Wait for the step that is on its way; False where it, or the end of the job, has to be looked for again."""
        while self.sent is not None:
            try:
                figures = self._place.trainer.settle()
            except (Restart, Interrupted, Stopped) as error:
                if not self._go_on(error):
                    return False
            else:
                self._close(figures)
        return True

    def _close(self, figures: StepFigures | None) -> None:
        sent, self.sent = self.sent, None
        if sent is not None and figures is not None:
            self._closed(sent, figures)

    def rewind(self) -> bool:
        """Whether a body was left in its middle: what it sent is given up, what was on its way is looked after."""
        unwound, self._unwound = self._unwound, None
        if unwound is None:
            return False
        if self.sent is None:
            self._place.trainer.give_up()
        elif unwound.cause is None or self._go_on(unwound.cause):
            self.settle()
        return True

    def lose(self) -> SentStep | None:
        """What is on its way has to be computed again; returns what it was."""
        sent, self.sent = self.sent, None
        if self._place.current is not None:
            self._place.current.give_up()
        return sent

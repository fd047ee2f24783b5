"""A step in flight while the next one is computed, and the recovery of both after a failure."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardline.client.api.workplace import Workplace
from shardline.client.exchange.outcomes import Interrupted, Restart, StepFigures, Stopped
from shardline.client.overlap.watching import StepAgain, StepWatch
from shardline.client.step.sending import Expected
from shardline.core.orders import StepReport
from shardline.data import UNWATCHED, Watch

log = logging.getLogger("shardline.client")


@dataclass(frozen=True)
class SentStep:
    """A step that was sent and is not closed yet."""

    reports: tuple[StepReport, ...]
    began_s: float
    batch: int
    """Asynchronous mode: the number of its batch."""


class InFlight:
    """Keeps track of the one step that may be in flight. Used by the session's thread.

    go_on(error): called after a failed exchange; True = send the same again, False = find the step again.
    still_ordered: whether the orders are still those that the open step began with. closed(sent, figures): called when
    a step is closed.
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
        """Seconds that the body has waited for the previous step; reset to 0 when a step begins."""
        self._unwound: StepAgain | None = None
        """Set if the loop's body was left in the middle."""

    @property
    def _place(self) -> Workplace:
        assert self.place is not None
        return self.place

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Turn a failed exchange of the previous step into StepAgain, which ends the body of this one."""
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
        """Context manager for the loop's body: swallows StepAgain, so that the body runs again."""
        try:
            yield
        except StepAgain as again:
            log.info("restarting the step: %s", again.cause or "orders changed")
            for error in (again, again.cause):
                if error is not None:
                    # Frames of the body would hold tensors that only the model's modules are to hold, see Reach.
                    traceback.clear_frames(error.__traceback__)
            self._unwound = again

    def watch(self, replica: int, owned: Sequence[int], *, ask_loss: bool) -> Watch:
        """Watch for replica_gradients. owned: replicas that still contribute to the step. ask_loss: the loss costs
        nothing.
        """
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
        """Wait until these tensors have arrived. Raises StepAgain if they don't."""
        with self._waiting():
            self._place.trainer.wait_for(tensors)

    def begin(self, replica: int) -> None:
        with self._waiting():
            self._place.trainer.begin(replica)

    def settle_in_body(self) -> None:
        """Wait for the whole previous step and check that the orders have not changed. Raises StepAgain otherwise."""
        if self.sent is None:
            return
        trainer = self._place.trainer
        with self._waiting():
            figures = trainer.settle()
        self._close(figures)
        trainer.exchange.arm()
        # Check orders that came before arm(); later ones interrupt again.
        if not self._still_ordered():
            raise StepAgain

    def settle_stages(self) -> None:
        """Wait for the whole previous step, sent again if need be. Raises StepAgain if it has to be found again."""
        if not self.settle():
            raise StepAgain
        self._place.trainer.exchange.arm()
        # Check orders that came before arm(); later ones interrupt again.
        if not self._still_ordered():
            raise StepAgain

    # Between two steps

    @property
    def healthy(self) -> bool:
        """Whether a step is in flight and nothing speaks against the next pass."""
        if self.sent is None:
            return False
        trainer = self._place.trainer
        return not (trainer.methods.needs_pull or trainer.open.failed) and self._still_ordered()

    def settle(self) -> bool:
        """Wait for the step in flight; False if the step, or the end of the job, has to be found again."""
        while self.sent is not None:
            try:
                figures = self._place.trainer.settle()
            except (Restart, Interrupted, Stopped) as error:
                if not self._go_on(error):
                    return False
            else:
                self._close(figures)
        return True

    def depart(self, sent: SentStep) -> None:
        """Note a step that was sent: the gate keeps readers from what has not arrived. Raises StepAgain."""
        self.sent = sent
        if self._place.gate is not None:
            with self._waiting():
                self._place.gate.shut()

    def _land(self) -> SentStep | None:
        """Note that no step is in flight any more; returns the one that was."""
        sent, self.sent = self.sent, None
        if self._place.gate is not None:
            self._place.gate.open()
        return sent

    def _close(self, figures: StepFigures | None) -> None:
        sent = self._land()
        if sent is not None and figures is not None:
            self._closed(sent, figures)

    def rewind(self) -> bool:
        """Whether a body was left in the middle. If so, give up what it sent and settle the step in flight."""
        unwound, self._unwound = self._unwound, None
        if unwound is None:
            return False
        if self.sent is None:
            self._place.trainer.give_up()
        elif unwound.cause is None or self._go_on(unwound.cause):
            self.settle()
        return True

    def lose(self) -> SentStep | None:
        """Give up the step in flight, which has to be computed again; returns it."""
        sent = self._land()
        if self._place.current is not None:
            self._place.current.give_up()
        return sent

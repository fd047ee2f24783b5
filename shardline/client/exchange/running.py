from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from shardline.client.exchange.arrivals import LOOK_S
from shardline.client.exchange.outcomes import Interrupted, ShardOutcome, rank
from shardline.errors import UnreachableError

log = logging.getLogger("shardline.client")


class Running:
    """A running exchange with all shards.

    interrupt: ends it early; interrupted: whether this was requested. grace_s: seconds that a part may exceed its
    promise. on_end: called once, when the last shard's part has ended, on that part's thread.
    """

    def __init__(
        self,
        shards: Sequence[int],
        *,
        interrupt: Callable[[], None],
        interrupted: Callable[[], bool],
        grace_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self._interrupt = interrupt
        self._interrupted = interrupted
        self._grace_s = grace_s
        self._on_end = on_end
        self._lock = threading.Lock()
        # Held until the end. An Event, which is a lock within a condition, takes several microseconds to make.
        self._open = threading.Lock()
        self._open.acquire()
        self.ended = False
        """Whether every shard's part has ended."""
        self._left_s = dict.fromkeys(shards, grace_s)
        """Seconds left to wait for a part, by shard whose part has not ended."""
        self._results: dict[int, ShardOutcome] = {}
        self._errors: list[Exception] = []
        self.ended_s = 0.0
        """When the last part ended, by the monotonic clock."""
        if not self._left_s:
            self._end()

    def part_ended(self, shard: int, future: Future[ShardOutcome]) -> None:
        error: BaseException | None = Interrupted() if future.cancelled() else future.exception()
        self._note(shard, future.result() if error is None else error)

    def run_here(self, shard: int, part: Callable[[], ShardOutcome]) -> None:
        """Run a shard's part on this thread, to its end; wait() raises its error. Raises what is no Exception."""
        try:
            found: ShardOutcome | Exception = part()
        except Exception as error:
            found = error
        except BaseException as error:
            self._note(shard, error)
            raise
        self._note(shard, found)

    def _note(self, shard: int, found: ShardOutcome | BaseException) -> None:
        error = found if isinstance(found, BaseException) else None
        with self._lock:
            first = error is not None and not self._errors
            if isinstance(error, Exception):
                self._errors.append(error)
            elif not isinstance(found, BaseException):
                self._results[shard] = found
            del self._left_s[shard]
            last = not self._left_s
        if first:
            # The others may be waiting for a step that won't come because this part failed.
            self._interrupt()
        if last:
            self._end()

    def _end(self) -> None:
        self.ended_s = time.monotonic()
        # First: whoever waits for the end may start the next exchange, whose own waits this must not end.
        self._on_end()
        self.ended = True
        self._open.release()

    @property
    def busy(self) -> bool:
        """Whether some shard's part has not ended: false before on_end is called."""
        return bool(self._left_s)

    @property
    def failed(self) -> bool:
        """Whether some shard's part has failed."""
        return bool(self._errors)

    def promise(self, shard: int, seconds: float) -> None:
        """Promise that a shard's part ends its next action within this many seconds."""
        with self._lock:
            if shard in self._left_s:
                self._left_s[shard] = seconds + self._grace_s

    def look(self) -> None:
        """Check for overdue parts; called every LOOK_S during a wait.

        Raises UnreachableError if a part is long overdue.

        Counts calls instead of reading the clock: a suspended process has not waited.
        """
        if self._interrupted():
            # A call that was cancelled just before it began may have missed the cancellation.
            self._interrupt()
        with self._lock:
            for shard in self._left_s:
                self._left_s[shard] -= LOOK_S
            late = sorted(shard for shard, left_s in self._left_s.items() if left_s <= 0.0)
        if late:
            raise UnreachableError(
                f"the exchange with shard {', '.join(map(str, late))} is still running {self._grace_s:.0f} s after "
                "the deadlines of its calls; this process can't continue training: restart it"
            )

    def wait(self) -> dict[int, ShardOutcome]:
        """Wait for the outcomes, by shard. Raises the most informative error of all shards, and what look() raises."""
        while not self.ended and not self._open.acquire(timeout=LOOK_S):
            self.look()
        if self._errors:
            raise min(self._errors, key=rank)
        return self._results

    def join(self) -> bool:
        """Wait for the end, whatever the outcome; False if it does not end."""
        try:
            self.wait()
        except Exception as error:
            log.debug("an exchange ended: %s", error or type(error).__name__)
        return self.ended

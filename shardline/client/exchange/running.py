"""An exchange that is under way, for whoever waits for it."""

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
    """An exchange with all shards that is under way.

    interrupt: ends it early; interrupted: whether that was asked for. grace_s: how long a part may take longer than it
    promised. on_end: called once, when the last shard's part has ended, on that part's thread.
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
        self._ended = threading.Event()
        self._left_s = dict.fromkeys(shards, grace_s)
        """By shard whose part has not ended: seconds that somebody may still wait for it."""
        self._results: dict[int, ShardOutcome] = {}
        self._errors: list[Exception] = []
        self.ended_s = 0.0
        """When the last part ended, by the monotonic clock."""
        if not self._left_s:
            self._end()

    def part_ended(self, shard: int, future: Future[ShardOutcome]) -> None:
        """Called as each shard's part ends."""
        error: BaseException | None = Interrupted() if future.cancelled() else future.exception()
        with self._lock:
            first = error is not None and not self._errors
            if isinstance(error, Exception):
                self._errors.append(error)
            elif error is None:
                self._results[shard] = future.result()
            del self._left_s[shard]
            last = not self._left_s
        if first:
            # The others may wait for a step that won't come because this one has failed.
            self._interrupt()
        if last:
            self._end()

    def _end(self) -> None:
        self.ended_s = time.monotonic()
        self._ended.set()
        self._on_end()

    @property
    def ended(self) -> bool:
        """Whether every shard's part has ended."""
        return self._ended.is_set()

    @property
    def failed(self) -> bool:
        """Whether some shard's part has failed."""
        return bool(self._errors)

    def promise(self, shard: int, seconds: float) -> None:
        """A shard's part begins something that ends by itself within this time."""
        with self._lock:
            if shard in self._left_s:
                self._left_s[shard] = seconds + self._grace_s

    def look(self) -> None:
        """Called every LOOK_S by whoever waits. Raises UnreachableError if a part should have ended long ago.

        Looks are counted, not the clock: a process that stood still has not waited.
        """
        if self._interrupted():
            # A call that was about to begin when it was cancelled may have forgotten that.
            self._interrupt()
        with self._lock:
            for shard in self._left_s:
                self._left_s[shard] -= LOOK_S
            late = sorted(shard for shard, left_s in self._left_s.items() if left_s <= 0.0)
        if late:
            raise UnreachableError(
                f"the exchange with shard {', '.join(map(str, late))} has not ended {self._grace_s:.0f} s after the "
                f"deadlines of its own calls; this process can't train any further: start it again"
            )

    def wait(self) -> dict[int, ShardOutcome]:
        """Outcome by shard; raises the most telling error of all shards, and what look() raises."""
        while not self._ended.wait(LOOK_S):
            self.look()
        if self._errors:
            raise min(self._errors, key=rank)
        return self._results

    def join(self) -> bool:
        """Wait for the end, whatever it is; False if it does not come."""
        try:
            self.wait()
        except Exception as error:
            log.debug("an exchange ended: %s", error or type(error).__name__)
        return self.ended

"""One step's pushes and pulls with all shards at once, retried until done, interrupted, or refused."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from shardline.client.exchange.conversation import Conversation, SilentShards
from shardline.client.exchange.live import LivePayloads
from shardline.client.exchange.observer import Observer
from shardline.client.exchange.outcomes import Interrupted, ShardOutcome, ShardTask
from shardline.client.exchange.pull_sink import PullSink
from shardline.client.exchange.running import Running
from shardline.core.exchange import Sender, Standing
from shardline.core.image import BucketImage
from shardline.core.outcome import Outcome
from shardline.core.timeouts import Timeouts
from shardline.errors import UnreachableError
from shardline.lanes.base import Lane
from shardline.rpc.messages import data

log = logging.getLogger("shardline.client")


class Exchange:
    """Exchanges with all shards in parallel. Any thread may call interrupt().

    index: the worker's, so that worker i starts at shard i mod S and W workers do not hit one server at once.
    """

    def __init__(
        self,
        lanes: Mapping[int, Lane],
        sinks: Mapping[int, PullSink],
        timeouts: Timeouts,
        *,
        index: int,
        observer: Observer | None = None,
    ) -> None:
        self.lanes = lanes
        self.timeouts = timeouts
        shards = sorted(lanes)
        offset = index % max(1, len(shards))
        self._order = shards[offset:] + shards[:offset]
        self._sizes = {shard: sink.shard_bytes for shard, sink in sinks.items()}
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(shards)), thread_name_prefix="shard")
        self._interrupted = threading.Event()
        self._live: list[LivePayloads] = []
        self._running: Running | None = None
        self.observer = observer or Observer()
        silence = SilentShards(self.observer)
        self._conversations = {
            shard: Conversation(
                shard,
                lane,
                sinks[shard],
                timeouts,
                interrupted=self._interrupted,
                observer=self.observer,
                silence=silence,
            )
            for shard, lane in lanes.items()
        }

    def arm(self) -> None:
        """Forget earlier interruptions. Check the orders between this and run(), so that no interruption is missed."""
        self._interrupted.clear()

    def interrupt(self) -> None:
        """Make the running exchange end soon, with Interrupted."""
        self._interrupted.set()
        for lane in self.lanes.values():
            lane.cancel()
        for payloads in list(self._live):
            payloads.wake()

    def give_up(self) -> None:
        """End the last exchange, whatever its outcome. Raises UnreachableError if it doesn't end."""
        self.interrupt()
        if self._running is not None and not self._running.join():
            raise UnreachableError("an abandoned exchange does not end; restart this process")

    def refusal(self) -> Exception | None:
        """The error that a wait within an exchange has to raise, if any."""
        return Interrupted() if self._interrupted.is_set() else None

    def start(
        self,
        sender: Sender,
        tasks: Mapping[int, ShardTask],
        on_end: Callable[[], None] = lambda: None,
        meanwhile: Callable[[], None] = lambda: None,
        *,
        here: bool = False,
    ) -> Running:
        """Start one task per shard.

        meanwhile: what this thread does while nothing has arrived yet. here: it will wait for the end, so a task that
        moves few bytes runs on it, to its end: to hand it over would take about as long as the rest. Its calls have
        deadlines like any other. An interruption that a call misses because it is about to begin still ends its push
        before anything is sent.
        """
        self._live = [
            push.payloads
            for task in tasks.values()
            for push in task.contributions
            if isinstance(push.payloads, LivePayloads)
        ]
        order = [shard for shard in self._order if shard in tasks]
        running = self._running = Running(
            order,
            interrupt=self.interrupt,
            interrupted=self._interrupted.is_set,
            grace_s=self.timeouts.total_s,
            on_end=on_end,
        )
        here = here and len(order) == 1 and self._moves(tasks[order[0]]) <= data.QUICK_BYTES
        if here:
            meanwhile()
        for shard in order:
            promise = functools.partial(running.promise, shard)
            hold = functools.partial(self._conversations[shard].hold, sender, tasks[shard], promise)
            if here:
                running.run_here(shard, hold)
            else:
                self._pool.submit(hold).add_done_callback(functools.partial(running.part_ended, shard))
        if not here:
            meanwhile()
        return running

    def _moves(self, task: ShardTask) -> int:
        return self._sizes[task.shard] if task.moves is None else task.moves

    def run(self, sender: Sender, tasks: Mapping[int, ShardTask]) -> dict[int, ShardOutcome]:
        """Run one task per shard. Once all have ended, raises the most informative error of all shards."""
        return self.start(sender, tasks).wait()

    def progress(self, sender: Sender, shard: int, replicas: Sequence[int]) -> Standing:
        """A shard's standing on some replicas; retried for a third of the timeout while the shard does not answer.

        Raises UnreachableError; Interrupted, because the servers exit when the job ends.
        """
        return self._conversations[shard].progress(sender, replicas)

    def state(self, sender: Sender, shard: int, step: int, buckets: Sequence[int] = ()) -> Sequence[BucketImage] | None:
        """Parameters and optimizer state of a shard at a step, where workers run the optimizer; None if it has none.

        buckets: () = all of parameters.

        Raises UnreachableError, Restart.
        """
        return self._conversations[shard].state(sender, step, buckets)

    def bring_state(self, sender: Sender, shard: int, images: Sequence[BucketImage]) -> Outcome:
        """Bring a shard such a state for a cut. Raises UnreachableError, ProtocolError."""
        return self._conversations[shard].bring_state(sender, images)

    def close(self) -> None:
        """End the threads and close the lanes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        try:
            self.give_up()
        except UnreachableError as error:
            log.warning("%s", error)
            return
        self._pool.shutdown(wait=True)
        # Another exchange may follow, so free memory and sockets now instead of at garbage collection.
        for lane in self.lanes.values():
            lane.close()

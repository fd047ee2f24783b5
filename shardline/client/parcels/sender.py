"""Sends parcels to one worker, one after another, while this one computes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from shardline.core.timeouts import Timeouts
from shardline.errors import ShardlineError, UnreachableError
from shardline.lanes.parcels import send_parcel
from shardline.pipeline.parcel import Parcel
from shardline.rpc.channel import Peer

log = logging.getLogger("shardline.client")
PAUSE_S = 0.1
"""Seconds between two attempts at a worker that does not answer."""
IDLE_S = 60.0
"""Seconds after which an idle thread looks again whether it is still needed."""
SLOWEST_BYTES_PER_S = 1e6


class ParcelSender:
    """A thread and its queue. What can't be delivered is tried again until clear(): the chief decides who is dead."""

    def __init__(self, peer: Peer, job: str, timeouts: Timeouts, sent: Callable[[float], None]) -> None:
        """sent(bytes): called for every delivered parcel."""
        self._peer = peer
        self._job = job
        self._timeouts = timeouts
        self._sent = sent
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, Parcel]] = deque()
        self._closed = False
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"parcels-{peer.task}", daemon=True)
        self._thread.start()

    def put(self, timeline: int, parcel: Parcel) -> None:
        """Queue a parcel."""
        with self._changed:
            self._queue.append((timeline, parcel))
            self._changed.notify_all()

    def clear(self) -> None:
        """Drop what has not been delivered."""
        with self._changed:
            self._queue.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._queue.clear()
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=self._timeouts.rpc_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queue, IDLE_S)
                if self._closed:
                    return
                if not self._queue:
                    continue
                item = self._queue[0]
            done = self._deliver(*item)
            with self._changed:
                if done and self._queue and self._queue[0] is item:
                    self._queue.popleft()
                if not done:
                    self._changed.wait_for(lambda: self._closed or not self._queue, PAUSE_S)

    def _deliver(self, timeline: int, parcel: Parcel) -> bool:
        """Whether nothing is left to do for this parcel."""
        timeout_s = self._timeouts.rpc_s + parcel.nbytes / SLOWEST_BYTES_PER_S
        try:
            self._peer.await_name(timeout_s)
            send_parcel(self._peer, self._job, timeline, parcel, timeout_s=timeout_s)
        except UnreachableError as error:
            if not self._told:
                log.warning("%s; it is tried again until the chief gives that stage to another worker", error)
            self._told = True
            return False
        except ShardlineError as error:
            # Repeating it would change nothing; the receiver's wait ends in the logs of both.
            log.error("%s", error)
            return True
        self._sent(parcel.nbytes)
        self._told = False
        return True

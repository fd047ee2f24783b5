"""Sends activations to one worker, one after another, while this one computes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.errors import ProtocolError, ShardlineError, UnreachableError
from shardline.host.awake import awake_s
from shardline.lanes.negotiated import Fallback
from shardline.lanes.parcels import ParcelLine, ParcelWay, send_parcel
from shardline.rpc.channel import Peer
from shardline.rpc.messages.parcels import Packed

log = logging.getLogger("shardline.client")
PAUSE_S = 0.1
"""Seconds between two attempts at a worker that does not answer."""
LOOK_S = 1.0
"""Seconds between two looks of an idle thread at what has been answered, and whether the line still stands."""
SLOWEST_BYTES_PER_S = 1e6
HEARD_BYTES = 4 << 20
"""Of parcels that were not heard of: their memory is not kept much longer than that of this many."""


class ActivationSender:
    """A queue, and a thread for what can't leave at once.

    put() sends on the caller's thread as far as the kernel has room: no hand-over, and nothing to wait for. The thread
    opens the line, sends what there was no room for, and repeats what was not answered before a line broke, until
    clear(): the chief decides who is dead.
    """

    def __init__(
        self,
        config: RoleConfig,
        peer: Peer,
        who: Identity,
        *,
        sent: Callable[[str, Packed], None],
        on_fallback: Fallback,
    ) -> None:
        """who: this life. sent(lane, parcel): called for every parcel that is sent. on_fallback: see ParcelWay."""
        self._config = config
        self._peer = peer
        self._who = who
        self._sent = sent
        self._on_fallback = on_fallback
        self._changed = threading.Condition()
        self._queue: deque[Packed] = deque()
        self._unanswered: deque[Packed | None] = deque()
        """Sent on the line; None = not needed any more."""
        self._unheard_bytes = 0
        """Of parcels that have left since answers were heard."""
        self._way: ParcelWay | None = None
        self._line: ParcelLine | None = None
        self._resting = False
        """The thread is at rest, so that put() may use the line."""
        self._closed = False
        self._failing_s: float | None = None
        """Since when the worker has not answered."""
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"parcels to {peer.task}", daemon=True)
        self._thread.start()

    def put(self, packed: Packed) -> None:
        """Send a parcel, now or soon."""
        with self._changed:
            self._queue.append(packed)
            if self._resting and len(self._queue) == 1 and self._line is not None and not self._line.busy:
                try:
                    if self._begin(self._line):
                        return
                except (OSError, ShardlineError) as error:
                    self._broke(error)
            # Only the thread waits for this.
            self._changed.notify()

    def clear(self) -> None:
        """Drop what has not been delivered."""
        with self._changed:
            self._queue.clear()
            self._unanswered = deque([None] * len(self._unanswered))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._queue.clear()
            self._closed = True
            if self._line is not None:
                self._line.shut()
            self._changed.notify()
        self._thread.join(timeout=self._config.timeouts.rpc_s)

    def _begin(self, line: ParcelLine) -> bool:
        """Send the first parcel of the queue as far as there is room; True if all of it has left. Holds the lock.

        Raises what ParcelLine raises.
        """
        packed = self._queue.popleft()
        self._unanswered.append(packed)
        # First: the next stage may be waiting for it.
        left = line.begin(packed)
        self._sent(line.lane, packed)
        self._unheard_bytes += packed.nbytes
        if self._unheard_bytes >= HEARD_BYTES:
            self._hear(line)
        return left

    def _hear(self, line: ParcelLine) -> None:
        """Forget parcels that were answered. Holds the lock. Raises what ParcelLine.answers() raises."""
        self._unheard_bytes = 0
        while count := line.answers():
            if count > len(self._unanswered):
                raise ProtocolError(f"{self._peer} answered {count} parcels of {len(self._unanswered)}")
            for _ in range(count):
                self._unanswered.popleft()
            if self._way is not None:
                self._way.works()
                self._failing_s, self._told = None, False

    def _broke(self, error: Exception) -> None:
        """Give up the line, and repeat what it has not delivered, except what was refused. Holds the lock."""
        line, self._line = self._line, None
        if line is not None:
            try:
                # A receiver says why before it closes the socket.
                self._hear(line)
            except ShardlineError as reason:
                error = reason
            except OSError:
                log.debug("%s: the line for parcels broke: %s", self._peer, error)
            line.close()
        if isinstance(error, ProtocolError) and self._unanswered:
            # Repeating it would change nothing; the receiver's wait ends in the logs of both.
            self._unanswered.popleft()
            log.error("%s refused a parcel: %s", self._peer, error)
        self._queue.extendleft(packed for packed in reversed(self._unanswered) if packed is not None)
        self._unanswered.clear()
        if self._way is not None and line is not None:
            self._way.broke(error)

    # The thread

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._resting = True
                    self._changed.wait_for(lambda: self._closed or self._has_work(), LOOK_S)
                    self._resting = False
                    if self._closed:
                        return
                if not self._work():
                    with self._changed:
                        self._changed.wait_for(lambda: self._closed, PAUSE_S)
        finally:
            if self._line is not None:
                self._line.close()

    def _has_work(self) -> bool:
        return bool(self._queue) or (self._line is not None and self._line.busy)

    def _work(self) -> bool:
        """Send all that is queued, and hear what was answered; False if it has to be tried again."""
        try:
            while True:
                line = self._line
                if line is not None:
                    line.finish(self._config.timeouts.rpc_s)
                    with self._changed:
                        self._hear(line)
                        if not self._queue:
                            return True
                        self._begin(line)
                elif not self._queue:
                    return True
                elif not self._open():
                    self._call()
        except (OSError, ShardlineError) as error:
            with self._changed:
                self._broke(error)
                if self._closed:
                    return True
            # Say once that a worker has not answered for long; one that has just started is behind for a moment.
            now_s = awake_s()
            if self._failing_s is None:
                self._failing_s = now_s
            if not self._told and now_s - self._failing_s >= self._config.timeouts.suspect_s:
                self._told = True
                log.warning("%s; it is tried again until the chief gives that stage to another worker", error)
            return False

    def _open(self) -> bool:
        """Open a line; False if parcels go by gRPC."""
        timeout_s = self._config.timeouts.rpc_s
        if self._way is None:
            self._peer.await_name(timeout_s)
            self._way = ParcelWay(self._config, self._peer, self._who, self._on_fallback)
        line = self._way.connect(timeout_s)
        with self._changed:
            self._line = line
        return line is not None

    def _call(self) -> None:
        """Send the first parcel of the queue by gRPC. Raises UnreachableError."""
        with self._changed:
            if not self._queue:
                return
            packed = self._queue[0]
        timeout_s = self._config.timeouts.rpc_s + packed.nbytes / SLOWEST_BYTES_PER_S
        try:
            send_parcel(self._peer, packed, self._who, timeout_s=timeout_s)
        except UnreachableError:
            raise
        except ShardlineError as error:
            log.error("%s", error)
        else:
            self._sent("grpc", packed)
            self._failing_s, self._told = None, False
        with self._changed:
            if self._queue and self._queue[0] is packed:
                self._queue.popleft()

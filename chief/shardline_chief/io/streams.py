"""The heartbeat streams of living tasks: sends orders that changed, and answers every heartbeat."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from shardline.core.orders import Orders
from shardline.errors import ShardlineError
from shardline_chief.rules.program import Program

log = logging.getLogger("shardline_chief.io.servicer")

MOST_WAITING = 16
"""Orders that wait until a task reads them."""
LAST = 1 << 62
"""Version of a life's last orders."""

Key = tuple[str, int]
"""(task, incarnation)."""


class StreamChannel:
    """Passes the orders of one heartbeat stream from the control thread to the server's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.queue: asyncio.Queue[Orders | ShardlineError | None] = asyncio.Queue()

    def send(self, item: Orders | ShardlineError | None) -> None:
        """Queue orders for the stream; None or an error ends it after what is queued."""
        try:
            self._loop.call_soon_threadsafe(self._add, item)
        except RuntimeError:
            # The loop is closed: the server, and with it the stream, has ended.
            log.debug("orders for a heartbeat stream that has ended")

    def _add(self, item: Orders | ShardlineError | None) -> None:
        # Each replaces those before it, which a task that reads nothing lets wait.
        while self.queue.qsize() >= MOST_WAITING:
            self.queue.get_nowait()
        self.queue.put_nowait(item)


class Streams:
    """Open streams, by life. Belongs to the control thread."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._channels: dict[Key, StreamChannel] = {}
        self._sent: dict[Key, Orders] = {}
        self._heard: set[Key] = set()
        """Lives whose heartbeat has not been answered yet."""

    def heard(self, key: Key, channel: StreamChannel, *, alive: bool) -> bool:
        """A heartbeat arrived on a channel. False: its life is fenced; the channel got last orders and was closed."""
        if alive:
            self._heard.add(key)
        if self._channels.get(key) is channel:
            return True
        if not alive:
            channel.send(dataclasses.replace(self._program.orders(*key), version=LAST))
            channel.send(None)
            return False
        self._channels[key] = channel
        return True

    def detach(self, key: Key, channel: StreamChannel) -> bool:
        """A stream has ended. False: a newer one of the same life had replaced it already."""
        if self._channels.get(key) is not channel:
            return False
        del self._channels[key]
        return True

    def push_orders(self) -> None:
        """Send orders to tasks whose orders changed, and repeat them for tasks with an unanswered heartbeat."""
        state, all_orders = self._program.state, self._program.all_orders()
        for key, channel in list(self._channels.items()):
            current = state.tasks.members.current(*key)
            if state.returning and current:
                # It keeps its last orders until this chief has taken command.
                continue
            # Versions grow over terms: a task ignores orders older than its own.
            last = self._sent.get(key, Orders(version=state.settings.term << 32))
            orders = dataclasses.replace(all_orders.of(*key), version=last.version)
            if key not in self._sent:
                self._sent = {life: sent for life, sent in self._sent.items() if life[0] != key[0]}
            if orders != last or key not in self._sent:
                orders = dataclasses.replace(orders, version=last.version + 1)
                self._sent[key] = orders
                channel.send(orders)
            elif key in self._heard:
                channel.send(last)
            if not current:
                # It has its last orders (fenced or ended); the stream ends after them.
                channel.send(None)
                del self._channels[key]
        self._heard.clear()

    def there(self) -> set[str]:
        """Tasks that have not closed their stream."""
        # This includes tasks just admitted and without a stream: no other chief would notify them of the end.
        living = [m for m in self._program.state.tasks.members if m.living]
        silent = {m.task for m in living if (m.task, m.incarnation) not in self._sent}
        return silent | {task for task, _ in self._channels}

    def close(self) -> None:
        for channel in self._channels.values():
            channel.send(None)
        self._channels.clear()

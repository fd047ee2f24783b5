"""The heartbeat streams of living tasks: whose orders changed is told; a heartbeat is answered in any case."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from shardline.core.orders import Orders
from shardline.errors import ShardlineError
from shardline_chief.rules.program import Program

LAST = 1 << 62
"""Version of orders after which none follow."""

Key = tuple[str, int]
"""Task and incarnation."""


class Channel(Protocol):
    """Where one heartbeat stream's orders go. Called from the control thread."""

    def send(self, orders: Orders) -> None:
        """Queue orders."""
        ...

    def close(self) -> None:
        """No more orders: the stream ends."""
        ...

    def refuse(self, error: ShardlineError) -> None:
        """The stream ends with this error."""
        ...


class Streams:
    """Streams by life. Belongs to the control thread."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._channels: dict[Key, Channel] = {}
        self._sent: dict[Key, Orders] = {}
        self._heard: set[Key] = set()
        """Lives whose heartbeat has not been answered yet."""

    def heard(self, key: Key, channel: Channel, *, alive: bool) -> bool:
        """A heartbeat came over this channel. False: its life is fenced, so the channel was closed with last orders."""
        if alive:
            self._heard.add(key)
        if self._channels.get(key) is channel:
            return True
        if not alive:
            channel.send(dataclasses.replace(self._program.orders(*key), version=LAST))
            channel.close()
            return False
        self._channels[key] = channel
        return True

    def detach(self, key: Key, channel: Channel) -> bool:
        """A stream is over. False: a newer one of the same life had taken its place already."""
        if self._channels.get(key) is not channel:
            return False
        del self._channels[key]
        return True

    def push_orders(self) -> None:
        """Send new orders to those for whom they changed, and the same again to those that have beaten since."""
        state = self._program.state
        for key, channel in list(self._channels.items()):
            current = state.tasks.members.current(*key)
            if state.returning and current:
                # It goes on by the orders it has until this chief knows what holds.
                continue
            # Grows over terms: a task takes no orders that are older than those it has.
            last = self._sent.get(key, Orders(version=state.settings.term << 32))
            orders = dataclasses.replace(self._program.orders(*key), version=last.version)
            if orders != last or key not in self._sent:
                orders = dataclasses.replace(orders, version=last.version + 1)
                self._sent[key] = orders
                channel.send(orders)
            elif key in self._heard:
                channel.send(last)
            if not current:
                # It has got its last orders (fenced, or good-bye); the stream ends behind them.
                channel.close()
                del self._channels[key]
        self._heard.clear()

    def there(self) -> set[str]:
        """Tasks that have not let go of their stream."""
        # Admitted just now and without a stream yet: nobody would be left to tell it of the end.
        living = [m for m in self._program.state.tasks.members if m.living]
        silent = {m.task for m in living if (m.task, m.incarnation) not in self._sent}
        return silent | {task for task, _ in self._channels}

    def close(self) -> None:
        """Nothing more is said."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

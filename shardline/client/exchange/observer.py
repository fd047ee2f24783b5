"""Who an exchange tells what it meets, and whom it asks whether its result is still wanted."""

from __future__ import annotations


class Observer:
    """Does nothing and lets everything go on; a session overrides what it wants to know. Called by any thread."""

    def still_ordered(self) -> bool:
        """Whether what an exchange waits for is still wanted of it; asked whenever a shard says WAITING."""
        return True

    def retried(self, shard: int) -> None:
        """A call to this shard is about to be made again."""

    def silent(self, shards: frozenset[int]) -> None:
        """Shards that have not been heard for as long as makes a task dead; called whenever that changes."""

    def not_finite(self, name: str) -> None:
        """The loss (name "loss") or the gradient of a tensor has NaN or infinity."""

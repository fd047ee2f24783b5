"""Receives the events of an exchange and says whether its result is still wanted."""

from __future__ import annotations


class Observer:
    """Ignores all events; a session overrides what it needs. Called by any thread."""

    def still_ordered(self) -> bool:
        """Whether the result of the exchange is still wanted; called whenever a shard answers WAITING."""
        return True

    def retried(self, shard: int) -> None:
        """A call to this shard is about to be repeated."""

    def silent(self, shards: frozenset[int]) -> None:
        """Shards that have been silent long enough to count as dead; called whenever this set changes."""

    def not_finite(self, name: str) -> None:
        """The loss (name "loss") or the gradient of a tensor has NaN or infinity."""

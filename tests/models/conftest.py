"""Fixtures of this folder."""

from tests.support.fixtures import no_push_is_small, one_thread_per_replica, start

__all__ = ["no_push_is_small", "one_thread_per_replica", "start"]

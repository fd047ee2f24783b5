"""Fixtures of this folder."""

from tests.support.fixtures import one_thread_per_replica, start

__all__ = ["one_thread_per_replica", "start"]

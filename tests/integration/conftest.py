"""Parameter servers in this process, and services in threads of it."""

from __future__ import annotations

from tests.support.fake_roles import fake_roles
from tests.support.fixtures import no_push_is_small, one_thread_per_replica, start

__all__ = ["fake_roles", "no_push_is_small", "one_thread_per_replica", "start"]

"""A ps and a plain client for it, and services in threads of this process."""

from __future__ import annotations

from tests.support.fixtures import client, ps, start

__all__ = ["client", "ps", "start"]

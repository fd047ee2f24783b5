"""A ps and a plain client of it."""

from __future__ import annotations

from tests.support.fixtures import client, folder, ps, ready

__all__ = ["client", "folder", "ps", "ready"]

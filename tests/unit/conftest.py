"""Roles that do next to nothing, for tests that start processes, and a launcher whose processes do not exist."""

from __future__ import annotations

from tests.support.fake_roles import fake_roles
from tests.support.launched import watch

__all__ = ["fake_roles", "watch"]

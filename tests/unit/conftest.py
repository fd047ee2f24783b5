"""Roles that do next to nothing, for tests that start processes."""

from __future__ import annotations

from tests.support.fake_roles import fake_roles

__all__ = ["fake_roles"]

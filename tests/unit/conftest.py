"""Roles that do next to nothing, for tests that start processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardline.native import library
from tests.support.fake_roles import fake_roles

__all__ = ["fake_roles"]


@pytest.fixture
def torch_alone() -> Iterator[None]:
    """Without native kernels, as with SHARDLINE_NATIVE=0."""
    before = library.level()
    library.use(None)
    yield
    library.use(before.name if before else None)

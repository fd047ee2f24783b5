from __future__ import annotations

from tests.e2e.conftest import nothing_left

__all__ = ["nothing_left"]

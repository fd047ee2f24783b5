"""A ps and a plain client for it, services in threads of this process, and models that are traced once."""

from __future__ import annotations

from tests.support.fixtures import client, ps, start
from tests.support.pipelines import traced_once

__all__ = ["client", "ps", "start", "traced_once"]

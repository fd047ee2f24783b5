"""Tests with a real Docker engine and Compose v2: `make e2e`. Left out of every other run, since each takes minutes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.containers import stack

collect_ignore_glob = [] if os.environ.get("SHARDLINE_E2E") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.containers)
            item.add_marker(pytest.mark.timeout(420))


def pytest_configure(config: pytest.Config) -> None:
    """Build the image from this tree, unless SHARDLINE_E2E_IMAGE names one: once, before the tests share out."""
    if not os.environ.get("SHARDLINE_E2E") or hasattr(config, "workerinput"):
        return
    if not stack.has_engine():
        raise pytest.UsageError("no Docker engine with Compose v2 answers; see: docker info; docker compose version")
    if not os.environ.get("SHARDLINE_E2E_IMAGE"):
        environment = {**os.environ, "SHARDLINE_IMAGE": stack.IMAGE}
        stack.run("docker", "compose", "build", "chief", timeout_s=400.0, env=environment)

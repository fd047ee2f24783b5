"""Training loops of other libraries as scripts. make test-scripts installs these; elsewhere the tests are skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.fixtures import one_thread_per_replica, start
from tests.support.services import Services

__all__ = ["one_thread_per_replica", "start"]


@pytest.fixture(autouse=True)
def nothing_from_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are made from small configurations; a download would be a mistake."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")


@pytest.fixture
def joins(start: Callable[..., Services], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Services]:
    """Start services that connect() without arguments finds."""

    def joined(**settings: Any) -> Services:
        services = start(workers=1, **{"ps": 2, **settings})
        monkeypatch.setenv("SHARDLINE_CLUSTER", services.spec.to_json())
        monkeypatch.setenv("SHARDLINE_TASK", "worker/0")
        return services

    return joined

"""Training loops of other libraries as scripts. make test-scripts installs these; elsewhere the tests are skipped."""

from __future__ import annotations

import pytest

from tests.support.fixtures import one_thread_per_replica, start

__all__ = ["one_thread_per_replica", "start"]


@pytest.fixture(autouse=True)
def nothing_from_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are made from small configurations; a download would be a mistake."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")

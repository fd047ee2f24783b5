"""Every end-to-end test: its processes carry a mark, and none of them may be left."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.e2e.support import RUN_ID, end_processes, processes


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The mark of this test's processes; fails the test where one of them is still there at its end."""
    run_id = uuid.uuid4().hex
    monkeypatch.setenv(RUN_ID, run_id)
    # Flags of the person who runs the tests are not the tests' flags.
    for name in ("TF_CONFIG", "SHARDLINE_CLUSTER", "SHARDLINE_TASK", "SHARDLINE_OUT"):
        monkeypatch.delenv(name, raising=False)
    yield run_id
    left = processes(run_id)
    end_processes(list(left))
    assert not left, f"still running after the test: {left}"

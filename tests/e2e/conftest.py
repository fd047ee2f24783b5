"""Every end-to-end test: its processes carry a mark, and none of them may be left."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.chaos.nursery import Nursery
from tests.e2e import support
from tests.e2e.support import RUN_ID, end_processes, processes
from tests.e2e.warm import descendants


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


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The process that all warm commands are forked from."""
    with Nursery("tests.e2e.warm") as made:
        yield made


@pytest.fixture
def warm(nursery: Nursery, nothing_left: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands of this test are forked; none of them may be left either."""
    monkeypatch.setattr(support, "nursery", nursery)
    yield
    left = descendants(nursery.pid)
    end_processes(list(left))
    assert not left, f"still running after the test: {left}"

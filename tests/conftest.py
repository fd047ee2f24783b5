"""What holds for every test."""

from __future__ import annotations

import collections
import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# As in the roles' processes. pytest runs in as many processes as there are cores; more threads would only wait there.
torch.set_num_threads(1)

# A deadline for one example would measure the machine. `make test-all` draws more of them, and others each time.
hypothesis.settings.register_profile("short", deadline=None, max_examples=20, derandomize=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=300)
hypothesis.settings.load_profile("short")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave all but each `of`-th case of a test with the mark `part`, from the `first`, to make test-long."""
    seen: collections.Counter[str] = collections.Counter()
    for item in items:
        part = item.get_closest_marker("part")
        if part is None or item.get_closest_marker("long"):
            continue
        name = item.nodeid.partition("[")[0]
        if seen[name] % part.kwargs["of"] != part.kwargs.get("first", 0):
            item.add_marker(pytest.mark.long)
        seen[name] += 1


def pytest_collection_finish() -> None:
    """Hide what is imported from the collector: going through torch and all tests takes it a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Put the environment back: the command's own entry sets variables for the tasks that it starts."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)

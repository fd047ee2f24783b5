"""Fixtures of tests that run parameter servers in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_per_replica() -> Iterator[None]:
    """As in the worker and ps processes: the last bits of gradients depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

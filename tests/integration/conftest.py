"""Fixtures of tests that run parameter servers in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardline.rpc import data


@pytest.fixture(autouse=True)
def one_thread_per_replica() -> Iterator[None]:
    """As in the worker and ps processes: the last bits of gradients depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_push_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of tests are: here they stand for larger ones, whose buckets leave one by one."""
    monkeypatch.setattr(data, "SMALL_BYTES", 0)

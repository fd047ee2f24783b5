"""Fixtures for more than one folder of tests; each folder's conftest.py names those it uses."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shardline.config import Timeouts
from shardline.host.process import Termination, torch_threads
from shardline.observability import log
from shardline.rpc.messages import data
from tests.support.cluster import Ps
from tests.support.plain_client import PlainClient
from tests.support.services import Services


@pytest.fixture(autouse=True)
def one_thread_per_replica() -> Iterator[None]:
    """As in worker and ps processes: the last bits of gradients depend on the number of threads."""
    with torch_threads(1):
        yield


@pytest.fixture
def no_push_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test models are small; here they stand for larger ones, whose buckets are sent one by one."""
    monkeypatch.setattr(data, "SMALL_BYTES", 0)
    monkeypatch.setattr(data, "QUICK_BYTES", 0)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Services]]:
    # Signals and logging belong to the process, which is pytest's.
    monkeypatch.setattr(Termination, "install", lambda self: None)
    monkeypatch.setattr(log, "setup", lambda *_, **__: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for name in ("TF_CONFIG", "SHARDLINE_CLUSTER", "SHARDLINE_TASK"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield lambda out=".", **settings: Services(tmp_path / out, **settings)
    torch.set_num_threads(threads)


@pytest.fixture
def ps() -> Iterator[Ps]:
    server = Ps(0, Timeouts(total_s=20.0))
    yield server
    server.close()


@pytest.fixture
def ready(client: PlainClient) -> PlainClient:
    """A client whose shard trains one replica and is at step 0."""
    client.start()
    return client


@pytest.fixture
def client(ps: Ps) -> Iterator[PlainClient]:
    plain = PlainClient(ps.address)
    yield plain
    plain.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder open to everyone, with a short path: addresses of unix sockets have little more than 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="sl-") as name:
        os.chmod(name, 0o755)
        yield Path(name)

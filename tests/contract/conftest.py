"""A ps and a plain client of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.core.timeouts import Timeouts
from tests.contract.plain_client import PlainClient
from tests.integration.cluster import Ps


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
    """One that everybody may enter, with a short name: addresses of unix sockets have little more than 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="sl-") as name:
        os.chmod(name, 0o755)
        yield Path(name)

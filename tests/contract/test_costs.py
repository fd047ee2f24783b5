"""Limits of what the job's token lets somebody cost a task: memory, checkpoints that are kept. See docs/security.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from shardline.checkpoint import CheckpointStore
from shardline.core.timeouts import Timeouts
from shardline.rpc.auth.access import Access
from shardline.rpc.server import RpcServer
from shardline.rpc.v1 import chief_pb2, chief_pb2_grpc
from shardline.security import PLAIN
from shardline_chief.io.control import Control
from shardline_chief.io.servicer import MOST_FETCHES, ChiefServicer, register
from tests.support.checkpoints import cut_of, job_of, spec
from tests.support.waiting import wait_for

PATIENCE_S = 30.0
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
"""A client that takes little before somebody reads it."""
LARGE = job_of((spec("w", (2048, 1024)),), rule="SGD")
"""8 MB."""


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    found = CheckpointStore(tmp_path / "checkpoints", keep=1)
    found.commit(cut_of(LARGE, step=1, shards=1))
    return found


@contextmanager
def served(store: CheckpointStore, timeout_s: float) -> Iterator[tuple[ChiefServicer, Any]]:
    """A chief's services without a job, and a stub for a caller that reads little ahead."""
    access = Access(PLAIN)
    control = cast(Control, SimpleNamespace())
    servicer = ChiefServicer(control, store, access, term=1, timeouts=Timeouts(total_s=timeout_s))
    server = RpcServer("127.0.0.1:0", register=[register(servicer)], name="chief", access=access)
    try:
        with grpc.insecure_channel(server.start(), options=NARROW) as channel:
            yield servicer, chief_pb2_grpc.ChiefStub(channel)
    finally:
        server.close(grace_s=0.0)


def fetch(stub: Any, step: int) -> Any:
    return stub.FetchCut(chief_pb2.FetchCutRequest(step=step, params_only=True), timeout=PATIENCE_S)


def test_checkpoints_that_nobody_reads_are_let_go_within_their_time(store: CheckpointStore) -> None:
    with served(store, timeout_s=3.0) as (servicer, stub):
        unread = [fetch(stub, 1) for _ in range(MOST_FETCHES)]
        for call in unread:
            next(call)
        wait_for(lambda: not servicer.sending, "all of them to be let go")
        for call in unread:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        store.commit(cut_of(LARGE, step=2, shards=1))
        assert store.list() == [2]
        # There is room for those who read.
        assert sum(len(frame.payload) for frame in fetch(stub, 2)) == 8 << 20


def test_few_checkpoints_are_sent_at_a_time(store: CheckpointStore) -> None:
    with served(store, timeout_s=600.0) as (_, stub):
        unread = [fetch(stub, 1) for _ in range(MOST_FETCHES)]
        for call in unread:
            next(call)
        with pytest.raises(grpc.RpcError, match="the chief sends 16 checkpoints at a time; ask again"):
            next(fetch(stub, 1))
        for call in unread:
            call.cancel()


def test_a_checkpoint_that_two_read_is_kept_for_the_second_when_the_first_has_read_it(store: CheckpointStore) -> None:
    store.protect(1)
    store.protect(1)
    store.unprotect(1)
    store.commit(cut_of(LARGE, step=2, shards=1))
    assert store.list() == [1, 2]
    store.unprotect(1)
    store.commit(cut_of(LARGE, step=3, shards=1))
    assert store.list() == [3]


@pytest.mark.parametrize("how", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_message_is_refused_without_being_opened(store: CheckpointStore, how: grpc.Compression) -> None:
    # Opened it would have 16 MB, and the call another status.
    zeros = chief_pb2.JoinRequest(stable_id="\0" * (16 << 20))
    with served(store, timeout_s=3.0) as (_, stub), pytest.raises(grpc.RpcError) as caught:
        stub.Join(zeros, timeout=PATIENCE_S, compression=how)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert "can't be parsed; compressed ones are not taken" in str(caught.value)

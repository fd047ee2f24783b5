"""A ps that is configured anew lets go of its old shards before it makes new ones, whoever waits on them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from shardline.core.plan import ShardSpec
from shardline.errors import UsageError
from shardline.rpc.v1 import common_pb2, parameter_server_pb2
from shardline.storage.publication import Publication
from shardline_ps import servicer
from tests.contract.test_fenced_calls import Half
from tests.support.cluster import Ps
from tests.support.plain_client import FIRST_W, TIMELINE, PlainClient, W
from tests.support.refusals import refused, unchanged
from tests.support.waiting import wait_for

NEXT = TIMELINE + 1


class Watch:
    """What of the shards of now is still in memory whenever a new shard is made."""

    def __init__(self, ps: Ps) -> None:
        store = ps.store
        self._parts: list[weakref.ref[Any]] = []
        for shard in store.shards.values():
            self._parts += [weakref.ref(part) for part in (shard, shard.publication, *shard.buckets)]
        self._make, store.make_publication = store.make_publication, self._watched
        self.seen: list[int] = []
        """Parts that were alive, by shard made."""

    @property
    def alive(self) -> int:
        return sum(part() is not None for part in self._parts)

    def _watched(self, spec: ShardSpec, sync: bool) -> Publication:
        self.seen.append(self.alive)
        return self._make(spec, sync)


@pytest.fixture
def no_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is freed is freed by its last user, not when a cycle is found."""

    gc.collect()
    gc.disable()
    monkeypatch.setattr(servicer.gc, "collect", lambda: 0)
    try:
        yield
    finally:
        monkeypatch.undo()
        gc.enable()


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def configure(client: PlainClient, **changes: Any) -> parameter_server_pb2.ConfigureReply:
    reply: parameter_server_pb2.ConfigureReply = client.call("Configure", client.configuration(**changes))
    return reply


def begin_again(client: PlainClient) -> None:
    """The next history works."""
    client.timeline = NEXT
    client.start(timeline=NEXT)
    assert client.weights() == FIRST_W


def test_shards_that_nobody_uses_are_gone_before_new_ones_are_made(
    ready: PlainClient, ps: Ps, no_collection: None
) -> None:
    watch = Watch(ps)
    assert watch.alive > 2
    assert configure(ready, timeline=NEXT).changed
    assert watch.seen == [0]
    begin_again(ready)


def test_a_pull_that_waits_is_woken_and_holds_no_shard_while_new_ones_are_made(
    client: PlainClient, ps: Ps, no_collection: None, beside: ThreadPoolExecutor
) -> None:
    client.start(replicas=2)
    calls = ps.servicer.calls.open
    pull = beside.submit(client.pull, exact_step=1, wait_s=15.0)
    wait_for(lambda: len(calls) == 1, "the pull to wait")
    watch = Watch(ps)
    assert configure(client, timeline=NEXT).changed
    assert watch.seen == [0]
    _, _, end = pull.result(10.0)
    assert (end.outcome, end.timeline) == (common_pb2.OUTCOME_WRONG_TIMELINE, NEXT)
    begin_again(client)


@pytest.mark.parametrize(("method", "pull"), [("Push", False), ("PushPull", False), ("PushPull", True)])
def test_half_a_push_is_ended_and_holds_no_shard_while_new_ones_are_made(
    client: PlainClient, ps: Ps, method: str, pull: bool, no_collection: None
) -> None:
    client.start(replicas=2)
    half = Half(client, method, 0, pull=pull)
    wait_for(lambda: ps.store.staging.leased > 0, "the push to be half there")
    watch = Watch(ps)
    assert configure(client, timeline=NEXT).changed
    assert watch.seen == [0]
    refused(grpc.StatusCode.UNAVAILABLE, "this ps was reconfigured", half.replies)
    half.close()
    assert ps.store.staging.leased == 0
    begin_again(client)


def work_under_way(ps: Ps) -> threading.Event:
    """The pool has begun something with shard 0, which ends when the event is set."""
    begun, over = threading.Event(), threading.Event()

    def work(shard: object) -> None:
        begun.set()
        assert over.wait(20.0)

    ps.store.pool.submit(work, ps.store.shards[0])
    assert begun.wait(10.0)
    return over


def test_work_in_the_pool_is_waited_for_and_meanwhile_nothing_is_admitted(
    ready: PlainClient, ps: Ps, no_collection: None, beside: ThreadPoolExecutor
) -> None:
    over = work_under_way(ps)
    watch = Watch(ps)
    renewal = beside.submit(configure, ready, timeline=NEXT)
    wait_for(lambda: not ps.store.shards, "the old shards to be let go of")
    _, _, end = ready.pull()
    assert end.outcome == common_pb2.OUTCOME_NOT_CONFIGURED
    assert not ready.status().shards
    # The same once more: it comes after the first, and finds it done.
    again = beside.submit(configure, ready, timeline=NEXT)
    assert not renewal.done()
    assert watch.seen == []
    over.set()
    assert renewal.result(15.0).changed
    assert not again.result(15.0).changed
    assert watch.seen == [0]
    begin_again(ready)


def test_work_that_does_not_end_is_waited_for_up_to_a_deadline_and_told(
    ready: PlainClient, ps: Ps, caplog: pytest.LogCaptureFixture
) -> None:
    ps.store.let_go_s = 0.2
    shard = ps.store.shards[0]
    watch = Watch(ps)
    assert configure(ready, timeline=NEXT).changed
    assert watch.seen[0] > 0
    assert "shards 0 are still in use 0.2 s after they were released" in caplog.text
    assert ps.store.shards[0] is not shard
    begin_again(ready)


def test_a_refused_configuration_leaves_the_old_shards_and_their_waiting_pulls_as_they_were(
    client: PlainClient, ps: Ps, beside: ThreadPoolExecutor
) -> None:
    client.start(replicas=2)
    pull = beside.submit(client.pull, exact_step=1, wait_s=15.0)
    wait_for(lambda: len(ps.servicer.calls.open) == 1, "the pull to wait")
    watch, before = Watch(ps), watch_of(ps)
    for changes, sentence in (
        ({"shards": [0, 7]}, "places shard 7 here"),
        ({"replicas": 0}, "0 replicas"),
        ({"keep_shards": [3]}, "shards \\[3\\] are not on this ps"),
        ({"codec": "zip"}, "zip"),
    ):
        refused(
            grpc.StatusCode.INVALID_ARGUMENT,
            sentence,
            lambda changes=changes: configure(client, timeline=NEXT, **changes),
        )
    ps.store.memory_limit_bytes = 1
    refused(
        getattr(grpc.StatusCode, UsageError.grpc_status), "the limit is 1.", lambda: configure(client, timeline=NEXT)
    )
    assert watch_of(ps) == before and watch.seen == []
    assert not pull.done()
    unchanged(client)
    for replica in range(2):
        client.push(client.gradient(block=(replica, 1)))
    values, _, end = pull.result(10.0)
    assert end.outcome == common_pb2.OUTCOME_SERVED
    assert values[W] == tuple(value - 0.5 for value in FIRST_W)


def watch_of(ps: Ps) -> tuple[Any, ...]:
    store = ps.store
    return store.generation, store.authority.timeline, store.authority.active, dict(store.shards), dict(store.signals)


def test_kept_shards_stay_while_the_configuration_changes(ready: PlainClient, ps: Ps, no_collection: None) -> None:
    held, watch = ps.store.shards[0], Watch(ps)
    assert configure(ready, timeline=NEXT, keep_shards=[0]).changed
    assert ps.store.shards[0] is held and watch.seen == []
    ready.timeline = NEXT
    assert not ready.call("Activate", ready.command("Activate")).empty_shards
    assert ready.weights() == FIRST_W


def test_where_making_fails_nothing_is_admitted_and_the_next_configuration_works(
    ready: PlainClient, ps: Ps, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = Mock(side_effect=MemoryError("no more"))
    with monkeypatch.context() as patched:
        patched.setattr(ps.store, "make_publication", fails)
        refused(grpc.StatusCode.INTERNAL, "MemoryError", lambda: configure(ready, timeline=NEXT))
    ready.timeline = NEXT
    refused(
        grpc.StatusCode.INVALID_ARGUMENT,
        "call Configure first",
        lambda: ready.call("Activate", ready.command("Activate")),
    )
    assert ready.pull()[2].outcome == common_pb2.OUTCOME_NOT_CONFIGURED
    begin_again(ready)


def test_a_caller_that_gives_up_does_not_leave_a_ps_half_configured(
    ready: PlainClient, ps: Ps, beside: ThreadPoolExecutor
) -> None:
    over = work_under_way(ps)
    call: Future[Any] | Any = ready.stub.Configure.future(ready.configuration(timeline=NEXT), timeout=15.0)
    wait_for(lambda: not ps.store.shards, "the old shards to be let go of")
    call.cancel()
    over.set()
    wait_for(lambda: ps.store.authority.configured, "the new shards to be made")
    begin_again(ready)


def test_a_renewal_that_was_begun_is_ended_although_another_leads_and_its_chief_does_nothing_more(
    ready: PlainClient, ps: Ps, beside: ThreadPoolExecutor
) -> None:
    over = work_under_way(ps)
    renewal = beside.submit(configure, ready, timeline=NEXT, activate=True)
    wait_for(lambda: not ps.store.shards, "the old shards to be let go of")
    later = parameter_server_pb2.Term(number=2, chief_uuid="another chief")
    assert ready.lead(later).held
    over.set()
    refused(grpc.StatusCode.FAILED_PRECONDITION, "obeys the chief of term 2", lambda: renewal.result(15.0))
    # Half of it would be of no use to anybody: no other command knows what to do with such a server.
    assert ps.store.authority.configured and not ps.store.authority.active
    assert list(ps.store.shards) == [0] and not ps.store.shards[0].initialized
    refused(grpc.StatusCode.FAILED_PRECONDITION, "obeys the chief of term 2", lambda: configure(ready, timeline=NEXT))
    ready.term = later
    begin_again(ready)

"""A chief that takes over while servers are being configured anew: it finds whole servers, and no standby is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from shardline.errors import ProtocolError
from shardline.rpc.client import PsControl
from tests.integration.test_standbys import standby_job
from tests.support.standbys import Protected
from tests.support.waiting import wait_for


@contextmanager
def half_renewed(cluster: Protected, *, keep_shard: bool) -> Iterator[Future[int]]:
    """ps/1 lets go of the standby of shard 0, or of its own shard 1, which a thread still uses; the other one stays."""
    store = cluster.hosts[1].store
    leaving = store.standbys[0].shard if keep_shard else store.shards[1]
    begun, over = threading.Event(), threading.Event()

    def work(shard: object) -> None:
        begun.set()
        assert over.wait(20.0)

    store.pool.submit(work, leaving)
    del leaving
    assert begun.wait(10.0)
    configuration = replace(cluster.configuration(1), timeline=cluster.timeline + 1)
    kept = {"keep": (1,)} if keep_shard else {"keep_standbys": (0,)}
    with ThreadPoolExecutor(1) as pool:
        try:
            renewal = pool.submit(cluster.controls[1].configure, replace(configuration, **kept))
            wait_for(lambda: not store.authority.configured, "the renewal to begin")
            yield renewal
        finally:
            over.set()


@pytest.fixture
def cluster() -> Iterator[Protected]:
    with Protected(standby_job(), ps=2) as cluster:
        cluster.await_synced()
        cluster.train([[0, 1], [2]], steps=3)
        yield cluster


@pytest.fixture
def chief(cluster: Protected) -> Iterator[PsControl]:
    """The next one, at ps/1."""
    place = cluster.hosts[1]
    control = PsControl(place.task, place.address, cluster.timeouts, term=7, chief_uuid="the next")
    yield control
    control.close()


def test_a_promotion_by_the_next_chief_waits_for_a_renewal_that_the_last_one_began(
    cluster: Protected, chief: PsControl
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with half_renewed(cluster, keep_shard=False) as renewal:
            chief.lead()
            promoted = pool.submit(chief.promote, cluster.timeline + 2, 0)
            with pytest.raises(TimeoutError):
                promoted.result(0.1)
        assert promoted.result(15.0) == ""
        with pytest.raises(ProtocolError, match="obeys the chief of term 7"):
            renewal.result(15.0)
    shards = {shard.shard: (shard.initialized, shard.step_min) for shard in chief.status().shards}
    assert shards == {0: (True, 3), 1: (False, 0)}


def test_a_server_whose_renewal_outlived_its_chief_is_activated_by_the_next_one(
    cluster: Protected, chief: PsControl
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with half_renewed(cluster, keep_shard=True) as renewal:
            chief.lead()
            activated = pool.submit(chief.activate, cluster.timeline + 1)
            with pytest.raises(TimeoutError):
                activated.result(0.1)
        activated.result(15.0)
        with pytest.raises(ProtocolError, match="obeys the chief of term 7"):
            renewal.result(15.0)
    assert cluster.hosts[1].store.authority.active
    assert [(shard.shard, shard.step_min) for shard in chief.status().shards] == [(1, 3)]


def test_a_renewal_may_take_as_long_as_its_own_deadline_and_a_promotion_behind_it_does_not_give_up_before(
    cluster: Protected, chief: PsControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    call = chief.peer.call

    def told(method: Any, request: Any, *, what: str, timeout_s: float | None = None) -> Any:
        asked.append(timeout_s or 0.0)
        return call(method, request, what=what, timeout_s=timeout_s)

    monkeypatch.setattr(chief.peer, "call", told)
    chief.lead()
    assert chief.promote(cluster.timeline + 1, 0) == ""
    chief.configure(replace(cluster.configuration(1), timeline=cluster.timeline + 1, keep=(1,)))
    chief.activate(cluster.timeline + 1)
    _, promote_s, configure_s, activate_s = asked
    assert promote_s == activate_s == configure_s == cluster.timeouts.total_s

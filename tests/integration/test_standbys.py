"""Standbys on real servers: they follow to the bit, take over without a rollback, and are never ahead of nor behind."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch

from shardline.core.image import BucketImage
from shardline.core.records import Begin
from shardline.job import Job
from shardline.model import named_values
from shardline.testing import ReferenceResult, reference
from shardline_ps.standby import record_log as replication
from tests.integration.test_asynchronous import plain_torch
from tests.support.cluster import COMPUTE, Worker, assert_same_end, same_bits
from tests.support.covering import covering
from tests.support.jobs import Rich, broad, make_job
from tests.support.standbys import Protected
from tests.support.waiting import wait_for

SMALL_BUCKETS = 512
MODES = pytest.mark.parametrize("clip_norm", [0.0, 0.05], ids=["eager", "voted"])


def standby_job(clip_norm: float = 0.0, **changes: Any) -> Job:
    return make_job("adam", **{"model": Rich, "steps": 8, "clip_norm": clip_norm, **changes})


# Each two of the three in every combination; the rest in `make test-long`.
LOSSES = [
    pytest.param(
        *(zombie, lost, step, clip_norm),
        id=f"{'cut_off' if zombie else 'killed'}-{lost}-{'voted' if clip_norm else 'eager'}",
        marks=[] if zombie ^ lost ^ (clip_norm > 0.0) else [pytest.mark.long],
    )
    for zombie in (False, True)
    for lost, step in ((0, 3), (1, 1))
    for clip_norm in (0.0, 0.05)
]


@functools.cache
def expected_end(clip_norm: float) -> ReferenceResult:
    return reference(standby_job(clip_norm))


def image(cluster: Protected, host: int, shard: int, bucket: int, *, standby: bool) -> BucketImage:
    store = cluster.hosts[host].store
    held = (store.standbys[shard].shard if standby else store.shards[shard]).buckets[bucket]
    with held.lock:
        return replication.copied_image(held)


def assert_equal_images(mine: BucketImage, theirs: BucketImage) -> None:
    assert (mine.step, mine.version, mine.scalars, mine.initialized) == (
        theirs.step,
        theirs.version,
        theirs.scalars,
        theirs.initialized,
    )
    assert mine.tensors.keys() == theirs.tensors.keys()
    for name, tensor in mine.tensors.items():
        assert same_bits(tensor, theirs.tensors[name]), name


@MODES
def test_a_standby_holds_what_its_primary_holds_to_the_bit(clip_norm: float) -> None:
    job = standby_job(clip_norm)
    with Protected(job, ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.await_synced()
        cluster.train([[0, 2], [1]])
        assert_same_end(cluster.state(), expected_end(clip_norm))
        for shard in range(2):
            found = cluster.status(shard)
            assert (found.standby, found.standby_task) == ("synced", f"ps/{1 - shard}")
            assert found.standby_record > job.steps
            for bucket in range(len(cluster.plan.shards[shard].buckets)):
                mine = image(cluster, shard, shard, bucket, standby=False)
                assert_equal_images(mine, image(cluster, 1 - shard, shard, bucket, standby=True))


@pytest.mark.parametrize("codec", ["sign-vote", "onebit"])
def test_a_standby_applies_what_a_codec_makes_of_the_mean(codec: str) -> None:
    with Protected(standby_job(codec=codec, model=broad), ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.await_synced()
        cluster.train([[0, 2], [1]])
        for shard in range(2):
            assert cluster.status(shard).standby == "synced"
            for bucket in range(len(cluster.plan.shards[shard].buckets)):
                mine = image(cluster, shard, shard, bucket, standby=False)
                assert_equal_images(mine, image(cluster, 1 - shard, shard, bucket, standby=True))


@pytest.mark.parametrize(("zombie", "lost", "step", "clip_norm"), LOSSES)
def test_a_server_that_is_lost_costs_no_step_and_no_bit(clip_norm: float, lost: int, step: int, zombie: bool) -> None:
    with Protected(standby_job(clip_norm), ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.await_synced()
        behind: list[tuple[int, int]] = []

        def lose() -> None:
            held = cluster.hosts[lost].store.shards[lost]
            assert held.step_min < cluster.job.steps, "too late to mean anything"
            cluster.fail_over(lost, zombie=zombie)
            behind.append((held.step_min, cluster.hosts[1 - lost].store.shards[lost].step_min))

        cluster.train_through([[0, 2], [1]], cluster.at_step(step, lost, lose))
        assert_same_end(cluster.state(), expected_end(clip_norm))
        old, promoted = behind[0]
        assert promoted >= old >= step - 1, "what was published before was lost"
        assert cluster.status(lost).standby == ""


@MODES
def test_a_new_standby_is_copied_while_training_and_takes_over_in_its_turn(clip_norm: float) -> None:
    with Protected(standby_job(clip_norm), ps=1, spare=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.await_synced()

        def lose_two() -> None:
            cluster.fail_over(0)
            cluster.place_standby(0, 2)
            cluster.await_standby(0, "synced")
            cluster.fail_over(1)

        cluster.train_through([[0], [1, 2]], cluster.at_step(1, 0, lose_two))
        assert cluster.host_of(0) == 2
        assert_same_end(cluster.state(), expected_end(clip_norm))


def test_a_standby_that_is_not_whole_refuses_to_be_promoted() -> None:
    with Protected(standby_job(), ps=1, spare=2) as cluster:
        cluster.await_synced()
        assert "ps/2 has no standby of shard 0" in cluster.controls[2].promote(cluster.timeline + 1, 0)
        cluster.hosts[1].store.standbys[0].take(Begin(7))
        reason = cluster.controls[1].promote(cluster.timeline + 1, 0)
        assert "is incomplete" in reason
        assert cluster.controls[1].status().timeline == cluster.timeline
        assert sorted(cluster.hosts[1].store.standbys) == [0]


def test_a_standby_is_promoted_for_the_appointment_that_it_was_copied_for_and_for_no_other() -> None:
    with Protected(standby_job(), ps=1, spare=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.place_standby(0, 1, appointment=5)
        cluster.await_synced()
        cluster.train([[0, 1], [2]], steps=2)
        # Given up, and placed again, which it is not told before its primary and the chief are gone.
        cluster.place_standby(0, None, unheard=[1])
        cluster.train([[0, 1], [2]], steps=4)
        assert cluster.controls[1].status().standbys[0].synced
        reason = cluster.controls[1].promote(cluster.timeline + 1, 0, 6)
        assert "was copied for appointment 0x5, not for 0x6; its primary has continued without it" in reason
        assert cluster.controls[1].status().timeline == cluster.timeline
        # Told, it is copied anew.
        cluster.place_standby(0, 1, appointment=6)
        cluster.await_synced()
        assert cluster.controls[1].status().standbys[0].appointment == 6
        cluster.fail_over(0)
        assert cluster.status(0).step_min == 4


def test_a_primary_whose_standby_gets_another_appointment_where_it_is_has_it_copied_anew() -> None:
    with Protected(standby_job(), ps=1, spare=1) as cluster:
        cluster.await_synced()
        standby = cluster.hosts[1].store.standbys[0]
        # The server of the standby hears of it later than the primary, or earlier.
        for appointment, last, reason in ((8, 1, "copied for appointment"), (9, 0, "has no standby")):
            cluster.place_standby(0, 1, appointment=appointment, unheard=[last])
            assert reason in cluster.controls[1].promote(cluster.timeline + 1, 0, appointment)
            cluster.place_standby(0, 1, appointment=appointment)
            wait_for(lambda at=appointment: appointed(cluster) == (at, True), "a copy for the new appointment")
        assert cluster.hosts[1].store.standbys[0] is not standby
        cluster.train([[0, 1], [2]])
        cluster.fail_over(0)
        assert_same_end(cluster.state(), expected_end(0.0))


def appointed(cluster: Protected) -> tuple[int, bool]:
    held = cluster.controls[1].status().standbys
    return (held[0].appointment, held[0].synced) if held else (0, False)


def test_a_server_whose_standby_is_silent_stands_still_until_the_chief_lets_it_go_on_alone() -> None:
    with Protected(standby_job(), ps=1, spare=1) as cluster:
        cluster.await_synced()
        cluster.train([[0, 1], [2]], steps=2)
        shard = cluster.shards[0]
        cluster.hosts[1].close()
        cluster.gone.add(1)
        assert cluster.await_standby(0, "silent").standby_problem

        def let_go_on() -> None:
            wait_for(lambda: shard.log is not None and shard.log.waits, "a step that is made and not published")
            threading.Event().wait(0.2)
            assert shard.step_max == 2
            cluster.place_standby(0, None)

        cluster.train_through([[0, 1], [2]], let_go_on)
        assert cluster.status(0).standby == ""
        assert_same_end(cluster.state(), expected_end(0.0))


def test_a_standby_that_differs_says_so_and_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "DIGEST_EVERY", 1)
    with Protected(standby_job(), ps=1, spare=1, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.await_synced()
        standby = cluster.hosts[1].store.standbys[0]
        first = standby.copy

        def spoil() -> None:
            for bucket in standby.shard.buckets:
                with bucket.lock:
                    bucket.values.add_(1)

        cluster.train_through([[0, 1, 2]], cluster.at_step(1, 0, spoil))
        cluster.await_standby(0, "synced")
        assert standby.copy != first
        for bucket in range(len(cluster.plan.shards[0].buckets)):
            mine = image(cluster, 0, 0, bucket, standby=False)
            assert_equal_images(mine, image(cluster, 1, 0, bucket, standby=True))
        assert_same_end(cluster.state(), expected_end(0.0))


def test_a_stream_that_breaks_goes_on_where_it_ended() -> None:
    with Protected(standby_job(), ps=1, spare=1, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.await_synced()
        standby = cluster.hosts[1].store.standbys[0]
        before = standby.copy

        def break_it() -> None:
            async def end() -> None:
                cluster.hosts[1].servicer.standby_servicer.end(0, "the test ends it")

            cluster.hosts[1].server.run(end(), timeout_s=5.0)

        cluster.train_through([[0, 1], [2]], cluster.at_step(2, 0, break_it))
        cluster.await_synced()
        assert standby.copy == before
        assert_same_end(cluster.state(), expected_end(0.0))


def test_a_rollback_leaves_no_standby_of_the_history_before() -> None:
    with Protected(standby_job(), ps=2) as cluster:
        cluster.await_synced()
        cluster.configure_anew(cluster.timeline + 1)
        for host in cluster.hosts:
            assert not host.store.standbys
        assert "has no standby" in cluster.controls[1].promote(cluster.timeline + 1, 0)


# Asynchronous


def async_job(**changes: Any) -> Job:
    return make_job("momentum", consistency="async", steps=30, **changes)


@pytest.mark.parametrize(("pushes", "zombie"), covering([3, 12], [False, True]))
def test_one_asynchronous_worker_stays_plain_torch_to_the_bit_when_its_server_is_lost(
    pushes: int, zombie: bool
) -> None:
    """With one shard the number of the last applied push says which batch comes next."""
    job = async_job(model=Rich)
    with Protected(job, ps=1, spare=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.await_synced()

        def run(worker: Worker) -> None:
            worker.trainer.exchange.arm()
            worker.trainer.locate([0], cluster.timeline)
            worker.run_async(range(cluster.shards[0].mode.last_push("worker/0"), job.steps))

        def lose() -> None:
            assert cluster.shards[0].version < job.steps, "too late to mean anything"
            cluster.fail_over(0, zombie=zombie)

        cluster.together([lambda: cluster.persist(0, run), cluster.at_step(pushes, 0, lose)])
        state = cluster.state()
        assert state.version == job.steps
        expected = named_values(plain_torch(job, job.steps))
        for name, value in {**state.params, **state.buffers}.items():
            assert torch.equal(value, expected[name]), name


def test_no_asynchronous_push_that_was_acknowledged_is_lost_with_a_server() -> None:
    with Protected(async_job(), ps=2) as cluster:
        cluster.await_synced()
        acknowledged: dict[tuple[int, int], int] = {}
        pushed = [0, 0, 0]

        def run(index: int, worker: Worker) -> None:
            worker.trainer.exchange.arm()
            worker.trainer.locate([0], cluster.timeline)
            while pushed[index] < 20:
                with COMPUTE:
                    worker.compute(pushed[index], 0)
                figures = worker.trainer.finish()
                pushed[index] += 1
                for shard, outcome in figures.outcomes.items():
                    acknowledged[shard, index] = max(
                        acknowledged.get((shard, index), 0), *(ack.next_seq - 1 for ack in outcome.acks)
                    )

        workers = [functools.partial(cluster.persist, index, functools.partial(run, index)) for index in range(3)]
        cluster.together([*workers, cluster.at_step(15, 1, lambda: cluster.fail_over(1, zombie=True))])
        assert cluster.host_of(1) == 0
        for (shard, index), last in acknowledged.items():
            held = cluster.shards[shard].mode.last_push(f"worker/{index}")
            assert held >= last >= 1
        for found in cluster.shards:
            applied = sum(record.last_seq for record in found.mode.settle().values())
            assert applied == found.version >= 60, "something counted twice, or was lost"

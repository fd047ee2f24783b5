"""Every codec trains on real servers: over every lane, with any number of workers, and with abandoned exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from shardline.codecs import CODECS
from shardline.codecs.coding import pulled, pushed
from shardline.testing import reference
from tests.conformance.toys import toy_codec
from tests.support.cluster import Cluster, Worker
from tests.support.covering import covering
from tests.support.jobs import Rich, Wide, make_job

LANES = ("grpc", "tcp", "shm")
MORE = {"top": "top:ratio=0.25"}
"""Codec settings for these tests, if the defaults are too coarse for a few steps."""
NAMES = [MORE.get(name, name) for name in CODECS.names]
EACH = pytest.mark.parametrize("codec", NAMES)
LOSSY = pytest.mark.parametrize("codec", [name for name in NAMES if not CODECS.parse(name).exact])
Params = Mapping[str, torch.Tensor]


def same(ours: Params, theirs: Params) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("codec", "model"), covering(NAMES, [Rich, Wide]))
def test_the_bits_are_those_of_one_worker_on_every_lane(codec: str, model: Any) -> None:
    job = make_job("adam", model=model, steps=5, codec=codec)
    ends: list[Params] = []
    for lane in ("grpc", *LANES):
        with Cluster(job, ps=2, bucket_bytes=1 << 14, lane=lane) as cluster:
            cluster.train([[0, 2], [1]] if ends else [[0, 1, 2]])
            ends.append(cluster.state().params)
            assert all(host.store.staging.in_use == 0 for host in cluster.hosts)
    assert all(same(end, ends[0]) for end in ends[1:])


@pytest.mark.parametrize(("codec", "lane"), covering(NAMES, LANES))
def test_the_same_holds_asynchronously(codec: str, lane: str) -> None:
    job = make_job("adam", model=Wide, steps=4, consistency="async", codec=codec)
    ends: list[Params] = []
    for way in ("grpc", lane):
        with Cluster(job, ps=2, bucket_bytes=1 << 16, lane=way) as cluster:
            cluster.worker(0).run_async([0, 1, 2, 3])
            ends.append(cluster.state().params)
    assert same(*ends)


def run_with_losses(worker: Worker, steps: int) -> None:
    """Train all replicas; every other exchange is abandoned after it has begun, whatever its outcome."""
    replicas = range(worker.job.replicas)
    worker.trainer.exchange.arm()
    todo = worker.trainer.locate(replicas, worker.cluster.timeline)
    tries = 0
    while worker.trainer.step < steps:
        for replica in sorted(todo):
            worker.compute(worker.trainer.step, replica)
        tries += 1
        if tries % 2:
            worker.trainer.send()
            worker.trainer.give_up()
            worker.trainer.exchange.arm()
            todo = worker.trainer.locate(replicas, worker.cluster.timeline)
        else:
            worker.trainer.finish()
            todo = set(replicas)
    assert tries > steps


@EACH
def test_exchanges_that_are_given_up_change_no_bit(codec: str) -> None:
    job = make_job("adam", model=Wide, steps=4, codec=codec)
    ends: list[Params] = []
    for disturbed in (False, True):
        with Cluster(job, ps=2, bucket_bytes=1 << 16) as cluster:
            worker = cluster.worker(0)
            if disturbed:
                run_with_losses(worker, job.steps)
            else:
                worker.run(range(job.replicas), job.steps)
            ends.append(cluster.state().params)
    assert same(*ends)


@LOSSY
def test_it_saves_bytes_in_its_direction_and_learns(codec: str) -> None:
    choice = CODECS.parse(codec)
    job = make_job("sgd", steps=60, codec=codec)
    with Cluster(job, ps=1) as cluster:
        worker, *_ = cluster.train([[0, 1, 2]])
        push_raw, push_wire, pull_raw, pull_wire = worker.trainer.meter.total
        ended = cluster.state().params
    assert (push_wire < push_raw) is not pushed(choice).exact
    assert (pull_wire < pull_raw) is not pulled(choice).exact
    first, exact = (reference(make_job("sgd", steps=job.steps), steps).params for steps in (0, job.steps))
    moved = sum(float((exact[name] - first[name]).square().sum()) for name in exact)
    off = sum(float((exact[name] - ended[name]).square().sum()) for name in exact)
    assert off < 0.25 * moved


def test_a_skipped_gradient_is_not_remembered() -> None:
    job = make_job("sgd", steps=8, codec="top:ratio=0.25", nan_policy="skip")
    with Cluster(job, ps=2) as cluster:
        worker = cluster.worker(0)
        worker.trainer.exchange.arm()
        worker.trainer.locate(range(3), cluster.timeline)
        for step in range(8):
            for replica in range(3):
                worker.trainer.begin()
                gradients = {
                    name: torch.full_like(value, float("nan") if (step, replica) == (3, 1) else 1.0)
                    for name, value in worker.values.items()
                }
                worker.trainer.contribute(replica, gradients, samples=4, loss=1.0)
            assert worker.trainer.finish().skipped is (step == 3)
        held = [worker.trainer.encoders.state_dict(replica) for replica in range(3)]
        assert all(bool(values.isfinite().all()) for state in held for of in state.values() for values in of.values())
        assert all(bool(values.isfinite().all()) for values in cluster.state().params.values())


def test_a_payload_that_the_toy_cannot_have_made_is_refused_and_nothing_changes() -> None:
    job = make_job("sgd", steps=2, codec="top:ratio=0.25")
    with Cluster(job, ps=1) as cluster:
        worker = cluster.worker(0)
        worker.trainer.exchange.arm()
        worker.trainer.locate(range(3), cluster.timeline)
        written = worker.trainer.weights.coding.push.bucket(0, 0)
        assert isinstance(written.codec, toy_codec.Top)
        before = cluster.state().params
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(written.encoder), "encode", lambda self, values, turn: b"\xff" * written.max_bytes)
            for replica in range(3):
                worker.compute(0, replica)
            with pytest.raises(Exception, match="claims 4294967295 bytes"):
                worker.trainer.finish()
        assert same(cluster.state().params, before)

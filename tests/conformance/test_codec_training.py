"""Every codec trains on real servers: over every lane, with any number of workers, and with abandoned exchanges."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from _pytest.mark import MarkDecorator

from shardline.codecs import CODECS
from shardline.codecs.auto import undecided
from shardline.codecs.coding import pulled, pushed
from shardline.job import Job
from shardline.testing import reference
from tests.conformance.toys import toy_codec
from tests.support.cluster import Cluster, Worker
from tests.support.covering import covering
from tests.support.jobs import Rich, Wide, broad, data, make_job, mse
from tests.support.waiting import wait_for

MORE = {
    "top": "top:ratio=0.25",
    "topk": "topk:ratio=0.1",
    "randomk": "randomk:ratio=0.25",
    "dgc": "dgc:ratio=0.1",
    "onebit-adam": "onebit-adam:warmup=2",
}
"""Codec settings for these tests, if the defaults are too coarse for a few steps."""
NAMES = [MORE.get(name, name) for name in CODECS.names]
LOSSY = pytest.mark.parametrize("codec", [name for name in NAMES if not CODECS.parse(name).exact])


def over_lanes(codecs: Sequence[str]) -> MarkDecorator:
    """All lanes and two models; of each codec one row is short, on another lane than the one it is compared with."""
    rows = itertools.product(codecs, ["grpc"], [Rich, Wide])
    long = [pytest.param(*row, marks=pytest.mark.long) for row in rows]
    return pytest.mark.parametrize(("codec", "lane", "model"), [*covering(codecs, ["tcp", "shm"], [Rich, Wide]), *long])


def optimizer_for(codec: str) -> str:
    """A codec with momentum goes with an optimizer that has none, unless it brings its rule along."""
    found = CODECS.parse(codec)
    return "adagrad" if found.has_momentum and not found.at_server.rule else "adam"


Params = Mapping[str, torch.Tensor]


def suits_asynchronous(codec: str) -> bool:
    """Doesn't need steps in common."""
    found = CODECS.parse(codec)
    return not found.memory.shared and not undecided(found) and not found.at_server.rule


def job_with(codec: str, model: Any, **changes: Any) -> Job:
    return make_job(optimizer_for(codec), model=model, steps=3, codec=codec, **changes)


def same(ours: Params, theirs: Params) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@functools.cache
def end_of_one_worker(codec: str, model: Any, consistency: str = "sync") -> Params:
    """Parameters after one worker has trained over gRPC, all replicas where they are synchronous."""
    job = job_with(codec, model, consistency=consistency)
    with Cluster(job, ps=2, bucket_bytes=1 << 16) as cluster:
        if consistency == "sync":
            cluster.train([[0, 1, 2]])
        else:
            cluster.worker(0).run_async(range(job.steps))
        assert all(host.store.staging.in_use == 0 for host in cluster.hosts)
        return cluster.state().params


@over_lanes(NAMES)
def test_the_bits_are_those_of_one_worker_on_every_lane(codec: str, lane: str, model: Any) -> None:
    with Cluster(job_with(codec, model), ps=2, bucket_bytes=1 << 16, lane=lane) as cluster:
        cluster.train([[0, 2], [1]])
        assert same(cluster.state().params, end_of_one_worker(codec, model))
        assert all(host.store.staging.in_use == 0 for host in cluster.hosts)


@pytest.mark.part(of=3)
@over_lanes([name for name in NAMES if suits_asynchronous(name)])
def test_the_same_holds_asynchronously(codec: str, lane: str, model: Any) -> None:
    job = job_with(codec, model, consistency="async")
    with Cluster(job, ps=2, bucket_bytes=1 << 16, lane=lane) as cluster:
        cluster.worker(0).run_async(range(job.steps))
        assert same(cluster.state().params, end_of_one_worker(codec, model, "async"))


def loss(params: Params) -> float:
    """Of broad() over all samples."""
    model = broad()
    model.load_state_dict(dict(params))
    return mse(model, list(data().tensors)).item()


@functools.cache
def exact_losses(optimizer: str, steps: int) -> tuple[float, float]:
    """Without a codec: before the first step and after the last."""
    job = make_job(optimizer, model=broad, replicas=1, steps=steps)
    return loss(reference(job, 0).params), loss(reference(job, steps).params)


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


@pytest.mark.part(of=3, first=1)
@pytest.mark.parametrize(("codec", "model"), covering(NAMES, [Rich, Wide]))
def test_exchanges_that_are_given_up_change_no_bit(codec: str, model: Any) -> None:
    job = job_with(codec, model)
    with Cluster(job, ps=2, bucket_bytes=1 << 16) as cluster:
        run_with_losses(cluster.worker(0), job.steps)
        assert same(cluster.state().params, end_of_one_worker(codec, model))


@pytest.mark.part(of=3, first=2)
@LOSSY
def test_it_saves_bytes_in_its_direction_and_learns(codec: str) -> None:
    choice = CODECS.parse(codec)
    optimizer = "adam" if choice.at_server.rule else "sgd"
    # Adam's steps are as long as its learning rate, so it takes more of them.
    job = make_job(optimizer, model=broad, replicas=1, steps=60 if choice.at_server.rule else 20, codec=codec)
    with Cluster(job, ps=1, lane="tcp") as cluster:
        worker, *_ = cluster.train([[0]])
        push_raw, push_wire, pull_raw, pull_wire = worker.trainer.meter.total
        ended = cluster.state().params
    assert (push_wire < push_raw) is not pushed(choice).exact
    assert (pull_wire < pull_raw) is not pulled(choice).exact
    first, last = exact_losses(optimizer, job.steps)
    # A codec with momentum learns faster.
    assert loss(ended) < first - 0.8 * (first - last)


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


def spoilt(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """NaN, and so is every gradient, for batches that begin with some numbers."""
    return mse(model, batch) * (float("nan") if 0.3 < float(batch[0][0, 0]) < 0.6 else 1.0)


@pytest.mark.parametrize("codec", ["raw", "topk:ratio=0.1", "sign-vote", "onebit-adam:warmup=2"])
def test_a_step_in_which_the_loss_and_every_gradient_are_nan_is_skipped(codec: str) -> None:
    ends = []
    for ps, shares in ((1, [[0, 1, 2]]), (2, [[0, 2], [1]])):
        job = make_job(
            optimizer_for(codec),
            model=broad,
            steps=8,
            codec=codec,
            loss=spoilt,
            nan_policy="skip",
            checkpoint_every=100,
        )
        with Cluster(job, ps=ps, bucket_bytes=1 << 14) as cluster:
            worker, *_ = cluster.train(shares)
            assert 0 < sum(figures.skipped for figures in worker.figures) < job.steps
            ends.append(cluster.state().params)
    assert same(ends[0], ends[1]) and all(bool(values.isfinite().all()) for values in ends[0].values())


@pytest.mark.parametrize("skips", [True, False], ids=["skipped", "counted"])
def test_a_worker_whose_answer_was_lost_knows_whether_its_step_was_skipped(skips: bool) -> None:
    job = make_job("sgd", steps=4, codec="top:ratio=0.25", nan_policy="skip")
    held = []
    for lost in (False, True):
        with Cluster(job, ps=2) as cluster:
            worker = cluster.worker(0)
            trainer = worker.trainer
            trainer.exchange.arm()
            trainer.locate(range(3), cluster.timeline)
            for step in range(2):
                for replica in range(3):
                    trainer.begin()
                    bad = skips and (step, replica) == (1, 2)
                    size = float("nan") if bad else 1.0 + replica + step
                    gradients = {
                        name: torch.linspace(0.5, 1.5, value.numel()).view_as(value) * size
                        for name, value in worker.values.items()
                    }
                    trainer.contribute(replica, gradients, samples=4, loss=1.0)
                if lost and step == 1:
                    trainer.send()
                    wait_for(lambda: all(shard.step_min == 2 for shard in cluster.shards), "the step is closed")
                    trainer.give_up()
                    trainer.exchange.arm()
                    trainer.locate(range(3), cluster.timeline)
                else:
                    assert trainer.finish().skipped is (skips and step == 1)
            held.append(trainer.encoders.state_dict(0))
    assert held[0].keys() == held[1].keys() and held[0]
    assert all(torch.equal(held[1][name][what], values) for name, of in held[0].items() for what, values in of.items())


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
            patch.setattr(type(written.coder), "encode", lambda self, values, turn: b"\xff" * written.usual_bytes)
            for replica in range(3):
                worker.compute(0, replica)
            with pytest.raises(Exception, match="claims 4294967295 bytes"):
                worker.trainer.finish()
        assert same(cluster.state().params, before)


@pytest.mark.parametrize("codec", ["topk:ratio=0.1", "powersgd"])
def test_a_worker_that_starts_over_while_others_are_awaited_still_owes_what_it_owed(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("adam", model=broad, replicas=2, steps=4, codec=codec)
    with Cluster(job) as cluster:
        cluster.train([[0], [1]])
        expected = cluster.state().params
    with Cluster(job) as cluster:
        one, two, asked = cluster.worker(0), cluster.worker(1), threading.Event()
        cluster.together([lambda: one.run([0], 2), lambda: two.run([1], 2)])
        one.tick([0])
        one.trainer.send()
        buckets = cluster.shards[0].buckets
        wait_for(lambda: all(0 in bucket.contributions.counted for bucket in buckets), "its push to count")
        one.trainer.give_up()
        standings = one.trainer.standings

        def told(replicas: Sequence[int]) -> Any:
            found = standings(replicas)
            asked.set()
            return found

        def rest() -> None:
            # The step is open when the first one asks for it.
            assert asked.wait(20.0)
            two.run([1], job.steps)

        monkeypatch.setattr(one.trainer, "standings", told)
        cluster.together([lambda: one.run([0], job.steps), rest])
        assert same(cluster.state().params, expected)

"""Asynchronous training: one worker is plain torch, several lose and repeat nothing, staleness is what theory says."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shardline import schedule
from shardline.client.exchange.shard_exchange import Restart, Stopped
from shardline.core.image import WorkerSequence
from shardline.core.outcome import Outcome
from shardline.data import BatchSource, derive, seed_everything
from shardline.errors import NonFiniteError, UnreachableError
from shardline.job import Job
from shardline.lanes.base import Lane
from shardline.model import named_values
from shardline.waist import Exchanged, Push, Sender, Sink, Standing, Want
from tests.support.cluster import PATIENCE_S, Cluster, Worker
from tests.support.covering import covering
from tests.support.jobs import OPTIMIZERS, Rich, make_job, mse


def make_async(optimizer: str = "momentum", **changes: Any) -> Job:
    return make_job(optimizer, consistency="async", **changes)


def plain_torch(job: Job, steps: int) -> nn.Module:
    """What a person would write, with the job's batches and seeds."""
    model = job.build_model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = job.build_optimizer(model)
    rate = optimizer.param_groups[0]["lr"]
    source = BatchSource(job)
    for step in range(steps):
        batch = source.batch(step, 0, 0)
        seed_everything(derive(job.seed, step, 0, 0))
        optimizer.zero_grad()
        mse(model, batch).backward()
        if job.clip_norm:
            nn.utils.clip_grad_norm_(parameters, job.clip_norm)
        optimizer.param_groups[0]["lr"] = rate * schedule.factor(job.spec(model).schedule, step)
        optimizer.step()
    return model


@pytest.mark.parametrize(("optimizer", "ps"), covering(OPTIMIZERS, [1, 3]))
def test_one_worker_is_plain_torch_to_the_bit(optimizer: str, ps: int) -> None:
    job = make_async(optimizer, model=Rich)
    with Cluster(job, ps=ps, bucket_bytes=512) as cluster:
        cluster.worker(1).run_async(range(8))
        expected = named_values(plain_torch(job, 8))
        state = cluster.state()
        for name, value in {**state.params, **state.buffers}.items():
            assert torch.equal(value, expected[name]), name
        assert [(shard.tally.pushes, shard.tally.staleness_max) for shard in cluster.shards] == [(8, 0)] * ps


@pytest.mark.parametrize("clip_norm", [0.05, 1e6])
def test_one_worker_that_clips_and_follows_a_schedule_is_plain_torch_to_the_bit(clip_norm: float) -> None:
    job = make_async("adamw", model=Rich, clip_norm=clip_norm, schedule=schedule.cosine(warmup_steps=2), steps=8)
    with Cluster(job, ps=2, bucket_bytes=512) as cluster:
        cluster.worker(0).run_async(range(8))
        expected = named_values(plain_torch(job, 8))
        for name, value in cluster.state().params.items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("workers", [2, 3])
def test_the_staleness_of_workers_in_lockstep_is_their_number_less_one_but_for_the_ends(workers: int) -> None:
    """A push of j counts once towards i's staleness, unless it comes after i's last push: half of the last round."""
    rounds = 6
    barrier = threading.Barrier(workers, timeout=PATIENCE_S)
    with Cluster(make_async("sgd"), ps=2) as cluster:

        def run(worker: Worker) -> None:
            worker.trainer.locate([0], cluster.timeline)
            for number in range(rounds):
                gradients = {name: torch.ones_like(value) for name, value in worker.values.items()}
                worker.trainer.contribute(0, gradients)
                barrier.wait()
                worker.figures.append(worker.trainer.finish())
                assert worker.trainer.step == number + 1

        held = [cluster.worker(index) for index in range(workers)]
        cluster.together([functools.partial(run, worker) for worker in held])
        pairs = workers * (workers - 1)
        for shard in cluster.shards:
            assert shard.tally.pushes == shard.version == workers * rounds
            assert shard.tally.staleness_sum == pairs * rounds - pairs // 2
            assert workers - 1 <= shard.tally.staleness_max <= 2 * (workers - 1)
        mean = pairs * (rounds - 0.5) / (workers * rounds)
        assert abs(mean - (workers - 1)) < 0.2


class LossyLane(Lane):
    """Loses requests and replies: the push may or may not have arrived."""

    name = "lossy"

    def __init__(self, lane: Lane, seed: int) -> None:
        self._lane = lane
        self._random = random.Random(seed)
        self.outcomes: list[Outcome] = []

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        draw = self._random.random() if contributions else 1.0
        if draw < 0.2:
            raise UnreachableError("the request was lost")
        done = self._lane.exchange(sender, contributions, want, sink, timeout_s=timeout_s)
        self.outcomes += [ack.outcome for ack in done.acks]
        if draw < 0.4:
            raise UnreachableError("the reply was lost")
        return done

    def standing(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        return self._lane.standing(sender, replicas, timeout_s=timeout_s)

    def cancel(self) -> None:
        self._lane.cancel()

    def close(self) -> None:
        self._lane.close()


class Counter(nn.Module):
    """Zeros, so that with SGD at rate 1 and whole-numbered gradients every value is an exact sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(7, 3))
        self.b = nn.Parameter(torch.zeros(()))
        self.c = nn.Parameter(torch.zeros(130))


def test_nothing_is_lost_or_applied_twice_when_requests_and_replies_get_lost() -> None:
    job = make_job("sgd", model=Counter, optimizer_args={"lr": 1.0}, consistency="async")
    pushes, workers = 8, 3
    lanes: list[LossyLane] = []

    def lossy(lane: Lane) -> Lane:
        lanes.append(LossyLane(lane, seed=len(lanes)))
        return lanes[-1]

    with Cluster(job, ps=2, bucket_bytes=512) as cluster:

        def run(worker: Worker) -> None:
            worker.trainer.locate([0], cluster.timeline)
            for number in range(pushes):
                amount = float(worker.index * 100 + number)
                worker.trainer.contribute(0, {n: torch.full_like(v, amount) for n, v in worker.values.items()})
                worker.trainer.finish()

        held = [cluster.worker(index, wrap=lossy) for index in range(workers)]
        cluster.together([functools.partial(run, worker) for worker in held])
        total = float(sum(index * 100 + number for index in range(workers) for number in range(pushes)))
        for name, value in cluster.state().params.items():
            assert torch.equal(value, torch.full_like(value, -total)), name
        assert [shard.version for shard in cluster.shards] == [workers * pushes] * 2
    assert any(Outcome.DUPLICATE in lane.outcomes for lane in lanes)


def test_a_repeated_push_after_a_broken_exchange_tells_the_base_it_was_computed_from() -> None:
    job = make_job("sgd", model=Counter, consistency="async")
    with Cluster(job) as cluster:
        first, second = cluster.worker(0), cluster.worker(1)
        for worker in (first, second):
            worker.trainer.locate([0], cluster.timeline)
        for _ in range(3):
            first.trainer.contribute(0, {})
            first.trainer.finish()
        second.trainer.contribute(0, {})
        second.trainer.weights.sinks[0].begin()  # as after an exchange that broke before its first bucket
        second.trainer.finish()
        assert second.trainer.weights.sinks[0].base_version == 4
        second.trainer.contribute(0, {})
        second.trainer.weights.sinks[0].begin()
        assert second.trainer.finish().staleness == 0


def test_a_nan_is_skipped_without_an_update_and_the_numbers_go_on() -> None:
    job = make_job("sgd", model=Counter, optimizer_args={"lr": 1.0}, consistency="async", nan_policy="skip")
    with Cluster(job, ps=2, bucket_bytes=512) as cluster:
        worker = cluster.worker(0)
        worker.trainer.locate([0], cluster.timeline)
        for amount in (1.0, float("nan"), 2.0):
            worker.trainer.contribute(0, {n: torch.full_like(v, amount) for n, v in worker.values.items()})
            worker.trainer.finish()
        assert [shard.version for shard in cluster.shards] == [2, 2]
        assert [(shard.tally.pushes, shard.tally.skipped_steps) for shard in cluster.shards] == [(2, 1)] * 2
        assert float(cluster.state().params["b"]) == -3.0


def test_what_a_codec_made_infinite_is_skipped_by_the_shard() -> None:
    job = make_job(
        "sgd", model=Counter, optimizer_args={"lr": 1.0}, consistency="async", nan_policy="skip", codec="fp16"
    )
    with Cluster(job) as cluster:
        worker = cluster.worker(0)
        worker.trainer.locate([0], cluster.timeline)
        worker.trainer.contribute(0, {n: torch.full_like(v, 1e6) for n, v in worker.values.items()})
        assert [ack.outcome for ack in worker.trainer.finish().outcomes[0].acks] == [Outcome.SKIPPED]
        assert cluster.shards[0].version == 0
        assert float(cluster.state().params["b"]) == 0.0


def test_a_nan_stops_the_job_before_anything_is_applied() -> None:
    with Cluster(make_job("sgd", model=Counter, consistency="async")) as cluster:
        worker = cluster.worker(0)
        worker.trainer.locate([0], cluster.timeline)
        with pytest.raises(NonFiniteError, match="the gradient of 'a'"):
            worker.trainer.contribute(0, {"a": torch.full((7, 3), torch.inf)})
        assert cluster.shards[0].version == 0


def test_a_stop_now_holds_a_cut_of_what_was_applied_and_ends_later_pushes() -> None:
    job = make_async("adam")
    with Cluster(job) as cluster:
        worker = cluster.worker(0).run_async(range(3))
        assert cluster.controls[0].cut(cluster.timeline, 3, stop=True) == (False, 3)
        worker.trainer.contribute(0, {})
        with pytest.raises(Stopped):
            worker.trainer.finish()
        images = list(cluster.controls[0].get_cut(cluster.timeline, 0, 3, max_bytes=1 << 20))
        assert {image.version for image in images} == {3}


def test_a_restored_shard_expects_the_push_after_the_last_one_in_its_cut() -> None:
    job = make_job("sgd", model=Counter, optimizer_args={"lr": 1.0}, consistency="async")
    with Cluster(job) as cluster:
        control, worker = cluster.controls[0], cluster.worker(0)

        def push(step: int) -> None:
            worker.trainer.locate([step], cluster.timeline)
            worker.trainer.contribute(0, {"b": torch.ones(())})
            worker.trainer.finish()

        for step in range(3):
            push(step)
        control.cut(cluster.timeline, 3)
        push(3)
        push(4)
        pushes: dict[str, WorkerSequence] = {}
        images = list(control.get_cut(cluster.timeline, 0, 3, max_bytes=1 << 20, sequences=pushes))
        # Of the moment of the cut, though two more were applied before it was fetched.
        assert pushes == {"worker/0": WorkerSequence(1, 3)}
        assert {image.version for image in images} == {3}
        control.restore(cluster.timeline, 0, lambda: images, pushes)
        assert cluster.shards[0].mode.settle() == {"worker/0": WorkerSequence(1, 3)}
        assert float(cluster.state().params["b"]) == -3.0


def test_a_replaced_worker_starts_with_numbers_of_its_own_and_the_old_life_is_fenced() -> None:
    job = make_job("sgd", model=Counter, optimizer_args={"lr": 1.0}, consistency="async")
    with Cluster(job, members={"worker/0": 1}) as cluster:
        old = cluster.worker(0, incarnation=1)
        old.trainer.locate([0], cluster.timeline)
        old.trainer.contribute(0, {"b": torch.ones(())})
        old.trainer.finish()
        assert cluster.controls[0].set_membership(cluster.timeline, {"worker/0": 2}) == 1
        new = cluster.worker(0, incarnation=2)
        new.trainer.locate([0], cluster.timeline)
        new.trainer.contribute(0, {"b": torch.full((), 10.0)})
        new.trainer.finish()
        old.trainer.contribute(0, {"b": torch.full((), 100.0)})
        with pytest.raises(Restart, match="fenced: worker/0 incarnation 0x1 is not admitted, 0x2 is"):
            old.trainer.finish()
        assert float(cluster.state().params["b"]) == -11.0

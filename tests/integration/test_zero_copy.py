"""Tensors in shared memory: the same bits as private ones, nothing copied, and private again when the lane goes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from shardline.client.exchange.outcomes import Interrupted
from shardline.client.step.shared_gradients import SharedGradients
from shardline.client.step.zero_copy import regions
from shardline.core.exchange import Exchanged
from shardline.core.plan import make_plan
from shardline.core.spec import TensorSpec
from shardline.core.timeouts import Timeouts
from shardline.errors import UsageError
from shardline.job import Job
from shardline.lanes.base import Lane, LaneUnavailable
from shardline.lanes.negotiated import NegotiatedLane
from shardline.lanes.shm.client import ShmLane
from shardline.testing import ReferenceResult, reference
from tests.support.cluster import Cluster, assert_same_end
from tests.support.jobs import Rich, Wide, make_job

BUCKET_BYTES = 1 << 18


def take_away(lane: Lane) -> None:
    """Have a lane say with the next exchange that it can't be used any more."""

    def exchange(*_: object, **__: object) -> Exchanged:
        raise LaneUnavailable("taken away by the test")

    lane.exchange = exchange  # type: ignore[method-assign]


class Even(nn.Module):
    """A matrix of 512 KB whose pieces need no padding, cut over several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 64)
        self.wide = nn.Linear(64, 2048, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.wide(self.first(x)).mean(dim=1, keepdim=True)
        return out


@functools.cache
def job_of(kind: str) -> Job:
    return make_job("adam", model=Rich if kind == "rich" else Wide, steps=4)


@functools.cache
def expected(kind: str) -> ReferenceResult:
    return reference(job_of(kind))


@pytest.mark.parametrize("kind", ["rich", "wide"])
@pytest.mark.parametrize("ps", [1, 2])
def test_training_on_mapped_parameters_gives_the_bits_of_the_reference(kind: str, ps: int) -> None:
    job = job_of(kind)
    with Cluster(job, ps=ps, bucket_bytes=BUCKET_BYTES, lane="shm") as cluster:
        worker = cluster.worker(0, zero_copy=True)
        worker.trainer.exchange.arm()
        worker.trainer.locate(range(job.replicas), cluster.timeline)
        mapped = worker.trainer.weights.residence.shared
        assert mapped
        while worker.trainer.step < job.steps:
            worker.step(range(job.replicas))
        assert_same_end(cluster.state(), expected(kind))
        for name in mapped:
            assert torch.equal(worker.values[name], cluster.state().params[name])


def test_a_write_to_a_parameter_reaches_nobody_and_is_gone_after_the_next_step() -> None:
    job = job_of("wide")
    with Cluster(job, bucket_bytes=BUCKET_BYTES, lane="shm") as cluster:
        first, second = (cluster.worker(number, zero_copy=True) for number in range(2))
        for worker in (first, second):
            worker.trainer.exchange.arm()
            worker.trainer.locate(range(job.replicas), cluster.timeline)
        (name, *_) = first.trainer.weights.residence.shared
        values = first.values[name].clone()
        aliases: list[torch.Tensor] = []
        while first.trainer.step < job.steps:
            aliases.append(first.values[name].data)
            with torch.no_grad():
                # A script may keep views of earlier steps.
                for alias in aliases:
                    if alias.data_ptr() != first.values[name].data_ptr():
                        alias.zero_()
                # Through torch and past it: what a script may do by mistake, or to try something.
                first.values[name].add_(1.0)
                first.values[name].numpy()[...] *= 2.0
            assert torch.equal(first.values[name], (values + 1.0) * 2.0)
            assert torch.equal(second.values[name], values)
            with torch.no_grad():
                first.values[name].copy_(values)
            first.step(range(job.replicas))
            second.trainer.locate(range(job.replicas), cluster.timeline)
            values = second.values[name].clone()
            assert torch.equal(first.values[name], values)
        assert_same_end(cluster.state(), expected("wide"))


def test_nothing_is_copied_on_a_worker_whose_gradients_are_computed_in_shared_memory() -> None:
    job = make_job("momentum", model=Even, replicas=1, steps=4)
    with Cluster(job, ps=1, bucket_bytes=BUCKET_BYTES, lane="shm") as cluster:
        worker = cluster.worker(0, zero_copy=True)
        trainer = worker.trainer
        trainer.exchange.arm()
        trainer.locate([0], cluster.timeline)
        names = trainer.weights.residence.shared
        gradients = {name: trainer.gradient_view(name) for name in names}
        assert all(view is not None for view in gradients.values())
        areas = []
        for step in range(3):
            for view in gradients.values():
                assert view is not None
                view.copy_(torch.full_like(view, 0.25 * (step + 1)))
            before = {name: worker.values[name].clone() for name in names}
            trainer.contribute(0, {name: view for name, view in gradients.items() if view is not None})
            trainer.finish()
            areas.append({name: worker.values[name].data_ptr() for name in names})
            assert all(not torch.equal(worker.values[name], before[name]) for name in names)
        # The same two areas in turn.
        assert areas[0] == areas[2] != areas[1]
        assert all(torch.equal(worker.values[name], cluster.state().params[name]) for name in names)
        # What the lane was given to send lay in the segment already: no place besides it was taken.
        lane = trainer.exchange.lanes[0]
        assert isinstance(lane, NegotiatedLane)
        shm = lane.current
        assert isinstance(shm, ShmLane) and shm.mapped is not None
        buckets = len(cluster.plan.shards[0].buckets)
        assert buckets > 2 and shm.mapped.used == {shm.offset(bucket) for bucket in range(buckets)}


def test_a_worker_that_loses_shared_memory_goes_on_with_private_tensors() -> None:
    job = job_of("wide")
    with Cluster(job, ps=1, bucket_bytes=BUCKET_BYTES, lane="auto") as cluster:
        worker = cluster.worker(0, zero_copy=True)
        worker.trainer.exchange.arm()
        worker.trainer.locate(range(job.replicas), cluster.timeline)
        names = worker.trainer.weights.residence.shared
        worker.step(range(job.replicas))
        lane = worker.trainer.exchange.lanes[0]
        assert isinstance(lane, NegotiatedLane) and lane.name == "shm"
        take_away(lane.current)
        while worker.trainer.step < job.steps:
            worker.step(range(job.replicas))
        assert lane.name == "tcp"
        assert_same_end(cluster.state(), expected("wide"))
        for name in names:
            # Private memory can be written to.
            worker.values[name].data.add_(0.0)
            assert torch.equal(worker.values[name], cluster.state().params[name])


class Idle(nn.Module):
    """As Even, with a matrix that is used in even calls only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 64)
        self.wide = nn.Linear(64, 2048, bias=False)
        self.idle = nn.Linear(64, 2048, bias=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.wide(self.first(x))
        if self.calls % 2 == 0:
            hidden = hidden + self.idle(self.first(x))
        self.calls += 1
        return hidden.mean(dim=1, keepdim=True)


def test_what_did_not_change_since_it_lay_in_shared_memory_is_brought_home_when_the_lane_goes() -> None:
    job = make_job("sgd", model=Idle, replicas=1, steps=4)
    with Cluster(job, ps=1, bucket_bytes=BUCKET_BYTES, lane="auto") as cluster:
        worker = cluster.worker(0, zero_copy=True)
        worker.trainer.exchange.arm()
        worker.trainer.locate([0], cluster.timeline)
        names = worker.trainer.weights.residence.shared
        first = worker.values["idle.weight"].clone()
        worker.step([0])
        assert "idle.weight" in names and not torch.equal(worker.values["idle.weight"], first)
        lane = worker.trainer.exchange.lanes[0]
        assert isinstance(lane, NegotiatedLane)
        take_away(lane.current)
        # The step that goes by the other lane leaves the idle matrix as it is, so it comes without bytes.
        worker.step([0])
        state = cluster.state().params
        assert all(torch.equal(worker.values[name], state[name]) for name in names)


def test_gradients_computed_in_shared_memory_for_several_replicas_do_not_meet_there() -> None:
    job = make_job("momentum", model=Even, replicas=2, steps=2)
    with Cluster(job, ps=1, bucket_bytes=BUCKET_BYTES, lane="shm") as cluster:
        worker = cluster.worker(0, zero_copy=True)
        trainer = worker.trainer
        trainer.exchange.arm()
        trainer.locate([0, 1], cluster.timeline)
        names = trainer.weights.residence.shared
        before = {name: worker.values[name].clone() for name in names}
        for replica, value in enumerate((1.0, 3.0)):
            shared = {name: trainer.gradient_view(name) for name in names}
            assert all((view is None) == (replica == 1) for view in shared.values())
            views = {name: torch.zeros_like(before[name]) if view is None else view for name, view in shared.items()}
            for view in views.values():
                view.fill_(value)
            trainer.contribute(replica, views, keep=True)
        trainer.finish()
        for name in names:
            assert torch.equal(worker.values[name], before[name].sub(2.0, alpha=0.05))


def test_no_gradient_is_computed_where_the_shard_may_still_read_one() -> None:
    job = make_job("momentum", model=Even, replicas=2, steps=2)
    with Cluster(job, ps=1, bucket_bytes=BUCKET_BYTES, lane="shm", timeouts=Timeouts(total_s=4.0)) as cluster:
        worker = cluster.worker(0, zero_copy=True)
        trainer = worker.trainer
        trainer.exchange.arm()
        trainer.locate([0], cluster.timeline)
        (name, *_) = trainer.weights.residence.shared
        assert trainer.gradient_view(name) is not None
        # The step waits for replica 1; what replica 0 has sent is counted, and given up by this worker.
        worker.orders.stand = lambda: False
        with pytest.raises(Interrupted):
            worker.step([0])
        worker.orders.stand = lambda: True
        trainer.exchange.arm()
        assert trainer.locate([0, 1], cluster.timeline) == {1}
        assert trainer.gradient_view(name) is None
        worker.step([1])
        assert trainer.gradient_view(name) is not None


def test_what_the_shard_may_still_read_of_a_step_that_was_given_up_is_not_written_to() -> None:
    job = make_job("sgd", model=Even, replicas=2, steps=2)
    with Cluster(job, ps=1, bucket_bytes=BUCKET_BYTES, lane="shm", timeouts=Timeouts(total_s=4.0)) as cluster:
        worker = cluster.worker(0, zero_copy=True)
        trainer = worker.trainer
        trainer.exchange.arm()
        trainer.locate([0], cluster.timeline)
        names = trainer.weights.residence.shared
        before = {name: worker.values[name].clone() for name in names}
        lent = SharedGradients({name: worker.values[name] for name in names}, trainer.gradient_view)
        lent.zero()
        gradients = [worker.values[name].grad for name in names]
        for gradient in gradients:
            assert gradient is not None
            gradient.fill_(1.0)
        trainer.contribute(0, lent.gradients(), keep=True)
        # The step waits for replica 1; replica 0 is counted, and given up by this worker.
        worker.orders.stand = lambda: False
        with pytest.raises(Interrupted):
            trainer.finish()
        lent.take_back()
        for name in names:
            gradient = worker.values[name].grad
            assert gradient is not None and torch.equal(gradient, torch.ones_like(gradient))
            # As zero_grad(set_to_none=False) does.
            gradient.zero_()
        worker.orders.stand = lambda: True
        trainer.exchange.arm()
        assert trainer.locate([0, 1], cluster.timeline) == {1}
        trainer.contribute(1, {name: torch.full_like(before[name], 3.0) for name in names})
        trainer.finish()
        for name in names:
            assert torch.equal(worker.values[name], before[name].sub(2.0, alpha=0.05)), name
        lent.close()


def test_closing_leaves_the_model_with_private_tensors_of_the_last_step() -> None:
    job = job_of("wide")
    with Cluster(job, ps=1, bucket_bytes=BUCKET_BYTES, lane="shm") as cluster:
        worker = cluster.worker(0, zero_copy=True)
        worker.trainer.exchange.arm()
        worker.trainer.locate(range(job.replicas), cluster.timeline)
        assert worker.trainer.weights.residence.shared
        worker.step(range(job.replicas))
        state = cluster.state().params
        worker.trainer.close()
        for name, values in state.items():
            worker.values[name].data.add_(0.0)
            assert torch.equal(worker.values[name], values)


@pytest.mark.parametrize("changes", [{"consistency": "async"}, {"codec": "bf16"}])
def test_jobs_whose_replies_are_made_for_one_worker_refuse_zero_copy(changes: dict[str, str]) -> None:
    job = make_job("momentum", model=Wide, **changes)
    with (
        Cluster(job, ps=1, lane="shm") as cluster,
        pytest.raises(UsageError, match="zero_copy needs a synchronous job"),
    ):
        cluster.worker(0, zero_copy=True)


def test_a_tensor_cut_over_two_shards_stays_private_with_all_that_shares_its_buckets() -> None:
    tensors = tuple(
        TensorSpec(name=name, shape=shape, dtype="float32")
        for name, shape in (("large", (4096, 64)), ("small", (10,)), ("other", (2048, 64)))
    )
    alone = regions(make_plan(tensors, 1, bucket_bytes=BUCKET_BYTES))
    assert set(alone) == {0, 1, 2}
    plan = make_plan(tensors, 3, bucket_bytes=BUCKET_BYTES)
    split = {
        number
        for number in range(3)
        if len(
            {s for s, shard in enumerate(plan.shards) for b in shard.buckets for p in b.slices if p.tensor == number}
        )
        > 1
    }
    assert split and not split & set(regions(plan))

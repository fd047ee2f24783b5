"""Tensors in shared memory: the same bits as private ones, nothing copied, and private again when the lane goes.

Parameters are read in place by every worker; with zero_copy, gradients are computed in shared memory too.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from shardline.client.exchange.shard_exchange import Interrupted
from shardline.client.step.in_place import InPlace, regions
from shardline.client.step.shared_gradients import SharedGradients
from shardline.core.plan import make_plan
from shardline.core.spec import TensorSpec
from shardline.core.timeouts import Timeouts
from shardline.errors import UsageError
from shardline.host import window
from shardline.host.addresses import pages_of
from shardline.host.segments import Segment
from shardline.host.window import Run, Window
from shardline.job import Job
from shardline.lanes.base import Lane, LaneUnavailable
from shardline.lanes.negotiated import NegotiatedLane
from shardline.lanes.shm.client import ShmLane
from shardline.testing import ReferenceResult, reference
from shardline.waist import Arrival, Exchanged, Push, Sender, Sink, Want
from tests.support.cluster import Cluster, Worker, assert_same_end
from tests.support.jobs import Rich, Wide, make_job
from tests.support.overlap import OverlapWorker

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


@pytest.fixture(autouse=True)
def _moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are moved, though these models are small enough to be copied."""
    monkeypatch.setattr(window, "COPIED_BYTES", 0)


@functools.cache
def job_of(kind: str) -> Job:
    return make_job("adam", model=Rich if kind == "rich" else Wide, steps=4)


@functools.cache
def expected(kind: str) -> ReferenceResult:
    return reference(job_of(kind))


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize(("kind", "ps"), [("rich", 1), ("wide", 1), ("wide", 2)])
def test_training_on_mapped_parameters_gives_the_bits_of_the_reference(kind: str, ps: int, zero_copy: bool) -> None:
    job = job_of(kind)
    with Cluster(job, ps=ps, bucket_bytes=BUCKET_BYTES, lane="shm") as cluster:
        worker = cluster.worker(0, zero_copy=zero_copy)
        worker.trainer.exchange.arm()
        worker.trainer.locate(range(job.replicas), cluster.timeline)
        mapped = worker.trainer.weights.memory.shared
        assert mapped
        while worker.trainer.step < job.steps:
            worker.step(range(job.replicas))
        assert_same_end(cluster.state(), expected(kind))
        for name in mapped:
            assert torch.equal(worker.values[name], cluster.state().params[name])


def begun(cluster: Cluster, worker: Worker, replicas: Iterable[int]) -> Worker:
    worker.trainer.exchange.arm()
    worker.trainer.locate(replicas, cluster.timeline)
    return worker


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("quick", [False, True], ids=["in time", "before writes are forgotten"])
def test_a_write_to_a_parameter_reaches_nobody_and_is_gone_after_the_next_step(
    zero_copy: bool, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quick:
        monkeypatch.setattr(InPlace, "pulling", lambda self: None)
    job = job_of("wide")
    with Cluster(job, bucket_bytes=BUCKET_BYTES, lane="shm") as cluster:
        first, second = (
            begun(cluster, cluster.worker(number, zero_copy=zero_copy), range(job.replicas)) for number in range(2)
        )
        (name, *_) = first.trainer.weights.memory.shared
        values = first.values[name].clone()
        while first.trainer.step < job.steps:
            with torch.no_grad():
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


def published(cluster: Cluster, name: str) -> list[torch.Tensor]:
    """The server's own memory of a tensor in one shard, flat: each of its pieces, in the area of the last step."""
    number, (shard,) = cluster.plan.index[name], cluster.shards
    return [shard.buckets[bucket].values[piece.offset : piece.end] for _, bucket, piece in cluster.plan.pieces(number)]


def test_whoever_refers_to_a_parameter_sees_every_step_of_it_where_the_server_has_it() -> None:
    job = make_job("adam", model=Even, steps=4)
    with Cluster(job, bucket_bytes=BUCKET_BYTES, lane="shm") as cluster:
        worker = begun(cluster, cluster.worker(0), range(job.replicas))
        assert set(worker.trainer.weights.memory.shared) == {name for name, _ in worker.model.named_parameters()}
        state = worker.model.state_dict()
        aliases = {
            name: [item.data, item.detach(), state[name], torch.from_numpy(item.detach().numpy()), item.data.view(-1)]
            for name, item in worker.values.items()
        }
        while worker.trainer.step < job.steps:
            worker.step(range(job.replicas))
            for name, values in cluster.state().params.items():
                assert all(torch.equal(alias.view_as(values), values) for alias in aliases[name]), name
                # Not a copy: the server's own memory.
                (piece, *_) = published(cluster, name)
                before = float(piece[0])
                piece[0] = 17.0
                assert (worker.values[name] == 17.0).any() and (aliases[name][0] == 17.0).any()
                piece[0] = before
        assert_same_end(cluster.state(), reference(job))


class Odd(nn.Module):
    """Parameters whose memory others have too: one flat tensor, an array of numpy, other processes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 64)
        self.flat = torch.cat([self.first.weight.detach().reshape(-1), self.first.bias.detach()])
        self.first.weight.data, self.first.bias.data = self.flat[:320].view(64, 5), self.flat[320:]
        self.array = np.full((64,), 0.1, np.float32)
        self.scale = nn.Parameter(torch.from_numpy(self.array))
        self.shift = nn.Parameter(torch.full((64,), 0.2)).share_memory_()
        self.held = nn.Parameter(torch.full((64,), 0.3))
        self.alias = self.held.data
        self.strided = nn.Parameter(torch.full((64, 64), 0.01).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * self.scale + self.shift * self.held
        return (hidden @ self.strided).mean(dim=1, keepdim=True)


def test_memory_that_others_have_too_stays_where_it_is() -> None:
    job = make_job("sgd", model=Odd, steps=3)
    with Cluster(job, lane="shm") as cluster:
        worker = cluster.worker(0)
        model = worker.model
        assert isinstance(model, Odd)
        begun(cluster, worker, range(job.replicas))
        memory = worker.trainer.weights.memory
        assert memory is None or not memory.shared
        while worker.trainer.step < job.steps:
            worker.step(range(job.replicas))
            state = cluster.state().params
            assert torch.equal(model.flat[320:], state["first.bias"])
            assert torch.equal(torch.from_numpy(model.array), state["scale"])
            assert torch.equal(model.alias, state["held"])
            assert model.shift.is_shared() and torch.equal(model.shift, state["shift"])
            assert torch.equal(model.strided, state["strided"])
        assert_same_end(cluster.state(), reference(job))


def test_a_parameter_that_moves_to_other_processes_memory_while_training_follows_there() -> None:
    job = make_job("adam", model=Even, steps=4)
    with Cluster(job, bucket_bytes=BUCKET_BYTES, lane="shm") as cluster:
        worker = begun(cluster, cluster.worker(0), range(job.replicas))
        moved = worker.values["first.weight"]
        assert "first.weight" in worker.trainer.weights.memory.shared
        moved.share_memory_()
        while worker.trainer.step < job.steps:
            worker.step(range(job.replicas))
            assert moved.is_shared()
            for name, values in cluster.state().params.items():
                assert torch.equal(worker.values[name], values), name
        assert_same_end(cluster.state(), reference(job))


def test_models_that_are_read_in_place_are_saved_and_copied_like_others() -> None:
    job = job_of("wide")
    with Cluster(job, bucket_bytes=BUCKET_BYTES, lane="shm") as cluster:
        worker = begun(cluster, cluster.worker(0), range(job.replicas))
        worker.step(range(job.replicas))
        values = {name: item.detach().clone() for name, item in worker.values.items()}
        file = io.BytesIO()
        torch.save(worker.model.state_dict(), file)
        assert file.tell() < sum(item.nbytes for item in values.values()) + 10_000
        file.seek(0)
        saved = torch.load(file)
        copies = copy.deepcopy(worker.model).state_dict(), pickle.loads(pickle.dumps(worker.model.state_dict()))
        worker.step(range(job.replicas))
        for name, value in values.items():
            assert not torch.equal(worker.values[name], value)
            assert all(torch.equal(one[name], value) for one in (saved, *copies)), name
        # As a script does that starts from weights of its own, too late: the job's are those of the servers.
        worker.model.load_state_dict(saved)
        worker.trainer.locate(range(job.replicas), cluster.timeline)
        while worker.trainer.step < job.steps:
            worker.step(range(job.replicas))
        assert_same_end(cluster.state(), expected("wide"))
        assert all(torch.equal(worker.values[name], value) for name, value in cluster.state().params.items())


def test_nothing_is_copied_on_a_worker_whose_gradients_are_computed_in_shared_memory() -> None:
    job = make_job("momentum", model=Even, replicas=1, steps=4)
    with Cluster(job, ps=1, bucket_bytes=BUCKET_BYTES, lane="shm") as cluster:
        worker = cluster.worker(0, zero_copy=True)
        trainer = worker.trainer
        trainer.exchange.arm()
        trainer.locate([0], cluster.timeline)
        names = trainer.weights.memory.shared
        gradients = {name: trainer.gradient_view(name) for name in names}
        assert all(view is not None for view in gradients.values())
        places = {name: worker.values[name].data_ptr() for name in names}
        for step in range(3):
            for view in gradients.values():
                assert view is not None
                view.copy_(torch.full_like(view, 0.25 * (step + 1)))
            before = {name: worker.values[name].clone() for name in names}
            trainer.contribute(0, {name: view for name, view in gradients.items() if view is not None})
            trainer.finish()
            assert {name: worker.values[name].data_ptr() for name in names} == places
            assert all(not torch.equal(worker.values[name], before[name]) for name in names)
        assert all(torch.equal(worker.values[name], cluster.state().params[name]) for name in names)
        # What the lane was given to send lay in the segment already: no place besides it was taken.
        lane = trainer.exchange.lanes[0]
        assert isinstance(lane, NegotiatedLane)
        shm = lane.current
        assert isinstance(shm, ShmLane) and shm.mapped is not None
        buckets = len(cluster.plan.shards[0].buckets)
        assert buckets > 2 and shm.mapped.used == {shm.offset(bucket) for bucket in range(buckets)}


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_worker_that_loses_shared_memory_goes_on_with_private_tensors(zero_copy: bool) -> None:
    job = job_of("wide")
    with Cluster(job, ps=1, bucket_bytes=BUCKET_BYTES, lane="auto") as cluster:
        worker = begun(cluster, cluster.worker(0, zero_copy=zero_copy), range(job.replicas))
        names = worker.trainer.weights.memory.shared
        worker.step(range(job.replicas))
        lane = worker.trainer.exchange.lanes[0]
        assert isinstance(lane, NegotiatedLane) and lane.name == "shm"
        take_away(lane.current)
        while worker.trainer.step < job.steps:
            worker.step(range(job.replicas))
        assert lane.name == "tcp"
        assert_same_end(cluster.state(), expected("wide"))
        assert names and not worker.trainer.weights.memory.shared
        for name in names:
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
        names = worker.trainer.weights.memory.shared
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
        names = trainer.weights.memory.shared
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
        (name, *_) = trainer.weights.memory.shared
        assert trainer.gradient_view(name) is not None
        # The step waits for replica 1; what replica 0 has sent is counted, and given up by this worker.
        worker.orders.still_ordered = lambda: False
        with pytest.raises(Interrupted):
            worker.step([0])
        worker.orders.still_ordered = lambda: True
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
        names = trainer.weights.memory.shared
        before = {name: worker.values[name].clone() for name in names}
        lent = SharedGradients({name: worker.values[name] for name in names}, trainer.gradient_view)
        lent.zero()
        gradients = [worker.values[name].grad for name in names]
        for gradient in gradients:
            assert gradient is not None
            gradient.fill_(1.0)
        trainer.contribute(0, lent.gradients(), keep=True)
        # The step waits for replica 1; replica 0 is counted, and given up by this worker.
        worker.orders.still_ordered = lambda: False
        with pytest.raises(Interrupted):
            trainer.finish()
        lent.take_back()
        for name in names:
            gradient = worker.values[name].grad
            assert gradient is not None and torch.equal(gradient, torch.ones_like(gradient))
            # As zero_grad(set_to_none=False) does.
            gradient.zero_()
        worker.orders.still_ordered = lambda: True
        trainer.exchange.arm()
        assert trainer.locate([0, 1], cluster.timeline) == {1}
        trainer.contribute(1, {name: torch.full_like(before[name], 3.0) for name in names})
        trainer.finish()
        for name in names:
            assert torch.equal(worker.values[name], before[name].sub(2.0, alpha=0.05)), name
        lent.close()


@pytest.mark.parametrize("way", ["close", "release"])
def test_what_the_server_does_afterwards_is_not_seen_by_a_model_that_was_closed_or_released(way: str) -> None:
    job = job_of("wide")
    with Cluster(job, ps=1, bucket_bytes=BUCKET_BYTES, lane="shm") as cluster:
        worker = begun(cluster, cluster.worker(0), range(job.replicas))
        worker.step(range(job.replicas))
        state = cluster.state().params
        places = {name: worker.values[name].data_ptr() for name in state}
        if way == "close":
            worker.trainer.close()
        else:
            worker.trainer.weights.keep()
        for name, values in state.items():
            for piece in published(cluster, name):
                piece.add_(1.0)
            assert worker.values[name].data_ptr() == places[name]
            assert torch.equal(worker.values[name], values), name
            for piece in published(cluster, name):
                piece.sub_(1.0)
        if way == "release":
            # As a worker that was asked to end in the middle of a step: what still comes is copied.
            worker.step(range(job.replicas))
            assert not worker.trainer.weights.memory.shared
            state = cluster.state().params
            assert all(torch.equal(worker.values[name], values) for name, values in state.items())


class Deep(nn.Module):
    """Layers of 20 KB, which neither begin nor end where a page does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 72), *(nn.Linear(72, 72) for _ in range(8)), nn.Linear(72, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Breaking:
    """A sink that loses the lane with a bucket of one pull, after others have come over it."""

    def __init__(self, sink: Sink, left: int) -> None:
        self._sink, self._left = sink, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def take(self, arrival: Arrival, memory: memoryview) -> None:
        self._left -= 1
        if self._left < 0:
            raise LaneUnavailable("taken away by the test")
        self._sink.take(arrival, memory)


def within(lane: Lane, step: int, wrap: Callable[[Sink], Breaking]) -> None:
    """Wrap the sink of the pull that follows the push of a step."""
    whole = lane.exchange

    def exchange(
        sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        chosen = contributions and contributions[0].step == step
        found = cast(Sink, wrap(sink)) if chosen else sink
        return whole(sender, contributions, want, found, timeout_s=timeout_s)

    lane.exchange = exchange  # type: ignore[method-assign]


class Late(Breaking):
    """Passes the buckets of a pull on in their order, and the last one only once a part has been shown."""

    def __init__(self, sink: Sink, last: int, shown: threading.Event) -> None:
        super().__init__(sink, sys.maxsize)
        self._last, self._shown = last, shown
        self._held: dict[int, tuple[Arrival, memoryview]] = {}

    def take(self, arrival: Arrival, memory: memoryview) -> None:
        self._held[arrival.bucket] = arrival, memory
        if len(self._held) <= self._last:
            return
        for bucket, (one, there) in sorted(self._held.items()):
            if bucket == self._last:
                assert self._shown.wait(10.0), "no part was shown before the last bucket came"
            super().take(one, there)


@pytest.mark.usefixtures("no_push_is_small")
@pytest.mark.parametrize("lost", [False, True], ids=["kept", "lost"])
def test_overlapping_workers_read_in_place_what_has_come(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("adam", model=Deep, replicas=2, steps=8)
    pages: list[int] = []
    shown = threading.Event()
    show = Window.show

    def counted(window: Window, segment: Segment, runs: Iterable[Run]) -> None:
        found = list(runs)
        count = sum(end - first for first, end in found)
        pages.append(count)
        show(window, segment, found)
        if 0 < count < pages_of(window.nbytes):
            shown.set()

    monkeypatch.setattr(Window, "show", counted)
    with Cluster(job, bucket_bytes=24 << 10, lane="auto") as cluster:
        workers = [OverlapWorker(cluster, number) for number in range(2)]
        cluster.workers.extend(workers)
        last = len(cluster.plan.shards[0].buckets) - 1
        assert last > 5
        lane, other = (worker.trainer.exchange.lanes[0] for worker in workers)
        assert isinstance(lane, NegotiatedLane) and isinstance(other, NegotiatedLane)

        def late(sink: Sink) -> Breaking:
            shown.clear()
            return Late(sink, last, shown)

        within(other.current, 2, late)
        if lost:
            within(lane.current, 4, lambda sink: Breaking(sink, 3))
        cluster.together([functools.partial(w.run, [number], job.steps) for number, w in enumerate(workers)])
        state = cluster.state()
        assert_same_end(state, reference(job))
        assert max(pages) > min(pages)
        assert lane.name == ("tcp" if lost else "shm")
        assert [bool(worker.trainer.weights.memory.shared) for worker in workers] == [not lost, True]
        for worker in workers:
            assert worker.early_steps == job.steps - 1
            assert all(torch.equal(worker.values[name], value) for name, value in state.params.items())


def test_workers_that_run_the_optimizer_refuse_zero_copy() -> None:
    with (
        Cluster(make_job("momentum", model=Wide, apply="worker"), ps=1, lane="shm") as cluster,
        pytest.raises(UsageError, match="zero_copy needs servers that run the optimizer"),
    ):
        cluster.worker(0, zero_copy=True)


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

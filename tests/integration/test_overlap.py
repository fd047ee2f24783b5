"""Gradients leave during the backward pass, the next forward pass waits per layer: the bits stay the reference's."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

from shardline import schedule
from shardline.client.exchange.streaming_payloads import LivePayloads, Unready
from shardline.client.layout import copy_each
from shardline.client.step.early_push import Expected
from shardline.division import Key
from shardline.errors import JobError, NonFiniteError
from shardline.lanes.base import Lane
from shardline.model import named_values
from shardline.testing import ReferenceResult, reference
from shardline.waist import Exchanged, Push, Sender
from tests.integration.test_asynchronous import plain_torch
from tests.integration.test_deaths import received
from tests.integration.test_equivalence import data_with_a_nan
from tests.support.cluster import COMPUTE, Cluster, assert_same_end, split_evenly
from tests.support.covering import covering
from tests.support.jobs import Rich, Wide, make_job
from tests.support.overlap import Layers, LosingLane, Middle, OverlapWorker
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("no_push_is_small")
SMALL_BUCKETS = 256


@functools.cache
def rich_end(optimizer: str, clip_norm: float) -> ReferenceResult:
    return reference(make_job(optimizer, model=Rich, clip_norm=clip_norm))


def train(cluster: Cluster, ownership: list[list[int]], **settings: Any) -> list[OverlapWorker]:
    """Train with one worker per entry, each with these replicas."""
    workers = [OverlapWorker(cluster, index, **settings) for index in range(len(ownership))]
    cluster.workers.extend(workers)
    steps = cluster.job.steps
    cluster.together([functools.partial(w.run, owned, steps) for w, owned in zip(workers, ownership, strict=True)])
    return workers


@pytest.mark.part(of=3, first=1)
@pytest.mark.parametrize(("workers", "ps", "clip_norm"), covering([1, 2, 3], [1, 2, 3], [0.0, 0.05]))
def test_any_number_of_workers_and_ps_ends_in_the_bits_of_the_reference(
    workers: int, ps: int, clip_norm: float
) -> None:
    job = make_job("adam", model=Rich, clip_norm=clip_norm)
    with Cluster(job, ps=ps, bucket_bytes=SMALL_BUCKETS * ps) as cluster:
        held = train(cluster, split_evenly(3, workers))
        assert_same_end(cluster.state(), rich_end("adam", clip_norm))
        assert [len(worker.figures) for worker in held] == [job.steps] * workers
        # Where one replica is one push, all steps but the first overlap; [0, 2] makes two pushes.
        assert held[-1].early_steps == job.steps - 1


CASES: dict[str, dict[str, Any]] = {
    "microbatches": {"accumulate": 3, "batch_size": 2},
    "cut tensors": {"model": Wide, "steps": 3},
    "schedule and clipping": {"schedule": schedule.step(2, 0.5), "clip_norm": 0.1},
    "one replica": {"replicas": 1},
    "one worker with every replica": {"replicas": 5, "batch_size": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_every_setting_ends_in_the_bits_of_the_reference(case: str) -> None:
    job = make_job("nesterov", **{"model": Rich, **CASES[case]})
    with Cluster(job, ps=2, bucket_bytes=96 << 10 if case == "cut tensors" else SMALL_BUCKETS) as cluster:
        (worker,) = train(cluster, [list(range(job.replicas))])
        assert_same_end(cluster.state(), reference(job))
        assert worker.early_steps == job.steps - 1


@pytest.mark.parametrize("ps", [1, 2])
def test_an_asynchronous_worker_is_plain_torch_to_the_bit(ps: int) -> None:
    job = make_job("adamw", model=Rich, consistency="async")
    with Cluster(job, ps=ps, bucket_bytes=SMALL_BUCKETS) as cluster:
        worker = OverlapWorker(cluster, 0)
        cluster.workers.append(worker)
        worker.run_async(range(8))
        expected = named_values(plain_torch(job, 8))
        state = cluster.state()
        for name, value in {**state.params, **state.buffers}.items():
            assert torch.equal(value, expected[name]), name
        assert worker.early_steps == 7


@pytest.mark.parametrize("clip_norm", [0.0, 0.2], ids=["eager", "clipped"])
def test_a_nan_that_is_met_while_others_have_left_skips_the_step_everywhere(clip_norm: float) -> None:
    job = make_job("adam", model=Rich, dataset=data_with_a_nan, nan_policy="skip", clip_norm=clip_norm)
    expected = reference(job)
    assert len(expected.skipped) == 1
    with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        train(cluster, [[0], [1], [2]])
        assert_same_end(cluster.state(), expected)


class Spoiled(nn.Module):
    """A gradient that is not finite in the first layer only, from one step on, although the loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 64), nn.Linear(64, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden: torch.Tensor = self.first(x)
        if self.calls > 3:
            hidden.register_hook(lambda gradient: gradient * float("inf"))  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, self.last(hidden))


def test_a_nan_stops_the_job_with_the_sentence_it_always_has() -> None:
    job = make_job("sgd", model=Spoiled, replicas=1)
    with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        worker = OverlapWorker(cluster, 0)
        cluster.workers.append(worker)
        with pytest.raises(NonFiniteError, match=r"step 3, replica 0: the gradient of 'first\..*' has NaN or infinity"):
            worker.run([0], job.steps)
        assert set(worker.orders.nonfinite) <= {"first.weight", "first.bias"}
        # The last layer's gradient may have been applied before, the first one's never.
        steps = {image.step for shard in cluster.images() for image in shard}
        assert steps <= {3, 4}
        assert 3 in steps


# Deaths


class Died(BaseException):
    """What a person's code raises, or the end of a process."""


@pytest.mark.parametrize("clip_norm", [0.0, 0.05], ids=["eager", "voted"])
def test_a_worker_that_dies_in_its_backward_pass_is_replaced_and_the_bits_stay(clip_norm: float) -> None:
    job = make_job("adam", model=Middle, clip_norm=clip_norm)
    with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS, members={"worker/0": 1, "worker/1": 1}) as cluster:
        doomed, survivor = OverlapWorker(cluster, 1), OverlapWorker(cluster, 0)
        cluster.workers.append(survivor)
        left: list[int] = []

        def die() -> None:
            if doomed.trainer.step < 3:
                return
            # The last layer's gradients are on their way and some have been counted.
            wait_for(lambda: sum(received(cluster, s, 1, 3) for s in range(2)) > 0, "the first bucket to be counted")
            left.append(sum(received(cluster, s, 1, 3) for s in range(2)))
            raise Died

        cast(Middle, doomed.model).between = die

        def live_and_die() -> None:
            with pytest.raises(Died):
                doomed.run([1], job.steps)
            doomed.close()
            assert all(not value._post_accumulate_grad_hooks for value in doomed.values.values() if value.requires_grad)
            for control in cluster.controls:
                control.set_membership(cluster.timeline, {"worker/0": 1, "worker/1": 2})
            heir = OverlapWorker(cluster, 1, incarnation=2)
            cluster.workers.append(heir)
            heir.run([1], job.steps)

        cluster.together([lambda: survivor.run([0, 2], job.steps), live_and_die])
        assert_same_end(cluster.state(), reference(job))
        buckets = sum(len(shard.buckets) for shard in cluster.shards)
        assert 0 < left[0] < buckets
        assert [shard.tally.duplicate_mismatches for shard in cluster.shards] == [0, 0]


def test_exchanges_that_break_during_the_backward_pass_are_made_again_and_change_no_bit() -> None:
    job = make_job("adam", model=Rich, replicas=1, steps=6)
    lanes: list[LosingLane] = []

    def losing(lane: Lane) -> Lane:
        lanes.append(LosingLane(lane, steps=[2, 4], times=2))
        return lanes[-1]

    with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        train(cluster, [[0]], wrap=losing)
        assert_same_end(cluster.state(), reference(job))
    assert [lane.broken for lane in lanes] == [4, 4]


def test_a_backward_pass_that_outlasts_the_calls_deadline_is_no_failure() -> None:
    class Impatient(LosingLane):
        def exchange(self, sender: Sender, contributions: Sequence[Push], *args: Any, **more: Any) -> Exchanged:
            for push in contributions:
                assert isinstance(push.payloads, LivePayloads)
                push.payloads.be_patient(0.05)
                calls[push.step] = calls.get(push.step, 0) + 1
            try:
                return super().exchange(sender, contributions, *args, **more)
            except Unready:
                unready.append(contributions[0].step)
                raise

    job = make_job("adam", model=Middle, replicas=1, steps=4)
    calls: dict[int, int] = {}
    unready: list[int] = []
    with Cluster(job, ps=1, bucket_bytes=SMALL_BUCKETS) as cluster:
        worker = OverlapWorker(cluster, 0, wrap=lambda lane: Impatient(lane, steps=[], times=0))
        cluster.workers.append(worker)
        trainer = worker.trainer
        cast(Middle, worker.model).between = lambda: wait_for(
            lambda: not trainer.open.leaves_early or trainer.step in unready, "the call to end"
        )
        worker.run([0], job.steps)
        assert_same_end(cluster.state(), reference(job))
    # Each is made again when there is more to send.
    assert sorted(set(unready)) == [1, 2, 3]
    assert calls[0] == 1
    assert all(calls[step] >= 2 for step in (1, 2, 3))


def test_gradients_are_freed_when_their_step_is_closed() -> None:
    job = make_job("sgd", model=Layers, replicas=1, steps=3)
    with Cluster(job) as cluster:
        worker = OverlapWorker(cluster, 0)
        cluster.workers.append(worker)
        worker.run([0], 2)
        with COMPUTE:
            worker.pass_of(2, 0, [0])
        gradients = [weakref.ref(value.grad) for value in worker.values.values() if value.grad is not None]
        assert len(gradients) == 5
        worker.send()
        worker.settle()
        worker.model.zero_grad(set_to_none=True)
        gc.collect()
        assert [found() for found in gradients] == [None] * 5


def test_a_gradient_that_changes_after_it_has_left_is_refused() -> None:
    job = make_job("sgd", model=Layers, replicas=1, steps=3)
    with Cluster(job) as cluster:
        worker = OverlapWorker(cluster, 0)
        cluster.workers.append(worker)
        worker.run([0], 2)
        trainer = worker.trainer
        batch = worker.source.batch(2, 0, 0)

        def backward() -> dict[str, torch.Tensor]:
            job.loss(worker.model, batch).backward()  # type: ignore[no-untyped-call]
            return {name: value.grad for name, value in worker.values.items() if value.grad is not None}

        worker.model.zero_grad(set_to_none=True)
        trainer.begin()
        trainer.expect(Expected(replica=0, owned=[0]))
        backward()
        with pytest.raises(JobError, match=r"the gradient of '.*' was changed after .* --no-overlap"):
            trainer.contribute(0, backward())
        trainer.give_up()
        trainer.exchange.arm()
        trainer.locate([0], cluster.timeline)
        trainer.expect(Expected(replica=0, owned=[0]))
        worker.model.zero_grad(set_to_none=True)
        gradients = backward()
        torch.nn.utils.clip_grad_norm_(worker.model.parameters(), 0.01)
        # The first step after a start is not overlapped: what is done to gradients before the end is done to it.
        trainer.contribute(0, gradients)
        trainer.finish()


class Channels(nn.Module):
    """Weights that are not contiguous: what arrives for them is carried over when somebody reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, (1, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, (1, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.stack([x, x * x], dim=1)[:, :, None]
        return cast(torch.Tensor, self.out(torch.tanh(self.second(self.norm(self.first(x)))).flatten(1)))


def test_weights_that_are_not_contiguous_are_whole_when_they_are_read() -> None:
    job = make_job("momentum", model=Channels)
    assert not job.build_model().get_parameter("second.weight").is_contiguous()
    with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        train(cluster, [[0], [1], [2]])
        assert_same_end(cluster.state(), reference(job))


class LazyDevice:
    """Stands for a GPU that begins nothing before somebody waits for it: see shardline.client.exchange.device.HostPath.

    What is read too early is old, what is overwritten too early is wrong: both change the bits.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._loads: dict[Key, Callable[[], None]] = {}
        self._marks = 0
        self._fences = 0
        self.loaded = 0
        self.locked = 0

    def pinned(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(elements, dtype=dtype)

    def lock_pages(self, memory: memoryview) -> bool:
        self.locked += 1
        return True

    def mark(self) -> int:
        self._marks += 1
        return self._marks

    @contextlib.contextmanager
    def after(self, events: Sequence[int]) -> Iterator[Callable[[list[torch.Tensor], list[torch.Tensor]], None]]:
        assert events
        assert all(mark <= self._marks for mark in events)
        yield copy_each

    def fence(self) -> None:
        with self._lock:
            assert not self._loads, "a load was not waited for when the model was given free again"
        self._fences += 1

    def load(self, key: Key, copy: Callable[[], None]) -> None:
        assert self._fences
        with self._lock:
            assert key not in self._loads
            self._loads[key] = copy

    def await_host_memory(self, key: Key) -> None:
        self.join([key])

    @property
    def unjoined(self) -> bool:
        return bool(self._loads)

    def join(self, keys: Iterable[Key]) -> None:
        for key in keys:
            with self._lock:
                copy = self._loads.pop(key, None)
                if copy is not None:
                    copy()
                    self.loaded += 1


@pytest.mark.parametrize(("lane", "per_layer"), covering(["grpc", "shm"], [True, False]))
def test_a_device_that_copies_late_is_waited_for_before_anybody_reads(
    lane: str, per_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[LazyDevice] = []

    def lazy(tensors: Iterable[torch.Tensor]) -> LazyDevice:
        devices.append(LazyDevice())
        return devices[-1]

    job = make_job("adam", model=Rich, steps=6)
    with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS, lane=lane) as cluster:
        monkeypatch.setattr("shardline.client.step.weights.host_path", lazy)
        train(cluster, [[0, 1], [2]], per_layer=per_layer)
        assert_same_end(cluster.state(), reference(job))
    assert [device.loaded > 20 for device in devices] == [True] * 2
    # Gradients go into the shared segment itself.
    assert [device.locked > 20 for device in devices] == [lane == "shm"] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine")
@pytest.mark.parametrize("clip_norm", [0.0, 0.05], ids=["eager", "voted"])
def test_a_gpu_ends_in_the_same_bits_with_and_without_overlap(clip_norm: float) -> None:
    job = make_job("adam", model=lambda: Rich().cuda(), clip_norm=clip_norm, steps=8)
    ends = []
    for overlap in (True, False):
        with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
            # One worker: two in one process draw their dropout from one generator, the device's, in any order.
            if overlap:
                train(cluster, [[0, 1, 2]])
            else:
                cluster.train([[0, 1, 2]])
            ends.append(cluster.state())
    for name, value in ends[0].params.items():
        assert torch.equal(value, ends[1].params[name]), name
    for name, value in ends[0].buffers.items():
        assert torch.equal(value, ends[1].buffers[name]), name

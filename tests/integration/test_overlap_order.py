"""Which gradient leaves first, what the next forward pass waits for, and when the model is written to."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch

from shardline.client.exchange.streaming_payloads import pull_order
from shardline.client.layout import homes
from shardline.client.step import early_push
from shardline.core.tensor_bytes import Buffer
from shardline.lanes.base import Lane
from shardline.testing import reference
from shardline.waist import Arrival, Exchanged, Payload, Payloads, Push, Sender, Sink, Want
from tests.support.cluster import COMPUTE, PATIENCE_S, Cluster, assert_same_end
from tests.support.jobs import make_job
from tests.support.overlap import Layers, LosingLane, Middle, OverlapWorker
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("no_push_is_small")
SMALL_BUCKETS = 256


class RecordingLane(LosingLane):
    """Notes in which order buckets leave; holds the first batch back until it is told."""

    def __init__(self, lane: Lane) -> None:
        super().__init__(lane, steps=[], times=0)
        self.sent: dict[int, list[int]] = {}
        self.go_on = threading.Event()
        self.go_on.set()

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        noted = [replace(push, payloads=self.Noted(push.payloads, self, push.step)) for push in contributions]
        return self._lane.exchange(sender, noted, want, sink, timeout_s=timeout_s)

    class Noted:
        def __init__(self, payloads: Payloads, lane: RecordingLane, step: int) -> None:
            self._payloads, self._lane, self._step = payloads, lane, step

        @property
        def nbytes(self) -> int:
            return self._payloads.nbytes

        @property
        def empty(self) -> Sequence[int]:
            return self._payloads.empty

        def batches(self) -> Iterator[Sequence[Payload]]:
            order = self._lane.sent.setdefault(self._step, [])
            for batch in self._payloads.batches():
                order.extend(item.bucket for item in batch)
                assert self._lane.go_on.wait(PATIENCE_S)
                yield batch


def test_what_is_ready_first_leaves_first_and_then_what_is_needed_first_overtakes() -> None:
    job = make_job("sgd", model=Layers, replicas=1, steps=4)
    lanes: list[RecordingLane] = []

    def recording(lane: Lane) -> Lane:
        lanes.append(RecordingLane(lane))
        return lanes[-1]

    with Cluster(job, bucket_bytes=256) as cluster:
        worker = OverlapWorker(cluster, 0, wrap=recording, credit_bytes=256)
        cluster.workers.append(worker)
        (lane,) = lanes
        model = cast(Layers, worker.model)
        names = [
            {cluster.plan.tensors[piece.tensor].name for piece in bucket.slices}
            for bucket in cluster.plan.shards[0].buckets
        ]
        bucket_of = {name: number for number, held in enumerate(names) for name in held}
        assert len(bucket_of) == len(names) == 5

        def stand_still() -> None:
            # From the last layer's gradient to the end of the backward pass the link is busy with that gradient.
            if worker.trainer.open.leaves_early:
                wait_for(lambda: bool(lane.sent.get(worker.trainer.step)), "the last layer's gradient to leave")
                lane.go_on.clear()

        model.after_last = stand_still
        plain = worker.send

        def send() -> None:
            lane.go_on.set()
            plain()

        worker.send = send  # type: ignore[method-assign]
        worker.run([0], job.steps)
        assert_same_end(cluster.state(), reference(job))
        order = [f"layers.{number}.weight" for number in range(4)]
        for step in range(1, 4):
            sent = lane.sent[step]
            assert sent[0] == bucket_of["out.weight"]
            rest = [name for number in sent[1:] for name in names[number]]
            # One more may have been taken from the queue when the link became busy.
            assert rest == order or rest[1:] == [name for name in order if name != rest[0]]


class LateLane(RecordingLane):
    """Delivers one bucket late: when it is told."""

    def __init__(self, lane: Lane) -> None:
        super().__init__(lane)
        self.late = -1
        self.may_come = threading.Event()

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        deferred: list[Arrival] = []
        late = self.late

        class Deferring:
            def buffer(self, arrival: Arrival) -> memoryview:
                return sink.buffer(arrival)

            def done(self, arrival: Arrival) -> None:
                if arrival.bucket == late and contributions:
                    deferred.append(arrival)
                else:
                    sink.done(arrival)

            def whole(self, arrival: Arrival, payload: Buffer) -> None:
                self.buffer(arrival)[:] = payload
                self.done(arrival)

            def take(self, arrival: Arrival, memory: memoryview) -> None:
                sink.take(arrival, memory)

        found = self._lane.exchange(sender, contributions, want, Deferring(), timeout_s=timeout_s)
        if deferred:
            assert self.may_come.wait(PATIENCE_S), "the layers before did not run"
            self.may_come.clear()
            sink.done(deferred[0])
        return found


@pytest.mark.parametrize("late", ["layers.3.weight", "out.weight"])
def test_the_next_forward_pass_runs_up_to_the_layer_that_has_not_come(late: str) -> None:
    job = make_job("sgd", model=Layers, replicas=1, steps=4)
    lanes: list[LateLane] = []

    def delaying(lane: Lane) -> Lane:
        lanes.append(LateLane(lane))
        return lanes[-1]

    with Cluster(job, bucket_bytes=256) as cluster:
        worker = OverlapWorker(cluster, 0, wrap=delaying)
        cluster.workers.append(worker)
        (lane,) = lanes
        model = cast(Layers, worker.model)
        number = [spec.name for spec in cluster.plan.tensors].index(late)
        waited: list[list[int]] = []
        plain = worker.wait_for

        def wait_for_tensors(tensors: Iterable[int]) -> None:
            wanted = list(tensors)
            if number in wanted and worker.trainer.weights.arrivals.waiting:
                waited.append(list(model.ran))
                lane.may_come.set()
            plain(wanted)

        worker.wait_for = wait_for_tensors  # type: ignore[method-assign]
        worker.run([0], 1)
        lane.late = next(iter(homes(cluster.plan)[number]))[1]
        model.ran.clear()
        worker.trainer.exchange.arm()
        for _ in range(3):
            with COMPUTE:
                worker.pass_of(worker.trainer.step, 0, [0])
            worker.send()
            model.ran.clear()
        lane.may_come.set()
        worker.settle()
        assert_same_end(cluster.state(), reference(job))
        # Everything before the late layer had run when somebody asked for it.
        before = list(range(3 if late.startswith("layers") else 4))
        assert waited
        assert all(ran == before for ran in waited), waited


def test_nothing_is_written_to_the_model_while_a_backward_pass_may_still_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What a shard answers first follows the step before; here always what a backward pass has first.
    monkeypatch.setattr(early_push, "pull_order", lambda ranks, **_: pull_order(ranks, at_once=False))
    job = make_job("sgd", model=Middle, replicas=1, steps=4)
    with Cluster(job, bucket_bytes=SMALL_BUCKETS) as cluster:
        worker = OverlapWorker(cluster, 0)
        cluster.workers.append(worker)
        model, trainer = cast(Middle, worker.model), worker.trainer
        seen: list[bool] = []

        def look() -> None:
            if trainer.open.leaves_early:
                before = model.last.weight.detach().clone()
                wait_for(lambda: bool(trainer.weights.sinks[0].arrived), "the last layer's next parameters")
                seen.append(torch.equal(model.last.weight, before))

        model.between = look
        worker.run([0], job.steps)
        assert seen == [True] * 3
        assert_same_end(cluster.state(), reference(job))

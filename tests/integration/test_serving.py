"""What a ps owes its peers: no starvation, no unbounded memory, one server per port, an end without stray errors."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
import time
import tracemalloc

import grpc
import pytest
import torch
from torch import nn

from shardline.client.exchange.shard_exchange import Interrupted, Restart
from shardline.client.step.weights import BucketSink
from shardline.core.outcome import Outcome
from shardline.core.timeouts import Timeouts
from shardline.errors import ShardlineError, UsageError
from shardline.lanes.grpc.client import GrpcLane
from shardline.rpc.channel import Peer, channel_options
from shardline.rpc.client import PsControl
from shardline.rpc.messages.data import data_header, ps_stub, pull_request
from shardline.rpc.server import WATCHER, RpcServer
from shardline.security import key_of
from shardline.waist import Want
from tests.support.cluster import PATIENCE_S, TIMELINE, Cluster, Ps
from tests.support.jobs import make_job
from tests.support.waiting import wait_for


def test_waiting_pulls_do_not_hold_up_a_push_and_are_all_answered_by_it() -> None:
    waiting = 16
    with Cluster(make_job("sgd", replicas=1)) as cluster:
        worker = cluster.worker(0)
        worker.trainer.locate([0], cluster.timeline)
        elements = [bucket.elements for bucket in cluster.plan.shards[0].buckets]
        peers = [Peer("ps/0", cluster.hosts[0].address, cluster.timeouts) for _ in range(waiting)]

        def wait(peer: Peer) -> Outcome:
            sink = BucketSink(worker.trainer.weights.layout, 0, worker.trainer.weights.coding)
            sink.done = lambda arrival: None  # type: ignore[method-assign]
            lane = GrpcLane(peer, 0, elements)
            want = Want(step=1, wait_s=PATIENCE_S)
            done = lane.exchange(cluster.sender("bench/0"), [], want, sink, timeout_s=PATIENCE_S)
            assert done.end is not None
            return done.end.outcome

        signal = cluster.hosts[0].store.signals[(0, 0)]

        def push() -> float:
            wait_for(lambda: signal.waiters >= waiting, "the pulls to wait")
            start_s = time.monotonic()
            worker.step([0])
            return time.monotonic() - start_s

        *outcomes, push_s = cluster.together([*[functools.partial(wait, peer) for peer in peers], push])
        assert outcomes == [Outcome.SERVED] * waiting
        assert push_s < 5.0
        for peer in peers:
            peer.close()


def test_a_pull_that_waits_too_long_names_the_replicas_it_waits_for() -> None:
    with Cluster(make_job("sgd"), timeouts=Timeouts(total_s=20.0)) as cluster:
        worker = cluster.worker(0)
        worker.trainer.locate([0, 2], cluster.timeline)
        worker.trainer.contribute(0, {})
        worker.trainer.contribute(2, {})

        def push() -> None:
            with pytest.raises(Interrupted):
                worker.trainer.finish()

        pushed = threading.Thread(target=push)
        pushed.start()
        wait_for(lambda: cluster.shards[0].mode.waiting_for() == [1], "two contributions")
        elements = [bucket.elements for bucket in cluster.plan.shards[0].buckets]
        peer = Peer("ps/0", cluster.hosts[0].address, cluster.timeouts)
        lane = GrpcLane(peer, 0, elements)
        sink = BucketSink(worker.trainer.weights.layout, 0, worker.trainer.weights.coding)
        end = lane.exchange(cluster.sender("bench/0"), [], Want(step=1, wait_s=0.1), sink, timeout_s=5.0).end
        assert end is not None and end.outcome is Outcome.WAITING
        assert end.waiting_for == (1,)
        assert end.reason == "step 1 is waiting for replicas 1 at shard 0 after 0.1 s"
        worker.trainer.exchange.interrupt()
        pushed.join(PATIENCE_S)
        assert not pushed.is_alive()
        peer.close()


class Large(nn.Module):
    """64 MB in buckets of 2 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4096, 4096), requires_grad=False)
        self.out = nn.Parameter(torch.zeros(3))


def test_a_client_that_stops_reading_makes_the_ps_hold_a_few_chunks_only() -> None:
    with Cluster(make_job("sgd", model=Large, replicas=1)) as cluster:
        host = cluster.hosts[0]
        # A client's own gRPC reads ahead by a window that grows with the link's speed, without bound on a loopback;
        # with a fixed one, what is encoded beyond it is what the ps holds.
        options = [*channel_options(cluster.timeouts), ("grpc.http2.bdp_probe", 0)]
        peer = Peer("ps/0", host.address, cluster.timeouts)
        peer.channel.close()
        peer.channel = grpc.insecure_channel(host.address, options=options)
        stub = ps_stub(peer)
        request = pull_request(data_header(cluster.sender("bench/0"), 0), Want(step=0, wait_s=5.0))
        calls = [stub.Pull(request, timeout=PATIENCE_S) for _ in range(4)]
        for call in calls:
            next(call)  # the first chunk, and no more
        wire = [-1]

        def settled() -> bool:
            pause = threading.Event()
            wire[0] = host.store.traffic.pull_wire_bytes
            pause.wait(0.3)
            return host.store.traffic.pull_wire_bytes == wire[0]

        wait_for(settled, "the ps to be held back")
        # Bytes encoded so far, of which the client has read 4 chunks and the rest is in flight or in memory.
        assert wire[0] <= len(calls) * (8 << 20), f"{wire[0]:,} bytes were encoded for clients that don't read"
        for call in calls:
            call.cancel()
        again = stub.Pull(request, timeout=PATIENCE_S)
        assert sum(len(reply.frame.chunk.payload) for reply in again) == cluster.plan.shards[0].nbytes
        peer.close()


def test_a_second_server_on_a_port_is_refused_with_the_port_named(capfd: pytest.CaptureFixture[str]) -> None:
    first = Ps(0, Timeouts(total_s=10.0))
    try:
        port = first.address.rpartition(":")[2]
        with pytest.raises(UsageError, match=f"can't listen on 127.0.0.1:{port} .*is another process using port"):
            RpcServer(first.address).start()
    finally:
        first.close()
    # gRPC logs a failure of its own before ours.
    assert "Failed to add port" not in capfd.readouterr().err
    # Nothing was left bound.
    Ps(0, Timeouts(total_s=10.0), address=first.address).close()


def test_a_ps_that_ends_in_mid_training_leaves_its_workers_with_an_error_that_names_it() -> None:
    job = make_job("sgd", replicas=2, steps=10_000)
    with Cluster(job, ps=2, timeouts=Timeouts(total_s=2.0)) as cluster:
        workers = [cluster.worker(0), cluster.worker(1)]
        errors: list[BaseException] = []

        def run(index: int) -> None:
            with pytest.raises((ShardlineError, Interrupted)) as caught:
                workers[index].run([index], job.steps)
            errors.append(caught.value)

        def end() -> None:
            wait_for(lambda: cluster.shards[1].step_min >= 3, "some steps")
            cluster.hosts[1].close()

        cluster.together([lambda: run(0), lambda: run(1), end])
        assert any("ps/1 at " in str(error) for error in errors), errors
        skew = {bucket.step for bucket in cluster.shards[0].buckets}
        assert max(skew) - min(skew) <= 1


def test_what_grpc_keeps_beside_a_call_ends_with_it_and_is_cancelled_only_where_it_does_not() -> None:
    server = RpcServer("127.0.0.1:0")
    server.start()
    ended: list[str] = []

    async def watch(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
            ended.append(f"{name} ended")
        except asyncio.CancelledError:
            ended.append(f"{name} was cancelled")

    async def begin() -> list[asyncio.Task[None]]:
        return [
            asyncio.create_task(watch("soon", 0.1), name=WATCHER),
            asyncio.create_task(watch("never", 600.0), name=WATCHER),
            asyncio.create_task(watch("a call", 600.0)),
        ]

    kept = server.run(begin(), timeout_s=PATIENCE_S)
    server.close(grace_s=0.0)
    assert ended == ["a call was cancelled", "soon ended", "never was cancelled"] and all(task.done() for task in kept)


def test_the_memory_of_a_training_ps_does_not_grow_with_its_steps() -> None:
    job = make_job("adam", steps=40)
    with Cluster(job, ps=2, cut_every=1) as cluster:
        worker = cluster.worker(0).run([0, 1, 2], 10)
        held = [shard.held_bytes for shard in cluster.shards]
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            worker.run([0, 1, 2], job.steps)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # The budget of cuts that nobody fetches was full before.
        assert [shard.held_bytes for shard in cluster.shards] == held
        assert after - before < 400_000


@pytest.mark.parametrize("name", ["another", ""])
def test_a_server_of_another_job_at_the_port_of_a_dead_one_is_not_taken_for_it(name: str) -> None:
    """Both have the same timeline, plan and lives; one has the same name, too."""
    job = make_job("sgd", replicas=1, steps=10_000)
    with Cluster(job, members={"worker/0": 1}, term=1) as cluster:
        worker, address, configuration = cluster.worker(0), cluster.hosts[0].address, cluster.configuration(0)
        others: list[Ps] = []

        def end() -> None:
            wait_for(lambda: cluster.shards[0].step_min >= 3, "some steps")
            cluster.hosts[0].close()
            others.append(Ps(0, cluster.timeouts, address=address))
            control = PsControl("ps/0", address, cluster.timeouts, term=1, chief_uuid="another")
            control.lead()
            control.configure(dataclasses.replace(configuration, job=name or configuration.job))
            control.set_membership(TIMELINE, {"worker/0": 1}, keys={"worker/0": key_of(b"another's secret")})
            control.close()

        def run() -> None:
            said = ""
            while "this ps has job 'another'" not in said and "the message is not from worker/0" not in said:
                # After this a worker waits for the chief's word, and asks again.
                with pytest.raises(Restart) as caught:
                    worker.run([0], job.steps)
                said = str(caught.value)

        cluster.together([run, end])
        with pytest.raises(ShardlineError, match="this ps obeys the chief of term 1"):
            # Its steps are not this job's.
            cluster.controls[0].status()
        others[0].close()

"""Twice as many workers take the chief at most twice the work, in what it does for all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardline.core.orders import BarrierPlace, Orders, Phase
from shardline.core.spec import TensorSpec
from shardline.errors import ShardlineError
from shardline_chief.io.streams import Streams
from tests.support.chief_cluster import Cluster, make_job
from tests.support.counting import assert_grows_at_most_linearly

STAGED = tuple(TensorSpec(name=f"w{stage}", shape=(64,), dtype="float32", fragment=stage) for stage in (0, 1))
JOBS: dict[str, Callable[[int], dict[str, Any]]] = {
    "replicas": lambda count: {"replicas": count},
    "replicas in stages": lambda count: {"replicas": count // 2, "pipeline": "flush", "tensors": STAGED},
    "a barrier": lambda count: {"replicas": count, "script": True},
}


class Kept:
    """A channel that keeps the last orders."""

    orders = Orders()

    def send(self, orders: Orders) -> None:
        self.orders = orders

    def close(self) -> None:
        raise AssertionError("no stream ends here")

    def refuse(self, error: ShardlineError) -> None:
        raise AssertionError(error)


def running(count: int, job: str) -> Cluster:
    """A job that this number of workers train; at a barrier all but one have arrived."""
    cluster = Cluster(job=make_job(**JOBS[job](count)), workers=count, max_workers=count)
    cluster.start(count)
    assert cluster.program.state.phase is Phase.RUNNING
    for index in range(count - 1 if job == "a barrier" else 0):
        cluster.beat(f"worker/{index}", barrier=BarrierPlace(begun=True, step=1, number=0))
    return cluster


@pytest.mark.parametrize("job", JOBS)
def test_orders_for_all_tasks_grow_as_the_workers_do(job: str) -> None:
    def prepare(count: int) -> Callable[[], object]:
        cluster = running(count, job)
        streams, channels = Streams(cluster.program), {key: Kept() for key in cluster.lives.items()}

        def act() -> None:
            # Twice: with orders that are new to all, and with the same again.
            for _ in range(2):
                for key, channel in channels.items():
                    streams.heard(key, channel, alive=True)
                streams.push_orders()
            sent = [channel.orders for (task, _), channel in channels.items() if task.startswith("worker/")]
            assert all(orders.workers == count for orders in sent)
            assert (
                len({replica for orders in sent for replica in orders.replicas})
                == cluster.program.job_view().job.replicas
            )
            assert {len(orders.posts) for orders in sent} == {count if job == "replicas in stages" else 0}
            waiting = [orders for orders in sent if orders.barrier and not orders.barrier.passed]
            assert len(waiting) == (count - 1 if job == "a barrier" else 0)

        return act

    assert_grows_at_most_linearly(prepare, 16)


@pytest.mark.parametrize("job", JOBS)
def test_rows_of_all_tasks_grow_as_the_workers_do(job: str) -> None:
    def prepare(count: int) -> Callable[[], object]:
        cluster = running(count, job)
        return lambda: cluster.program.rows(cluster.now_s)

    assert_grows_at_most_linearly(prepare, 16)

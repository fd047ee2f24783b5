"""A cluster in one process whose workers go through aggregators."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.placement import Post
from shardline.job import Job
from shardline.topology import Hop
from shardline_aggregator.aggregator import Aggregator
from tests.support.cluster import Cluster


class Aggregated(Cluster):
    """Its workers, made after the aggregators, exchange with these."""

    def __init__(self, job: Job, *, aggregators: int = 1, workers: int = 2, **more: Any) -> None:
        super().__init__(job, **more)
        self.num_workers = workers
        self.moved: Counter[tuple[str, str]] = Counter()
        """Bytes between aggregators and servers, by ("push" or "pull", ps)."""
        self.between = [self.start_aggregator(index) for index in range(aggregators)]

    def start_aggregator(self, index: int) -> Aggregator:
        """A new life of an aggregator, which admits the first life of all workers."""
        cluster = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:2",), "aggregator": ("127.0.0.1:0",) * 9})
        config = RoleConfig(role="aggregator", index=index, cluster=cluster, timeouts=self.timeouts, lane=self.lane)

        def count(peer: str, kind: str, codec: str, nbytes: int) -> None:
            self.moved[kind, peer] += nbytes

        made = Aggregator(config, "127.0.0.1:0", count=count)
        self.aggregators[index] = Hop(f"aggregator/{index}", made.start())
        self.renew(made, index)
        return made

    def renew(self, aggregator: Aggregator, index: int) -> None:
        members = [Post(task=f"worker/{n}", address="", incarnation=1) for n in range(self.num_workers)]
        aggregator.renew(self.view, Identity(f"aggregator/{index}", 1), members)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers.clear()
        for aggregator in self.between:
            aggregator.close()
        super().close()

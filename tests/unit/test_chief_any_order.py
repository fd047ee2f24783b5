"""Whatever dies, in whatever order: drawn from seeds."""

from __future__ import annotations

import random

import pytest

from shardline.core.orders import Phase
from tests.support.chief_cluster import Cluster, T, make_job, phase


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_whatever_dies_in_whatever_order_the_job_ends_well_when_all_come_back(mode: str) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        cluster = Cluster(job=make_job(mode=mode, checkpoint_every=10 if mode == "async" else 0), ps=3, workers=2)
        cluster.start()
        for _ in range(12):
            event = draw.choice(["ps", "ps", "worker", "steps", "time"])
            if event == "ps":
                number = draw.randrange(3)
                cluster.kill_ps(number)
                if draw.random() < 0.5:
                    cluster.tick(draw.choice([1, T / 3 + 2]))
                cluster.restart_ps(number)
            elif event == "worker":
                index = draw.randrange(2)
                cluster.program.stream_broken(f"worker/{index}", cluster.lives[f"worker/{index}"], cluster.now_s)
                cluster.settle()
                cluster.join("worker", index)
            elif event == "time":
                cluster.tick(draw.choice([0.1, 3]))
            elif phase(cluster) is Phase.RUNNING:
                for ps in cluster.ps:
                    ps.advance(ps.step + 3)
                    if mode == "async":
                        ps.version += 3
                cluster.tick()
        for _ in range(10):
            cluster.tick(1)
            if cluster.program.state.work.initializer:
                cluster.initialize()
        assert cluster.finish is None, (seed, cluster.finish)
        assert phase(cluster) is Phase.RUNNING, (seed, cluster.text())
        state = cluster.program.state
        held = sorted(number for ps in cluster.ps for number in ps.shards)
        assert held == [place.shard for place in state.layout.placement], seed
        assert all(ps.active and ps.timeline == state.layout.timeline for ps in cluster.ps if ps.shards), seed
        if mode == "sync":
            cluster.advance(100)
            assert cluster.finish is not None, seed
            assert cluster.finish.exit_code == 0

"""Gradients leave during the backward pass, the next forward pass waits per layer: the bits stay the reference's."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from shardline.testing import ReferenceResult, reference
from tests.integration.cluster import Cluster, assert_same_end, split_evenly
from tests.integration.jobs import Rich, make_job
from tests.integration.overlap import OverlapWorker

SMALL_BUCKETS = 256


@functools.cache
def rich_end(optimizer: str, clip_norm: float) -> ReferenceResult:
    return reference(make_job(optimizer, model=Rich, clip_norm=clip_norm))


def train(cluster: Cluster, ownership: list[list[int]], **settings: Any) -> list[OverlapWorker]:
    """Train with one worker per entry, each with these replicas."""
    workers = [OverlapWorker(cluster, index, **settings) for index in range(len(ownership))]
    cluster._workers.extend(workers)
    steps = cluster.job.steps
    cluster.together([functools.partial(w.run, owned, steps) for w, owned in zip(workers, ownership, strict=True)])
    return workers


@pytest.mark.parametrize("clip_norm", [0.0, 0.05], ids=["eager", "voted"])
@pytest.mark.parametrize("ps", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 3])
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

"""What a script knows of its place in the job, and from when on."""

from __future__ import annotations

import json

import pytest
import torch

import shardline

CLUSTER = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"], "worker": ["127.0.0.1:0"] * 3}


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_worker_knows_its_replica_before_it_is_attached(consistency: str) -> None:
    session = shardline.connect(
        cluster=json.dumps(CLUSTER), task="worker/2", consistency=consistency, timeout_s=2.0, name="script"
    )
    try:
        assert (session.replica, session.num_replicas) == (2, 3)
        # What it is needed for.
        sampler = torch.utils.data.DistributedSampler(
            range(9),  # type: ignore[arg-type]
            num_replicas=session.num_replicas,
            rank=session.replica,
            shuffle=False,
        )
        assert list(sampler) == [2, 5, 8]
    finally:
        session.shutdown()

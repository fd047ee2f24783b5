"""Shards move between servers of a running job, and the job ends with the bits of one process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.support import (
    HandCluster,
    assert_refused,
    expected_sha256,
    shardline,
    slow_job,
    summary_of,
    wait_for_event,
    wait_for_step,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_servers_join_and_leave_a_running_job_which_keeps_its_bits(tmp_path: Path) -> None:
    job, out = slow_job(tmp_path / "job.py", replicas=2, width=20_000, steps=100_000), tmp_path / "out"
    with HandCluster.write(tmp_path, ps=3, worker=2) as cluster:
        everything = cluster.path.read_text()
        # The chief is started for two servers; the third is one of tomorrow's.
        cluster.path.write_text(json.dumps({**cluster.tasks, "ps": cluster.tasks["ps"][:2]}))
        chief = cluster.start("chief/0", "--job", job, "--out", out, "--shards", "4")
        for task in ("ps/0", "ps/1"):
            cluster.start(task)
        for task in ("worker/0", "worker/1"):
            cluster.start(task, "--job", job)
        wait_for_step(out, 10, while_runs=chief)
        assert_refused(shardline("drain", "ps/7", "--cluster", cluster.path), 2, r"ps/7 is no living server.*ps/[01]")
        drained = shardline("drain", "ps/1", "--cluster", cluster.path)
        assert drained.code == 0, drained
        assert drained.out == "shard 1 moves to ps/0\nshard 3 moves to ps/0\nps/1 holds no shard; it can be stopped\n"
        cluster.commands["ps/1"].signal(signal.SIGTERM)
        assert cluster.commands["ps/1"].finish().code == 0
        wait_for_event(out, "left", "ps/1 is leaving as requested; it held nothing")
        cluster.path.write_text(everything)
        for task in ("ps/1", "ps/2"):
            cluster.start(task)
            wait_for_event(out, "joined", f"^{task} ", more_than=int(task == "ps/1"))
        back = shardline("rebalance", "--cluster", cluster.path)
        assert back.code == 0 and " moves to ps/1\n" in back.out and " moves to ps/2\n" in back.out, back
        assert shardline("stop", "--cluster", cluster.path).code == 0
        for task, command in cluster.commands.items():
            assert command.finish().code == 0, (task, command.finish())
    summary = summary_of(out)
    assert summary["recoveries"] == []
    assert summary["sha256"] == expected_sha256(job, steps=summary["steps"])

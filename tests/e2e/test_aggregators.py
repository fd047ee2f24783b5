"""Real workers behind real aggregators, which die in the middle of steps: the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.core.tensor_bytes import params_sha256
from shardline.job import load_job
from tests.e2e.support import (
    PATIENCE_S,
    expected_sha256,
    mortal_cluster,
    slow_job,
    summary_of,
    train,
    wait_for_event,
    wait_until,
    write_job,
)
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]


def test_three_workers_behind_two_aggregators_end_where_one_process_does(tmp_path: Path) -> None:
    job, out = write_job(tmp_path / "job.py", steps=12, replicas=6, topology="aggregators"), tmp_path / "out"
    finished = train(job, out, "--ps", "2", "--workers", "3", "--tasks", "aggregator=2")
    assert finished.code == 0, finished
    assert summary_of(out)["sha256"] == expected_sha256(job)


CODED = {"codec_up": "onebit", "codec_down": "delta:by=int8,refresh=50", "checkpoint_every": 50}


@pytest.mark.parametrize(
    ("kills", "codecs"), [pytest.param(3, {}, id="raw", marks=pytest.mark.long), pytest.param(1, CODED, id="coded")]
)
def test_an_aggregator_that_is_killed_again_and_again_changes_no_bit(
    tmp_path: Path, kills: int, codecs: dict[str, Any]
) -> None:
    settings = {"steps": 80 * kills, "replicas": 4, **codecs}
    job = slow_job(tmp_path / "job.py", step_s=0.03, topology="aggregators", **settings)
    out = tmp_path / "out"
    with mortal_cluster(job, out, workers=4, tasks=(("aggregator", 2),)) as cluster:
        for number in range(kills):
            # Whoever has come back is used again.
            log = out / "logs" / f"worker-{2 * (number % 2)}.log"
            used = f"aggregator/{number % 2} at"
            wait_until(lambda: log.read_text().count(used) > 2 * (number // 2), "its way goes through it")  # noqa: B023
            cluster.kill(f"aggregator/{number % 2}", restart=True)
            wait_for_event(out, "joined", f"^aggregator/{number % 2} ", more_than=1 + number // 2)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, cluster.log_tail("chief/0", 30)
    found = summary_of(out)["sha256"]
    if not codecs:
        assert found == expected_sha256(job)
        return
    flat = load_job(write_job(tmp_path / "flat.py", **settings))
    with Cluster(flat) as straight:
        straight.train([[0], [1], [2], [3]])
        assert found == params_sha256(straight.state().params)


def test_one_host_has_one_speaker_and_another_after_its_death(tmp_path: Path) -> None:
    job = slow_job(tmp_path / "job.py", step_s=0.03, steps=160, replicas=4, topology="local-sum")
    out = tmp_path / "out"
    with mortal_cluster(job, out, workers=4, ps=1) as cluster:
        log = out / "logs" / "worker-3.log"
        wait_until(lambda: "worker/0 at" in log.read_text(), "its way goes through the first worker")
        cluster.kill("worker/0", restart=True)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, cluster.log_tail("chief/0", 30)
    assert summary_of(out)["sha256"] == expected_sha256(job)

"""The chief is killed while its job trains: it is started again at its place, and training goes on as before.

Part of `make chaos-e2e`, not of `make test`: each of these takes about ten seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.support import PATIENCE_S, events, expected_sha256, mortal_cluster, slow_job, summary_of, wait_for_event

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(300)]


def journal(out: Path) -> list[dict[str, object]]:
    """All entries of all terms, oldest first."""
    files = sorted((out / "chief").glob("journal-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def test_a_killed_chief_comes_back_and_no_step_is_made_again(tmp_path: Path) -> None:
    steps = 100
    job = slow_job(
        tmp_path / "job.py",
        replicas=2,
        steps=steps,
        checkpoint_every=25,
    )
    out = tmp_path / "run"
    with mortal_cluster(job, out) as cluster:
        pids = {task: cluster.pid(task) for task in cluster.tasks()}
        wait_for_event(out, "checkpoint", "checkpoint of step 25")
        cluster.kill("chief/0")
        assert cluster.wait(timeout_s=PATIENCE_S) == 0
        kept = [task for task, pid in pids.items() if cluster.pid(task) == pid]
    assert kept == ["ps/0", "ps/1", "worker/0", "worker/1"]
    found = summary_of(out)
    assert found["steps"] == steps
    assert found["sha256"] == expected_sha256(job)
    assert found["chief_restarts"] == 1
    assert found["recoveries"] == []
    assert any("no step is repeated" in text for text in events(out))
    begun = [entry["timeline"] for entry in journal(out) if entry["kind"] == "timeline" and entry["state"] == "active"]
    assert begun == [1 << 32 | 1]
    assert [entry["takes_over"] for entry in journal(out) if entry["kind"] == "chief"] == [None, 1]
    assert journal(out)[-1]["kind"] == "closed"


def test_a_killed_chief_of_an_asynchronous_job_hands_no_acknowledged_batch_out_again(tmp_path: Path) -> None:
    job = slow_job(
        tmp_path / "job.py",
        consistency="async",
        steps=600,
        checkpoint_every=50,
    )
    out = tmp_path / "run"
    with mortal_cluster(job, out, evaluators=1) as cluster:
        wait_for_event(out, "checkpoint", "checkpoint of step [5-9]")
        cluster.kill("chief/0")
        wait_for_event(out, "adopted", "no step is repeated")
        assert cluster.wait(timeout_s=PATIENCE_S) == 0
    found = summary_of(out)
    assert found["chief_restarts"] == 1
    assert found["recoveries"] == []
    assert found["repeated_batches"] == 0
    assert found["versions"] == [600, 600]
    assert found["evaluation"]["last"]["step"] == 600


def test_a_chief_and_a_server_killed_together_cost_steps_and_no_bit(tmp_path: Path) -> None:
    job = slow_job(
        tmp_path / "job.py",
        replicas=2,
        steps=120,
        checkpoint_every=10,
        step_s=0.03,
    )
    out = tmp_path / "run"
    with mortal_cluster(job, out) as cluster:
        wait_for_event(out, "checkpoint", "checkpoint of step [12]0")
        cluster.kill("chief/0")
        cluster.kill("ps/1")
        assert cluster.wait(timeout_s=PATIENCE_S) == 0
    found = summary_of(out)
    assert found["steps"] == 120
    assert found["sha256"] == expected_sha256(job)
    assert [recovery["task"] for recovery in found["recoveries"]] == ["ps/1"]

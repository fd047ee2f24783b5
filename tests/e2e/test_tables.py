"""Embedding tables in clusters of processes whose tasks die."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch

from shardline import EmbeddingTable, connect
from shardline.checkpoint import find_checkpoint
from shardline.checkpoint.manifest import step_folder
from shardline.cli.launcher import LocalCluster
from shardline.errors import CheckpointError, JobError, MismatchError, UsageError
from shardline.nn import Embedding
from tests.e2e.support import (
    PATIENCE_S,
    TABLED,
    events,
    expected_sha256,
    mortal_cluster,
    shardline,
    summary_of,
    train,
    wait_for_event,
    write_job,
)

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]


def read_beside(out: Path, cluster: LocalCluster) -> None:
    """Read a checkpoint of a running job as a client that is none of its tasks."""
    ids = torch.tensor([[997, 0], [-997, 123456789]])
    spec = cluster.options.spec(cluster.chief_address).to_json()
    with connect(cluster=spec, read_only=True) as reader:
        read, step = reader.rows("signs", ids), reader.step
        assert read.shape == (2, 2, 4)
        with pytest.raises(CheckpointError, match="no table 'sings'"):
            reader.rows("sings", ids)
        with pytest.raises(JobError, match=r"table 'signs': ids are torch.float32; they must be"):
            reader.rows("signs", ids.float())
        with pytest.raises(MismatchError, match="table 'signs' has dim 4 in the checkpoint, 8 in the model"):
            reader.load(Embedding(EmbeddingTable("signs", 8)))
        stored = find_checkpoint(out / "checkpoints" / step_folder(step))
        assert torch.equal(read.view(4, 4), stored.rows("signs", ids.view(-1)))
        layer, tensors = Embedding(EmbeddingTable("signs", 4)), reader.tensors()
        reader.load(layer)
        assert torch.equal(layer(ids), read) and "last.weight" in tensors
        assert reader.refresh() == reader.step >= step
    with pytest.raises(UsageError, match="this reader is closed"):
        layer(ids)
    with pytest.raises(UsageError, match="takes cluster and timeout_s only; leave out task"):
        connect(cluster=spec, read_only=True, task="worker/0")


def test_deaths_of_every_role_change_no_bit(tmp_path: Path) -> None:
    slow = {"imports": "import time", "after_loss": "time.sleep(0.02)"}
    job, out = (
        write_job(
            tmp_path / "job.py", steps=60, replicas=3, checkpoint_every=10, checkpoint_keep=9, after=TABLED, **slow
        ),
        tmp_path / "run",
    )
    with mortal_cluster(job, out, evaluators=1) as cluster:
        wait_for_event(out, "evaluation", "^step 10: ")
        read_beside(out, cluster)
        cluster.kill("ps/1")
        wait_for_event(out, "evaluation", "^step 30: ")
        for task in ("chief/0", "worker/1"):
            cluster.kill(task)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, cluster.log_tail("chief/0", 30)
    found = summary_of(out)
    assert found["sha256"] == expected_sha256(job)
    assert found["recoveries"], events(out)
    # Onto one server, and on.
    finished = train(job, out, "--workers", "1", "--ps", "1", "--steps", "70", "--resume")
    assert finished.code == 0, finished
    assert summary_of(out)["sha256"] == expected_sha256(job, steps=70)
    rows = shardline("lookup", str(out), "signs", "997", "123456789")
    assert rows.code == 0, rows
    known, initial = map(json.loads, rows.out.splitlines())
    assert (known["stored"], initial["stored"]) == (True, False) and len(known["values"]) == 4
    assert max(map(abs, initial["values"])) <= 0.05 < max(map(abs, known["values"]))


def test_a_table_on_a_server_and_the_rest_among_the_workers_keep_their_bits_through_deaths(tmp_path: Path) -> None:
    slow = {"imports": "import time", "after_loss": "time.sleep(0.02)"}
    settings = {"steps": 40, "replicas": 2, "checkpoint_every": 10, "after": TABLED, **slow}
    job, out = write_job(tmp_path / "job.py", **settings), tmp_path / "run"
    with mortal_cluster(job, out, ps=3, with_ps=True, min_workers=2) as cluster:
        wait_for_event(out, "plan", "2 among the workers and 1 on servers")
        for task, step in (("ps/2", 10), ("worker/1", 20)):
            wait_for_event(out, "checkpoint", f"of step {step}: ")
            cluster.kill(task)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, cluster.log_tail("chief/0", 30)
    assert summary_of(out)["sha256"] == expected_sha256(job)
    assert len(summary_of(out)["recoveries"]) == 2, events(out)
    # On servers alone, and back.
    for steps, flags in ((50, ["--workers", "1"]), (60, ["--mirrored", "2", "--ps", "1"])):
        finished = train(job, out, *flags, "--steps", str(steps), "--resume")
        assert finished.code == 0, finished
        assert summary_of(out)["sha256"] == expected_sha256(job, steps=steps)


WIDE = (
    TABLED.replace('EmbeddingTable("signs", 4, rule="adam:lr=0.05")', 'EmbeddingTable("signs", 300, memory_rows=1024)')
    .replace("nn.Linear(4, 4)", "nn.Linear(300, 4)")
    .replace("(points * 3)", "(points * 3000)")
)
"""More rows than fit into memory."""


def test_a_full_disk_ends_the_job_which_goes_on_elsewhere(tmp_path: Path) -> None:
    slow = {"imports": "import time", "after_loss": "time.sleep(0.05)"}
    job = write_job(tmp_path / "job.py", replicas=3, checkpoint_every=2, after=WIDE, **slow)
    out, other = tmp_path / "run", tmp_path / "other"
    with mortal_cluster(job, out, ps=1) as cluster:
        resource.prlimit(cluster.pid("ps/0"), resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        assert cluster.wait(timeout_s=PATIENCE_S) == 6, cluster.log_tail("chief/0", 30)
    said = events(out)[-1]
    assert f"table 'signs' can't keep rows beyond its memory_rows in {out}, where they take 1,04" in said
    other.mkdir()
    finished = train(job, out, "--workers", "1", "--ps", "2", "--cold-dir", other, "--resume")
    assert finished.code == 0, finished
    found = summary_of(out)
    assert found["sha256"] == expected_sha256(job)
    assert found["tables"]["signs"]["disk_rows"] > 500 and found["tables"]["signs"]["memory_misses"] > 500
    assert not [*other.iterdir(), *out.glob("shardline-rows-*")]

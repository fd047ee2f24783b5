"""Certificates that end while a job trains: replaced in time, they cost nothing."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import pytest
import trustme

from shardline.checkpoint import committed_steps
from tests.e2e.support import (
    Command,
    expected_sha256,
    summary_of,
    train_command,
    wait_for_step,
    wait_until,
    write_job,
)

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

LIFE_S = 40
TASKS = ("chief-0", "ps-0", "worker-0", "worker-1")
# Half a second per step until the file is there.
SLOWLY = "[time.sleep(0.05) for _ in range(10) if not os.path.exists({path!r})]"


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def issue(ca: trustme.CA, folder: Path, end: datetime.datetime) -> None:
    leaf = ca.issue_cert("127.0.0.1", not_after=end)
    for name, blob in (("own.key", leaf.private_key_pem), ("own.pem", leaf.cert_chain_pems[0])):
        blob.write_to_path(str(folder / "new"))
        (folder / "new").replace(folder / name)


def test_a_job_whose_certificates_are_replaced_before_they_end_has_its_final_cut(tmp_path: Path) -> None:
    ca, out, go = trustme.CA(), tmp_path / "run", tmp_path / "go"
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    job = write_job(tmp_path / "job.py", imports="import os, time", after_loss=SLOWLY.format(path=str(go)), steps=200)
    end = now() + datetime.timedelta(seconds=LIFE_S)
    issue(ca, tmp_path, end)
    files = ["--tls-ca", tmp_path / "ca.pem", "--tls-cert", tmp_path / "own.pem", "--tls-key", tmp_path / "own.key"]
    command = Command(*train_command(job, out, "--ps", "1", "--workers", "2", "--lane", "tcp", *files))
    wait_for_step(out, 3, while_runs=command)
    later = now() + datetime.timedelta(days=30)
    issue(ca, tmp_path, later)
    said = f"own.pem as read now, valid until {later:%Y-%m-%d}"
    for task in TASKS:
        log = out / "logs" / f"{task}.log"
        wait_until(lambda log=log: said in log.read_text(), f"{task} to use them", while_runs=command)  # type: ignore[misc]
    assert now() < end, "the certificates ended before they were replaced"
    # A certificate is still valid in its last second.
    time.sleep((end - now()).total_seconds() + 1.0)
    go.touch()
    finished = command.finish()
    assert finished.code == 0, finished
    assert summary_of(out)["sha256"] == expected_sha256(job)
    assert committed_steps(out / "checkpoints")[-1] == 200

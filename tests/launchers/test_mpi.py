"""Open MPI's mpirun, on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from shardline.host.ports import held_port
from tests.e2e.support import expected_sha256, summary_of, write_job
from tests.launchers.support import Started

MPIRUN = shutil.which("mpirun")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: apt-get install openmpi-bin"),
]


def test_ranks_of_mpirun_train_the_job(tmp_path: Path) -> None:
    job, out = write_job(tmp_path / "job.py", replicas=1, steps=30), tmp_path / "run"
    with held_port() as held:
        port = held.getsockname()[1]
    assert MPIRUN is not None
    command = [MPIRUN, "--oversubscribe", "-n", "3", "-x", f"MASTER_PORT={port}"]
    command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    run = [sys.executable, "-P", "-m", "shardline", "run", job, "--out", out, "--page", "off", "--timeout", "60"]
    ended = Started([*command, *run], tmp_path / "log", env={"OMPI_MCA_plm_rsh_agent": "false"}).end()
    assert ended.code == 0, ended.said
    assert "worker/0 place from Open MPI, task 2 of 3" in ended.said
    assert summary_of(out)["sha256"] == expected_sha256(job)

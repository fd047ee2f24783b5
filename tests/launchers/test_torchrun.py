"""torchrun itself, on this machine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from shardline.host.ports import held_port
from tests.e2e.support import expected_sha256, processes, slow_job, summary_of, wait_for_step, write_job
from tests.launchers.support import DIGITS, SCRIPT, Ended, Started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TIMEOUT = ("--timeout", "60")


def test_ranks_are_workers_and_the_first_hosts_the_rest(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", replicas=2, steps=30)
    out = tmp_path / "run"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "shardline", "run", job, "--ps", "2"]
    ended = Started([*command, "--out", out, *TIMEOUT], tmp_path / "log").end()
    assert ended.code == 0, ended.said
    assert "worker/1 place from torchrun, rank 1 of 2" in ended.said and "joined as worker/1" in ended.said
    found = summary_of(out)
    assert (found["steps"], len(found["versions"]), found["replicas"]) == (30, 2, 2)
    assert found["sha256"] == expected_sha256(job)


@pytest.mark.long
def test_two_agents_meet_and_the_folder_has_a_name_of_its_own(tmp_path: Path) -> None:
    """Two agents on this machine, as on two nodes: names instead of loopback, and the store in the first agent."""
    with held_port() as held:
        port = held.getsockname()[1]
    flags = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "localhost", "--master-port", str(port)]
    run = ["-m", "shardline", "run", DIGITS, "--ps", "1", "--steps", "40", "--insecure-bind", *TIMEOUT]
    agents = [
        Started([*TORCHRUN, "--node-rank", str(node), *flags, *run], tmp_path / f"log-{node}", cwd=tmp_path)
        for node in range(2)
    ]
    for agent in agents:
        ended = agent.end()
        assert ended.code == 0, ended.said
    (out,) = (tmp_path / "runs").iterdir()
    assert out.name.startswith("job-") and summary_of(out)["steps"] == 40


def test_a_script_is_a_worker_in_each_rank(tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    assert text.count("STEPS = 500") == 1
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(text.replace("STEPS = 500", "STEPS = 40\nimport os\nassert 'RANK' not in os.environ"))
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "shardline", "run", "--script", script]
    ended = Started([*command, "--out", out, *TIMEOUT], tmp_path / "log").end()
    assert ended.code == 0, ended.said
    found = summary_of(out)
    assert (found["steps"], found["job"], found["replicas"]) == (40, "train", 2)
    assert "replica 1 of 2: test accuracy" in ended.said


def test_a_killed_rank_restarts_the_group_which_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    job = slow_job(tmp_path / "job.py", replicas=2, steps=150, checkpoint_every=10)
    out = tmp_path / "run"
    command = [*TORCHRUN, "--standalone", "--max-restarts", "1", "--nproc-per-node", "2", "-m", "shardline", "run", job]
    started = Started([*command, "--out", out, "--timeout", "20"], tmp_path / "log")
    wait_for_step(out, 25)
    (victim,) = [
        pid
        for pid, line in processes(os.environ["E2E_RUN_ID"]).items()
        if "shardline run" in line and "torch.distributed.run" not in line and rank_of(pid) == "1"
    ]
    os.kill(victim, signal.SIGKILL)
    ended = started.end()
    assert ended.code == 0, ended.said
    assert "restarted 1 time" in ended.said
    found = summary_of(out)
    assert found["sha256"] == expected_sha256(job)
    assert found["checkpoint_step"] == 150


def test_a_job_that_can_not_be_ends_with_its_sentence(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "shardline", "run", tmp_path / "no.py"]
    ended: Ended = Started(command, tmp_path / "log").end()
    assert ended.code != 0
    assert "exitcode  : 2" in ended.said and "does not exist" in ended.said


def rank_of(pid: int) -> str:
    parts = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((part[5:].decode() for part in parts if part.startswith(b"RANK=")), "")

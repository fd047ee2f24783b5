"""Slurm itself, on this machine: batch jobs whose steps are clusters."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support import events, expected_sha256, processes, slow_job, summary_of, wait_for_step, write_job
from tests.launchers import slurm
from tests.launchers.slurm import Slurm

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
]
RUN = f"{sys.executable} -P -m shardline run"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def step(job: Path, out: Path, *flags: str, tasks: int = 5, nodes: int = 1) -> str:
    return f"srun -N {nodes} -n {tasks} {RUN} {job} --out {out} --page off {' '.join(flags)}"


def task_process(task: str) -> int:
    """Process id of a step's task; srun's own command line names none."""
    (found,) = [
        pid for pid in processes(os.environ["E2E_RUN_ID"]) if numbered(pid) == task and command(pid).startswith(RUN)
    ]
    return found


def numbered(pid: int) -> str:
    parts = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((part.split(b"=")[1].decode() for part in parts if part.startswith(b"SLURM_PROCID=")), "")


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_a_steps_tasks_train_the_job(cluster: Slurm, tmp_path: Path) -> None:
    job, out = write_job(tmp_path / "job.py", replicas=2, steps=30, checkpoint_every=10), tmp_path / "out"
    flags = ("--ps", "2", "--evaluators", "1", "--timeout", "60")
    number = cluster.submit(step(job, out, *flags, tasks=6), "-N1", "-n6")
    assert cluster.wait(number, "COMPLETED", "FAILED") == "COMPLETED", cluster.log(number)
    assert "worker/1 place from Slurm, task 5 of 6" in cluster.log(number)
    found = summary_of(out)
    assert (found["steps"], len(found["versions"]), found["sha256"]) == (30, 2, expected_sha256(job))


def test_a_step_that_is_cancelled_writes_a_checkpoint_from_which_the_next_goes_on(
    cluster: Slurm, tmp_path: Path
) -> None:
    job, out = slow_job(tmp_path / "job.py", replicas=2, steps=120), tmp_path / "out"
    run = step(job, out, "--timeout", "30", "--resume", tasks=4)
    number = cluster.submit(f"{run}; echo ended with $?\n{run}", "-N1", "-n4")
    wait_for_step(out, 15)
    cluster.call("scancel", "--signal=TERM", f"{number}.0")
    assert cluster.wait(number, "COMPLETED", "FAILED") == "COMPLETED", cluster.log(number)
    assert "ended with 0" in cluster.log(number)
    assert summary_of(out)["sha256"] == expected_sha256(job)
    (stopped,), (restored,) = events(out, "stop_step"), events(out, "restore")
    assert stopped.removeprefix("the job stops at ") in restored


def test_a_job_that_is_requeued_goes_on_from_its_newest_checkpoint(cluster: Slurm, tmp_path: Path) -> None:
    job = slow_job(tmp_path / "job.py", replicas=1, steps=150, checkpoint_every=10)
    number = cluster.submit(
        f"cd {tmp_path} && srun -n 3 {RUN} {job} --page off --timeout 30", "-N1", "-n3", "--requeue"
    )
    out = tmp_path / "runs" / f"job-slurm-{number}"
    wait_for_step(out, 25)
    os.kill(task_process("0"), signal.SIGKILL)
    cluster.call("scontrol", "requeue", number)
    cluster.wait(number, "PENDING", "RUNNING")
    assert cluster.wait(number, "COMPLETED", "FAILED") == "COMPLETED", cluster.log(number)
    assert "restarted 1 time" in cluster.log(number)
    assert summary_of(out)["sha256"] == expected_sha256(job)


def test_nodes_whose_names_lead_nowhere_are_named_before_training(cluster: Slurm, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py")
    number = cluster.submit(
        f"{step(job, tmp_path / 'out', '--insecure-bind', tasks=4, nodes=2)}; echo ended with $?", "-N2", "-n4"
    )
    cluster.wait(number, "COMPLETED", "FAILED")
    assert "ended with 2" in cluster.log(number)
    assert "the chief's host 'node1' has no address" in cluster.log(number)


def test_a_step_with_fewer_tasks_than_roles_is_refused(cluster: Slurm, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py")
    number = cluster.submit(f"{step(job, tmp_path / 'out', '--ps', '2', tasks=3)}; echo ended with $?", "-N1", "-n3")
    cluster.wait(number, "COMPLETED", "FAILED")
    assert "ended with 2" in cluster.log(number)
    assert "Slurm started 3 tasks, but 1 chief, 2 ps" in cluster.log(number)
    assert not (tmp_path / "out").exists()

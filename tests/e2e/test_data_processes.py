"""Jobs and scripts that read their data in processes of their own, with every start method."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import (
    PATIENCE_S,
    assert_refused,
    expected_sha256,
    mortal_cluster,
    slow_job,
    summary_of,
    train,
    wait_for_step,
    write_job,
)

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

JOB = """
import torch
from shardline import Job
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Squares(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), index / 64.0), torch.tensor([float(index)])

class Stream(IterableDataset):
    def __iter__(self):
        yield from DataLoader(Squares(), batch_size=None, num_workers={processes}, multiprocessing_context={start!r})

job = Job(
    model=lambda: torch.nn.Linear(4, 1),
    loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
    dataset=Stream(),
    optimizer="SGD",
    optimizer_args={{"lr": 0.01}},
    batch_size=8,
    replicas=2,
    steps={steps},
)
"""
SCRIPT = """
import torch
import shardline
from torch.utils.data import DataLoader, TensorDataset

def main():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(4, 1)
    session = shardline.connect()
    optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
    settings = {{"num_workers": 2, "multiprocessing_context": {start!r}, "persistent_workers": {persistent}}}
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, **settings)
    batches = iter(loader)
    for step in session.steps({steps}):
        if step % 4 == 0:
            batches = iter(loader)
        points, sums = next(batches)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(points), sums).backward()
        optimizer.step()
    session.close()

if __name__ == "__main__":
    main()
"""


@pytest.mark.part(of=3)
@pytest.mark.parametrize(("start", "processes", "steps"), [("fork", 2, 40), ("spawn", 1, 4), ("forkserver", 1, 4)])
def test_a_job_reads_through_a_data_loader_of_its_own(tmp_path: Path, start: str, processes: int, steps: int) -> None:
    """steps: those of ten passes or, where a child has to import torch, of one."""
    job, out = tmp_path / "job.py", tmp_path / "run"
    job.write_text(JOB.format(start=start, processes=processes, steps=steps))
    finished = train(job, out, "--workers", "1")
    assert finished.code == 0, finished
    assert summary_of(out)["steps"] == steps


@pytest.mark.part(of=4, first=3)
@pytest.mark.parametrize(
    ("start", "persistent", "steps"),
    [("fork", False, 80), ("fork", True, 40), ("spawn", True, 8), ("forkserver", True, 8)],
)
def test_a_script_reads_through_a_data_loader(tmp_path: Path, start: str, persistent: bool, steps: int) -> None:
    script, out = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT.format(start=start, persistent=persistent, steps=steps))
    finished = train(script, out, "--script", "--workers", "1")
    assert finished.code == 0, finished
    assert summary_of(out)["steps"] == steps


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"accumulate": 2}, id="sync"),
        pytest.param({"consistency": "async"}, id="async", marks=pytest.mark.long),
    ],
)
def test_a_job_with_loaders_makes_the_steps_of_one_without(tmp_path: Path, settings: dict[str, int | str]) -> None:
    job, out = write_job(tmp_path / "job.py", steps=24, replicas=2, **settings), tmp_path / "run"
    finished = train(job, out, "--workers", "1", "--loaders", "2")
    assert finished.code == 0, finished
    found = summary_of(out)
    assert found["steps"] == 24
    if "consistency" not in settings:
        assert found["sha256"] == expected_sha256(job)


@pytest.mark.long
def test_a_job_that_trains_locally_has_the_same_bits_with_loaders(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", steps=8, cadence="local-sgd:every=3")
    found = set()
    for loaders in ("0", "2"):
        finished = train(job, tmp_path / loaders, "--workers", "1", "--loaders", loaders)
        assert finished.code == 0, finished
        found.add(summary_of(tmp_path / loaders)["sha256"])
    assert len(found) == 1


def test_a_worker_that_is_killed_leaves_its_loaders_and_replicas_to_others(tmp_path: Path) -> None:
    job, out = slow_job(tmp_path / "job.py", replicas=3, steps=60, loaders=2), tmp_path / "run"
    with mortal_cluster(job, out, workers=2) as cluster:
        wait_for_step(out, 12)
        cluster.kill("worker/1")
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, [cluster.log_tail(task, 30) for task in cluster.tasks()]
    assert summary_of(out)["sha256"] == expected_sha256(job)


RAISES = "Points.__getitem__ = lambda self, index: [][index]"


def test_an_error_in_a_loader_ends_the_job_as_without_loaders(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", after=RAISES)
    sentences = set()
    for loaders in ("0", "2"):
        out = tmp_path / f"run{loaders}"
        finished = train(job, out, "--workers", "1", "--loaders", loaders)
        assert_refused(
            finished, 2, r"dataset\[\d+\] \(of 256\) raised IndexError: list index out of range \(.*job.py, line \d+\)"
        )
        sentences.add(summary_of(out)["reason"])
    assert len(sentences) == 1

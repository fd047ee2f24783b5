"""Jobs and scripts that read their data in processes of their own, with every start method."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import summary_of, train

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


@pytest.mark.parametrize(("start", "processes", "steps"), [("fork", 2, 40), ("spawn", 1, 4), ("forkserver", 1, 4)])
def test_a_job_reads_through_a_data_loader_of_its_own(tmp_path: Path, start: str, processes: int, steps: int) -> None:
    """steps: those of ten passes or, where a child has to import torch, of one."""
    job, out = tmp_path / "job.py", tmp_path / "run"
    job.write_text(JOB.format(start=start, processes=processes, steps=steps))
    finished = train(job, out, "--workers", "1")
    assert finished.code == 0, finished
    assert summary_of(out)["steps"] == steps


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

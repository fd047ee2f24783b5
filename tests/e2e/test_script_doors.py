"""Scripts in one process alone, and one written for DistributedDataParallel with three lines changed."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardline.core.timeouts import Timeouts
from tests.e2e.support import PATIENCE_S, mortal_cluster, summary_of

STEPS = 8

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn
import shardline

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
generator = torch.Generator().manual_seed(5)
data = torch.utils.data.TensorDataset(torch.randn(32, 6, generator=generator), torch.arange(32) % 3)
sampler = torch.utils.data.DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for points, labels in torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()
        scheduler.step()
    dist.barrier()
if rank == 0:
    torch.save(model.module.state_dict(), os.path.join(OUT, "model.pt"))
print("rank", rank, "of", world, flush=True)
dist.destroy_process_group()
"""
CHANGES = {
    'dist.init_process_group("gloo")': "shardline.init_process_group()",
    "nn.parallel.DistributedDataParallel(model)": "shardline.DistributedModel(model)",
    "optimizer = torch.optim.Adam(model.parameters(), lr=0.05)": (
        "optimizer = shardline.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05), model)"
    ),
}


def changed() -> str:
    text = SCRIPT
    for old, new in CHANGES.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def write(folder: Path, text: str) -> Path:
    folder.mkdir()
    path = folder / "script.py"
    path.write_text(f"OUT = {str(folder)!r}\n{text}")
    return path


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SHARDLINE_")}


@pytest.mark.e2e
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_script_for_ddp_trains_as_with_ddp_with_three_lines_changed(tmp_path: Path) -> None:
    theirs = write(tmp_path / "ddp", SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(theirs)]
    done = subprocess.run(torchrun, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    ours = write(tmp_path / "ours", changed())
    lines = difflib.ndiff(SCRIPT.splitlines(), changed().splitlines())
    assert sum(line.startswith("+ ") for line in lines) == 3
    run = tmp_path / "run"
    with mortal_cluster(ours, run, script=True, timeouts=Timeouts(total_s=PATIENCE_S)) as cluster:
        assert cluster.wait(timeout_s=2 * PATIENCE_S) == 0, [cluster.log_tail(f"worker/{i}", 20) for i in (0, 1)]
    assert summary_of(run)["steps"] == STEPS
    first, second = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("ddp", "ours"))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    for index in (0, 1):
        assert f"rank {index} of 2" in (run / "logs" / f"worker-{index}.log").read_text()


@pytest.mark.e2e
@pytest.mark.processes
def test_it_trains_with_python_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "ours", changed())
    done = subprocess.run(
        [sys.executable, str(path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "rank 0 of 1\n"), done.stderr
    assert (path.parent / "model.pt").is_file()


PLAIN = """
import torch, shardline
session = shardline.connect()
model = torch.nn.Linear(2, 1)
optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("made", session.step)
"""


@pytest.mark.e2e
@pytest.mark.processes
def test_a_script_runs_with_python_alone_and_says_so_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    done = subprocess.run(
        [sys.executable, script],
        env={**environment(), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "made 3\n"), done.stderr
    assert (
        done.stderr == "shardline: no cluster is given: training in this process alone; start the script with "
        "`shardline train --script train.py` for a cluster\n"
    )
    assert [*tmp_path.iterdir()] == [script]

"""shardline.launch: a function trains on a cluster of processes, as from a cell of a notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.support import RUN_ID, processes

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(180)]
CELLS = """
import sys

import torch
from torch import nn

import shardline

rate = 0.05


def train():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    session = shardline.connect(seed=3)
    optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=rate))
    for step in session.steps(12):
        samples = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 2 + session.replica))
        optimizer.zero_grad()
        loss = ((model(samples) - samples.sum(1, keepdim=True)) ** 2).mean()
        loss.backward()
        session.log_loss(loss)
        optimizer.step()


def fail():
    raise ValueError(f"no rate {rate}")


run = shardline.launch(train, ps=2, workers=2, out="one")
print("found", len(run.losses), run.losses[0] > run.losses[-1], sorted(run.state_dict()), run.summary["sha256"])
try:
    shardline.launch(fail, out="two", show=False)
except shardline.ShardlineError as error:
    print("failed", type(error).__name__, error)
"""


def test_a_function_of_the_main_module_trains_and_fails_with_its_own_sentence(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    (tmp_path / "cells.py").write_text(CELLS)
    environment = {**os.environ, RUN_ID: str(tmp_path)}
    command = [sys.executable, "cells.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=True
    )
    sha256 = json.loads((tmp_path / "one" / "summary.json").read_text())["sha256"]
    assert f"found 12 True ['bias', 'weight'] {sha256}" in done.stdout
    assert "12 steps in" in done.stdout
    failed = next(line for line in done.stdout.splitlines() if line.startswith("failed"))
    assert failed.startswith("failed UsageError worker/0: the script raised ValueError: no rate 0.05 (")
    assert not processes(str(tmp_path))

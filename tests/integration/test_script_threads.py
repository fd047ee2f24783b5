"""Scripts whose main thread ends while other threads are running: Python waits for them, the job does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.services import PATIENCE_S, Services

SCRIPT = """
import sys
import threading

import torch

import shardline


session = shardline.connect(name="loop")
model = torch.nn.Linear(2, 1)
optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train():
    for step in session.steps(3):
        optimizer.zero_grad()
        if sys.argv[1] == "main thread trains" or sys.stdin.readline():
            model(torch.ones(2)).sum().backward()
        optimizer.step()


if sys.argv[1] == "main thread trains":
    threading.Thread(target=sys.stdin.read, name="uploader").start()
    train()
else:
    threading.Thread(target=train).start()
"""


@pytest.mark.parametrize("how", ["main thread trains", "another thread trains"])
def test_a_script_has_done_its_part_when_the_thread_that_trains_has_ended(
    start: Callable[..., Services], tmp_path: Path, how: str
) -> None:
    services = start(ps=1, workers=1)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "SHARDLINE_CLUSTER": services.spec.to_json(), "SHARDLINE_TASK": "worker/0"}
    process = subprocess.Popen(
        [sys.executable, str(script), how], env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        if how == "main thread trains":
            # The job ends although the script can't.
            assert services.end()["steps"] == 3
            assert process.poll() is None
        _, said = process.communicate("\n\n\n", timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    if how == "main thread trains":
        assert "Python waits for its threads: uploader" in said
    else:
        assert services.end()["steps"] == 3

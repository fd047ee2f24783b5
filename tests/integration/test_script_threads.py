"""Scripts whose main thread ends while other threads are running: Python waits for them, the job does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.services import PATIENCE_S, Services
from tests.support.waiting import wait_for

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
    log = tmp_path / "script.log"
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, str(script), how], env=environment, stdin=subprocess.PIPE, stderr=said, text=True
        )
    try:
        if how == "main thread trains":
            # The job ends although the script can't.
            assert services.end()["steps"] == 3
            wait_for(lambda: "Python waits for its threads: uploader" in log.read_text(), "the script to say so")
            assert process.poll() is None
        process.communicate("\n\n\n", timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, log.read_text()
    if how == "another thread trains":
        assert services.end()["steps"] == 3

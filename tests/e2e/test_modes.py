"""SoftSync and bounded staleness with real processes: they learn, and neither a death nor the job's end blocks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import (
    PATIENCE_S,
    events,
    mortal_cluster,
    slow_job,
    summary_of,
    train,
    wait_for_event,
    wait_for_step,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "job.py"
# The rate of the example is for workers in step: where each pushes for itself, momentum adds up over their pushes.
CALM_DIGITS = f"""
import dataclasses
import runpy

digits = runpy.run_path({str(DIGITS)!r})["job"]
job = dataclasses.replace(digits, optimizer_args={{**digits.optimizer_args, "lr": 0.02}})
"""
WORKERS = 3


@pytest.mark.part(of=5, first=3)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("mode", "comes_back"), [("async", True), ("softsync", True), ("ssp", False), ("ssp:slack=1", True)]
)
def test_digits_are_learned_though_a_worker_dies(tmp_path: Path, mode: str, comes_back: bool) -> None:
    job, out = tmp_path / "job.py", tmp_path / "run"
    job.write_text(CALM_DIGITS, encoding="utf-8")
    options = {"workers": WORKERS, "evaluators": 1, "overrides": (("consistency", mode), ("checkpoint_every", "60"))}
    with mortal_cluster(job, out, **options) as cluster:
        wait_for_step(out, 60)
        cluster.kill("worker/1", restart=comes_back)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, events(out)
    found = summary_of(out)
    assert found["consistency"] == mode
    # 0.98 in step. Here batch norm's statistics are the last push's, which on a busy machine may be an old one.
    assert found["evaluation"]["last"]["metrics"]["accuracy"] >= 0.9
    # Every batch is in exactly one update, but for those that the dead worker had begun.
    pushes = WORKERS if mode.startswith("softsync") else 1
    versions, repeated = found["versions"], found["repeated_batches"]
    assert all(500 / pushes <= version <= 500 + repeated for version in versions), (versions, repeated)


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["softsync", "ssp:slack=1"])
@pytest.mark.parametrize("standbys", [0, 1])
def test_a_killed_ps_holds_nobody_back_for_ever(tmp_path: Path, mode: str, standbys: int) -> None:
    job = slow_job(tmp_path / "job.py", consistency=mode, steps=300, checkpoint_every=20, step_s=0.01)
    out = tmp_path / "run"
    with mortal_cluster(job, out, workers=WORKERS, standbys=standbys) as cluster:
        if standbys:
            for shard in (0, 1):
                wait_for_event(out, "standby", f"shard {shard} is protected")
        wait_for_event(out, "checkpoint", "checkpoint of step [2-9]")
        cluster.kill("ps/1")
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, events(out)
    found = summary_of(out)
    (recovery,) = found["recoveries"]
    assert recovery["task"] == "ps/1"
    assert not standbys or (recovery["lost"], found["lost_updates"]) == (0, 0)


# The first worker has less to do than the others, and is slower.
UNEVEN = """
import time
import torch
import shardline

session = shardline.connect()
model = torch.nn.Linear(3, 2)
optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
first = session.replica == 0
for step in session.steps(10 if first else 40):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    time.sleep(0.05 if first else 0.01)
    optimizer.step()
session.barrier()
print("all are there")
session.close()
"""


def test_workers_of_a_script_wait_for_a_slow_one_and_for_none_that_is_done(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "run"
    script.write_text(UNEVEN, encoding="utf-8")
    finished = train(script, out, "--script", "--ps", "2", "--workers", "2", "--consistency", "ssp:slack=2")
    assert finished.code == 0, finished
    assert summary_of(out)["versions"] == [50, 50]
    for replica in (0, 1):
        assert "all are there" in (out / "logs" / f"worker-{replica}.log").read_text()

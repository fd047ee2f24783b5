"""Servers killed under a job with standbys: another one takes over, nothing goes back, no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.core.tensor_bytes import params_sha256
from shardline.core.timeouts import Timeouts
from shardline.job import load_job
from tests.e2e.support import (
    DEATH_TIMEOUT_S,
    PATIENCE_S,
    events,
    expected_sha256,
    in_a_fork,
    mortal_cluster,
    slow_job,
    summary_of,
    wait_for_event,
    wait_for_step,
)
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]


def run_and_kill(
    folder: Path, *, steps: int, lane: str = "auto", also: tuple[str, ...] = (), timeout_s: float = 0.0, **settings: Any
) -> tuple[Path, Path]:
    """A job during which ps/1 dies, and others with it; returns the job and its output."""
    job = slow_job(folder / "job.py", steps=steps, **settings)
    tasks = (*also, "ps/1")
    in_a_fork(train_and_kill, folder=str(folder), tasks=tasks, lane=lane, timeout_s=timeout_s or DEATH_TIMEOUT_S)
    return job, folder / "run"


def train_and_kill(folder: str, tasks: list[str], lane: str, timeout_s: float) -> None:
    """Run the job of a folder there and kill these tasks once each shard has its standby."""
    job, out, timeouts = Path(folder, "job.py"), Path(folder, "run"), Timeouts(total_s=timeout_s)
    with mortal_cluster(job, out, standbys=1, lane=lane, timeouts=timeouts) as cluster:
        for shard in (0, 1):
            wait_for_event(out, "standby", f"shard {shard} is protected")
        wait_for_step(out, 10)
        for task in tasks:
            cluster.kill(task)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, cluster.log_tail("chief/0", 30)


@pytest.mark.parametrize("clip_norm", [0.0, pytest.param(0.5, marks=pytest.mark.chaos)], ids=["eager", "voted"])
def test_a_killed_ps_with_a_standby_costs_no_step_and_no_bit(tmp_path: Path, clip_norm: float) -> None:
    job, out = run_and_kill(tmp_path, steps=80, replicas=2, clip_norm=clip_norm)
    found = summary_of(out)
    assert (found["steps"], found["sha256"]) == (80, expected_sha256(job))
    (recovery,) = found["recoveries"]
    assert (recovery["task"], recovery["lost"]) == ("ps/1", 0)
    told = events(out)
    assert any("taken over: shard 1 by ps/0; no step is lost" in text for text in told), told
    assert not any("go back to step" in text for text in told), told


@pytest.mark.parametrize("cadence", ["easgd:every=2", "streaming-diloco:every=4,fragments=2"])
def test_replicas_keep_parameters_of_their_own_when_a_ps_with_a_standby_is_killed(tmp_path: Path, cadence: str) -> None:
    job, out = run_and_kill(tmp_path, steps=60, replicas=2, cadence=cadence)
    with Cluster(load_job(job)) as cluster:
        cluster.train([[0, 1]])
        assert summary_of(out)["sha256"] == params_sha256(cluster.state().params)
    (recovery,) = summary_of(out)["recoveries"]
    assert (recovery["task"], recovery["lost"]) == ("ps/1", 0)


@pytest.mark.chaos
def test_a_killed_ps_of_an_asynchronous_job_with_a_standby_loses_no_acknowledged_update(tmp_path: Path) -> None:
    _, out = run_and_kill(tmp_path, steps=200, consistency="async")
    found = summary_of(out)
    (recovery,) = found["recoveries"]
    assert (recovery["task"], recovery["lost"], found["lost_updates"]) == ("ps/1", 0, 0)
    # Batches that were under way are trained on again, and may land once more on the shard that had them.
    assert all(200 <= version <= 200 + found["repeated_batches"] for version in found["versions"])


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_ps_and_the_chief_killed_together_cost_nothing_that_was_acknowledged(tmp_path: Path, mode: str) -> None:
    # Two of them start again at the same time, and the chief waits for most of the servers.
    settings = {"steps": 120, "replicas": 2} if mode == "sync" else {"steps": 300, "consistency": "async"}
    job, out = run_and_kill(tmp_path, also=("chief/0",), timeout_s=60, checkpoint_every=25, **settings)
    found = summary_of(out)
    (recovery,) = found["recoveries"]
    assert (recovery["task"], recovery["lost"]) == ("ps/1", 0)
    assert found["chief_restarts"] == 1
    told = events(out)
    assert any("taken over: shard 1 by ps/0; no step is lost" in text for text in told), told
    assert not any("go back to step" in text for text in told), told
    if mode == "sync":
        assert (found["steps"], found["sha256"]) == (120, expected_sha256(job))
    else:
        assert found["lost_updates"] == 0
        assert all(300 <= version <= 300 + found["repeated_batches"] for version in found["versions"])


# Nothing here knows of steps(): the loop makes each step once, whatever happens to the servers.
PLAIN_LOOP = """
import time
import torch
import shardline

session = shardline.connect()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 4))
optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
for step in range(80):
    generator = torch.Generator().manual_seed(step * 10 + session.replica)
    optimizer.zero_grad()
    model(torch.randn(8, 30, generator=generator)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
session.close()
"""


def run_plain_loop(folder: Path, *, kill: bool, **options: Any) -> tuple[dict[str, Any], list[str]]:
    folder.mkdir()
    script, out = folder / "script.py", folder / "run"
    script.write_text(PLAIN_LOOP, encoding="utf-8")
    with mortal_cluster(script, out, script=True, standbys=1, **options) as cluster:
        for shard in (0, 1):
            wait_for_event(out, "standby", f"shard {shard} is protected")
        wait_for_step(out, 10)
        if kill:
            cluster.kill("ps/1")
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, events(out)
    return summary_of(out), events(out)


@pytest.mark.chaos
def test_a_loop_of_ones_own_does_not_see_that_a_ps_with_a_standby_was_killed(tmp_path: Path) -> None:
    undisturbed, _ = run_plain_loop(tmp_path / "undisturbed", kill=False)
    found, told = run_plain_loop(tmp_path / "killed", kill=True)
    (recovery,) = found["recoveries"]
    assert (recovery["task"], recovery["lost"], undisturbed["recoveries"]) == ("ps/1", 0, [])
    assert any("taken over: shard 1 by ps/0; no step is lost" in text for text in told), told
    assert (found["steps"], found["sha256"]) == (80, undisturbed["sha256"])


@pytest.mark.chaos
def test_an_asynchronous_loop_of_ones_own_loses_no_push_with_a_ps_that_has_a_standby(tmp_path: Path) -> None:
    found, _ = run_plain_loop(tmp_path / "run", kill=True, overrides=(("consistency", "async"),))
    (recovery,) = found["recoveries"]
    assert (recovery["task"], recovery["lost"], found["lost_updates"]) == ("ps/1", 0, 0)
    # Two workers of 80 pushes each, and none of them is made twice.
    assert found["versions"] == [160, 160]

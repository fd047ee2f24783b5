"""Servers that die while a job trains: it goes on by itself, from its newest checkpoint.

Part of `make chaos-e2e`, not of `make test`: each of these takes about ten seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline import plugins
from tests.e2e.support import (
    DEVICE_MEMORY,
    PATIENCE_S,
    events,
    expected_sha256,
    mortal_cluster,
    slow_job,
    summary_of,
    train,
    wait_for_event,
    wait_for_step,
)

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("comes_back", "lane"), [(True, "auto"), (False, "auto"), (True, "cuda")])
def test_a_killed_ps_costs_steps_and_no_bit_whether_it_comes_back_or_its_shards_move(
    tmp_path: Path, comes_back: bool, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lane == "cuda":
        monkeypatch.setenv(plugins.VARIABLE, str(DEVICE_MEMORY))
    steps = 60
    job = slow_job(
        tmp_path / "job.py",
        replicas=2,
        steps=steps,
        checkpoint_every=10,
    )
    out = tmp_path / "run"
    with mortal_cluster(job, out, lane=lane) as cluster:
        wait_for_event(out, "checkpoint", "checkpoint of step [12]0")
        cluster.kill("ps/1", restart=comes_back)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0
    found = summary_of(out)
    assert found["steps"] == steps
    assert found["sha256"] == expected_sha256(job)
    (recovery,) = found["recoveries"]
    assert recovery["task"] == "ps/1"
    assert recovery["from_step"] % 10 == 0
    assert 0 <= recovery["lost"] == recovery["at_step"] - recovery["from_step"]
    moved = [text for text in events(out) if "moves from ps/1 to ps/0" in text]
    assert len(moved) == (0 if comes_back else 1)


@pytest.mark.parametrize("victim", ["ps/1", "worker/1"])
def test_parameters_sent_as_changes_end_in_the_same_bits_whoever_dies(tmp_path: Path, victim: str) -> None:
    job = slow_job(
        tmp_path / "job.py", replicas=2, steps=60, checkpoint_every=10, codec="bf16", codec_down="delta:refresh=10"
    )
    undisturbed = train(job, tmp_path / "undisturbed", "--ps", "2", "--workers", "2")
    assert undisturbed.code == 0, undisturbed
    out = tmp_path / "run"
    with mortal_cluster(job, out) as cluster:
        wait_for_event(out, "checkpoint", "checkpoint of step [12]0")
        cluster.kill(victim)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0
    assert summary_of(out)["sha256"] == summary_of(tmp_path / "undisturbed")["sha256"]


def test_a_killed_ps_of_an_asynchronous_job_costs_updates_of_its_shard_only(tmp_path: Path) -> None:
    job = slow_job(
        tmp_path / "job.py",
        consistency="async",
        steps=300,
        checkpoint_every=20,
        step_s=0.01,
    )
    out = tmp_path / "run"
    with mortal_cluster(job, out) as cluster:
        wait_for_event(out, "checkpoint", "checkpoint of step [2-9]")
        cluster.kill("ps/1")
        assert cluster.wait(timeout_s=PATIENCE_S) == 0
    found = summary_of(out)
    (recovery,) = found["recoveries"]
    assert recovery["task"] == "ps/1"
    kept, restored = found["versions"]
    # Batches that were under way at the loss are trained on again, and may land once more on the shard that had them.
    assert 300 <= kept <= 300 + found["repeated_batches"] <= 302
    assert recovery["lost"] <= found["lost_updates"]
    assert 300 <= restored + found["lost_updates"] <= 302
    assert any("ps/1 at" in text and "rolling it back to the newest checkpoint (step " in text for text in events(out))


SCRIPT = """
import time
import torch
import shardline

session = shardline.connect(checkpoint_every=10)
torch.manual_seed(3)
model = torch.nn.Linear(300, 20)
optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))

def make(step):
    generator = torch.Generator().manual_seed(step * 10 + session.replica)
    optimizer.zero_grad()
    model(torch.randn(8, 300, generator=generator)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)

{loop}
session.close()
"""


def run_script(folder: Path, loop: str, *, kill: bool) -> tuple[int, Path]:
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT.format(loop=loop), encoding="utf-8")
    out = folder / "run"
    with mortal_cluster(script, out, script=True) as cluster:
        wait_for_event(out, "checkpoint", "checkpoint of step [12]0")
        if kill:
            # Past the checkpoint: there is something to go back from.
            wait_for_step(out, 13)
            cluster.kill("ps/1")
        return cluster.wait(timeout_s=PATIENCE_S), out


def test_a_script_that_loops_over_steps_goes_back_with_the_job_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    loop = "for step in session.steps(60):\n    make(step)"
    runs = [run_script(tmp_path / name, loop, kill=kill) for name, kill in (("undisturbed", False), ("killed", True))]
    assert [code for code, _ in runs] == [0, 0]
    found = [summary_of(out) for _, out in runs]
    assert [len(one["recoveries"]) for one in found] == [0, 1]
    assert found[0]["sha256"] == found[1]["sha256"]


def test_a_script_with_a_loop_of_its_own_is_told_the_step_that_the_job_went_back_to(tmp_path: Path) -> None:
    code, out = run_script(tmp_path / "run", "while session.step < 10_000:\n    make(session.step)", kill=True)
    assert code == 9
    step = summary_of(out)["recoveries"][0]["from_step"]
    assert (
        f"a parameter server was lost, and the job was rolled back to step {step}; loop over session.steps()"
        in "".join(events(out))
    )

"""Digits on a GPU, with servers on it and in host memory: `make test-gpu`. Skipped where torch sees no CUDA device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.e2e.support import PATIENCE_S, mortal_cluster, summary_of, train, wait_for_event

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "job.py"


def lanes(out: Path) -> set[str]:
    """The lanes that the workers have opened."""
    found = set()
    for path in out.glob("logs/worker-*.jsonl"):
        for line in path.read_text().splitlines():
            _, said, lane = json.loads(line)["message"].partition(": lane ")
            found |= {lane.split()[0]} if said else set()
    return found


@pytest.mark.parametrize(("flags", "lane"), [(["--ps-device", "cuda"], "cuda"), ([], "shm")])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_digits_are_learnt_on_a_gpu(tmp_path: Path, flags: list[str], lane: str, mode: str) -> None:
    out = tmp_path / "run"
    evaluated = ["--evaluators", "1", "--consistency", mode]
    finished = train(DIGITS, out, "--ps", "2", "--workers", "2", "--device", "cuda:0", *evaluated, *flags)
    assert finished.code == 0, finished
    assert lanes(out) == {lane}
    assert summary_of(out)["evaluation"]["best"]["metrics"]["accuracy"] >= 0.97


@pytest.mark.parametrize("victim", ["worker/1", "ps/1"])
def test_a_task_that_is_killed_on_a_gpu_costs_no_step(tmp_path: Path, victim: str) -> None:
    out = tmp_path / "run"
    overrides = (("steps", "300"), ("checkpoint_every", "50"))
    placed = {"device": "cuda:0", "ps_device": "cuda:0", "bucket_mb": 1024, "overrides": overrides}
    with mortal_cluster(DIGITS, out, **placed) as cluster:
        wait_for_event(out, "checkpoint", "checkpoint of step 50")
        cluster.kill(victim)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, cluster.log_tail("chief/0", 30)
    assert lanes(out) == {"cuda"}
    assert summary_of(out)["versions"] == [300, 300]

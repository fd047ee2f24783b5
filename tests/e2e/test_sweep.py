"""shardline sweep: models in processes that end, fail and are interrupted."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shardline.core.tensor_bytes import params_sha256
from shardline.host.run_lock import RunLock
from tests.e2e.support import Command, assert_refused, expected_sha256, shardline, wait_until, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("warm")]

FAILS = 'if len(labels) == 5: value = value * float("nan")\n    if len(labels) == 3: os.kill(os.getpid(), 9)'


def models(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "results.json").read_text())["models"]
    return found


def test_models_train_side_by_side_as_alone_and_those_that_fail_are_rows(tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = write_job(tmp_path / "job.py", imports="import os", after_loss=FAILS, steps=12, checkpoint_every=6)
    grid = ["--grid", "lr=0.05,0.001", "--grid", "batch_size=8,5,3", "--seed", "1"]
    ended = shardline("sweep", job, *grid, "--out", out, "--parallel", "2")
    assert ended.code == 0, ended.err
    found = models(out)
    assert [one["fields"]["batch_size"] for one in found[:2]] == ["8", "8"]
    for one in found[:2]:
        assert one["sha256"] == expected_sha256(job, seed=1, batch_size=8, lr=one["fields"]["lr"])
    assert found[0]["scores"][-1][1]["accuracy"] >= found[1]["scores"][-1][1]["accuracy"]
    failures = sorted(one["failure"] for one in found[2:])
    assert [("SIGKILL" in sentence, "nan" in sentence) for sentence in failures] == [(True, False)] * 2 + [
        (False, True)
    ] * 2
    table = ended.out.splitlines()
    assert any("failed" in line for line in table) and table[-1].startswith(f"best: lr={found[0]['fields']['lr']} ")
    shardline("export", out / "best", tmp_path / "best.safetensors")
    exported = load_file(tmp_path / "best.safetensors")
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    trained = {name: value for name, value in exported.items() if not name.endswith(buffers)}
    assert found[0]["best_step"] != 12 or params_sha256(trained) == found[0]["sha256"]
    assert (out / "results.png").stat().st_size > 0


def test_a_sweep_that_is_interrupted_trains_what_is_missing(tmp_path: Path) -> None:
    out, hold = tmp_path / "out", tmp_path / "hold"
    waits = f"while len(labels) == 6 and os.path.exists({str(hold)!r}): time.sleep(0.01)"
    job = write_job(tmp_path / "job.py", imports="import os, time", after_loss=waits, steps=6)
    hold.touch()
    arguments = ["sweep", job, "--grid", "batch_size=8,6,4", "--out", out, "--parallel", "1"]
    first = Command(*arguments)
    results = [out / "models" / f"batch_size={size}" / "result.json" for size in (8, 6, 4)]
    wait_until(results[1].exists, "the second model", while_runs=first)
    first.signal(signal.SIGINT)
    ended = first.finish()
    assert ended.code == 130 and "trains what is missing" in ended.err
    hold.unlink()
    done = results[0].stat().st_mtime_ns
    again = shardline(*arguments)
    assert again.code == 0, again.err
    assert results[0].stat().st_mtime_ns == done, "it is not trained again"
    assert {one["sha256"] for one in models(out)} == {expected_sha256(job, batch_size=size) for size in (8, 6, 4)}


def test_a_sweep_of_which_nothing_is_left_fails_and_one_at_a_time_has_a_folder(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", imports="import os", after_loss=FAILS, steps=4)
    ended = shardline("sweep", job, "--grid", "batch_size=3,5", "--out", tmp_path / "out")
    assert ended.code == 1
    assert not (tmp_path / "out" / "best").exists()
    with contextlib.closing(RunLock.take(tmp_path / "out" / "models")):
        refused = shardline("sweep", job, "--grid", "batch_size=3,5", "--out", tmp_path / "out")
    assert_refused(refused, 2, "out is in use by another run")

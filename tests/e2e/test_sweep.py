"""shardline sweep: models in processes that end, fail and are interrupted."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shardline import Ensemble
from shardline.core.tensor_bytes import params_sha256
from shardline.host.run_lock import RunLock
from shardline.job import load_job
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


def test_an_ensemble_is_one_more_row_and_the_same_after_it_was_interrupted(tmp_path: Path) -> None:
    out, hold = tmp_path / "out", tmp_path / "hold"
    job = write_job(tmp_path / "job.py", imports="import os, time", after_loss=FAILS, steps=6)
    waits = f"data = Points()\n    while hasattr(model, 'members') and os.path.exists({str(hold)!r}): time.sleep(0.01)"
    job.write_text(job.read_text().replace("    data = Points()", f"    {waits}"))
    hold.touch()
    arguments = ["sweep", job, "--grid", "batch_size=8,5,6,4", "--ensemble", "2", "--out", out]
    first = Command(*arguments)
    wait_until((out / "ensemble" / "log.txt").exists, "the ensemble's process", while_runs=first)
    first.signal(signal.SIGINT)
    assert first.finish().code == 130 and not (out / "ensemble.safetensors").exists()
    hold.unlink()
    again = shardline(*arguments)
    assert again.code == 0, again.err
    found = json.loads((out / "results.json").read_text())
    best = [one["folder"] for one in found["models"][:2]]
    assert found["ensemble"]["members"] == best and found["ensemble"]["failure"] == ""
    loaded = load_file(out / "ensemble.safetensors")
    ours = load_job(job)
    model = Ensemble([ours.build_model(), ours.build_model()])
    model.load_state_dict(loaded)
    assert ours.score(model) == found["ensemble"]["scores"]
    lines = again.out.splitlines()
    assert [*filter(re.compile(f"mean of 2 +{found['ensemble']['scores']['accuracy']:.4f} ").match, lines)]
    assert lines[-1] == f"ensemble: mean of 2: {out / 'ensemble.safetensors'}"
    more = shardline(*arguments[:-3], "3", "--average", "probabilities", "--out", out)
    assert more.code == 0 and "mean of 3" in more.out, "of one that is done"


@pytest.mark.long
def test_five_models_together_beat_the_best_of_them_on_digits(tmp_path: Path) -> None:
    """The figures of docs/sweeps.md."""
    job, rows = Path(__file__).parents[2] / "examples/digits/bagging.py", []
    for first in (0, 5, 10):
        seeds = ",".join(map(str, range(first, first + 5)))
        out = tmp_path / str(first)
        ended = shardline("sweep", job, "--grid", f"seed={seeds}", "--ensemble", "--out", out)
        assert ended.code == 0, ended.err
        found = json.loads((out / "results.json").read_text())
        alone = [dict(one["scores"])[one["best_step"]]["accuracy"] for one in found["models"]]
        rows.append((sum(alone) / 5, max(alone), found["ensemble"]["scores"]["accuracy"]))
        print("members {:.4f}, best {:.4f}, ensemble {:.4f}".format(*rows[-1]))
    mean, best, together = (sum(column) / 3 for column in zip(*rows, strict=True))
    print(f"mean of 3: members {mean:.4f}, best {best:.4f}, ensemble {together:.4f}")
    assert all(ensemble > members for members, _, ensemble in rows)
    assert together > best > mean


def test_a_sweep_of_which_nothing_is_left_fails_and_one_at_a_time_has_a_folder(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", imports="import os", after_loss=FAILS, steps=4)
    ended = shardline("sweep", job, "--grid", "batch_size=3,5", "--ensemble", "--out", tmp_path / "out")
    assert ended.code == 1
    assert not (tmp_path / "out" / "best").exists() and not (tmp_path / "out" / "ensemble.safetensors").exists()
    assert ended.out.splitlines()[-1] == "mean of 0: an average takes 2 models, and 0 of 2 have succeeded"
    with contextlib.closing(RunLock.take(tmp_path / "out" / "models")):
        refused = shardline("sweep", job, "--grid", "batch_size=3,5", "--out", tmp_path / "out")
    assert_refused(refused, 2, "out is in use by another run")

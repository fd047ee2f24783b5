"""Curves in Weights & Biases and MLflow, with the libraries themselves and without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from shardline.core.points import Point, TrackedRun

SETTINGS: Mapping[str, object] = {"steps": 4, "codec": "raw"}
FIRST = [Point("train/loss", 3.0, 0, 100.0), Point("evaluation/accuracy@1", 0.5, 1, 101.0)]
AGAIN = [Point("train/loss", 2.0, 0, 102.0)]
"""After a rollback, from another chief."""


def test_wandb_keeps_a_run_offline_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb")
    from shardline.integrations.wandb import WandbTracker

    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "logs").mkdir()
    run = TrackedRun(tmp_path, "digits: 50%", SETTINGS)
    for points in (FIRST, AGAIN):
        tracker = WandbTracker(run)
        tracker.write(points)
        tracker.close()
    assert "there is no key of Weights & Biases: the run stays in" in caplog.text
    files = sorted((tmp_path / "logs" / "wandb").glob("offline-run-*/run-*.wandb"))
    text = b"".join(file.read_bytes() for file in files)
    assert files and len({file.name for file in files}) == 1, "both chiefs continue one run"
    for item in (b"train/loss", b"evaluation/accuracy@1", b"digits- 50-", b"codec"):
        assert item in text


def test_mlflow_has_settings_and_all_values_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    from shardline.integrations.mlflow import MlflowTracker

    uri = (tmp_path / "store").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    (tmp_path / "logs").mkdir()
    for points in (FIRST, AGAIN):
        tracker = MlflowTracker(TrackedRun(tmp_path, "digits", SETTINGS))
        tracker.write(points)
        tracker.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert found.data.params == {"steps": "4", "codec": "raw"} and found.info.status == "FINISHED"
    values = [(one.value, one.step) for one in client.get_metric_history(found.info.run_id, "train/loss")]
    assert sorted(values) == [(2.0, 0), (3.0, 0)]
    assert found.data.metrics["evaluation/accuracy_1"] == 0.5

"""shardline init: every template is a job or script that loads, and nothing is overwritten."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardline.cli.main import main
from shardline.job import load_job
from shardline_lab.init import EXAMPLES, TEMPLATES


def services(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    return found


def test_what_a_script_needs_is_named_and_installed_in_its_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["init", "hf", str(tmp_path)]) == 0
    needed = "scikit-learn 'transformers[torch]'"
    assert f"it needs more: pip install {needed}\n" in capsys.readouterr().out
    assert f"/tmp/shardline-*.whl {needed}\n" in services(tmp_path)["chief"]["build"]["dockerfile_inline"]
    assert "ShardlineTrainer as Trainer" in (tmp_path / "train.py").read_text()


@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if not template.script])
def test_a_project_has_a_job_that_loads(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / name
    assert main(["init", name, str(folder)]) == 0
    assert f"cd {folder} && shardline train job.py --ps 2" in capsys.readouterr().out
    assert load_job(folder / "job.py", (), workers=2).steps > 0
    assert "examples/" not in (folder / "job.py").read_text()
    chief, worker = services(folder)["chief"], services(folder)["worker"]
    assert chief["environment"]["SHARDLINE_JOB"] == worker["environment"]["SHARDLINE_JOB"] == "/job/job.py"
    assert f'"worker": {worker["deploy"]["replicas"]}' in chief["environment"]["SHARDLINE_CLUSTER"]
    assert "evaluator" in services(folder)


def test_a_script_is_run_by_its_workers_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "script", str(tmp_path)]) == 0
    assert f"cd {tmp_path} && shardline train --script train.py --ps 2 --workers 2" in capsys.readouterr().out
    assert (tmp_path / "train.py").read_text().count("of 3") == (EXAMPLES / "digits/train.py").read_text().count("of 3")
    found = services(tmp_path)
    assert found["worker"]["entrypoint"] == ["python", "/job/train.py"] and "evaluator" not in found
    assert "SHARDLINE_JOB" not in found["chief"]["environment"]


def test_the_digits_in_a_folder_of_that_name_are_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert sorted(path.name for path in Path("digits").iterdir()) == ["compose.yaml", "job.py"]


def test_a_file_that_exists_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "compose.yaml").write_text("mine")
    assert main(["init", "digits", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"shardline: {tmp_path / 'compose.yaml'} already exists; choose another folder\n"
    assert (tmp_path / "compose.yaml").read_text() == "mine" and not (tmp_path / "job.py").exists()


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_named(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["init", "digits", str(tmp_path / place)]) == 2
    assert f"{tmp_path / place} can't be made" in capsys.readouterr().err

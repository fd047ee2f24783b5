"""What `make test-versions` says of what it tried; the trials themselves take too long for here."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from tests.versions import ROOT, Outcome, Trial, find_pythons, oldest, passed, report, run

TRIAL = Trial("/usr/bin/python3.12", "3.12.1", "newest")


def test_interpreters_that_are_not_there_or_do_not_run_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python3.12"
    broken.write_text("#!/bin/sh\necho 'python3.12: command not found' >&2\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found, missing = find_pythons(["python3.12", "python3.99", sys.executable])
    assert found == [(sys.executable, sys.version.split()[0])]
    assert missing == {
        "python3.12": "python3.12: command not found",
        "python3.99": "there is no such command on PATH",
    }


def test_every_dependency_has_a_lower_end_and_that_is_what_the_oldest_libraries_are() -> None:
    pins = oldest(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    assert "torch==2.11" in pins
    with pytest.raises(ValueError, match=r"'torch' in pyproject\.toml has no lower end"):
        oldest(["torch"])


def test_nothing_tried_is_no_pass_and_what_was_not_to_be_had_is_said() -> None:
    missing = Outcome(trial=TRIAL, missing="No matching distribution found for torch")
    good = Outcome(trial=TRIAL, versions={"torch": "2.15.0"}, tests="9 passed", seconds=3.0)
    bad = Outcome(trial=TRIAL, versions={"torch": "2.15.0"}, failed="the demo", seconds=3.0)
    assert [passed(outcomes) for outcomes in ([], [missing], [good, missing], [good, bad])] == [
        False,
        False,
        True,
        False,
    ]
    assert report([good, bad, missing], {"python3.14": "there is no such command on PATH"}).splitlines() == [
        "Python 3.12.1 with the newest libraries (torch 2.15.0): demo and unit tests pass (9 passed), 3 s",
        "Python 3.12.1 with the newest libraries (torch 2.15.0): FAILED: the demo, 3 s",
        "Python 3.12.1 with the newest libraries: not to be had: No matching distribution found for torch",
        "python3.14: not to be had: there is no such command on PATH",
    ]


def test_an_interpreter_that_makes_no_environment_fails_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such module: venv\nexit 1\n")
    broken.chmod(0o755)
    outcome = run(Trial(str(broken), "3.12.1", "oldest"), tmp_path / "trial")
    assert (outcome.failed, outcome.missing) == ("making its environment", "")
    assert "no such module: venv" in capsys.readouterr().out
    assert not (tmp_path / "trial").exists()

"""Contenders as processes: their figures are read, their deaths are seen, nothing of them stays."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.network import allow
from benchmarks.process import ALLOCATOR, Child, ContenderError, environment, read_all, run_json


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_figures_are_the_json_among_other_lines() -> None:
    code = "print('hello'); print('[1]'); print('{\"median_s\": 0.5}'); print('bye')"
    assert run_json(python(code), what="it", timeout_s=20.0) == {"median_s": 0.5}


def test_contender_without_figures_is_told_with_its_last_words() -> None:
    with pytest.raises(ContenderError, match=r"it ended with code 3 without figures: no such thing"):
        run_json(python("import sys; print('no such thing', file=sys.stderr); sys.exit(3)"), what="it", timeout_s=20.0)


def test_contender_that_says_nothing_runs_into_its_deadline() -> None:
    with pytest.raises(ContenderError, match=r"it gave no figures within 0 s"):
        run_json(python("import time; time.sleep(60)"), what="it", timeout_s=0.2)


def test_program_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(ContenderError, match=r"it can't be started"):
        run_json(["/nonexistent/program"], what="it", timeout_s=1.0)


def test_death_of_one_contender_ends_the_wait_for_the_others() -> None:
    start_s = time.monotonic()
    with (
        Child(python("import time; time.sleep(60)"), what="first") as first,
        Child(python("raise SystemExit(1)"), what="second") as second,
        pytest.raises(ContenderError, match="second ended with code 1"),
    ):
        read_all([first, second], 50.0)
    assert time.monotonic() - start_s < 30.0


def test_what_a_contender_started_ends_with_it() -> None:
    code = (
        "import json, subprocess, sys; "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(json.dumps({'pid': p.pid}), flush=True); p.wait()"
    )
    with Child(python(code), what="it") as child:
        pid = child.read_json(20.0)["pid"]
    end_s = time.monotonic() + 10.0
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < end_s, "a grandchild is left"
        time.sleep(0.02)


def test_environment_is_the_same_for_all_and_has_nothing_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLINE_LANE", "grpc")
    monkeypatch.setenv("TF_CONFIG", "{}")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    settings = environment(more={"X": "1"})
    assert "SHARDLINE_LANE" not in settings
    assert "TF_CONFIG" not in settings
    assert settings["OMP_NUM_THREADS"] == "1"
    assert settings["X"] == "1"
    assert settings.items() >= ALLOCATOR.items()
    assert not [name for name in environment(tuned=False) if name.startswith("MALLOC_")]
    assert os.environ["SHARDLINE_LANE"] == "grpc"


def test_congestion_control_is_added_and_none_is_taken_away(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text("reno bbr\n")
    allow("cubic", allowed)
    allow("cubic", allowed)
    assert allowed.read_text() == "reno bbr cubic\n"

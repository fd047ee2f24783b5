"""Methods of files that `--plugin` names: every task of a real cluster trains by them, and the summary names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import expected_sha256, summary_of, train, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

TOYS = Path(__file__).parents[1] / "conformance" / "toys"
PLUGINS = [
    part for name in ("toy_codec", "toy_rule", "toy_consistency") for part in ("--plugin", str(TOYS / f"{name}.py"))
]
DEFAULTS = {
    "consistency": "sync",
    "rule": "torch",
    "codec": "raw",
    "cadence": "every-step",
    "topology": "flat",
    "pipeline": "whole-model",
}


def trained(tmp_path: Path, **chosen: str) -> dict[str, Any]:
    """The summary of a short job with these methods."""
    job = write_job(tmp_path / "job.py", steps=6, replicas=2)
    flags = [part for seam, text in chosen.items() for part in (f"--{seam}", text)]
    # A lane on which bytes are counted.
    finished = train(job, tmp_path / "out", "--ps", "2", "--workers", "2", "--lane", "tcp", *PLUGINS, *flags)
    assert finished.code == 0, finished
    found = summary_of(tmp_path / "out")
    assert found["methods"] == {**DEFAULTS, **chosen}
    return found


def test_a_codec_of_a_plugin_trains(tmp_path: Path) -> None:
    found = trained(tmp_path, codec="top:ratio=0.25")
    pushed, pulled = found["bytes"]["push"], found["bytes"]["pull"]
    assert 0 < pushed["wire"] < 0.75 * pushed["raw"] and pulled["wire"] == pulled["raw"] > 0
    assert found["versions"] == [6, 6]


def test_a_rule_of_a_plugin_trains(tmp_path: Path) -> None:
    assert trained(tmp_path, rule="toy-momentum:momentum=0.5", consistency="async")["versions"] == [6, 6]


def test_a_consistency_of_a_plugin_trains(tmp_path: Path) -> None:
    # Of 6 pushes every 3 are an update.
    assert trained(tmp_path, consistency="every:count=3")["versions"] == [2, 2]


def test_a_cadence_of_a_plugin_trains_and_the_bits_are_the_same_whoever_computes(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", replicas=2, steps=4)
    plugin = ("--plugin", str(TOYS / "toy_cadence.py"), "--cadence", "every:steps=3")
    ends = []
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        assert train(job, out, *plugin, "--workers", str(workers), "--ps", "2").code == 0
        ends.append(summary_of(out)["sha256"])
    # Not those of a job that sends every pass.
    assert ends[0] == ends[1] != expected_sha256(job)

"""The lessons of docs/learn: their files and commands are read off the pages and run, in order; `make test-lessons`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "learn").glob("[0-9]*.md"))
FILE = re.compile(r'^```python title="(\S+)"\n(.*?)^```$', re.M | re.S)
COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
TIMEOUT_S = 240

pytestmark = [pytest.mark.lessons, pytest.mark.timeout(TIMEOUT_S + 30)]


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def last_loss(run: Path) -> float:
    lines = (run / "logs" / "steps.jsonl").read_text().splitlines()[-10:]
    return sum(json.loads(line)["loss"] for line in lines) / len(lines)


def one_process(out: Path, printed: str) -> None:
    hashes = re.findall(r"^(?:plain|shardline): +([0-9a-f]{16})$", printed, re.M)
    assert len(hashes) == 2 and hashes[0] == hashes[1]
    assert "equal bits" in printed


def parameter_servers(out: Path, printed: str) -> None:
    one, two = (read(out / name / "summary.json") for name in ("one-worker", "two-workers"))
    assert one["sha256"] == two["sha256"]


def bandwidth(out: Path, printed: str) -> None:
    rate = {name: read(out / f"{name}.json")["passes_per_s"] for name in ("w1", "w2", "w4", "w8", "w8-ps2")}
    ceiling = 125e6 / (3_225_610 * 4)
    assert rate["w1"] < rate["w4"] < rate["w8"] < ceiling < 1.5 * rate["w8"]
    assert rate["w8-ps2"] > 1.6 * rate["w8"]


def stragglers(out: Path, printed: str) -> None:
    found = {name: read(out / f"{name}.json") for name in ("sync", "spares", "ssp", "async")}
    assert found["spares"]["steps_per_s"] > 3 * found["sync"]["steps_per_s"]
    assert found["sync"]["staleness"]["max"] == 0
    assert found["async"]["staleness"]["max"] > found["ssp"]["staleness"]["mean"]
    assert found["async"]["passes_per_s"] > 2 * found["sync"]["passes_per_s"]
    assert read(out / "async-run" / "summary.json")["staleness"]["max"] > 0


def compression(out: Path, printed: str) -> None:
    moved = {name: read(out / name / "summary.json")["bytes"]["push"]["wire"] for name in ("raw", "topk", "diloco")}
    assert moved["topk"] < moved["raw"] / 10 and moved["diloco"] < moved["raw"] / 4
    assert all(last_loss(out / name) < 1.5 for name in moved)


def pipelines(out: Path, printed: str) -> None:
    assert "27 %" in printed
    assert read(out / "stash.json")["steps_per_s"] > 1.2 * read(out / "m8.json")["steps_per_s"]


CLAIMS = [one_process, parameter_servers, bandwidth, stragglers, compression, pipelines]


@pytest.mark.parametrize(
    ("page", "claim"), list(zip(PAGES, CLAIMS, strict=True)), ids=lambda value: getattr(value, "stem", "")
)
def test_a_lesson_does_what_it_says(page: Path, claim: Any, tmp_path: Path) -> None:
    for name in ("docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    out = tmp_path / "runs" / "learn"
    out.mkdir(parents=True)
    for earlier in PAGES[: PAGES.index(page) + 1]:
        for name, text in FILE.findall(earlier.read_text()):
            (tmp_path / name).write_text(text)
    script = "set -eo pipefail\n" + "\n".join(COMMANDS.findall(page.read_text()))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(  # noqa: PLW1510 - its output is shown where it fails
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    assert (out / f"{page.stem}.png").stat().st_size > 5_000, done.stdout
    claim(out, done.stdout)

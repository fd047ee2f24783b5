"""A running job changes its version: each task in turn is replaced by one of the next version, or of the one before.

The version before is a wheel of the commit PREVIOUS, which is built and put on the path of the tasks that have it. Part
of `make test-wheel`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.support import (
    HandCluster,
    events,
    expected_sha256,
    json_lines,
    shardline,
    slow_job,
    summary_of,
    wait_for_event,
    wait_for_step,
)

ROOT = Path(__file__).parents[2]
PREVIOUS = "3d4cf530ffe3c23d206b2bb064a77d3058500851"
"""The commit of the version before. A change that it can't follow needs a new minor version of the protocol."""
pytestmark = [pytest.mark.e2e, pytest.mark.wheel, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of a task that runs the version before."""
    folder = tmp_path_factory.mktemp("previous")

    def run(*command: str | Path) -> None:
        subprocess.run([str(part) for part in command], check=True, timeout=300, stdin=subprocess.DEVNULL)

    if subprocess.run(["git", "-C", ROOT, "cat-file", "-e", f"{PREVIOUS}^{{commit}}"], check=False).returncode:
        pytest.skip(f"this clone lacks the commit {PREVIOUS}; fetch its history: git fetch --unshallow")
    run("git", "clone", "--quiet", "--no-checkout", ROOT, folder / "source")
    run("git", "-C", folder / "source", "checkout", "--quiet", PREVIOUS)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, folder / "source")
    (wheel,) = folder.glob("*.whl")
    run(*pip, "install", "--no-deps", "--target", folder / "packages", wheel)
    return {"PYTHONPATH": str(folder / "packages")}


@pytest.mark.parametrize("next_is", ["newer", "older"])
def test_each_task_in_turn_changes_its_version_and_no_bit_changes(
    tmp_path: Path, previous: Mapping[str, str], next_is: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = slow_job(tmp_path / "job.py", replicas=2, steps=1_000_000, checkpoint_every=10)
    out = tmp_path / "out"
    flags: dict[str, list[str | Path]] = {
        "chief": ["--job", job, "--out", out, "--standbys", "1", "--no-page"],
        "ps": [],
        "worker": ["--job", job],
        "evaluator": ["--job", job],
    }
    with HandCluster.write(tmp_path, ps=2, worker=2, evaluator=1) as cluster:

        def start(task: str, *, older: bool) -> None:
            with monkeypatch.context() as patch:
                if older:
                    patch.setenv("PYTHONPATH", previous["PYTHONPATH"])
                cluster.start(task, *flags[task.partition("/")[0]])

        def told(pattern: str) -> int:
            return sum(pattern in text for text in events(out))

        tasks = ["ps/0", "ps/1", "worker/0", "worker/1", "evaluator/0", "chief/0"]
        for task in tasks:
            start(task, older=next_is == "newer")
        wait_for_step(out, 20, while_runs=cluster.commands["chief/0"])
        for task in tasks:
            server = task.startswith("ps")
            # Only what stands by can take over.
            awaited = [f"{task} joined"] + ["is protected: its standby"] * server
            before = [told(pattern) for pattern in awaited]
            # A server that is asked to end ends the job.
            cluster.commands[task].signal(signal.SIGTERM if task[0] in "we" else signal.SIGKILL)
            cluster.commands[task].finish()
            done = json_lines(out / "logs" / "steps.jsonl")[-1]["step"]
            start(task, older=next_is == "older")
            for pattern, count in zip(awaited, before, strict=True):
                if task != "chief/0":
                    wait_for_event(out, "", pattern, more_than=count + server * ("protected" in pattern))
            wait_for_step(out, done + 20, while_runs=cluster.commands["chief/0"])
        assert shardline("stop", "--cluster", cluster.path).code == 0
        for task, command in cluster.commands.items():
            assert command.finish().code == 0, (task, command.finish())
    found = summary_of(out)
    assert found["sha256"] == expected_sha256(job, steps=found["steps"])
    assert found["chief_restarts"] == 1
    assert [one["lost"] for one in found["recoveries"]] == [0, 0]

"""The example of a person's own training script, run as `shardline train --script` runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.support import assert_refused, json_lines, summary_of, train

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).parents[2] / "examples" / "digits" / "train.py"


def test_the_digits_script_learns_on_two_servers_with_two_workers(tmp_path: Path) -> None:
    out = tmp_path / "run"
    finished = train(SCRIPT, out, "--script", "--ps", "2", "--workers", "2")
    assert finished.code == 0, finished
    found = summary_of(out)
    assert (found["steps"], found["versions"], found["replicas"], found["job"]) == (500, [500, 500], 2, "train")
    assert [line["step"] for line in json_lines(out / "logs" / "steps.jsonl")] == list(range(500))
    for replica in (0, 1):
        said = (out / "logs" / f"worker-{replica}.log").read_text()
        accuracy = re.search(rf"replica {replica} of 2: test accuracy (\d\.\d+)", said)
        assert accuracy is not None, said
        assert float(accuracy[1]) >= 0.95


def test_what_only_a_script_itself_can_say_is_refused_as_a_flag(tmp_path: Path) -> None:
    finished = train(SCRIPT, tmp_path / "run", "--script", "--steps", "10")
    assert_refused(finished, 2, r"steps can't be set from outside.* after --")
    assert not (tmp_path / "run").exists()

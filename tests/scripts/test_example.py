"""The script that `shardline init hf` writes, as `shardline train` runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.support import summary_of, train

pytest.importorskip("transformers", reason="transformers is not installed; make test-scripts does it")
SCRIPT = Path(__file__).parents[2] / "examples" / "transformers" / "train.py"


@pytest.mark.timeout(300)
def test_the_example_with_a_trainer_learns_and_replica_0_says_so(tmp_path: Path) -> None:
    finished = train(SCRIPT, tmp_path / "run", "--script", "--ps", "2", "--workers", "2")
    assert finished.code == 0, finished
    accuracies = re.findall(r"'eval_accuracy': '?(\d\.?\d*)", finished.out)
    assert len(accuracies) == 8 and float(accuracies[-1]) > 0.85, finished.out
    assert summary_of(tmp_path / "run")["replicas"] == 2

"""shardline bench codecs: what it measures of each codec, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardline.cli.main import main
from shardline.codecs import CODECS
from shardline.codecs.auto import undecided
from shardline.codecs.base import Direction

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import shardline

job = shardline.Job(
    model=lambda: nn.Linear(64, 64),
    loss=lambda model, batch: model(batch[0]).square().mean(),
    dataset=TensorDataset(torch.randn(64, 64, generator=torch.Generator().manual_seed(0))),
    optimizer="SGD", optimizer_args={"lr": 0.1}, batch_size=4, steps=50,
)
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardline.codecs.measuring.MEASURED_S", 0.0)
    monkeypatch.setattr("shardline_lab.bench.codecs.SIDE", 250)


@pytest.mark.usefixtures("quick")
def test_every_codec_of_gradients_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, figures = tmp_path / "job.py", tmp_path / "figures.json"
    job.write_text(JOB)
    for of in ([str(job)], []):
        assert main(["bench", "codecs", *of, "--json", str(figures)]) == 0
        rows = {row["codec"]: row for row in json.loads(figures.read_text())}
        assert set(rows) >= {
            kind.name for kind in CODECS if kind.direction is not Direction.PULL and not undecided(kind())
        }
        assert rows["raw"]["ratio"] == 1.0 and rows["raw"]["relative_error"] == 0.0
        assert 1.9 < rows["bf16"]["ratio"] <= 2.0 and 0.0005 < rows["bf16"]["relative_error"] < 0.004
        # What it sends before the end of its warm-up is not what it is chosen for.
        for figure in ("ratio", "relative_error"):
            assert rows["onebit-adam"][figure] == pytest.approx(rows["onebit"][figure], rel=0.01)
        assert all(row["encode_s"] > 0.0 and row["decode_s"] > 0.0 for row in rows.values())
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"codec +MB +ratio +error +encode GB/s +decode GB/s", said[0])
    assert any(line.startswith("bf16 ") for line in said)


@pytest.mark.usefixtures("quick")
def test_a_link_adds_the_time_of_a_push(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codecs", "--only", "raw", "--link", "8Mbit"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.endswith("ms over the link") and float(row.split()[-1]) == pytest.approx(250, rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "delta"), "--only delta: it does not encode gradients"),
        (("--only", "zip"), "codec 'zip' does not exist"),
        (("--seed", "3"), "there is no job file to set them in"),
        (("--link", "1Gb"), "--link: '1Gb' is not a bandwidth"),
        (("nowhere.py",), "job file nowhere.py does not exist"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "codecs", *arguments]) == 2
    assert said in capsys.readouterr().err

"""Methods of files that `--plugin` names: every task of a real cluster trains by them, and the summary names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import summary_of, train, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TOYS = Path(__file__).parents[1] / "conformance" / "toys"
PLUGINS = [
    part for name in ("toy_codec", "toy_rule", "toy_consistency") for part in ("--plugin", str(TOYS / f"{name}.py"))
]
DEFAULTS = {"consistency": "sync", "rule": "torch", "codec": "raw", "cadence": "every-step", "topology": "flat"}


@pytest.mark.parametrize(
    "chosen",
    [
        {"codec": "top:ratio=0.5"},
        {"rule": "toy-momentum:momentum=0.5", "consistency": "async"},
        {"consistency": "every:count=3"},
    ],
    ids=lambda chosen: next(iter(chosen)),
)
def test_a_method_of_a_plugin_trains(tmp_path: Path, chosen: dict[str, str]) -> None:
    job = write_job(tmp_path / "job.py", steps=6, replicas=2)
    flags = [part for seam, text in chosen.items() for part in (f"--{seam}", text)]
    finished = train(job, tmp_path / "out", "--ps", "2", "--workers", "2", *PLUGINS, *flags)
    assert finished.code == 0, finished
    found = summary_of(tmp_path / "out")
    assert found["methods"] == {**DEFAULTS, **chosen}
    print({k: v for k, v in found.items() if k not in ("evaluation", "reason")})

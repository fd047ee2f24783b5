"""Methods of files that `--plugin` names: every task of a real cluster trains by them, and the summary names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.core.status import TaskStatus
from shardline.core.timeouts import Timeouts
from shardline.rpc.client import ChiefClient
from tests.e2e.support import (
    HandCluster,
    expected_sha256,
    scrape,
    shardline,
    summary_of,
    total,
    train,
    wait_for_event,
    wait_until,
    write_job,
)

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

TOYS = Path(__file__).parents[1] / "conformance" / "toys"
PLUGINS = [
    part
    for name in ("toy_codec", "toy_rule", "toy_consistency", "toy_dssp")
    for part in ("--plugin", str(TOYS / f"{name}.py"))
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


def test_a_consistency_whose_slack_the_servers_tune_trains(tmp_path: Path) -> None:
    assert trained(tmp_path, consistency="dssp:least=1,most=4")["versions"] == [6, 6]


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


ROOT = Path(__file__).parents[2]
ROLE = TOYS / "toy_role.py"


def alive(client: ChiefClient, task: str) -> TaskStatus | None:
    return next((row for row in client.status().tasks if row.task == task and row.state == "alive"), None)


def test_a_role_of_a_plugin_joins_is_healthy_exchanges_counts_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    job = write_job(tmp_path / "job.py", replicas=1, steps=100_000)
    with HandCluster.write(tmp_path, ps=1, worker=1, probe=1) as cluster:
        cluster.start("chief/0", "--job", job, "--out", tmp_path / "out", "--plugin", ROLE)
        cluster.start("ps/0", "--plugin", ROLE)
        cluster.start("worker/0", "--job", job, "--plugin", ROLE)
        cluster.start("probe/0", f"--plugin={ROLE}")
        wait_for_event(tmp_path / "out", "joined", "probe/0 joined")
        client = ChiefClient(cluster.tasks["chief"][0], Timeouts(total_s=15))
        row = wait_until(lambda: alive(client, "probe/0"), "the probe's first heartbeat")
        assert row.address == cluster.tasks["probe"][0]
        healthy = shardline("health", "--address", row.address)
        assert (healthy.code, healthy.out) == (0, f"{row.address} is serving\n"), healthy

        wait_until(lambda: total(scrape(row.metrics_address), "shardline_pull_raw_bytes_total"), "the pull")
        counted = scrape(row.metrics_address)
        assert not [name for name in counted if name.startswith("shardline_shard_version")], "that is for a ps"

        shown = shardline("status", "--cluster", cluster.path, env={"COLUMNS": "240", "SHARDLINE_PLUGINS": str(ROLE)})
        assert any(line.startswith("probe/0 ") for line in shown.out.splitlines()), shown
        assert shardline("stop", "--cluster", cluster.path, env={"SHARDLINE_PLUGINS": str(ROLE)}).code == 0
        client.close()
        for task, command in cluster.commands.items():
            assert (finished := command.finish()).code == 0, (task, finished)


def test_the_launcher_starts_tasks_of_a_role_of_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    job = write_job(tmp_path / "job.py", replicas=1, steps=4)
    finished = train(job, tmp_path / "out", "--workers", "1", "--tasks", "probe=2", "--plugin", ROLE)
    assert finished.code == 0, finished
    assert "started 1 chief, 1 ps, 1 worker, 2 probes" in finished.err, finished
    log = (tmp_path / "out" / "logs" / "chief-0.log").read_text()
    assert "probe/1 joined" in log, log

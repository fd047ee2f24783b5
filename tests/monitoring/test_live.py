"""A real Prometheus scrapes two real clusters, and every expression of dashboard, rules and alerts is put to it."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.support import Command, free_ports, json_lines, train_command, wait_until, write_job
from tests.monitoring.promql import PROMETHEUS, VARIABLES, Expression, dashboard, of_dashboard, of_rules, rules

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="there is no prometheus; on Debian: apt-get install prometheus"
    ),
]

ALERTS_AT_ONCE = {rule["alert"] for rule in rules() if "alert" in rule and "for" not in rule}
"""Those that tell of a fault however short; there is none here."""

RUNS = ("sync", "async", "staged")
STAGED = """
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardline


def loss(model, batch):
    time.sleep(0.01)
    return model(batch[0]).square().mean()


job = shardline.Job(
    model=lambda: shardline.Pipeline([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)], stages=[2]),
    loss=loss, dataset=lambda: TensorDataset(torch.randn(64, 8)), optimizer="SGD", optimizer_args={"lr": 0.01},
    batch_size=4, accumulate=2, steps=1_000_000, checkpoint_every=50, pipeline="stash",
)
"""


@dataclass(frozen=True)
class Prometheus:
    """A running one."""

    address: str

    def get(self, path: str, **query: str) -> Any:
        """The data of an API call; what it refuses is an AssertionError with its words."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10.0) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {json.load(error)['error']}") from None

    def values(self, text: str) -> list[float]:
        """Values of an expression's series at present, those that are numbers."""
        found = self.get("query", query=text)
        assert found["resultType"] == "vector", f"{text} is a {found['resultType']}"
        values = [float(item["value"][1]) for item in found["result"]]
        return [value for value in values if not math.isnan(value)]

    def total(self, text: str) -> float:
        """Sum of an expression; 0 of nothing."""
        return sum(self.values(text))

    def ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5.0) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    """Prometheus with our configuration for one machine, but of these runs, and quicker."""
    config = yaml.safe_load((PROMETHEUS / "local.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    (lookup,) = config["scrape_configs"][0]["file_sd_configs"]
    lookup["files"] = [str(tmp_path / run / Path(lookup["files"][0]).name) for run in RUNS]
    lookup["refresh_interval"] = "1s"
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    (port,) = free_ports(1)
    command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        found = Prometheus(f"127.0.0.1:{port}")
        wait_until(found.ready, "Prometheus", limit_s=30.0, seen=(tmp_path / "prometheus.log").read_text)
        yield found
    finally:
        process.terminate()
        process.wait(timeout=30.0)


def without_data(prometheus: Prometheus, expressions: list[Expression]) -> list[Expression]:
    """Those that have no data yet."""
    return [expression for expression in expressions if not prometheus.values(expression.text)]


def test_every_expression_has_data_of_real_clusters(tmp_path: Path, prometheus: Prometheus) -> None:
    pace = {"imports": "import time", "after_loss": "time.sleep(0.02)", "steps": 1_000_000, "checkpoint_every": 50}
    sync = write_job(tmp_path / "sync.py", **pace)
    # Wide enough that tensors are encoded.
    codecs = {"codec_up": "onebit", "codec_down": "fp16"}
    other = write_job(tmp_path / "async.py", width=400, consistency="async", **codecs, **pace)
    staged = tmp_path / "staged.py"
    staged.write_text(STAGED, encoding="utf-8")
    outs = [tmp_path / run for run in RUNS]
    # Twelve processes start at once; on a busy machine that takes longer than other tests have.
    flags = ["--no-page", "--timeout", "60"]
    commands = [
        Command(*train_command(sync, outs[0], *flags, "--evaluators", "1")),
        # Such a line is full at once.
        Command(
            *train_command(other, outs[1], *flags, "--workers", "2", "--lane", "tcp"),
            env={"SHARDLINE_LINK_MBIT": "0.001"},
        ),
        Command(*train_command(staged, outs[2], *flags, "--workers", "2")),
    ]
    try:
        for command, out in zip(commands, outs, strict=True):
            wait_until(
                lambda out=out: json_lines(out / "logs" / "steps.jsonl"), f"a step of {out.name}", while_runs=command
            )
        left = [*of_dashboard(), *of_rules()]

        def all_have() -> bool:
            left[:] = without_data(prometheus, left)
            return not left

        wait_until(all_have, "data for every expression", limit_s=60.0, while_runs=commands[0], seen=lambda: left)
        check_rules(prometheus)
        check_variables(prometheus)
        check_bytes(prometheus)
        check_parts_of_a_step(prometheus)
        # While the first worker is alone, nothing is stale.
        stale = 'shardline:staleness:p95{run="async"}'
        wait_until(lambda: prometheus.total(stale) > 0.0, "stale pushes", limit_s=60.0, while_runs=commands[1])
        assert prometheus.total('shardline:staleness:p95{run="sync"}') == 0.0
        check_stages(prometheus)
        check_alerts(prometheus)
    finally:
        for command in commands:
            command.signal(signal.SIGINT)
        ends = [command.finish() for command in commands]
    assert [end.code for end in ends] == [130] * len(RUNS), ends
    for out in outs:
        assert json.loads((out / "prometheus-targets.json").read_text()) == []


def check_stages(prometheus: Prometheus) -> None:
    """A job without a pipeline has no stages; those of the other idle for a share, and the first is a step behind."""
    for metric in ("pipeline_bubble_ratio", "stage_held_microbatches"):
        assert len(prometheus.values(f'shardline_{metric}{{run="staged"}}')) == 2
        assert not prometheus.values(f'shardline_{metric}{{run!="staged"}}')
    assert all(0.0 <= value < 1.0 for value in prometheus.values('shardline_pipeline_bubble_ratio{run="staged"}'))
    # Two passes at a time in the first stage, one in the second.
    assert prometheus.values('shardline_stage_held_microbatches{stage="0"}') == [2.0]
    assert prometheus.values('shardline_stage_held_microbatches{stage="1"}') == [1.0]


def check_rules(prometheus: Prometheus) -> None:
    """Prometheus has evaluated every rule without an error."""

    def states() -> set[tuple[str, str, str]]:
        groups = prometheus.get("rules")["groups"]
        return {(item["name"], item["health"], item.get("lastError", "")) for part in groups for item in part["rules"]}

    wait_until(lambda: all(health != "unknown" for _, health, _ in states()), "every rule", limit_s=30.0, seen=states)
    assert {name for name, _, _ in states()} == {rule.get("alert") or rule["record"] for rule in rules()}
    assert not [state for state in states() if state[1:] != ("ok", "")]


def check_variables(prometheus: Prometheus) -> None:
    """The dashboard's choices offer what there is."""

    def offered() -> dict[str, list[str]]:
        found = {}
        for variable in dashboard()["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = variable["query"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
                for name, value in VARIABLES.items():
                    metric = metric.replace(name, value)
                found[variable["name"]] = prometheus.get(f"label/{label}/values", **{"match[]": metric})
        return found

    tasks = ["chief/0", "evaluator/0", "ps/0", "worker/0", "worker/1"]
    # Namespaces are Kubernetes' own: here there is none to choose.
    there = {"job": ["shardline"], "namespace": [], "run": sorted(RUNS), "task": tasks}
    # A second worker may take its time.
    wait_until(lambda: offered() == there, f"{there}", limit_s=60.0, seen=offered)


def check_alerts(prometheus: Prometheus) -> None:
    """The line that is full is told, both ways, and no fault that there is not."""

    def full() -> set[tuple[str, str]]:
        found = [alert["labels"] for alert in prometheus.get("alerts")["alerts"]]
        return {(item["run"], item["direction"]) for item in found if item["alertname"] == "ShardlineLinkFull"}

    both = {("async", "sent"), ("async", "received")}
    wait_until(lambda: full() == both, "the alert of a full line", limit_s=30.0, seen=full)
    names = {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"]}
    # Others may be pending for a moment on a busy machine.
    assert not ALERTS_AT_ONCE & names


def check_bytes(prometheus: Prometheus) -> None:
    """Shared memory counts bytes in memory and none on the wire; codecs shorten what the other lane sends."""
    # Batch norm's statistics are never rounded, and a bucket has a head.
    for way, low, high in (("push", 3.0, 32.0), ("pull", 1.5, 2.0)):
        for task in ("ps/.*", "worker/.*"):
            chosen = f'task=~"{task}"'
            held, sent = f"shardline_{way}_raw_bytes_total", f"shardline_{way}_wire_bytes_total"
            in_memory = f'{held}{{run="sync",lane="shm",{chosen}}}'
            # A busy task may not have been scraped yet.
            wait_until(lambda query=in_memory: prometheus.total(query) > 0, f"bytes of {way} at {task}", limit_s=30.0)
            assert prometheus.total(f'{sent}{{run="sync",{chosen}}}') == 0, (way, task)
            assert prometheus.total(f'{held}{{run="sync",lane!="shm",{chosen}}}') == 0, (way, task)
            ratio = f'shardline:compression:ratio{{run="async",way="{way}",{chosen}}}'
            # A rate needs two scrapes of a task, and that of another may have been there before.
            wait_until(lambda ratio=ratio: prometheus.values(ratio), f"data for {ratio}", limit_s=30.0)
            ratios = prometheus.values(ratio)
            assert ratios and all(low < value < high for value in ratios), (way, task, ratios)
    assert prometheus.total('shardline:compression:ratio{run="sync"}') == 0


def check_parts_of_a_step(prometheus: Prometheus) -> None:
    """With one shard a step has one exchange: its parts are within it, and with compute they are most of a step."""
    whole = prometheus.total('shardline_step_seconds_sum{run="async",task=~"worker/.*"}')
    names = ("compute", "push", "barrier_wait", "pull")
    parts = {name: prometheus.total(f'shardline_{name}_seconds_sum{{run="async",task=~"worker/.*"}}') for name in names}
    assert all(value >= 0.0 for value in parts.values()) and parts["compute"] > 0.0 and parts["pull"] > 0.0, parts
    exchange = prometheus.total('shardline_exchange_seconds_sum{run="async",task=~"worker/.*"}')
    assert sum(parts.values()) - parts["compute"] <= exchange + 1e-6, (parts, exchange)
    # The rest is a busy machine's.
    assert sum(parts.values()) > 0.5 * whole, (parts, whole)

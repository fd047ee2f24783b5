"""Configurations, rules and dashboard by themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from grafana_foundation_sdk.models.prometheus import Dataquery

from shardline.observability.metrics import BY_NAME
from shardline.roles import ROLES
from tests.monitoring.promql import DASHBOARD, GRAFANA, PROMETHEUS, dashboard, metrics_of, of_dashboard, of_rules, rules

ROOT = Path(__file__).parents[2]
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool; on Debian: apt-get install prometheus"
)


def promtool(*arguments: str | Path) -> str:
    finished = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60.0
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


def mounts_of(service: dict[str, Any]) -> dict[str, str]:
    """Folder in the container by folder of the tree, of a compose service."""
    pairs = [
        (item["source"], item["target"]) if isinstance(item, dict) else item.split(":")[:2]
        for item in service["volumes"]
    ]
    return dict(pairs)


@needs_promtool
@pytest.mark.parametrize("name", ["prometheus", "token", "local", "machines"])
def test_promtool_takes_the_configuration_with_its_rules(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "prometheus"
    shutil.copytree(PROMETHEUS, folder)
    # What a person puts beside it, which promtool looks for.
    trustme.CA().cert_pem.write_to_path(str(folder / "ca.pem"))
    (folder / "token").write_text("a-token-of-enough-characters")
    path = folder / f"{name}.yml"
    path.write_text(path.read_text().replace("/run/secrets/token", "token"))
    assert "SUCCESS: 2 rule files found" in promtool("check", "config", path)


def test_with_a_token_prometheus_in_compose_brings_it_and_is_otherwise_the_same() -> None:
    plain, secured = (yaml.safe_load((PROMETHEUS / f"{name}.yml").read_text()) for name in ("prometheus", "token"))
    (scrape,) = secured["scrape_configs"]
    overlay = yaml.safe_load((ROOT / "deploy" / "compose" / "token.yaml").read_text())
    service = overlay["services"]["prometheus"]
    (secret,) = service["secrets"]
    assert scrape.pop("authorization") == {"credentials_file": f"/run/secrets/{secret}"}
    assert secured == plain
    assert "--config.file=/etc/prometheus/token.yml" in service["command"]
    assert overlay["x-secured"]["environment"] == {"SHARDLINE_TOKEN_FILE": f"/run/secrets/{secret}"}


@needs_promtool
def test_every_alert_fires_when_it_should_and_not_before() -> None:
    assert "SUCCESS" in promtool("test", "rules", Path(__file__).parent / "alerts_test.yml")


def test_every_alert_has_a_test_of_both_and_says_what_to_do() -> None:
    cases = yaml.safe_load((Path(__file__).parent / "alerts_test.yml").read_text())["tests"]
    fired: dict[str, set[bool]] = {}
    for case in cases:
        for check in case.get("alert_rule_test", ()):
            fired.setdefault(check["alertname"], set()).add(bool(check["exp_alerts"]))
    for rule in rules():
        if "alert" in rule:
            assert fired.get(rule["alert"]) == {False, True}, f"{rule['alert']} is not tested firing and silent"
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}


def test_expressions_name_metrics_that_there_are() -> None:
    expressions = [*of_dashboard(), *of_rules()]
    assert len(expressions) > 60
    for expression in expressions:
        unknown = metrics_of(expression.text) - BY_NAME.keys()
        assert not unknown, f"{expression.where}: no such metric {unknown}"
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = " ".join(expression.text for expression in expressions)
    for name in recorded:
        assert name in used, f"nothing uses {name}"


def test_dashboard_is_what_its_script_makes() -> None:
    made = subprocess.run(
        [sys.executable, str(GRAFANA / "make_dashboard.py")], capture_output=True, text=True, check=True, timeout=60.0
    )
    assert made.stdout == DASHBOARD.read_text(encoding="utf-8"), "run: make docs"


def test_dashboard_is_one_to_grafanas_own_library() -> None:
    register_default_plugins()
    read = Dashboard.from_json(dashboard())
    assert (read.uid, read.title) == ("shardline", "Shardline")
    panels = list(read.panels or ())
    numbers = [panel.id_val for panel in panels]
    assert len(set(numbers)) == len(numbers) and all(numbers)
    titles = {panel.title for panel in panels if panel.type_val == "row"}
    assert titles == {"Job", "Training", "A step", "Pipeline", "Traffic", "Staleness and shards", "Checkpoints"}
    for panel in panels:
        if panel.type_val != "row":
            assert panel.targets and all(isinstance(target, Dataquery) for target in panel.targets), panel.title
            assert panel.datasource is not None and panel.datasource.uid == "${datasource}"
            assert panel.grid_pos is not None and panel.grid_pos.x + panel.grid_pos.w <= 24
    variables = {item.name: item for item in (read.templating.list_val or ())}
    assert list(variables) == ["datasource", "job", "namespace", "run", "task"]


def test_provisioning_leads_to_the_dashboard_and_from_it_to_prometheus() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    mounts = mounts_of(compose["services"]["grafana"])
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/shardline.yml").read_text())["providers"]
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    (chosen,) = [item for item in dashboard()["templating"]["list"] if item["name"] == "datasource"]
    assert chosen["current"]["value"] == source["uid"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose["services"]


def test_prometheus_in_compose_looks_for_every_service_at_its_port() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    mounts = mounts_of(compose["services"]["prometheus"])
    assert mounts["./deploy/prometheus"] == "/etc/prometheus"
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    (scrape,) = config["scrape_configs"]
    (lookup,) = scrape["dns_sd_configs"]
    tasks = {name for name, service in compose["services"].items() if (service.get("command") or [""])[0] in ROLES}
    assert set(lookup["names"]) == tasks
    ports = {
        compose["services"][name]["environment"]["SHARDLINE_METRICS_PORT"]
        for name in tasks
        if "SHARDLINE_METRICS_PORT" in compose["services"][name].get("environment", {})
    }
    assert ports <= {str(lookup["port"])}
    assert compose["x-environment"]["SHARDLINE_METRICS_PORT"] == str(lookup["port"])
    for rule_file in config["rule_files"]:
        assert (PROMETHEUS / rule_file).is_file()

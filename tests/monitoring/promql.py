"""Every PromQL expression that the project ships, and what of it can be said without a Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
GRAFANA = DEPLOY / "grafana"
DASHBOARD = GRAFANA / "dashboards" / "shardline.json"
VARIABLES = {"$__rate_interval": "10s", "$job": ".*", "$namespace": ".*", "$run": ".*", "$task": ".*"}
"""As Grafana fills them in where everything is chosen."""
COMPARISON = re.compile(r" (==|>|<) (?!.* (?:==|>|<) )")


@dataclass(frozen=True)
class Expression:
    """One expression and where it is from."""

    where: str
    text: str


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def of_dashboard() -> Iterator[Expression]:
    """The queries of all panels, variables filled in."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            assert "$" not in text, f"{panel['title']}: a variable that nobody fills in: {text}"
            yield Expression(f"panel {panel['title']!r}, query {target['refId']}", text)


def rules() -> Iterator[dict[str, Any]]:
    """All recording rules and alerts."""
    for file in ("rules.yml", "alerts.yml"):
        for group in yaml.safe_load((PROMETHEUS / file).read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]


def of_rules() -> Iterator[Expression]:
    """Recording rules as they are; alerts without their threshold: 0 or 1 for every series that is compared."""
    for rule in rules():
        if "record" in rule:
            yield Expression(f"rule {rule['record']}", rule["expr"])
        else:
            compared, count = COMPARISON.subn(r" \1 bool ", rule["expr"])
            assert count == 1, f"{rule['alert']} is no comparison: {rule['expr']}"
            yield Expression(f"alert {rule['alert']}", compared)


def metrics_of(text: str) -> set[str]:
    """Names of our metrics in an expression, without the endings of a histogram's series."""
    names = re.findall(r"\bshardline_\w+", text)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}

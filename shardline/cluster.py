"""Who takes part: roles, tasks, addresses; cluster.json and TF_CONFIG."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ROLES = ("chief", "ps", "worker", "evaluator")


@dataclass(frozen=True)
class ClusterSpec:
    """Addresses (host:port) by role, TensorFlow's shape."""

    tasks: Mapping[str, tuple[str, ...]]

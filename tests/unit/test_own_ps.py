"""The ps in a worker's own process: what its failure does to that process. It trains in tests/e2e/test_deaths.py."""

from __future__ import annotations

import os
from typing import Any

import pytest

from shardline import plugins
from shardline.client.api.joining import OwnPs
from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.timeouts import Timeouts
from shardline.errors import FencedError
from shardline.host.process import Termination

SPEC = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:0",) * 2, "worker": ("127.0.0.1:0",) * 2})


def own_ps(monkeypatch: pytest.MonkeyPatch, run: Any, *, asked: bool = False) -> tuple[list[RoleConfig], list[int]]:
    """One that runs this, until its end; the settings that it got, and the exit codes of its process.

    asked: its process was asked to end.
    """
    made: list[RoleConfig] = []
    codes: list[int] = []

    class Fake:
        def __init__(self, config: RoleConfig) -> None:
            made.append(config)

        def run(self, termination: Termination) -> int:
            found: int = run()
            return found

    monkeypatch.setattr(plugins, "installed", lambda *_: Fake)
    monkeypatch.setattr(os, "_exit", codes.append)
    timeouts = Timeouts(total_s=20.0)
    config = RoleConfig(role="worker", index=1, cluster=SPEC, timeouts=timeouts, metrics_port=9000, with_ps=True)
    termination = Termination()
    if asked:
        termination.event.set()
    OwnPs(config, termination).close(ended=True)
    return made, codes


def test_it_has_the_workers_index_and_no_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    (config,), codes = own_ps(monkeypatch, lambda: 0)
    assert (config.task, config.metrics_port, config.ready_fd) == ("ps/1", 0, None)
    assert codes == []


def test_its_failure_ends_the_process_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise FencedError("replaced")

    assert own_ps(monkeypatch, fail)[1] == [FencedError.exit_code]


def test_the_process_ends_if_the_chief_does_not_let_it_go(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_ps(monkeypatch, lambda: 1, asked=True)[1] == [1]
    assert own_ps(monkeypatch, lambda: 1)[1] == []

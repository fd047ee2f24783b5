"""A chief that trains: a separate worker process with the name chief/0, which ends with the chief.

A process and not a thread: heartbeats and checkpoints must not wait for a backward pass that holds the GIL.

    python -m shardline_chief.io.training_process < settings.json
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardline.cluster import ClusterSpec, format_address, parse_address
from shardline.config import RoleConfig
from shardline.core.timeouts import Timeouts
from shardline.errors import ShardlineError
from shardline.host import lifeline
from shardline.host.allocator import tune_allocator
from shardline.observability import log as logs
from shardline.roles import ROLES
from shardline.security import Security

log = logging.getLogger("shardline_chief.io.training_process")

PATHS = ("job", "out", "run_dir")
SECURITY_FILES = tuple(field.name for field in dataclasses.fields(Security) if field.init)


def _text(path: Path | None) -> str | None:
    return str(path) if path is not None else None


def _path(text: str | None) -> Path | None:
    return Path(text) if text is not None else None


def to_json(config: RoleConfig) -> str:
    """Settings of the training process as JSON, for its standard input."""
    fields: dict[str, Any] = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in ("cluster", "timeouts", "security", *PATHS)
    }
    fields["cluster"] = json.loads(config.cluster.to_json())
    fields["timeouts"] = dataclasses.asdict(config.timeouts)
    for name in PATHS:
        fields[name] = _text(getattr(config, name))
    # Paths of the secrets, not their content.
    fields["security"] = {name: _text(getattr(config.security, name)) for name in SECURITY_FILES}
    return json.dumps(fields)


def from_json(text: str) -> RoleConfig:
    fields = json.loads(text)
    cluster = ClusterSpec.from_mapping(fields["cluster"])
    fields["cluster"] = TrainerCluster(cluster.tasks, cluster.labels)
    fields["timeouts"] = Timeouts(**fields["timeouts"])
    for name in PATHS:
        fields[name] = _path(fields[name])
    fields["security"] = Security(**{name: _path(text) for name, text in fields["security"].items()})
    fields["overrides"] = tuple((name, value) for name, value in fields["overrides"])
    return RoleConfig(**fields)


@dataclasses.dataclass(frozen=True)
class TrainerCluster(ClusterSpec):
    """The cluster for the training process: `chief` is the address to call; its own services need another port."""

    def address(self, task: str) -> str:
        if task != "chief/0":
            return super().address(task)
        host, _ = parse_address(self.chief)
        return format_address(host, 0)


class TrainingProcess:
    """The chief's own training process."""

    def __init__(self, config: RoleConfig, chief_address: str, *, on_exit: Callable[[int], None]) -> None:
        """Start the process. config: the chief's. on_exit gets the exit code, on a thread of its own."""
        self._life_read, self._life_write = os.pipe()
        settings = dataclasses.replace(
            config,
            role="chief",
            index=0,
            cluster=config.cluster.with_address("chief/0", chief_address),
            metrics_port=0,
            ready_fd=None,
            lock_fd=None,
            life_fd=self._life_read,
            resume=False,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shardline_chief.io.training_process"],
            stdin=subprocess.PIPE,
            pass_fds=(self._life_read,),
            # Ctrl-C in the chief's terminal is for the chief to handle.
            start_new_session=True,
        )
        os.close(self._life_read)
        assert self._process.stdin is not None
        self._process.stdin.write(to_json(settings).encode())
        self._process.stdin.close()
        watcher = threading.Thread(target=lambda: on_exit(self._process.wait()), name="trainer-watch", daemon=True)
        watcher.start()

    def close(self, timeout_s: float) -> None:
        """Wait until the process has exited; kill it after timeout_s seconds."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("the chief's training process did not end within %.1f s; killing it", timeout_s)
            self._process.kill()
            self._process.wait(5.0)
        os.close(self._life_write)


def main() -> int:
    """Run the worker role with the chief's name; returns its exit code."""
    config = from_json(sys.stdin.read())
    if config.life_fd is not None:
        lifeline.watch(config.life_fd)
    logs.setup(f"{config.task} trainer")
    tune_allocator()
    try:
        return ROLES["worker"].runner()(config)
    except ShardlineError as error:
        log.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())

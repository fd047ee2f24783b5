"""What compose itself makes of docker-compose.yml: no engine is needed, only the command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def composed(*profiles: str, **knobs: str) -> dict[str, Any]:
    """`docker compose config`, with knobs as the shell would set them."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    chosen = [part for profile in profiles for part in ("--profile", profile)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SHARDLINE_", "COMPOSE_"))}
    done = subprocess.run(
        [docker, "compose", "--env-file", os.devnull, *chosen, "config", "--format", "json"],
        cwd=ROOT,
        env={**kept, **knobs},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_gpu_profile_puts_workers_with_one_gpu_each_in_the_place_of_the_others() -> None:
    services = composed("gpu", TORCH="cuda", CPU_WORKERS="0", WORKERS="3", GPU_MEMORY_FRACTION="0.5")["services"]
    assert services["worker"]["deploy"]["replicas"] == 0
    worker = services["worker-gpu"]
    assert worker["deploy"]["replicas"] == 3
    assert worker["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    ]
    environment = worker["environment"]
    assert (environment["SHARDLINE_DEVICE"], environment["SHARDLINE_GPU_MEMORY_FRACTION"]) == ("cuda", "0.5")
    assert worker["command"] == services["worker"]["command"]
    assert services["chief"]["build"]["args"]["TORCH"] == "cuda"


def test_gpus_are_asked_for_by_their_profile_alone() -> None:
    services = composed()["services"]
    assert "worker-gpu" not in services
    assert not [name for name, one in services.items() if "devices" in str(one.get("deploy"))]

"""systemd units and the compose file for one machine: valid, and what Shardline makes of their settings."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from shardline.cli import options
from shardline.cli.roles import COMMANDS, role_command
from shardline.config import RoleConfig
from shardline.errors import UsageError
from shardline.roles import ROLES

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "deploy" / "systemd"
UNIT = SYSTEMD / "shardline@.service"
DROP_IN = SYSTEMD / "shardline@.service.d" / "secrets.conf"
ADMIN_DROP_IN = SYSTEMD / "shardline@.service.d" / "admin.conf"
COMPOSE = ROOT / "deploy" / "compose-per-machine"
PROGRAM = "/opt/shardline/bin/shardline"
SPEC = {
    "chief": ["10.0.0.1:2222"],
    "ps": ["10.0.0.2:2222", "10.0.0.3:2222"],
    "worker": ["10.0.0.4:2222", "10.0.0.5:2222"],
    "evaluator": ["10.0.0.6:2222"],
    "aggregator": ["10.0.0.7:2222"],
}
FLAGS = {
    parameter.envvar: parameter
    for command in COMMANDS
    for parameter in command.params
    if isinstance(parameter, click.Option) and parameter.envvar
}


def variables(path: Path) -> dict[str, str]:
    """What systemd and compose read of an env file without quotes."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def settings_of(role: str, values: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> RoleConfig:
    """The settings that a role's command makes of its variables, each of which must be a flag's.

    Without the TLS files, which the machine has and this test hasn't.
    """
    monkeypatch.setenv("SHARDLINE_INSECURE_BIND", "true")
    found: list[RoleConfig] = []
    for name, value in values.items():
        assert name in FLAGS, f"{name} sets no flag"
        monkeypatch.setenv(name, value)

    def keep(role: str, flags: dict[str, Any]) -> int:
        found.append(options.role_config(role, flags, environ={}))
        return 0

    role_command(role, keep).main([], standalone_mode=False)
    return found[0]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A machine's files."""
    (tmp_path / "cluster.json").write_text(json.dumps(SPEC))
    (tmp_path / "job.py").write_text("job = None")
    (tmp_path / "token").write_text("a-token-of-enough-characters")
    (tmp_path / "admin-token").write_text("an-admin-token-of-enough-characters")
    return tmp_path


# systemd


def unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """Sections of a unit file; a setting may be given several times."""
    found: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found.setdefault(section, {}).setdefault(name, []).append(value)
    return found


def test_units_pass_systemds_own_check(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not installed")
    folder = tmp_path / "units"
    shutil.copytree(SYSTEMD, folder)
    # The check wants the program to be there.
    path = folder / UNIT.name
    path.write_text(path.read_text().replace(PROGRAM, sys.executable))
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"}
    command = [verify, "verify", "--man=no", "--recursive-errors=no", str(path)]
    good = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    if "Failed to" in good.stderr and "D-Bus" in good.stderr:
        pytest.skip(f"systemd-analyze can't run here: {good.stderr}")
    assert (good.returncode, good.stderr) == (0, "")
    path.write_text(path.read_text().replace("RestartSec=2", "RestartSecs=2"))
    wrong = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert "RestartSecs" in wrong.stderr


def test_drop_in_hands_over_the_token_and_leaves_files_that_are_renewed_where_they_are() -> None:
    service = unit(DROP_IN)["Service"]
    assert service["LoadCredential"] == ["token:/etc/shardline/token"]
    told = dict(text.split("=", 1) for text in service["Environment"])
    names = ("task.pem", "task.key", "ca.pem")
    assert list(told.values()) == ["%d/token", *(f"/etc/shardline/{name}" for name in names)]
    assert set(told) == {"SHARDLINE_TOKEN_FILE", "SHARDLINE_TLS_CERT", "SHARDLINE_TLS_KEY", "SHARDLINE_TLS_CA"}
    assert set(told) <= set(FLAGS)
    admin = unit(ADMIN_DROP_IN)["Service"]
    assert admin["Environment"] == ["SHARDLINE_ADMIN_TOKEN_FILE=%d/admin-token"]
    assert [text.split(":", 1)[0] for text in admin["LoadCredential"]] == ["admin-token"]
    assert "SHARDLINE_ADMIN_TOKEN_FILE" in FLAGS


def test_unit_gives_a_task_longer_to_end_than_its_timeout() -> None:
    service = unit(UNIT)["Service"]
    assert float(service["TimeoutStopSec"][0]) > float(variables(SYSTEMD / "common.env")["SHARDLINE_TIMEOUT"])
    assert service["Restart"] == ["on-failure"]
    assert UsageError.exit_code in [int(code) for code in service["RestartPreventExitStatus"][0].split()]
    assert service["User"][0] in (SYSTEMD / "shardline.sysusers").read_text().splitlines()[-1].split()


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("chief", "chief/0"),
        ("ps-0", "ps/0"),
        ("worker-0", "worker/0"),
        ("evaluator", "evaluator/0"),
        ("aggregator-0", "aggregator/0"),
    ],
)
def test_settings_of_an_instance_make_its_task(
    name: str, task: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = unit(UNIT)["Service"]
    read = [path.replace("%i", name) for path in service["EnvironmentFile"]]
    assert read == ["/etc/shardline/common.env", f"/etc/shardline/{name}.env"]
    values: dict[str, str] = {}
    for path in read:
        assert (SYSTEMD / Path(path).name).read_text().splitlines()[0].startswith(f"# {path}")
        values |= variables(SYSTEMD / Path(path).name)
    program, argument = service["ExecStart"][0].split()
    assert (program, argument) == (PROGRAM, "$ROLE")
    role = values.pop("ROLE")
    assert role in ROLES
    state = f"/var/lib/{service['StateDirectory'][0].replace('%i', name)}"
    assert values.get("SHARDLINE_OUT", state) == state
    moved = {key: value.replace("/etc/shardline", str(here)) for key, value in values.items()}
    config = settings_of(role, moved, monkeypatch)
    # A chief ends with the code of its job in any case.
    assert (config.task, config.exit_with_job) == (task, role != "chief")
    assert config.resume == (role == "chief")


def test_instances_of_one_machine_take_metrics_ports_of_their_own() -> None:
    ports = [variables(path)["SHARDLINE_METRICS_PORT"] for path in SYSTEMD.glob("*.env") if path.name != "common.env"]
    assert len(set(ports)) == len(ports) == 5


# Compose


def compose_file() -> dict[str, Any]:
    """The compose file with anchors resolved, by the YAML merge key."""
    found: dict[str, Any] = yaml.safe_load((COMPOSE / "docker-compose.yml").read_text())
    return found


def filled(text: str, given: Mapping[str, str]) -> str:
    """A value with its variables: ${NAME}, ${NAME:-default}, ${NAME:?message}."""
    return re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", lambda found: given.get(found[1], found[2]), text)


@pytest.mark.parametrize("role", [*ROLES, "worker-gpu"])
def test_profile_starts_one_task_in_the_machines_network(
    role: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = compose_file()["services"]
    service = services[role]
    assert service["profiles"] == [role]
    assert (service["network_mode"], service["read_only"], service["cap_drop"]) == ("host", True, ["ALL"])
    command = role.removesuffix("-gpu")
    assert service["command"] == [command]
    given = {"TASK": f"{command}/0", "ADDRESS": SPEC[command][0]}
    values = {name: filled(str(value), given) for name, value in service["environment"].items()}
    # Where the mounts put this machine's files; TLS files are read when they are used.
    places = {"/etc/shardline/cluster.json": "cluster.json", "/job/job.py": "job.py"}
    places |= {f"/run/secrets/{name}": name for name in ("token", "admin-token")}
    secured = {f"SHARDLINE_TLS_{part}" for part in ("CERT", "KEY", "CA")}
    tokens = {"token", "admin-token"} if role in ("chief", "ps") else {"token"}
    assert {Path(values[name]).name for name in secured} | tokens == set(service["secrets"])
    assert ("SHARDLINE_ADMIN_TOKEN_FILE" in values) == ("admin-token" in tokens)
    moved = {
        name: str(here / places[value]) if value in places else value
        for name, value in values.items()
        if name not in secured
    }
    config = settings_of(command, moved, monkeypatch)
    assert config.task == given["TASK"] and config.security.check("a-token-of-enough-characters")
    assert bool(config.security.admin_token) == ("admin-token" in tokens)
    assert filled(service["healthcheck"]["test"][-1], given) == config.cluster.address(config.task)
    assert (config.out == Path("/out")) == (role == "chief")
    assert config.device == ("cuda" if role == "worker-gpu" else "cpu")
    assert float(service["stop_grace_period"].rstrip("s")) > config.timeouts.total_s


def test_example_settings_name_every_variable_of_the_compose_file() -> None:
    text = (COMPOSE / "docker-compose.yml").read_text()
    used = {part.split("}")[0].split(":")[0] for part in text.split("${")[1:]}
    lines = (COMPOSE / ".env.example").read_text().splitlines()
    named = {line.lstrip("#").split("=")[0] for line in lines if "=" in line and not line.startswith("# ")}
    assert used == named - {"COMPOSE_PROFILES"}


def test_composes_own_check_takes_the_file_and_asks_for_what_is_missing(tmp_path: Path) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    shutil.copytree(COMPOSE, tmp_path / "machine")
    command = [docker, "compose", "config", "--format", "json"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path / "machine", capture_output=True, text=True, timeout=60, check=False
        )

    (tmp_path / "machine" / ".env").write_text("COMPOSE_PROFILES=ps\n")
    missing = run()
    assert missing.returncode != 0 and "in .env" in missing.stderr
    shutil.copy(COMPOSE / ".env.example", tmp_path / "machine" / ".env")
    found = run()
    assert found.returncode == 0, found.stderr
    assert list(json.loads(found.stdout)["services"]) == ["ps"]

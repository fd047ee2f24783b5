"""Where tasks listen: in plain on this machine only, unless told otherwise, and what is said then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
import trustme

from shardline.cli import options
from shardline.cli.launcher import LaunchOptions, task_environment
from shardline.cli.roles import role_command
from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.errors import UsageError
from shardline.security import Security, is_loopback
from tests.support.fake_roles import read_back

HERE, ELSEWHERE = "127.0.0.1:0", "10.0.0.7:2222"
REMEDIES = (
    r"without TLS, where others can read and change the traffic; set --tls-cert, --tls-key and --tls-ca, or stay on "
    r"this machine with {flag} 127\.0\.0\.1, or set --insecure-bind \(SHARDLINE_INSECURE_BIND\)"
)


def config(role: str = "ps", address: str = HERE, **more: Any) -> RoleConfig:
    spec = ClusterSpec({"chief": (HERE,), "ps": (HERE,), "worker": (HERE,), "evaluator": (HERE,), role: (address,)})
    return RoleConfig(role=role, index=0, cluster=spec, **more)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bind")
    ca = trustme.CA()
    cert = ca.issue_cert("10.0.0.7")
    found = {name: folder / name for name in ("ca", "cert", "key", "job", "admin")}
    ca.cert_pem.write_to_path(str(found["ca"]))
    cert.cert_chain_pems[0].write_to_path(str(found["cert"]))
    cert.private_key_pem.write_to_path(str(found["key"]))
    for name in ("job", "admin"):
        found[name].write_text(f"the-{name}-token-of-this-test")
    return found


@pytest.mark.parametrize("role", ["chief", "ps", "worker", "evaluator"])
def test_task_beyond_loopback_without_tls_ends_with_the_three_remedies(role: str) -> None:
    sentence = rf"the services of {role}/0 would listen at 10\.0\.0\.7 {REMEDIES.format(flag='--bind')}"
    with pytest.raises(UsageError, match=sentence):
        config(role, ELSEWHERE)
    assert config(role, ELSEWHERE, insecure_bind=True).insecure_bind
    # Others may know it by another address, such as a tunnel's.
    assert config(role, ELSEWHERE, bind="127.0.0.1").bind == "127.0.0.1"


@pytest.mark.parametrize(
    ("settings", "what", "flag"),
    [
        ({"bind": "0.0.0.0"}, "the services of chief/0 would listen at 0.0.0.0", "--bind"),
        ({"address": "trainer.example:2222"}, "the services of chief/0 would listen at trainer.example", "--bind"),
        ({"address": "[fd00::7]:2222"}, "the services of chief/0 would listen at fd00::7", "--bind"),
        ({"host": "0.0.0.0"}, "the metrics of chief/0 would listen at 0.0.0.0", "--host"),
        ({"page": "[::]:8080"}, "the chief's page would listen at ::", "--page"),
    ],
)
def test_every_listener_of_a_task_is_under_the_rule(
    settings: dict[str, Any], what: str, flag: str, files: dict[str, Path]
) -> None:
    with pytest.raises(UsageError, match=f"{what} {REMEDIES.format(flag=flag)}"):
        config("chief", **settings)
    # A CA alone, or a token, hides nothing of what travels.
    for security in (Security(tls_ca=files["ca"]), Security(token_file=files["job"])):
        with pytest.raises(UsageError, match=what):
            config("chief", security=security, **settings)
    config("chief", insecure_bind=True, **settings)
    config("chief", security=Security(tls_cert=files["cert"], tls_key=files["key"]), **settings)


def keeping(role: str, found: list[RoleConfig]) -> click.Command:
    """A role's command that keeps its settings and runs nothing."""

    def keep(role: str, flags: dict[str, Any]) -> int:
        found.append(options.role_config(role, flags, {}))
        return 0

    return role_command(role, keep)


def test_flag_and_variable_say_that_the_network_is_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[RoleConfig] = []
    command = keeping("ps", found)
    arguments = ["--cluster", f'{{"chief": ["{HERE[:-1]}1"], "ps": ["{ELSEWHERE}"]}}']
    with pytest.raises(UsageError, match="or set --insecure-bind"):
        command.main(arguments, standalone_mode=False)
    command.main([*arguments, "--insecure-bind"], standalone_mode=False)
    monkeypatch.setenv("SHARDLINE_INSECURE_BIND", "true")
    command.main(arguments, standalone_mode=False)
    assert [one.insecure_bind for one in found] == [True, True]


def test_what_is_left_open_is_said_once_and_nothing_where_nothing_is(files: dict[str, Path]) -> None:
    tls = {"tls_cert": files["cert"], "tls_key": files["key"]}
    both = {"token_file": files["job"], "admin_token_file": files["admin"]}
    assert config().cautions() == []
    assert config(address=ELSEWHERE, security=Security(**tls, tls_ca=files["ca"])).cautions() == []
    assert config(address=ELSEWHERE, security=Security(**tls, **both)).cautions() == []

    (plain,) = config(address=ELSEWHERE, insecure_bind=True).cautions()
    assert plain.startswith("--insecure-bind: ps/0 listens at 10.0.0.7 without TLS; anyone on that network can read")
    assert plain.endswith("and without a token anyone can send it commands")
    (guarded,) = config(address=ELSEWHERE, insecure_bind=True, security=Security(**both)).cautions()
    assert guarded.endswith("can read and change the traffic")
    (open_tls,) = config(address=ELSEWHERE, security=Security(**tls)).cautions()
    assert "admits anyone who can reach it; set --token-file or --tls-ca" in open_tls


@pytest.mark.parametrize("role", ["chief", "ps", "worker", "evaluator"])
def test_chief_and_servers_warn_where_the_jobs_token_is_every_right(role: str, files: dict[str, Path]) -> None:
    found = config(role, security=Security(token_file=files["job"])).cautions()
    assert len(found) == (role in ("chief", "ps"))
    assert all("there is no --admin-token-file, so the job token grants every right" in sentence for sentence in found)


def role_security(role: str, **given: Path) -> Security:
    found: list[RoleConfig] = []
    command = keeping(role, found)
    spec = '{"chief": ["127.0.0.1:1"], "ps": 1, "worker": 1, "evaluator": 1}'
    flags = [text for name, path in given.items() for text in (f"--{name.replace('_', '-')}", str(path))]
    command.main(["--cluster", spec, "--bind", "127.0.0.1", *flags], standalone_mode=False)
    return found[0].security


def test_admin_token_is_read_by_chief_and_servers_alone(files: dict[str, Path], tmp_path: Path) -> None:
    both = {"token_file": files["job"], "admin_token_file": files["admin"]}
    for role in ("chief", "ps"):
        assert role_security(role, **both).admin_token
        with pytest.raises(UsageError, match="--admin-token-file needs --token-file too"):
            role_security(role, admin_token_file=files["admin"])
    for role in ("worker", "evaluator"):
        # All tasks may have the same variables: the file need not be there for them.
        assert not role_security(role, token_file=files["job"], admin_token_file=tmp_path / "not there").admin_token


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("LocalHost", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.7", "fd00::7", "localhost.example", "", "*", "127.1")],
)
def test_only_addresses_and_the_name_of_loopback_count_as_this_machine(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_launcher_gives_the_admin_token_to_chief_and_servers_alone(files: dict[str, Path], tmp_path: Path) -> None:
    tokens = Security(token_file=files["job"], admin_token_file=files["admin"])
    local = LaunchOptions(job=tmp_path / "job.py", out=tmp_path, evaluators=1, security=tokens, insecure_bind=True)
    found = {task: read_back(local, task) for task in local.spec().task_names()}
    assert {task for task, config in found.items() if config.security.admin_token} == {"chief/0", "ps/0"}
    assert all(config.security.token for config in found.values())
    assert {task for task, config in found.items() if config.insecure_bind} == set(found)
    script = LaunchOptions(job=tmp_path / "job.py", out=tmp_path, script=True, security=tokens)
    inherited = {"SHARDLINE_ADMIN_TOKEN_FILE": str(files["admin"]), "SHARDLINE_INSECURE_BIND": "1"}
    environment = task_environment(script, "worker/0", life_fd=3, base=inherited)
    assert environment["SHARDLINE_TOKEN_FILE"] == str(files["job"])
    assert not inherited.keys() & environment.keys()

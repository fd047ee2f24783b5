"""The Kubernetes manifests: valid by Kubernetes' own schemas, and what Shardline makes of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from shardline.cli import options
from shardline.cli.health import health
from shardline.cli.roles import role_command
from shardline.cluster import read_spec
from shardline.config import RoleConfig
from tests.deploy import kustomize

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
BASE = KUBERNETES / "base"
VERSIONS = ("1.28", "1.37")
"""The oldest that docs/deploy.md promises, and the newest whose schemas are at hand."""
PODS = ("chief", "ps", "worker", "evaluator")
KUBECTL = shutil.which("kubectl")

Manifest = dict[str, Any]


def documents(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


@cache
def base_manifests() -> tuple[Manifest, ...]:
    """What stands in the files of base/ themselves."""
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return tuple(document for name in names for document in documents(BASE / name))


@cache
def rendered(folder: str) -> tuple[Manifest, ...]:
    """What `kubectl apply -k` would send: by kubectl, or without it by our small reader of the same files."""
    return by_kubectl(folder) if KUBECTL is not None else tuple(kustomize.render(Path(folder)))


def by_kubectl(folder: str) -> tuple[Manifest, ...]:
    assert KUBECTL is not None
    made = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    assert made.returncode == 0, made.stderr
    return tuple(yaml.safe_load_all(made.stdout))


def named(manifests: tuple[Manifest, ...], name: str, *kinds: str) -> Manifest:
    found = [one for one in manifests if one["metadata"]["name"] == name and one["kind"] in kinds]
    assert len(found) == 1, (name, kinds, [one["kind"] for one in found])
    return found[0]


def workload(manifests: tuple[Manifest, ...], role: str) -> Manifest:
    return named(manifests, role, "StatefulSet", "Deployment")


def container(manifests: tuple[Manifest, ...], role: str) -> Manifest:
    found: list[Manifest] = workload(manifests, role)["spec"]["template"]["spec"]["containers"]
    assert len(found) == 1
    return found[0]


def check_schema(manifest: Manifest) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


# Schemas


@pytest.mark.parametrize("manifest", base_manifests(), ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
def test_manifest_of_base_follows_the_schema(manifest: Manifest) -> None:
    check_schema(manifest)


def test_namespace_follows_the_schema_and_asks_for_the_restricted_standard() -> None:
    (namespace,) = documents(KUBERNETES / "namespace.yaml")
    check_schema(namespace)
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}


def test_schema_refuses_a_field_that_is_misspelt() -> None:
    wrong = json.loads(json.dumps(workload(base_manifests(), "ps")))
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 90
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        check_schema(wrong)


def with_gpus(folder: Path) -> str:
    """A kustomization as a user writes it, in a folder of its own."""
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "resources": ["secured"],
                "components": ["components/gpu", "components/aggregators"],
            }
        )
    )
    for part in ("base", "secured", "components"):
        shutil.copytree(KUBERNETES / part, folder / part)
    return str(folder)


def test_rendered_manifests_follow_the_schemas(tmp_path: Path) -> None:
    kinds: list[str] = []
    for folder in (str(BASE), str(KUBERNETES / "secured"), with_gpus(tmp_path)):
        for manifest in rendered(folder):
            kinds.append(manifest["kind"])
            assert manifest["metadata"]["namespace"] == "shardline"
            # The operator's kind has no schema in Kubernetes itself; a test below reads it.
            if manifest["kind"] != "ServiceMonitor":
                check_schema(manifest)
    expected = {"ConfigMap": 2, "Service": 4, "StatefulSet": 3, "Deployment": 1, "PodDisruptionBudget": 2}
    expected |= {"NetworkPolicy": 1}
    counts = {kind: kinds.count(kind) for kind in kinds}
    expected = {kind: 3 * count for kind, count in expected.items()} | {"ServiceMonitor": 2}
    # The aggregators of one of them.
    assert counts == expected | {"Service": 13, "StatefulSet": 10}


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed; its kustomize is what ours is compared with")
@pytest.mark.parametrize("folder", ["base", "secured", "gpu"])
def test_our_reader_makes_what_kubectl_makes(folder: str, tmp_path: Path) -> None:
    path = with_gpus(tmp_path) if folder == "gpu" else str(KUBERNETES / folder)

    def by_name(manifests: tuple[Manifest, ...]) -> list[Manifest]:
        # The suffix of a generated name is a hash of its content.
        text = re.sub(r"(shardline-(?:job|settings))-\w+", r"\1", json.dumps(manifests))
        return sorted(json.loads(text), key=lambda one: (one["kind"], one["metadata"]["name"]))

    assert by_name(tuple(kustomize.render(Path(path)))) == by_name(by_kubectl(path))


# Pods


@pytest.mark.parametrize("role", PODS)
def test_pod_meets_the_restricted_standard_on_a_read_only_root(role: str) -> None:
    spec = workload(base_manifests(), role)["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    # The image's own user; its Dockerfile makes it.
    assert f"ARG UID={spec['securityContext']['runAsUser']}\n" in (ROOT / "Dockerfile").read_text()
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsUser"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert container(base_manifests(), role)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    allowed = {"configMap", "secret", "emptyDir"}
    assert all(set(volume) - {"name"} <= allowed for volume in spec["volumes"])
    writable = {mount["name"] for mount in spec["containers"][0]["volumeMounts"] if not mount.get("readOnly")}
    assert writable == ({"tmp", "out"} if role == "chief" else {"tmp"})


@pytest.mark.parametrize("role", PODS)
def test_pod_selects_itself_mounts_what_it_has_and_ends_after_its_timeout(role: str) -> None:
    manifest = workload(base_manifests(), role)
    labels = {"app.kubernetes.io/name": "shardline", "app.kubernetes.io/component": role}
    template = manifest["spec"]["template"]
    assert manifest["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"] == labels
    service = named(base_manifests(), role, "Service")
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == labels
    if manifest["kind"] == "StatefulSet":
        assert manifest["spec"]["serviceName"] == role
    else:
        assert manifest["spec"]["strategy"] == {"type": "Recreate"}
    claims = {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", ())}
    volumes = {volume["name"] for volume in template["spec"]["volumes"]} | claims
    assert {mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]} == volumes
    assert template["spec"]["terminationGracePeriodSeconds"] > float(settings()["SHARDLINE_TIMEOUT"])


def test_budgets_let_one_server_and_one_worker_go_at_a_time() -> None:
    for role in ("ps", "worker"):
        budget = named(base_manifests(), role, "PodDisruptionBudget")["spec"]
        assert budget["maxUnavailable"] == 1
        assert budget["selector"] == workload(base_manifests(), role)["spec"]["selector"]


def test_policy_lets_tasks_reach_tasks_on_all_ports_and_others_the_metrics_only() -> None:
    spec = named(base_manifests(), "shardline", "NetworkPolicy")["spec"]
    tasks = {"matchLabels": {"app.kubernetes.io/name": "shardline"}}
    assert spec["podSelector"] == tasks
    assert spec["ingress"] == [
        {"from": [{"podSelector": tasks}]},
        {"ports": [{"port": "metrics", "protocol": "TCP"}]},
    ]


# What Shardline makes of them


def settings() -> dict[str, str]:
    lines = (BASE / "settings.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def environment(found: Manifest, config: Mapping[str, str], *, pod: str, index: int) -> dict[str, str]:
    """Variables as the kubelet hands them to a container."""
    fields = {"metadata.name": pod, "metadata.labels['apps.kubernetes.io/pod-index']": str(index)}
    values = dict(config)
    for variable in found["env"]:
        if "valueFrom" in variable:
            values[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            # Only variables before this one are known to it.
            values[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], variable["value"])
    return values


def config_of(role: str, values: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> RoleConfig:
    """The settings that a role's command makes of its variables."""
    found: list[RoleConfig] = []
    for name, value in values.items():
        monkeypatch.setenv(name, value)

    def keep(role: str, flags: dict[str, Any]) -> int:
        found.append(options.role_config(role, flags, environ={}))
        return 0

    role_command(role, keep).main([], standalone_mode=False)
    return found[0]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Where the pods' files lie, and what lies there here instead."""
    token = tmp_path / "token"
    token.write_text("a-token-of-enough-characters")
    return {
        "/etc/shardline/job/cluster.json": str(BASE / "cluster.json"),
        "/etc/shardline/job/job.py": str(BASE / "job.py"),
        "/etc/shardline/token/token": str(token),
    }


EXPECTED = {
    "chief": ("chief/0", "chief:2222"),
    "ps": ("ps/1", "ps-1.ps:2222"),
    "worker": ("worker/1", "worker-1.worker:2222"),
    "evaluator": ("evaluator/0", "evaluator-host:2222"),
}


@pytest.mark.parametrize("role", PODS)
def test_pods_variables_make_the_task_that_others_will_find(
    role: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = container(base_manifests(), role)
    assert found["args"] == [role]
    asked: list[tuple[str, str, str]] = []

    def place(chief: str, role: str, address: str, *_: object) -> str:
        asked.append((chief, role, address))
        return f"{role}/{1 if role == 'worker' else 0}"

    monkeypatch.setattr("shardline.rpc.index_request.take_place", place)
    monkeypatch.setattr("socket.gethostname", lambda: "evaluator-host")
    values = environment(found, settings(), pod=f"{role}-1", index=1)
    mounted = {name: files.get(value, value) for name, value in values.items()}
    config = config_of(role, mounted, monkeypatch)
    assert (config.task, config.cluster.address(config.task)) == EXPECTED[role]
    assert asked == ([("chief:2222", role, EXPECTED[role][1])] if role in ("worker", "evaluator") else [])
    assert (config.bind, config.host) == ("0.0.0.0", "0.0.0.0")
    ports = {port["name"]: port["containerPort"] for port in found["ports"]}
    assert ports["grpc"] == int(config.cluster.address(config.task).rpartition(":")[2])
    assert ports["metrics"] == config.metrics_port
    annotations = workload(base_manifests(), role)["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.metrics_port)
    # A chief ends with the code of its job in any case.
    assert config.exit_with_job == (role != "chief")
    assert config.security.check("a-token-of-enough-characters")
    if role == "chief":
        assert (config.out, config.resume) == (Path("/out"), True)
        assert config.page == f"127.0.0.1:{ports['page']}"
    # Every file that is named lies on a mount.
    mounts = [mount["mountPath"] for mount in found["volumeMounts"]]
    paths = [value for value in values.values() if value.startswith("/")]
    assert paths and all(any(Path(path).is_relative_to(mount) for mount in mounts) for path in paths)


def test_cluster_has_as_many_tasks_as_there_are_pods() -> None:
    spec = read_spec(str(BASE / "cluster.json"))
    for role in PODS:
        assert spec.num(role) == workload(base_manifests(), role)["spec"]["replicas"], role
    assert spec.addresses("ps") == tuple(f"ps-{index}.ps:2222" for index in range(spec.num("ps")))


def test_job_is_the_digits_example() -> None:
    assert (BASE / "job.py").read_bytes() == (ROOT / "examples" / "digits" / "job.py").read_bytes()


@pytest.mark.parametrize("role", PODS)
def test_probes_ask_the_health_service_and_leave_time_for_the_start(role: str) -> None:
    found = container(base_manifests(), role)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert found[probe]["grpc"] == {"port": 2222}
    start = found["startupProbe"]
    # A task that asks for its index may wait as long as joining may take before it answers, and imports torch before.
    waits_s = float(settings()["SHARDLINE_JOIN_TIMEOUT"]) + float(settings()["SHARDLINE_TIMEOUT"])
    assert start["periodSeconds"] * start["failureThreshold"] > waits_s


# TLS, monitoring, GPUs


def config_maps(manifests: tuple[Manifest, ...]) -> dict[str, dict[str, str]]:
    return {one["metadata"]["name"]: one["data"] for one in manifests if one["kind"] == "ConfigMap"}


@pytest.mark.parametrize("role", PODS)
def test_secured_pods_have_their_certificate_and_ask_over_tls(role: str) -> None:
    manifests = rendered(str(KUBERNETES / "secured"))
    found = container(manifests, role)
    spec = workload(manifests, role)["spec"]["template"]["spec"]
    (reference,) = found["envFrom"]
    config = config_maps(manifests)[reference["configMapRef"]["name"]]
    assert {name for name in config if "TLS" in name} == {f"SHARDLINE_TLS_{part}" for part in ("CERT", "KEY", "CA")}
    plain = settings()
    assert (plain.pop("SHARDLINE_INSECURE_BIND"), config["SHARDLINE_INSECURE_BIND"]) == ("true", "false")
    assert config.items() >= plain.items()
    (mount,) = (mount for mount in found["volumeMounts"] if mount["name"] == "tls")
    assert all(Path(config[name]).parent == Path(mount["mountPath"]) for name in config if "TLS" in name)
    (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "tls")
    # Readable for the pod's group, as the key of a Secret that root owns has to be.
    assert volume["secret"] == {"secretName": "shardline-tls", "defaultMode": 0o440}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert "grpc" not in found[probe]
        command = found[probe]["exec"]["command"]
        assert command[:2] == ["shardline", "health"]
        with health.make_context("health", command[2:]) as context:
            assert context.params["address"] == "127.0.0.1:2222"
            assert context.params["within"] < found[probe]["timeoutSeconds"]


@pytest.mark.parametrize("folder", ["base", "secured"])
def test_pods_refer_to_config_maps_that_are_made_with_them(folder: str) -> None:
    manifests = rendered(str(KUBERNETES / folder))
    made = config_maps(manifests)
    used = set()
    for role in PODS:
        found = container(manifests, role)
        assert found["image"] == "registry.example/shardline:0.1.0"
        used |= {source["configMapRef"]["name"] for source in found["envFrom"]}
        volumes = workload(manifests, role)["spec"]["template"]["spec"]["volumes"]
        used |= {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}
    assert used == set(made)
    job = next(data for name, data in made.items() if name.startswith("shardline-job-"))
    assert job == {name: (BASE / name).read_text() for name in ("cluster.json", "job.py")}


def test_service_monitor_selects_every_service_by_a_port_that_it_has_and_makes_them_one_job() -> None:
    (monitor,) = documents(KUBERNETES / "components" / "monitoring" / "servicemonitor.yaml")
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    services = [one for one in base_manifests() if one["kind"] == "Service"]
    assert len(services) == len(PODS)
    # What Prometheus calls the job, in its own configuration for compose and in what rules and dashboard ask for.
    (scrape,) = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    for service in services:
        assert service["metadata"]["labels"].items() >= wanted
        assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == scrape["job_name"]
        ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
        assert ports[endpoint["port"]] == int(settings()["SHARDLINE_METRICS_PORT"])


def test_scrapes_bring_the_jobs_token_and_over_tls_trust_the_clusters_ca() -> None:
    (plain,) = documents(KUBERNETES / "components" / "monitoring" / "servicemonitor.yaml")
    (secured,) = (one for one in rendered(str(KUBERNETES / "secured")) if one["kind"] == "ServiceMonitor")
    volumes = workload(base_manifests(), "ps")["spec"]["template"]["spec"]["volumes"]
    (token,) = (volume["secret"]["secretName"] for volume in volumes if volume["name"] == "token")
    for monitor in (plain, secured):
        (endpoint,) = monitor["spec"]["endpoints"]
        name = Path(settings()["SHARDLINE_TOKEN_FILE"]).name
        assert endpoint["authorization"] == {"credentials": {"name": token, "key": name}}
    assert "scheme" not in plain["spec"]["endpoints"][0]
    assert endpoint["scheme"] == "https"
    # A name that docs/deploy.md has in the certificate.
    assert f"DNS:{endpoint['tlsConfig']['serverName']}," in (ROOT / "docs" / "deploy.md").read_text()
    for role in PODS:
        found = workload(rendered(str(KUBERNETES / "secured")), role)
        assert found["spec"]["template"]["metadata"]["annotations"]["prometheus.io/scheme"] == "https"


def test_chief_and_servers_alone_have_the_admin_token() -> None:
    manifests = rendered(str(KUBERNETES / "secured"))
    for role in PODS:
        found = container(manifests, role)
        given = {variable["name"]: variable.get("value") for variable in found["env"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in found["volumeMounts"]}
        assert ("admin" in mounts) == (role in ("chief", "ps"))
        if "admin" in mounts:
            assert given["SHARDLINE_ADMIN_TOKEN_FILE"] == f"{mounts['admin']}/admin-token"
        else:
            assert "SHARDLINE_ADMIN_TOKEN_FILE" not in given


def test_workers_on_gpus_ask_for_one_each(tmp_path: Path) -> None:
    manifests = rendered(with_gpus(tmp_path))
    found = container(manifests, "worker")
    assert found["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"name": "SHARDLINE_DEVICE", "value": "cuda"} in found["env"]
    assert "nvidia.com/gpu" not in container(manifests, "ps")["resources"]["limits"]


@pytest.mark.parametrize(
    "path", sorted(KUBERNETES.rglob("kustomization.yaml")), ids=lambda path: str(path.parent.relative_to(KUBERNETES))
)
def test_kustomization_names_files_that_are_there(path: Path) -> None:
    found = yaml.safe_load(path.read_text())
    generators = found.get("configMapGenerator", ())
    names = [*found.get("resources", ()), *found.get("components", ())]
    names += [name for generator in generators for key in ("files", "envs") for name in generator.get(key, ())]
    names += [patch["path"] for patch in found.get("patches", ()) if "path" in patch]
    assert names or found.get("patches")
    assert all((path.parent / name).exists() for name in names)

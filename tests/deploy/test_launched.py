"""The manifests for JobSet and TFJob: valid by what their CRDs ask for, and what `shardline run` makes of their pods.

The schemas of these kinds are written down here as far as the manifests need them; pods and Jobs in them are checked
with Kubernetes' own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from shardline_launchers.command import FINAL_CODES, run
from shardline_launchers.places import Asked, ProcessPlace, find

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSIONS = ("1.29", "1.37")
"""Schemas of 1.28 want an `onPodConditions` in every rule of a podFailurePolicy, which Kubernetes itself does not."""
Manifest = dict[str, Any]


def an_object(required: tuple[str, ...] = (), **properties: Any) -> Manifest:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


COUNT, TEXT, SWITCH, ANY = (
    {"type": "integer", "minimum": 0},
    {"type": "string"},
    {"type": "boolean"},
    {"type": "object"},
)
NAMES = {"type": "array", "items": TEXT}


def one_of(*values: str) -> Manifest:
    return {"enum": list(values)}


JOBSET = an_object(
    ("replicatedJobs",),
    replicatedJobs={
        "type": "array",
        "items": an_object(
            ("name", "template"), name=TEXT, replicas=COUNT, template=an_object(("spec",), metadata=ANY, spec=ANY)
        ),
    },
    network=an_object(enableDNSHostnames=SWITCH, subdomain=TEXT, publishNotReadyAddresses=SWITCH),
    successPolicy=an_object(("operator",), operator=one_of("All", "Any"), targetReplicatedJobs=NAMES),
    failurePolicy=an_object(
        maxRestarts=COUNT,
        restartStrategy=one_of("Recreate", "BlockingRecreate", "InPlaceRestart"),
        rules={
            "type": "array",
            "maxItems": 20,
            "items": an_object(
                ("name", "action"),
                name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                action=one_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
                onJobFailureReasons={
                    "type": "array",
                    "items": one_of(
                        "BackoffLimitExceeded",
                        "DeadlineExceeded",
                        "FailedIndexes",
                        "MaxFailedIndexesExceeded",
                        "PodFailurePolicy",
                    ),
                },
                targetReplicatedJobs=NAMES,
            ),
        },
    ),
    suspend=SWITCH,
    ttlSecondsAfterFinished=COUNT,
)
REPLICAS = an_object(
    ("template",),
    replicas=COUNT,
    restartPolicy=one_of("Always", "OnFailure", "Never", "ExitCode"),
    template=an_object(("spec",), metadata=ANY, spec=ANY),
)
TFJOB = an_object(
    ("tfReplicaSpecs",),
    tfReplicaSpecs=an_object(Chief=REPLICAS, Master=REPLICAS, PS=REPLICAS, Worker=REPLICAS, Evaluator=REPLICAS),
    runPolicy=an_object(
        cleanPodPolicy=one_of("", "None", "Running", "All"),
        ttlSecondsAfterFinished=COUNT,
        activeDeadlineSeconds=COUNT,
        backoffLimit=COUNT,
        suspend=SWITCH,
    ),
    successPolicy=one_of("", "AllWorkers"),
    enableDynamicWorker=SWITCH,
)
SCHEMAS = {
    "JobSet": an_object(
        ("spec",), apiVersion={"const": "jobset.x-k8s.io/v1alpha2"}, kind=TEXT, metadata=ANY, spec=JOBSET
    ),
    "TFJob": an_object(("spec",), apiVersion={"const": "kubeflow.org/v1"}, kind=TEXT, metadata=ANY, spec=TFJOB),
}


def documents(name: str) -> dict[str, Manifest]:
    found = [one for one in yaml.safe_load_all((KUBERNETES / name).read_text()) if one is not None]
    return {one["kind"]: one for one in found}


def check(manifest: Manifest) -> None:
    """Validate with the schema of its kind. Raises ValidationError."""
    if manifest["kind"] in SCHEMAS:
        jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
        return
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


def inner(manifest: Manifest) -> Iterator[Manifest]:
    """Make of the manifest what a controller does, in kinds of Kubernetes itself."""
    for group in manifest.get("spec", {}).get("replicatedJobs", ()):
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": group["name"]}, **group["template"]}
    for kind, replicas in manifest.get("spec", {}).get("tfReplicaSpecs", {}).items():
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": kind.lower()}, **replicas["template"]}


def pods(manifest: Manifest) -> dict[str, Manifest]:
    """The pods' specs by group, in lower case."""
    if manifest["kind"] == "TFJob":
        return {pod["metadata"]["name"]: pod["spec"] for pod in inner(manifest)}
    return {job["metadata"]["name"]: job["spec"]["template"]["spec"] for job in inner(manifest)}


BOTH = pytest.mark.parametrize("name", ["jobset.yaml", "tfjob.yaml"])


@BOTH
def test_manifests_follow_their_schemas(name: str) -> None:
    for manifest in documents(name).values():
        assert manifest["metadata"]["namespace"] == "shardline"
        check(manifest)
        for made in inner(manifest):
            check(made)


@pytest.mark.parametrize(
    ("name", "kind", "field"), [("jobset.yaml", "JobSet", "network"), ("tfjob.yaml", "TFJob", "runPolicy")]
)
def test_schemas_refuse_a_field_that_is_misspelt(name: str, kind: str, field: str) -> None:
    wrong = copy.deepcopy(documents(name)[kind])
    wrong["spec"][f"{field}s"] = wrong["spec"].pop(field)
    with pytest.raises(jsonschema.ValidationError, match=f"{field}s"):
        check(wrong)


@BOTH
def test_pods_meet_the_restricted_standard_and_mount_what_they_have(name: str) -> None:
    (manifest,) = [one for kind, one in documents(name).items() if kind in SCHEMAS]
    settings = documents(name)["ConfigMap"]["data"]
    for spec in pods(manifest).values():
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["envFrom"] == [{"configMapRef": {"name": documents(name)["ConfigMap"]["metadata"]["name"]}}]
        assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in spec["volumes"]}
        assert spec["terminationGracePeriodSeconds"] > 60
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for path in (settings["SHARDLINE_JOB"], settings["SHARDLINE_TOKEN_FILE"]):
            assert any(path.startswith(f"{mount}/") for mount in mounts)


def place(settings: Mapping[str, str], environ: Mapping[str, str], arguments: list[str]) -> ProcessPlace:
    """Where `shardline run` finds a pod's place; its flags and variables must be those of the command."""
    known = {option.envvar for option in run.params if option.envvar is not None}
    assert settings.keys() <= known
    command, *flags = arguments
    assert command == "run"
    context = run.make_context("run", flags)
    assert context.params["file"] is None
    asked = Asked(ps=int(settings.get("SHARDLINE_PS", 1)), workers=int(settings.get("SHARDLINE_WORKERS", 0)) or None)
    found = find(environ, asked, expand=lambda short: (short,))
    assert found is not None
    return found


def test_every_pod_of_the_jobset_is_the_task_that_it_should_be() -> None:
    manifest, settings = documents("jobset.yaml")["JobSet"], documents("jobset.yaml")["ConfigMap"]["data"]
    name = manifest["metadata"]["name"]
    found = {}
    for job in inner(manifest):
        group = job["metadata"]["name"]
        (container,) = job["spec"]["template"]["spec"]["containers"]
        for index in range(job["spec"]["completions"]):
            host = f"{name}-{group}-0-{index}"
            environ = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": host}
            found[host] = place(settings, environ, container["args"])
            assert found[host].spec.address(found[host].task) == f"{host}.{name}:2222"
    assert [one.task for one in found.values()] == ["chief/0", "ps/0", "ps/1", "worker/0", "worker/1"]
    assert {one.spec.chief for one in found.values()} == {"digits-chief-0-0.digits:2222"}
    assert {one.spec.num("ps") for one in found.values()} == {2}


def test_every_pod_of_the_tfjob_is_the_task_that_it_should_be() -> None:
    manifest, settings = documents("tfjob.yaml")["TFJob"], documents("tfjob.yaml")["ConfigMap"]["data"]
    replicas = {kind.lower(): one["replicas"] for kind, one in manifest["spec"]["tfReplicaSpecs"].items()}
    # As the operator makes it: evaluators are not in the cluster.
    cluster = {
        kind: [f"digits-{kind}-{index}.shardline.svc:2222" for index in range(count)]
        for kind, count in replicas.items()
        if kind != "evaluator"
    }
    tasks = []
    for kind, spec in pods(manifest).items():
        (container,) = spec["containers"]
        # The names that the operator looks for.
        assert (container["name"], container["ports"]) == (
            "tensorflow",
            [{"name": "tfjob-port", "containerPort": 2222}],
        )
        for index in range(replicas[kind]):
            config = {"cluster": cluster, "task": {"type": kind, "index": index}, "environment": "cloud"}
            tasks.append(place(settings, {"TF_CONFIG": json.dumps(config)}, container["args"]).task)
    assert tasks == ["chief/0", "ps/0", "ps/1", "worker/0", "worker/1", "evaluator/0"]


def test_pods_are_started_again_where_that_may_help_and_only_there() -> None:
    hopeless = sorted(code for code in FINAL_CODES if code)
    for job in inner(documents("jobset.yaml")["JobSet"]):
        (rule,) = job["spec"]["podFailurePolicy"]["rules"]
        assert rule == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": hopeless}}
        # Kubernetes looks at exit codes of pods that it doesn't restart in place only.
        assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    settings = documents("tfjob.yaml")["ConfigMap"]["data"]
    assert int(settings["SHARDLINE_RESTART_CODE"]) > 127 and max(hopeless) < 128
    policies = {one["restartPolicy"] for one in documents("tfjob.yaml")["TFJob"]["spec"]["tfReplicaSpecs"].values()}
    assert policies == {"ExitCode"}

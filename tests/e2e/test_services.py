"""Services started by hand, as on machines of their own: any order, TF_CONFIG, health, metrics, status, the end."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shardline.core.status import ChiefStatus
from shardline.core.timeouts import Timeouts
from shardline.rpc.client import ChiefClient
from tests.e2e.support import (
    RUN_ID,
    HandCluster,
    assert_refused,
    events,
    expected_sha256,
    free_ports,
    processes,
    scrape,
    shardline,
    summary_of,
    total,
    train,
    wait_for_event,
    wait_for_step,
    wait_until,
    write_job,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

# Names that must have counted something after 20 steps and a scored checkpoint.
COUNTED = {
    "ps": (
        "shardline_push_raw_bytes_total",
        "shardline_pull_raw_bytes_total",
        "shardline_push_seconds_count",
        "shardline_apply_seconds_count",
        "shardline_barrier_wait_seconds_count",
        "shardline_shard_version",
        "shardline_shard_step",
        "shardline_held_bytes",
    ),
    "worker": (
        "shardline_push_raw_bytes_total",
        "shardline_pull_raw_bytes_total",
        "shardline_push_seconds_count",
        "shardline_pull_seconds_count",
        "shardline_step_seconds_count",
        "shardline_data_seconds_count",
        "shardline_compute_seconds_count",
        "shardline_examples_total",
        "shardline_loss",
    ),
    "chief": (
        "shardline_checkpoint_seconds_count",
        "shardline_checkpoint_bytes",
        "shardline_checkpoints_total",
        "shardline_heartbeats_total",
        "shardline_tasks",
        "shardline_examples_total",
        "shardline_loss",
    ),
    "evaluator": ("shardline_evaluations_total", "shardline_evaluation_metric", "shardline_evaluation_seconds_count"),
}


@pytest.mark.usefixtures("warm")
def test_services_started_one_by_one_train_show_themselves_and_end_by_themselves(tmp_path: Path) -> None:
    job = write_job(
        tmp_path / "job.py", name="digits", replicas=2, steps=100_000, checkpoint_every=10, checkpoint_keep=2
    )
    other = write_job(tmp_path / "other.py", width=24, replicas=2, steps=100_000, checkpoint_every=10)
    out = tmp_path / "out"
    (metrics_port,) = free_ports(1)
    with HandCluster.write(tmp_path, ps=2, worker=2) as cluster:
        # Who calls first waits; worker/1 and the evaluator know the cluster from TF_CONFIG alone.
        cluster.start("worker/0", "--job", job)
        cluster.start("ps/1")
        cluster.start("evaluator/0", "--job", job, env=cluster.tf_config("evaluator", 0))
        cluster.start("chief/0", "--job", job, "--out", out, "--metrics-port", str(metrics_port))
        cluster.start("ps/0")
        refused = cluster.start("worker/1", "--job", other).finish()
        assert_refused(refused, 2, r"worker/1", r"0\.weight.* \(24, 12\) here, \(40, 12\) in the job")
        wait_for_event(out, "refused", r"worker/1 at .* is not admitted")
        cluster.start("worker/1", "--job", job, env=cluster.tf_config("worker", 1))
        wait_for_step(out, 20, while_runs=cluster.commands["chief/0"])

        second = HandCluster(tmp_path, cluster.tasks).start("ps/0").finish()
        port = cluster.tasks["ps"][0].partition(":")[2]
        assert_refused(second, 2, rf"can't listen on 127\.0\.0\.1:{port} .*is another process using port {port}")

        client = ChiefClient(cluster.tasks["chief"][0], Timeouts(total_s=15))
        found: ChiefStatus = wait_until(lambda: scored(client), "an evaluation at step 10 or later")
        check_status_command(cluster, found)
        addresses = {task.task: task.address for task in found.tasks} | {"chief/0": cluster.tasks["chief"][0]}
        assert sorted(addresses) == ["chief/0", "evaluator/0", "ps/0", "ps/1", "worker/0", "worker/1"]
        for address in addresses.values():
            check_health_and_reflection(address)
        pages = {task.task: task.metrics_address for task in found.tasks} | {"chief/0": f"127.0.0.1:{metrics_port}"}
        for task, address in pages.items():
            check_metrics(task, address)

        stopped = shardline("stop", "--cluster", cluster.path, "--reason", "seen enough")
        assert stopped.code == 0, stopped
        assert stopped.out == "the job will end with a checkpoint at its next common step, and its tasks will exit\n"
        client.close()
        for task, command in cluster.commands.items():
            finished = command.finish()
            assert finished.code == 0, (task, finished)
            assert "Traceback" not in finished.err, (task, finished.err)
    assert not processes(os.environ[RUN_ID])
    summary = summary_of(out)
    assert summary["reason"] == "stopped: seen enough"
    assert summary["steps"] == summary["checkpoint_step"]
    assert summary["sha256"] == expected_sha256(job, steps=summary["steps"])


@pytest.mark.usefixtures("warm")
def test_tasks_of_a_job_that_is_complete_are_told_so_and_end_with_zero(tmp_path: Path) -> None:
    job, out = write_job(tmp_path / "job.py", name="digits", replicas=1, steps=4), tmp_path / "out"
    assert train(job, out, "--workers", "1", "--ps", "1").code == 0
    with HandCluster.write(tmp_path, ps=1, worker=1) as cluster:
        cluster.start("chief/0", "--job", job, "--out", out, "--resume")
        cluster.start("ps/0")
        cluster.start("worker/0", "--job", job)
        for task, command in cluster.commands.items():
            finished = command.finish()
            assert finished.code == 0, (task, finished)
            assert "already has all 4 steps" in finished.err, (task, finished)


def scored(client: ChiefClient) -> ChiefStatus | None:
    """The status once a checkpoint of trained parameters has been scored."""
    found = client.status()
    return found if found.last_metrics and found.checkpoint_step >= 10 and found.steps_per_s > 0 else None


def check_status_command(cluster: HandCluster, found: ChiefStatus) -> None:
    """`shardline status` has the job's figures, and a line per task and shard."""
    # As wide as all columns need; runners of tests set 80.
    shown = shardline("status", "--cluster", cluster.path, env={"COLUMNS": "240"})
    assert shown.code == 0, shown
    assert shown.out.startswith("digits  sync  "), shown.out
    for wanted in (
        r"\bstep \d+/100000 ",
        r"^loss \d.* steps/s  push \d.*/s  pull \d",
        r"^evaluated at step \d+: accuracy \d",
        r"^checkpoint of step \d+0, .* /\S+$",
        r"^ +0 ps/0 .* \d+ +\d+(-\d+)? ",
    ):
        assert re.search(wanted, shown.out, re.MULTILINE), (wanted, shown.out)
    for task in found.tasks:
        (line,) = [line for line in shown.out.splitlines() if line.startswith(f"{task.task} ")]
        assert " alive " in line
        assert f" {task.incarnation >> 32}.{task.incarnation & 0xFFFFFFFF} " in line
        assert task.address in line
        assert task.metrics_address in line
        assert re.search(r" \d+\.\d s ", line), line


def check_health_and_reflection(address: str) -> None:
    """The standard services answer at every task."""
    with grpc.insecure_channel(address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10.0)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING, address
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = stub.ServerReflectionInfo(iter([request]), timeout=10.0)
        names = {service.name for service in listed.list_services_response.service}
        assert "grpc.health.v1.Health" in names, (address, names)


def check_metrics(task: str, address: str) -> None:
    """A task's page has its names, each with something counted, and who the task is on every line of ours."""
    values = scrape(address)
    role = task.split("/")[0]
    for name in COUNTED[role]:
        assert total(values, name) > 0, (task, name, sorted(values))
    if role in ("ps", "worker"):
        # All tasks are on this host: their bytes lie in shared memory, and none travels.
        for name in (f"shardline_{kind}_{what}_bytes_total" for kind in ("push", "pull") for what in ("raw", "wire")):
            lanes = [key for key in values if key.startswith(name)]
            assert lanes and all('lane="shm"' in key for key in lanes), lanes
        assert total(values, "shardline_push_wire_bytes_total") == 0
    ours = [name for name in values if name.startswith("shardline_")]
    assert all(f'task="{task}"' in name for name in ours), ours
    assert values["process_resident_memory_bytes"] > 0


def test_tf_config_of_another_shape_is_refused_in_a_sentence(tmp_path: Path) -> None:
    finished = shardline("worker", env={"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}})})
    assert_refused(finished, 2, r"TF_CONFIG has no object \"task\"")


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_shards_are_cut_for_the_links_of_the_machines_in_the_cluster_file(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", width=40_000, replicas=4, steps=10)
    out = tmp_path / "out"
    with HandCluster.write(tmp_path, ps=3, worker=2) as cluster:
        machines = {"chief": [1], "ps": [21, 22, 25], "worker": [21, 22]}
        cluster.tasks = {
            role: [
                f"127.0.0.{number}:{one.rpartition(':')[2]}" for number, one in zip(machines[role], every, strict=True)
            ]
            for role, every in cluster.tasks.items()
        }
        cluster.path.write_text(json.dumps(cluster.tasks))
        cluster.start("chief/0", "--job", job, "--out", out)
        for task in ("ps/0", "ps/1", "ps/2"):
            cluster.start(task)
        for index in range(2):
            cluster.start(f"worker/{index}", "--job", job)
        for task, command in cluster.commands.items():
            assert command.finish().code == 0, (task, command.finish())
    said = "\n".join(events(out, "plan"))
    parts = re.search(r"cut for the machines' links: (\d+) % on ps/0, (\d+) % on ps/1, (\d+) % on ps/2", said)
    assert parts, said
    assert [int(part) for part in parts.groups()] == pytest.approx([40, 40, 20], abs=1), said
    assert summary_of(out)["sha256"] == expected_sha256(job)

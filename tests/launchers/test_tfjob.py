"""The pods of a TFJob, played on loopback: each process has the environment that the operator writes."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from shardline.host.ports import held_port
from tests.e2e.support import expected_sha256, slow_job, summary_of, wait_for_step, wait_until, write_job
from tests.launchers.support import RUN, Started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
FLAGS = ("--timeout", "20", "--page", "off")


def cluster_of(ps: int, workers: int) -> dict[str, list[str]]:
    """Addresses on loopback in place of names of pods; only the chief's port has to be known."""
    with held_port() as held:
        chief = f"127.0.0.1:{held.getsockname()[1]}"
    return {"chief": [chief], "ps": ["127.0.0.1:0"] * ps, "worker": ["127.0.0.1:0"] * workers}


def pod(cluster: dict[str, list[str]], kind: str, index: int, job: Path, out: Path) -> Started:
    task = {"type": kind, "index": index}
    config = json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})
    log = out.parent / f"{kind}-{index}.log"
    command = [*RUN, job, "--out", out / "chief" if kind == "chief" else out / f"{kind}-{index}", *FLAGS]
    return Started(command, log, env={"TF_CONFIG": config, "HOSTNAME": f"digits-{kind}-{index}"})


def test_the_same_command_in_every_pod_trains_the_job(tmp_path: Path) -> None:
    job, out = write_job(tmp_path / "job.py", replicas=2, steps=30, checkpoint_every=10), tmp_path / "out"
    cluster = cluster_of(ps=2, workers=2)
    tasks = [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1), ("evaluator", 0)]
    pods = {f"{kind}/{index}": pod(cluster, kind, index, job, out) for kind, index in tasks}
    for task, started in pods.items():
        ended = started.end()
        assert ended.code == 0, ended.said
        assert f"{task} place from TF_CONFIG" in ended.said
    found = summary_of(out / "chief")
    assert (found["steps"], found["sha256"]) == (30, expected_sha256(job))
    assert found["evaluation"]["last"]["step"] == 30


def test_pods_that_are_killed_are_started_again_by_the_same_command(tmp_path: Path) -> None:
    """As OnFailure does it, with the volume of the chief's pod; on a busy machine others give it up meanwhile."""
    job, out = slow_job(tmp_path / "job.py", replicas=2, steps=120, checkpoint_every=10), tmp_path / "out"
    cluster = cluster_of(ps=1, workers=2)
    tasks = [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]
    pods = {kind_index: pod(cluster, *kind_index, job, out) for kind_index in tasks}
    wait_for_step(out / "chief", 15)
    for victim in (("worker", 1), ("chief", 0)):
        os.kill(pods[victim].process.pid, signal.SIGKILL)
        assert pods[victim].end().code == -signal.SIGKILL
        pods[victim] = pod(cluster, *victim, job, out)
    starts = Counter([*pods])
    # The job is done when its chief is.
    while ("chief", 0) in pods:
        key = wait_until(lambda: next((key for key, one in pods.items() if one.process.poll() is not None), None), "")
        ended = pods.pop(key).end()
        starts[key] += 1
        assert ended.code == 0 or starts[key] < 5, ended.said
        if ended.code:
            pods[key] = pod(cluster, *key, job, out)
    for left in pods.values():
        left.process.terminate()
        left.end()
    assert summary_of(out / "chief")["sha256"] == expected_sha256(job)


def test_all_pods_of_a_job_that_fails_end_with_its_code_or_the_one_for_restarts(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", replicas=1, steps=30, after_loss="value = value * float('nan')")
    out = tmp_path / "out"
    cluster = cluster_of(ps=1, workers=1)
    pods = [pod(cluster, kind, 0, job, out) for kind in ("chief", "ps", "worker")]
    # NaN comes again whatever is restarted.
    assert [started.end().code for started in pods] == [5, 5, 5]


def test_a_code_after_which_a_restart_may_help_is_the_one_that_the_launcher_knows(tmp_path: Path) -> None:
    job, out = write_job(tmp_path / "job.py"), tmp_path / "out"
    cluster = cluster_of(ps=1, workers=1)
    task = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}
    command = [*RUN, job, "--out", out, "--timeout", "3", "--join-timeout", "3"]
    plain = Started(command, tmp_path / "plain", env=task)
    told = Started([*command, "--restart-code", "138"], tmp_path / "told", env=task)
    assert (plain.end().code, told.end().code) == (3, 138), plain.said()

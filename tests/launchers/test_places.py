"""A process's place from its environment, with the variables as the launchers really write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardline.cli.main import main
from shardline.cli.roles import role_command
from shardline.cluster import UNNAMED
from shardline.errors import UsageError
from shardline_launchers import command
from shardline_launchers.places import SLURM_PORTS, Asked, ProcessPlace, find
from tests.launchers.support import DIGITS

TORCHRUN = {
    "LOCAL_RANK": "1",
    "RANK": "5",
    "GROUP_RANK": "1",
    "ROLE_RANK": "5",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "8",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "8",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "digits",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMP_NUM_THREADS": "1",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEPID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "6",
    "SLURM_NPROCS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_NODELIST": "node[03-04]",
    "SLURM_JOB_NODELIST": "node[03-04]",
    "SLURM_SRUN_COMM_HOST": "10.0.0.1",
    "SLURMD_NODENAME": "node04",
    "SLURM_RESTART_COUNT": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-head-1@1",
}
TFJOB = {
    "chief": ["digits-chief-0.ml.svc:2222"],
    "ps": ["digits-ps-0.ml.svc:2222", "digits-ps-1.ml.svc:2222"],
    "worker": ["digits-worker-0.ml.svc:2222", "digits-worker-1.ml.svc:2222"],
}
ONE_MACHINE = {"SLURM_STEP_NODELIST": "node03"}


def tfjob(kind: str, index: int, **cluster: Any) -> dict[str, str]:
    """TF_CONFIG as the operator of TFJob writes it."""
    task = {"type": kind, "index": index}
    config = {"cluster": {**TFJOB, **cluster}, "task": task, "environment": "cloud"}
    return {"TF_CONFIG": json.dumps(config), "HOSTNAME": f"digits-{kind}-{index}"}


def sparse(kind: str, index: int, **cluster: Any) -> dict[str, str]:
    """TF_CONFIG of a TFJob with enableDynamicWorker."""
    config = {"sparseCluster": {"worker": {}, "ps": [], **cluster}, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(config), "HOSTNAME": f"digits-{kind}-{index}"}


def expand(short: str) -> Sequence[str]:
    """Expand the one list in these tests as scontrol does."""
    return ("node03", "node04") if short == "node[03-04]" else (short,)


def place(environ: Mapping[str, str], *, by: str | None = None, **asked: Any) -> ProcessPlace:
    found = find(environ, Asked(**asked), expand=expand, by=by)
    assert found is not None
    return found


def refusal(environ: Mapping[str, str], **asked: Any) -> str:
    with pytest.raises(UsageError) as caught:
        place(environ, **asked)
    return str(caught.value)


def test_no_launchers_variables_are_no_place() -> None:
    assert find({"HOME": "/root", "HOSTNAME": "digits-worker-0"}, Asked(), expand=expand) is None


# TF_CONFIG


@pytest.mark.parametrize(
    ("kind", "index", "task"),
    [("chief", 0, "chief/0"), ("master", 0, "chief/0"), ("ps", 1, "ps/1"), ("worker", 1, "worker/1")],
)
def test_a_tfjobs_pods_have_the_operators_place(kind: str, index: int, task: str) -> None:
    cluster: dict[str, Any] = {"chief": None, "master": TFJOB["chief"]} if kind == "master" else {}
    environ = tfjob(kind, index)
    config = json.loads(environ["TF_CONFIG"])
    config["cluster"] = {name: entries for name, entries in {**TFJOB, **cluster}.items() if entries}
    found = place({"TF_CONFIG": json.dumps(config)})
    assert (found.task, found.spec.chief) == (task, "digits-chief-0.ml.svc:2222")
    assert found.spec.addresses("ps") == tuple(TFJOB["ps"])
    assert not found.hosted and found.meeting is None and not found.resolves


def test_a_tfjobs_evaluator_is_not_in_the_cluster_and_has_a_place() -> None:
    assert place(tfjob("evaluator", 0)).task == "evaluator/0"


def test_a_sparse_cluster_may_leave_out_the_tasks_that_this_one_does_not_call() -> None:
    found = place(tfjob("worker", 1, worker={"1": "digits-worker-1.ml.svc:2222"}))
    assert found.task == "worker/1"
    assert found.spec.addresses("worker") == (UNNAMED, "digits-worker-1.ml.svc:2222")


def test_a_tfjob_with_dynamic_workers_finds_its_chief_by_the_names_of_pods() -> None:
    ps, worker = TFJOB["ps"], {"7": "digits-worker-7.ml.svc:2222"}
    assert place(sparse("worker", 7, ps=ps, worker=worker)).spec.chief == "digits-chief-0.ml.svc:2222"
    server = place(sparse("ps", 1, ps=[ps[1]]))
    assert (server.task, server.spec.chief) == ("ps/1", "digits-chief-0.ml.svc:2222")
    assert server.spec.addresses("ps") == (UNNAMED, ps[1])
    chief = place(sparse("chief", 0), ps=2)
    assert (chief.task, chief.spec.chief, chief.spec.num("ps")) == ("chief/0", "digits-chief-0:2222", 2)


def test_a_tf_config_that_is_wrong_is_refused_with_what_is_wrong() -> None:
    assert "it must be chief, ps, worker, aggregator or evaluator" in refusal(tfjob("driver", 0))
    assert "task ps/2 is not in the cluster spec" in refusal(tfjob("ps", 2))
    assert "TF_CONFIG is not JSON" in refusal({"TF_CONFIG": "{cluster"})
    assert 'no object "cluster"' in refusal({"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'})
    assert "numbered tasks" in refusal(tfjob("worker", 0, worker={"9999999": "far:1"}))


# Slurm


@pytest.mark.parametrize(
    ("rank", "task"),
    [(0, "chief/0"), (1, "ps/0"), (2, "ps/1"), (3, "evaluator/0"), (4, "worker/0"), (5, "worker/1")],
)
def test_a_steps_tasks_are_the_chief_then_servers_evaluators_and_workers(rank: int, task: str) -> None:
    found = place({**SLURM, "SLURM_PROCID": str(rank)}, ps=2, evaluators=1)
    assert found.task == task
    assert (found.spec.num("ps"), found.spec.num("evaluator"), found.spec.num("worker")) == (2, 1, 2)
    host, port = found.spec.chief.split(":")
    assert host == "node03" and int(port) in SLURM_PORTS and found.resolves
    if rank:
        assert found.spec.address(task) == "node04:0"
    assert (found.restarts, found.run) == (1, "slurm-4711")


def test_steps_of_a_job_have_ports_of_their_own() -> None:
    ports = {place({**SLURM, "SLURM_STEP_ID": str(step)}).spec.chief for step in range(5)}
    assert len(ports) == 5


def test_a_step_on_one_machine_stays_on_it() -> None:
    found = place({**SLURM, **ONE_MACHINE})
    assert found.spec.chief.startswith("127.0.0.1:")
    assert found.spec.address("worker/3") == "127.0.0.1:0"


def test_a_batch_script_is_no_task_of_a_step() -> None:
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert find(batch, Asked(), expand=expand) is None


def test_a_step_that_does_not_fit_is_refused() -> None:
    few = refusal({**SLURM, "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"}, ps=2)
    assert "started 3 tasks" in few and "are 4" in few
    assert "of which 4 are left for workers" in refusal(SLURM, workers=3)
    assert "SLURM_PROCID is '6'; it must be a number from 0 to 5" in refusal({**SLURM, "SLURM_PROCID": "6"})
    assert "SLURM_STEP_NODELIST is not set" in refusal({**SLURM, "SLURM_STEP_NODELIST": ""})


def test_a_chief_that_trains_needs_no_worker() -> None:
    environ = {**SLURM, **ONE_MACHINE, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    found = place(environ, chief_trains=True)
    assert (found.task, found.spec.num("worker")) == ("ps/0", 0)


# torchrun


def test_each_rank_of_torchrun_is_a_worker() -> None:
    found = place(TORCHRUN, ps=2)
    assert (found.task, found.hosted, found.spec.num("worker"), found.spec.num("ps")) == ("worker/5", (), 8, 2)
    assert found.meeting is not None
    assert (found.meeting.host, found.meeting.port, found.meeting.serves) == ("head", 29400, False)
    assert "digits" in found.meeting.key and "/1/" in found.meeting.key
    assert found.restarts == 1


def test_rank_0_of_torchrun_hosts_the_other_roles() -> None:
    found = place({**TORCHRUN, "RANK": "0"}, ps=2, evaluators=1)
    assert found.hosted == ("chief/0", "ps/0", "ps/1", "evaluator/0", "worker/0")
    assert found.spec.chief == "head:0"


def test_ranks_of_one_machine_stay_on_it() -> None:
    found = place({**TORCHRUN, "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"})
    assert (found.spec.chief, found.spec.address("worker/5")) == ("127.0.0.1:0", "127.0.0.1:0")


def test_without_an_agents_store_rank_0_opens_it() -> None:
    plain = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    served = [place({**plain, "RANK": rank}).meeting for rank in "05"]
    assert [meeting is not None and meeting.serves for meeting in served] == [True, False]


def test_a_rank_that_can_not_be_is_refused() -> None:
    assert "RANK is '8'; it must be a number from 0 to 7" in refusal({**TORCHRUN, "RANK": "8"})
    assert "WORLD_SIZE is 'many'" in refusal({**TORCHRUN, "WORLD_SIZE": "many"})
    assert "MASTER_ADDR is not set" in refusal({**TORCHRUN, "MASTER_ADDR": ""})
    assert "each of which is a worker" in refusal(TORCHRUN, workers=3)


# Kubernetes


def pod(name: str, index: int = 0) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": name, "KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.mark.parametrize(
    ("name", "index", "task"),
    [
        ("digits-chief-0-0", 0, "chief/0"),
        ("digits-ps-0-1", 1, "ps/1"),
        ("my-digits-worker-0-3", 3, "worker/3"),
        ("digits-worker-3-0", 0, "worker/3"),
    ],
)
def test_a_jobsets_groups_are_the_roles(name: str, index: int, task: str) -> None:
    found = place(pod(name, index), ps=2, workers=4)
    name_of_set = name.rsplit("-", 3)[0]
    assert (found.task, found.spec.chief) == (task, f"{name_of_set}-chief-0-0.{name_of_set}:2222")
    assert found.spec.address(task) == f"{name}.{name_of_set}:2222"
    assert not found.resolves


def test_an_indexed_job_is_divided_among_the_roles() -> None:
    found = place(pod("digits-3", 3), ps=2, workers=2)
    assert (found.task, found.spec.chief) == ("worker/0", "digits-0.digits:2222")
    assert found.spec.address("worker/0") == "digits-3.digits:2222"
    group = place(pod("digits-nodes-0-1", 1), ps=2, workers=2)
    assert (group.task, group.spec.chief) == ("ps/0", "digits-nodes-0-0.digits:2222")


def test_a_pod_without_a_role_is_refused() -> None:
    assert "add --workers" in refusal(pod("digits-3", 3), ps=2)
    assert "has number 5" in refusal(pod("digits-5", 5), ps=2, workers=2)
    assert "several Jobs with one" in refusal(pod("digits-worker-2-1", 1), ps=2)


# Open MPI


def test_ranks_of_mpirun_are_divided_among_the_roles() -> None:
    found = place({**OPEN_MPI, "MASTER_ADDR": "head", "MASTER_PORT": "7000"}, ps=2)
    assert (found.task, found.spec.chief) == ("worker/0", "head:7000")
    alone = place({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert (alone.task, alone.spec.chief) == ("worker/1", "127.0.0.1:2222")


def test_mpirun_on_several_machines_has_to_be_told_the_first() -> None:
    assert "mpirun -x MASTER_ADDR=HOST" in refusal(OPEN_MPI)


def test_a_launcher_with_pmix_alone_has_to_be_told_the_total() -> None:
    pmix = {"PMIX_RANK": "2", "MASTER_ADDR": "head"}
    assert place(pmix, workers=3).task == "worker/0"
    assert "PMIx tells its processes no total" in refusal(pmix)


# Several launchers


def test_a_launcher_started_by_another_is_followed() -> None:
    srun = {**SLURM, **TORCHRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert place(srun).task == "worker/5"
    assert place({**pod("digits-node-0-1", 1), **TORCHRUN}).task == "worker/5"


def test_launchers_that_agree_are_taken_in_order() -> None:
    both = {**SLURM, "PMIX_RANK": "4", "RANK": "4", "WORLD_SIZE": "6", "MASTER_ADDR": "node03", "MASTER_PORT": "1"}
    assert place(both, ps=2, evaluators=1).source == "Slurm, task 4 of 6"


@pytest.mark.parametrize(
    "other",
    [{**OPEN_MPI, "MASTER_ADDR": "head"}, {**TORCHRUN, "GROUP_WORLD_SIZE": "3"}, tfjob("worker", 1)],
    ids=["openmpi", "torchrun", "tf_config"],
)
def test_launchers_that_disagree_are_refused_until_one_is_chosen(other: dict[str, str]) -> None:
    both = {**SLURM, **other}
    said = refusal(both)
    assert "two launchers have numbered this process" in said and "--by slurm" in said
    assert place(both, by="slurm").source == "Slurm, task 4 of 6"


def test_a_launcher_that_is_chosen_must_be_there() -> None:
    with pytest.raises(UsageError, match="was it started by slurm"):
        find(TORCHRUN, Asked(), expand=expand, by="slurm")


# What the place becomes


def started(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environ: str) -> dict[str, Any]:
    """The flags with which `shardline run` runs a role."""
    found: dict[str, Any] = {}

    def run_role(role: str, flags: dict[str, Any]) -> int:
        found.update(flags, role=role)
        return 0

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "role_command", lambda role: role_command(role, run_role))
    assert main(["run", *arguments]) == 0
    return found


def test_a_role_gets_the_flags_that_it_reads_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {**SLURM, **ONE_MACHINE}
    run = (str(DIGITS), "--ps", "2", "--steps", "7", "--set", "batch_size=8", "--no-overlap", "--device", "cuda:1")
    worker = started(monkeypatch, *run, **environ)
    assert (worker["role"], worker["task"], worker["job"]) == ("worker", "worker/1", DIGITS)
    assert (worker["steps"], worker["settings"], worker["overlap"]) == (7, (("batch_size", "8"),), False)
    assert (worker["device"], worker["exit_with_job"], worker["chief_trains"]) == ("cuda:1", True, False)
    server = started(monkeypatch, *run, SLURM_PROCID="2")
    assert (server["task"], server["device"], server["exit_with_job"]) == ("ps/1", "cpu", True)
    chief = started(monkeypatch, *run, SLURM_PROCID="0")
    assert (chief["task"], chief["out"], chief["exit_with_job"]) == ("chief/0", Path("runs/job-slurm-4711"), False)
    # Slurm has started the job again.
    assert chief["resume"] and not chief["chief_trains"]
    assert "worker" in json.loads(chief["cluster"])


def test_no_launcher_is_told_what_to_do_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(DIGITS)]) == 2
    assert "use: shardline train" in capsys.readouterr().err


def test_two_job_files_and_a_code_for_a_script_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(DIGITS), "--job", "other.py"]) == 2
    assert "two job files are given" in capsys.readouterr().err
    assert main(["run", str(DIGITS), "--script", "--restart-code", "138"]) == 2
    assert "the script's own" in capsys.readouterr().err

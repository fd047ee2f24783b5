"""A job's steps through a chief, parameter servers and a worker, all in this process; the sockets between are real."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from shardline.checkpoint import Checkpoint
from shardline.checkpoint.manifest import step_folder
from shardline.client.api.session import Session
from shardline.client.job_loop import run_replicas
from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.timeouts import Timeouts
from shardline.data import BatchSource
from shardline.errors import InternalError, UnreachableError, telling
from shardline.host.process import resolve_device, torch_threads
from shardline.job import Job

Role = Callable[[RoleConfig], int]
ANY = "127.0.0.1:0"


@dataclass(frozen=True, kw_only=True)
class InProcessCluster:
    """The tasks in this process. role: finds what runs a role, by its name."""

    role: Callable[[str], Role]
    out: Path
    """Folder of the chief's files; a new one."""
    ps: int = 2
    lane: str = "auto"
    overlap: bool = True
    device: str = "cpu"
    ps_device: str = "cpu"
    timeouts: Timeouts = field(default_factory=Timeouts)


def train_served(job: Job, cluster: InProcessCluster) -> dict[int, dict[str, torch.Tensor]]:
    """Train the job with one worker that runs all replicas; returns the values before the first step and at the end.

    They are those of its checkpoints, on the CPU, by number of steps done. Raises what training it would raise.
    """
    # A model that is refused is so before anything starts.
    model = job.build_model().to(resolve_device(cluster.device))
    jobspec = job.spec(model)
    spec, tasks = start_tasks(cluster)
    try:
        session = Session(_config(cluster, "worker", spec, 0, device=cluster.device))
        try:
            with telling(session.fail):
                optimizer = session.attach(model, job.build_optimizer(model), job=jobspec)
                # After the servers have set theirs.
                with torch_threads(job.threads):
                    run_replicas(session, optimizer, model, job, BatchSource(job, session.data_took))
        finally:
            session.shutdown()
    except Exception:
        # They write into a folder that the caller removes.
        wait(tasks.values(), cluster.timeouts.total_s)
        raise
    for name, task in tasks.items():
        code = _result(task, cluster.timeouts, name)
        if code:
            raise InternalError(f"{name} of the comparison ended with exit code {code} after its last step")
    folder = cluster.out / "checkpoints"
    return {step: Checkpoint(folder / step_folder(step)).state_dict() for step in (0, job.steps)}


def start_tasks(cluster: InProcessCluster) -> tuple[ClusterSpec, dict[str, Future[int]]]:
    """Start the chief and the servers on threads, by task; returns when all can be reached. Raises UnreachableError."""
    spec = ClusterSpec({"chief": (ANY,), "ps": (ANY,) * cluster.ps, "worker": (ANY,)})
    chief, address = _start_told(cluster, replace(_config(cluster, "chief", spec, 0), out=cluster.out))
    spec = spec.with_address("chief/0", address)
    tasks = {"chief/0": chief}
    # A server sets the number of threads with which torch computes.
    with torch_threads(torch.get_num_threads()):
        for index in range(cluster.ps):
            config = _config(cluster, "ps", spec, index, device=cluster.ps_device)
            tasks[config.task], _ = _start_told(cluster, config)
    return spec, tasks


def _config(cluster: InProcessCluster, role: str, spec: ClusterSpec, index: int, *, device: str = "cpu") -> RoleConfig:
    return RoleConfig(
        role=role,
        index=index,
        cluster=spec,
        timeouts=cluster.timeouts,
        lane=cluster.lane,
        overlap=cluster.overlap,
        device=device,
    )


def _start_told(cluster: InProcessCluster, config: RoleConfig) -> tuple[Future[int], str]:
    """Start a task and wait for its address."""
    read, write = os.pipe()

    def end_line(_: Future[int]) -> None:
        # Wakes the reader of a task that ended without an address; there is none after one that has told it.
        with contextlib.suppress(BrokenPipeError), open(write, "wb", buffering=0) as pipe:
            pipe.write(b"\n")

    with open(read, encoding="utf-8") as ready:
        task = _start(cluster.role(config.role), replace(config, ready_fd=os.dup(write)))
        task.add_done_callback(end_line)
        told, _, _ = select.select([read], [], [], cluster.timeouts.total_s)
        address = ready.readline().strip() if told else ""
    if address:
        return task, address
    if task.done():
        task.result()
    raise UnreachableError(f"{config.task} did not start in this process within {cluster.timeouts.total_s:g} s")


def _start(role: Role, config: RoleConfig) -> Future[int]:
    """Run a task on a thread of its own; a daemon, so that an error elsewhere ends the process at once."""
    future: Future[int] = Future()

    def body() -> None:
        try:
            future.set_result(role(config))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, name=config.task, daemon=True).start()
    return future


def _result(task: Future[int], timeouts: Timeouts, name: str) -> int:
    try:
        return task.result(timeouts.total_s)
    except TimeoutError:
        raise UnreachableError(f"{name} of the comparison did not end within {timeouts.total_s:g} s") from None

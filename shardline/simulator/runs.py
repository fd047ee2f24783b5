"""How long passes take: measured on this machine, or read from a real run's logs or a file."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import torch

from shardline.cluster import parse_task
from shardline.data import BatchSource, replica_gradients
from shardline.errors import ShardlineError, UsageError
from shardline.job import Job
from shardline.simulator.times import Measured, Times

FIRST_PASSES = 2
"""Passes of each task that are left out: they also load code and fill caches."""
PASSES = 8
PASSES_S = 10.0
"""No further pass is measured after so many seconds."""


def measure(job: Job) -> Measured:
    """Run some passes of the job here, with its number of threads. Raises what the job's own code raises."""
    before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        model, source = job.build_model(), BatchSource(job)
        found: list[float] = []
        ends_s = time.monotonic() + PASSES_S
        while len(found) < FIRST_PASSES + PASSES and (len(found) <= FIRST_PASSES or time.monotonic() < ends_s):
            begun_s = time.perf_counter()
            replica_gradients(model, job, source, 0, 0)
            found.append(time.perf_counter() - begun_s)
    finally:
        torch.set_num_threads(before)
    return Measured(tuple(found[FIRST_PASSES:]))


def read_times(path: Path, passes: int = 1) -> tuple[Times, ...]:
    """Times of one pass, from the folder of a run or a file with a number of seconds per line.

    A run that logs every worker's steps by themselves gives one distribution per worker. One that joins the replicas
    of a step logs only the longest time, from which that of a single replica is derived. passes: of a step.
    Raises UsageError.
    """
    try:
        if path.is_dir():
            return _of_run(path / "logs" / "steps.jsonl", passes)
        lines = path.read_text(encoding="utf-8").split()
        return (Measured(tuple(float(line) for line in lines)),)
    except OSError as error:
        raise UsageError(f"--from {path}: {error.filename} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(
            f"--from {path} is neither a run's folder nor a file of one number per line: {error}"
        ) from None


def _of_run(path: Path, passes: int) -> tuple[Times, ...]:
    alone: dict[str, list[float]] = {}
    joined: list[float] = []
    replicas = 1
    for text in path.read_text(encoding="utf-8").splitlines():
        # A crash may have cut a line off.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            spent_s = float(line["compute_s"]) / passes
            if "task" in line:
                alone.setdefault(str(line["task"]), []).append(spent_s)
            else:
                joined.append(spent_s)
                replicas = int(line["replicas"])
    found = [alone[task] for task in sorted(alone, key=_place)] if alone else [joined]
    kept = [tuple(value for value in values[FIRST_PASSES:] if value > 0.0) for values in found]
    if not any(kept):
        raise UsageError(f"--from: {path} has no compute times of more than {FIRST_PASSES} steps of a worker")
    return tuple(Measured(values, 1 if alone else replicas) for values in kept if values)


def _place(task: str) -> tuple[str, int]:
    try:
        return parse_task(task)
    except ShardlineError:
        return task, 0

"""How long passes take: measured on this machine, or read from a real run's logs or a file."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Hashable, Iterable
from dataclasses import replace
from pathlib import Path

from torch import nn

from shardline.cluster import parse_task
from shardline.core.parcel import Parcel
from shardline.data import BatchSource, replica_gradients
from shardline.errors import ShardlineError, UsageError
from shardline.host.process import torch_threads
from shardline.job import Job
from shardline_lab.simulator.simulation import StageCosts
from shardline_lab.simulator.times import Measured, Times
from shardline_pipeline import schedule_named
from shardline_pipeline.runner import AtHome, StageRunner
from shardline_pipeline.staged import StagedModel

FIRST_PASSES = 2
"""Passes of each task that are left out: they also load code and fill caches."""
PASSES = 8
PASSES_S = 10.0
"""No further pass is measured after so many seconds."""


def measure(job: Job) -> Measured:
    """Run some passes of the job here, with its number of threads. Raises what the job's own code raises."""
    with torch_threads(job.threads):
        model, source = job.build_model(), BatchSource(job)
        found: list[float] = []
        ends_s = time.monotonic() + PASSES_S
        while len(found) < FIRST_PASSES + PASSES and (len(found) <= FIRST_PASSES or time.monotonic() < ends_s):
            begun_s = time.perf_counter()
            replica_gradients(model, job, source, 0, 0)
            found.append(time.perf_counter() - begun_s)
    return Measured(tuple(found[FIRST_PASSES:]))


class _Counting(AtHome):
    """Parcels at home, whose bytes, encoded, are counted: (stage whose output it is, whether it is the gradient)."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[tuple[int, bool], float] = {}

    def send(self, parcel: Parcel) -> None:
        key = parcel.key
        self.sent[key.stage if key.back else key.stage - 1, key.back] = float(parcel.nbytes)
        super().send(parcel)


def measure_stages(job: Job, model: nn.Module) -> StageCosts:
    """Run some steps of a job in stages here, one pass after another. Raises what the job's own code raises."""
    home = _Counting()
    if not isinstance(model, StagedModel):
        raise UsageError(f"pipeline {job.pipeline} needs a model in stages: shardline.Pipeline([...], stages=...)")
    with torch_threads(job.threads):
        runner = StageRunner(model, job, BatchSource(job), schedule_named("flush"), home)
        ends_s = time.monotonic() + PASSES_S
        for number in range(FIRST_PASSES + PASSES):
            if number > FIRST_PASSES and time.monotonic() >= ends_s:
                break
            if number == FIRST_PASSES:
                home.passes.clear()
            runner.run(0, {0: range(model.num_stages)})
    spent = [(one.stage, one.microbatch, one.back, one.end_s - one.start_s) for one in home.passes]
    found = _costs(model.num_stages, spent)
    sent, back = (tuple(home.sent.get((one, way), 0.0) for one in range(model.num_stages)) for way in (False, True))
    return replace(found, parcel_bytes=sent, gradient_bytes=back)


def _costs(stages: int, spent: Iterable[tuple[int, Hashable, bool, float]], *, recompute: bool = False) -> StageCosts:
    """Costs of stages from the seconds of their passes, in order: (stage, microbatch, backward, seconds).

    recompute: the forward pass is in the backward pass once more, which is left out here. Raises UsageError
    for a stage without a microbatch that has gone both ways.
    """
    open_s: dict[tuple[int, Hashable], float] = {}
    whole: list[list[float]] = [[] for _ in range(stages)]
    forward_s = [0.0] * stages
    for stage, microbatch, back, seconds in spent:
        if not back:
            open_s[stage, microbatch] = seconds
        elif (stage, microbatch) in open_s:
            ahead_s = open_s.pop((stage, microbatch))
            forward_s[stage] += ahead_s
            whole[stage].append(max(ahead_s, seconds) if recompute else ahead_s + seconds)
    if not all(whole):
        raise UsageError(f"no microbatch has gone both ways through stage {whole.index([])}")
    return StageCosts(
        times=tuple(Measured(tuple(max(one, 1e-9) for one in each)) for each in whole),
        forward=tuple(part_s / sum(each) for part_s, each in zip(forward_s, whole, strict=True)),
    )


def read_stages(path: Path, stages: int) -> StageCosts:
    """Costs of stages from the trace of a real run, by its folder, without its first steps. Raises UsageError."""
    file = path / "pipeline-trace.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        events, recompute = found["traceEvents"], schedule_named(found["otherData"]["pipeline"]).recompute
        passes = sorted((one for one in events if one["ph"] == "X"), key=lambda one: float(one["ts"]))
        spent = [
            (
                int(one["args"]["stage"]),
                (one["args"]["step"], one["args"]["replica"], one["args"]["microbatch"]),
                one["cat"] == "backward",
                float(one["dur"]) / 1e6,
            )
            for one in passes
            if int(one["args"]["step"]) >= FIRST_PASSES
        ]
    except OSError as error:
        raise UsageError(f"--from {path}: {file} can't be read: {error.strerror}; a run in stages has one") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--from {path}: {file} is no trace of a pipeline: {error}") from None
    there = 1 + max((stage for stage, *_ in spent), default=-1)
    if there != stages:
        raise UsageError(f"--from {path}: that run has passes of {there} stages, and the job has {stages}")
    return _costs(stages, spent, recompute=recompute)


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
            # Runs of earlier versions counted the wait for data as computing.
            spent_s = (float(line["compute_s"]) + float(line.get("data_s", 0.0))) / passes
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

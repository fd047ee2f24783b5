"""Predictions of `shardline simulate` beside real runs on this machine; prints a table for docs/simulator.md.

    python -m benchmarks.simulated                      # all runs, in ten minutes, on a machine that does nothing else
    python -m benchmarks.simulated --only sync --json runs.json
    python -m benchmarks.simulated --only stages

One run of one worker calibrates: its compute times, and the time that its exchanges take on loopback. Everything else
is predicted from these two and the settings of a run. Passes sleep (benchmarks/simulated_job.py), so that several
workers fit on two cores. A run in two stages calibrates those in stages: what a parcel and an exchange take there. Runs
with a link need root: each task has a host of its own with a shaped link (netns-lab).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.network import lab
from benchmarks.process import HERE, ROOT, Child, ContenderError, Prefix, environment
from shardline.cli import quantities
from shardline.job import load_job
from shardline_lab.simulator import runs
from shardline_lab.simulator.links import Network
from shardline_lab.simulator.simulation import Setup, StageCosts
from shardline_lab.simulator.stages import simulated
from shardline_lab.simulator.times import Times

JOB = ROOT / "benchmarks" / "simulated_job.py"
PORT = 2422
RUN_S = 300.0
TIMEOUT_S = 30.0
GOODPUT = 0.94
"""Share of an Ethernet link's bits that are TCP payload."""
LIMIT = 0.15
Pass = dict[str, Any]
"""A slice of a trace: "ts" and "dur" in microseconds, and in "args" the pass."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A real run."""

    name: str
    workers: int
    steps: int
    consistency: str = "sync"
    cadence: str = "every-step"
    link: str = ""
    """Rate of each host's link as tc writes it; "" = loopback."""
    width: int = 256
    """A megabyte of parameters is a width of 256."""
    mean_s: float = 0.1
    """Of a pass."""
    cv: float = 0.3
    """Of passes: the standard deviation over the mean."""
    slow: float = 1.0
    """The last worker takes so many times as long."""
    pauses: float = 1.0
    """One pass of ten takes so many times as long."""
    stages: int = 0
    """Of the model; each replica then has as many workers."""
    layers: tuple[float, ...] = ()
    """Seconds of each layer, in stages that begin with `cuts` and are at `homes`, the numbers of workers."""
    cuts: tuple[int, ...] = ()
    homes: tuple[int, ...] = ()
    pipeline: str = "whole-model"
    microbatches: int = 1

    def arguments(self, worker: int) -> str:
        """What the job file is told by a worker's environment."""
        mean_s = self.mean_s * (self.slow if worker == self.workers - 1 else 1.0)
        found = ["--width", str(self.width), "--mean", str(mean_s), "--cv", str(self.cv), "--pauses", str(self.pauses)]
        if self.layers:
            for name in ("layers", "cuts", "homes"):
                found += [f"--{name}", *map(str, getattr(self, name))]
        return shlex.join([*found, "--stages", str(self.stages)] if self.stages else found)

    @property
    def replicas(self) -> int:
        """Of the job."""
        if self.layers:
            return 1
        if self.stages:
            return self.workers // self.stages
        return self.workers if self.consistency.startswith("sync") else 1

    @property
    def overrides(self) -> list[tuple[str, str]]:
        """Fields of the job."""
        fields = ("consistency", "cadence", "replicas", "steps", "pipeline")
        return [*((field, str(getattr(self, field))) for field in fields), ("accumulate", str(self.microbatches))]


def staged(pipeline: str, stages: int, microbatches: int, *, replicas: int = 1, **more: Any) -> Run:
    """A run in stages of 40 ms per microbatch, unless `more` says otherwise."""
    times = f", {replicas} replicas" if replicas > 1 else ""
    return Run(
        name=f"{pipeline}, {stages} stages, {microbatches} microbatches{times}",
        workers=stages * replicas,
        stages=stages,
        pipeline=pipeline,
        microbatches=microbatches,
        **{"mean_s": 0.04, **more},
    )


STAGED_CALIBRATION = staged("flush", 2, 1, steps=150)
CALIBRATION = Run(name="calibration", workers=1, steps=200, consistency="async")
RUNS = (
    Run(name="sync", workers=2, steps=200),
    Run(name="sync", workers=4, steps=150),
    Run(name="sync:spares=1", workers=4, steps=150, consistency="sync:spares=1"),
    Run(name="async", workers=4, steps=800, consistency="async"),
    Run(name="ssp:slack=1", workers=4, steps=600, consistency="ssp:slack=1"),
    Run(name="softsync", workers=4, steps=150, consistency="softsync"),
    Run(name="local-sgd, 4 passes a step", workers=3, steps=40, cadence="local-sgd:every=4"),
    Run(name="sync, 1 MB", workers=1, steps=120, link="100mbit"),
    Run(name="sync, 1 MB", workers=2, steps=100, link="100mbit"),
    Run(name="sync, 1 MB", workers=4, steps=60, link="100mbit"),
    Run(name="async, 1 MB", workers=3, steps=200, consistency="async", link="100mbit"),
    Run(name="ssp:slack=1, 1 MB", workers=3, steps=200, consistency="ssp:slack=1", link="100mbit"),
    Run(name="async, 4 MB", workers=3, steps=100, consistency="async", link="200mbit", width=512),
    Run(name="ssp:slack=1, 4 MB", workers=3, steps=100, consistency="ssp:slack=1", link="200mbit", width=512),
    staged("gpipe", 3, 6, steps=40),
    staged("flush", 2, 4, steps=60),
    staged("flush", 4, 4, steps=40),
    staged("flush", 2, 4, steps=60, replicas=2),
    staged("stash", 3, 1, steps=200),
    staged("stash", 4, 4, steps=60),
    staged("double-buffer", 4, 4, steps=60),
    staged("flush", 2, 4, steps=40, link="100mbit"),
    staged("double-buffer", 2, 4, steps=60, link="100mbit"),
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of a run, real or predicted."""

    steps_per_s: float
    staleness: float
    """Mean of all pushes; in stages, the highest of any."""


@contextmanager
def places(run: Run) -> Iterator[tuple[dict[str, list[str]], list[Prefix]]]:
    """Addresses by role, and what stands before the commands of chief and ps, and of each worker."""
    if run.link:
        with lab(1 + run.workers, run.link) as hosts:
            addresses = [hosts.address(host) for host in range(1, 2 + run.workers)]
            workers = [f"{address}:{PORT}" for address in addresses[1:]]
            spec = {"chief": [f"{addresses[0]}:{PORT}"], "ps": [f"{addresses[0]}:{PORT + 1}"], "worker": workers}
            yield spec, [hosts.prefix(host) for host in range(1, 2 + run.workers)]
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    local = "127.0.0.1:0"
    spec = {"chief": [f"127.0.0.1:{port}"], "ps": [local], "worker": [local] * run.workers}
    yield spec, [HERE] * (1 + run.workers)


def real(run: Run, out: Path) -> Figures:
    """Run it; `out` holds the run's folder then. Raises ContenderError."""
    fields = [word for field, value in run.overrides for word in ("--set", f"{field}={value}")]
    with places(run) as (spec, prefixes), ExitStack() as stack:

        def task(role: str, prefix: Prefix, *more: str, index: int = 0) -> Child:
            settings = environment(more={"SHARDLINE_JOB_ARGS": run.arguments(index)})
            command = [sys.executable, "-m", "shardline", role, "--cluster", json.dumps(spec)]
            command += ["--timeout", str(TIMEOUT_S), *more]
            return stack.enter_context(Child(command, prefix=prefix, what=role, env=settings))

        chief = task("chief", prefixes[0], "--job", str(JOB), "--out", str(out), "--no-page", *fields)
        task("ps", prefixes[0])
        for index in range(run.workers):
            task("worker", prefixes[1 + index], "--task", f"worker/{index}", "--job", str(JOB), *fields, index=index)
        code = chief.wait(RUN_S)
        if code:
            raise ContenderError(f"{run.name}: the chief ended with code {code}{chief.last_words()}")
    return measured(out)


def measured(out: Path) -> Figures:
    """Figures of a run's folder, without its first fifth, in which workers still join."""
    lines = [json.loads(line) for line in (out / "logs" / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    kept = lines[len(lines) // 5 :]
    # In asynchronous modes a line is a batch, of which several may make one step.
    rate = (len(kept) - 1) / (kept[-1]["time"] - kept[0]["time"])
    staleness = statistics.fmean(line["staleness"] for line in kept)
    if summary["stages"]:
        staleness = float(max(stage["behind"] for stage in summary["stages"]))
    return Figures(steps_per_s=rate * summary["steps"] / len(lines), staleness=staleness)


def gradients_per_s(out: Path) -> float:
    """Passes that made updates, per second, without the run's first fifth. A pass is of one sample."""
    lines = [json.loads(line) for line in (out / "logs" / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = lines[len(lines) // 5 :]
    gradients = sum(line["samples"] for line in kept[1:])
    return float(gradients / (kept[-1]["time"] - kept[0]["time"]))


def predicted(run: Run, times: Sequence[Times], exchange_s: float, stages: StageCosts | None = None) -> Figures:
    """What the simulator says of a run. stages: what those of a run in stages cost."""
    os.environ["SHARDLINE_JOB_ARGS"] = run.arguments(0)
    job = load_job(JOB, run.overrides)
    network = Network(bytes_per_s=quantities.bytes_per_s(run.link, "link") * GOODPUT) if run.link else Network()
    if stages is not None:
        sizes = runs.measure_stages(job, job.build_model())
        stages = replace(stages, parcel_bytes=sizes.parcel_bytes, gradient_bytes=sizes.gradient_bytes)
    setup = Setup(
        job=job.spec(job.build_model()),
        workers=run.workers,
        times=times,
        stages=stages,
        network=network,
        exchange_s=exchange_s,
        steps=2 * run.steps,
    )
    found = simulated(setup)
    staleness = float(found.staleness_max) if run.stages else found.staleness
    return Figures(steps_per_s=found.steps_per_s, staleness=staleness)


def calibrate(out: Path) -> tuple[tuple[Times, ...], float]:
    """Compute times, and the rest of a step on loopback in seconds.

    The logged times of exchanges are of no use here: with overlap one begins while gradients are still computed.
    """
    found, times = real(CALIBRATION, out), runs.read_times(out)
    return times, max(0.0, 1 / found.steps_per_s - times[0].mean_s)


def passes(out: Path) -> list[Pass]:
    """The passes in the trace of a run in stages, by start: see shardline_pipeline.timeline.trace."""
    events = json.loads((out / "pipeline-trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return sorted((one for one in events if one["ph"] == "X"), key=lambda one: float(one["ts"]))


def calibrate_stages(out: Path) -> tuple[StageCosts, float]:
    """Costs of the stages, and the time of an exchange in seconds.

    In a run of one microbatch, every pass waits for the parcel of the one before, and every step for its parameters.
    """
    real(STAGED_CALIBRATION, out)
    waits: dict[bool, list[float]] = {True: [], False: []}
    for before, one in itertools.pairwise(passes(out)):
        if before["pid"] != one["pid"] or before["args"]["step"] != one["args"]["step"]:
            within = before["args"]["step"] == one["args"]["step"]
            waits[within].append((one["ts"] - before["ts"] - before["dur"]) / 1e6)
    parcel_s, exchange_s = (statistics.median(waits[within]) for within in (True, False))
    found = runs.read_stages(out, 2)
    # All stages are alike.
    costs = StageCosts(times=found.times[:1], forward=found.forward[:1], parcel_s=max(0.0, parcel_s))
    return costs, max(0.0, exchange_s)


def row(run: Run, found: Figures, expected: Figures) -> str:
    """A line of the table."""
    error = expected.steps_per_s / found.steps_per_s - 1
    lag = f"{expected.staleness / found.staleness - 1:+.0%}" if found.staleness > 0.05 else "-"
    cells = (
        run.name,
        str(run.workers),
        run.link or "-",
        f"{found.steps_per_s:.2f}",
        f"{expected.steps_per_s:.2f}",
        f"{error:+.0%}",
        f"{found.staleness:.2f}",
        f"{expected.staleness:.2f}",
        lag,
    )
    return f"| {' | '.join(cells)} |"


def within(found: Figures, expected: Figures) -> bool:
    """Whether both figures are within LIMIT."""
    speed = abs(expected.steps_per_s / found.steps_per_s - 1) <= LIMIT
    return speed and abs(expected.staleness - found.staleness) <= max(LIMIT * found.staleness, 0.05)


def main() -> int:
    """Run all; the exit code says whether every figure is within LIMIT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a run's name")
    parser.add_argument("--json", type=Path, help="write the figures here")
    flags = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="shardline-simulated-") as folder:
        chosen = [run for run in RUNS if flags.only in run.name]
        whole = calibrate(Path(folder) / "calibration") if any(not run.stages for run in chosen) else None
        parts = calibrate_stages(Path(folder) / "stages") if any(run.stages for run in chosen) else None
        if whole is not None:
            print(f"calibrated: {whole[0][0].mean_s * 1e3:.1f} ms per pass, {whole[1] * 1e3:.1f} ms per exchange\n")
        if parts is not None:
            print(
                f"calibrated in stages: {parts[0].times[0].mean_s * 1e3:.1f} ms per microbatch, "
                f"{parts[0].parcel_s * 1e3:.1f} ms per parcel, {parts[1] * 1e3:.1f} ms per exchange\n"
            )
        print("| job | workers | link | steps/s | predicted | error | staleness | predicted | error |")
        print("|---|---|---|---|---|---|---|---|---|")
        for number, run in enumerate(chosen):
            try:
                found = real(run, Path(folder) / str(number))
            except ContenderError as error:
                print(f"| {run.name} | {run.workers} | {run.link} | not run: {error} |")
                continue
            if run.stages:
                assert parts is not None
                expected = predicted(run, (), parts[1], parts[0])
            else:
                assert whole is not None
                expected = predicted(run, *whole)
            print(row(run, found, expected), flush=True)
            good = within(found, expected)
            rows.append({**asdict(run), "real": asdict(found), "predicted": asdict(expected), "within": good})
    if flags.json is not None:
        flags.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0 if rows and all(one["within"] for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

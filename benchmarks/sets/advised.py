"""What `shardline advise` expects of each topology by the links that `bench mesh` has measured, beside real runs."""

from __future__ import annotations

import itertools
import json
import shlex
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import AT_MOST, Row, Samples, median
from benchmarks.network import Lab, lab
from benchmarks.process import ROOT, Child, ContenderError, environment

NAME = "advised"
ABOUT = "2 hosts with 2 or 3 workers and a third with a ps: steps that advise --mesh expects, beside those of real runs"
JOB = ROOT / "benchmarks" / "simulated_job.py"
PORT, HOSTS, RUN_S, MEAN_S, CV = 2522, 3, 300.0, 0.05, 0.1
BAR, BEST = 1.15, 0.95


@dataclass(frozen=True)
class Case:
    """Links as tc writes them, workers on each of two hosts, and the width of the model's four layers."""

    rate: str
    workers: int
    width: int

    @property
    def name(self) -> str:
        """For people."""
        return f"2 x {self.workers} workers, {self.rate}, {self.width**2 * 16 / 1e6:.0f} MB"


CASES = (Case("1gbit", 3, 1024), Case("200mbit", 2, 512))
Layout = dict[str, Any]
"""Of a topology: its name, and the addresses of servers and aggregators."""


def given(hosts: Lab, case: Case) -> dict[str, list[str]]:
    """The cluster as it is: chief and ps on host 1."""
    workers = [f"{hosts.address(2 + index // case.workers)}:{PORT + index}" for index in range(2 * case.workers)]
    return {"chief": [f"{hosts.address(1)}:{PORT}"], "ps": [f"{hosts.address(1)}:{PORT + 20}"], "worker": workers}


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Measure the links, ask for advice, and run every row of it."""
    samples: dict[str, list[dict[str, Any]]] = {}
    failures: dict[str, str] = {}
    for case in CASES:
        try:
            with lab(HOSTS, case.rate) as hosts:
                contenders = [
                    Contender(name=name_of(case, row), run=lambda row=row: sample(bench, hosts, case, row))  # noqa: B023
                    for row in advice(hosts, case)
                ]
                found = collect(contenders, bench.scale.repeats, bench.say)
        except ContenderError as error:
            bench.say(f"  {error}")
            found = {}, {case.name: str(error)}
        samples.update(found[0])
        failures.update(found[1])
    return samples, failures


def name_of(case: Case, row: Layout) -> str:
    """A layout for people."""
    where = "its ps" if len(row["servers"]) == 1 else "servers beside workers, too"
    return f"{case.name}: {row['topology']}, {where}"


def settings(case: Case) -> dict[str, str]:
    """Environment of all tasks."""
    words = ["--width", str(case.width), "--mean", str(MEAN_S), "--cv", str(CV)]
    return environment(more={"SHARDLINE_JOB_ARGS": shlex.join(words)})


def advice(hosts: Lab, case: Case) -> list[Layout]:
    """The rows of `shardline advise --mesh`. Its --exchange is what one worker beside its server takes."""
    alone = {"topology": "flat", "servers": [hosts.address(1)], "aggregators": []}
    one = [f"{hosts.address(1)}:{PORT + 1}"]
    exchange_s = max(0.0, run(hosts, case, alone, {**given(hosts, case), "worker": one}, steps=40) - MEAN_S)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardline-bench-")))
        cluster, mesh, rows = json.dumps(given(hosts, case)), folder / "mesh.json", folder / "rows.json"

        def command(host: int, *words: str) -> Child:
            line = [sys.executable, "-m", "shardline", *words]
            return stack.enter_context(
                Child(line, prefix=hosts.prefix(host), what=" ".join(words[:2]), env=settings(case))
            )

        bench = ("bench", "mesh", "--cluster", cluster)
        for host in range(2, HOSTS + 1):
            # It says so once it listens.
            serving = command(host, *bench, "--serve")
            serving.read()
        job = (str(JOB), "--set", f"replicas={2 * case.workers}", "--compute", f"{MEAN_S}s", "--cv", str(CV))
        for words in (
            (*bench, "--out", str(mesh)),
            ("advise", *job, "--mesh", str(mesh), "--exchange", f"{exchange_s}s", "--json", str(rows)),
        ):
            child = command(1, *words)
            if child.wait(RUN_S):
                raise ContenderError(f"{child.what} failed{child.last_words()}")
        found: list[Layout] = json.loads(rows.read_text(encoding="utf-8"))
    return [{**row, "place": place} for place, row in enumerate(found)]


def sample(bench: Bench, hosts: Lab, case: Case, row: Layout) -> dict[str, Any]:
    """A real run of a row, with what was expected."""
    seconds = run(hosts, case, row, given(hosts, case), steps=bench.scale.steps + bench.scale.warmup)
    return {"median_s": seconds, "expected_s": row["expected_s"], "place": row["place"]}


def run(hosts: Lab, case: Case, row: Layout, spec: dict[str, list[str]], *, steps: int) -> float:
    """Median seconds of a step, without the first third of them."""
    host_of = {hosts.address(host): host for host in range(1, HOSTS + 1)}
    spec = {**spec, "ps": [f"{address}:{PORT + 20}" for address in row["servers"]]}
    if row["aggregators"]:
        spec["aggregator"] = [f"{address}:{PORT + 21}" for address in row["aggregators"]]
    job = ["--job", str(JOB), "--topology", row["topology"]]
    for field, value in (("replicas", len(spec["worker"])), ("steps", steps)):
        job += ["--set", f"{field}={value}"]
    with ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardline-bench-"))) / "out"

        def task(role: str, index: int, *more: str) -> Child:
            prefix = hosts.prefix(host_of[spec[role][index].rpartition(":")[0]])
            line = [sys.executable, "-m", "shardline", role, "--cluster", json.dumps(spec), "--task", f"{role}/{index}"]
            return stack.enter_context(Child([*line, *more], prefix=prefix, what=role, env=settings(case)))

        chief = task("chief", 0, *job, "--out", str(out), "--no-page")
        for role in spec:
            for index in range(len(spec[role]) if role != "chief" else 0):
                task(role, index, *(job if role == "worker" else ()))
        if chief.wait(RUN_S):
            raise ContenderError(f"{row['topology']}: the chief failed{chief.last_words()}")
        lines = (out / "logs" / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    times = [json.loads(line)["time"] for line in lines][len(lines) // 3 :]
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def rows(samples: Samples) -> list[Row]:
    """Each layout, and whether the one that was advised is the fastest."""
    found = [row(samples, name) for name in samples]
    for case in CASES:
        own = [name for name in samples if name.startswith(f"{case.name}:") and samples[name]]
        if own:
            speeds = {name: 1 / (median(samples, name) or 1.0) for name in own}
            first = min(own, key=lambda name: samples[name][0]["place"])
            found.append(
                Row(
                    work=f"{case.name}: the first one of the table",
                    value=speeds[first],
                    unit="steps/s",
                    against={"the fastest one": max(speeds.values())},
                    ratio=speeds[first] / max(speeds.values()),
                    bar=BEST,
                )
            )
    return found


def row(samples: Samples, name: str) -> Row:
    """Steps per second, expected over measured or measured over expected, the larger one."""
    own, expected = (median(samples, name, field) for field in ("median_s", "expected_s"))
    known = own is not None and expected is not None
    return Row(
        work=name,
        value=1 / own if own else None,
        unit="steps/s",
        against={"expected": 1 / expected} if expected else {},
        ratio=max(own / expected, expected / own) if known and own and expected else None,
        sense=AT_MOST,
        bar=BAR,
    )

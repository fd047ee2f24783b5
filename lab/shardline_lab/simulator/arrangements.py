"""Topologies and places of servers that a job could have on the machines of its cluster: each simulated, fastest first.

Only what is on machines that the cluster has is compared, with the job's own methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardline import topology
from shardline.cli.terminal import aligned
from shardline.errors import JobError
from shardline.job import Job
from shardline.topology import Aggregators, Flat, LocalSum
from shardline_lab.simulator.result import Result
from shardline_lab.simulator.simulation import Setup, placed
from shardline_lab.simulator.stages import simulated as simulation

STEPS = 60
"""Steps that an arrangement is simulated for."""


@dataclass(frozen=True)
class Arrangement:
    """A topology, and the machines of servers and aggregators."""

    topology: str
    servers: tuple[str, ...]
    aggregators: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Simulated:
    arrangement: Arrangement
    servers: tuple[str, ...]
    """Machines of those that hold something."""
    step_s: float
    """Expected time of a step, in seconds: the median."""
    result: Result


def arrangements(given: Arrangement, workers: Sequence[str], racks: Mapping[str, str]) -> Iterator[Arrangement]:
    """The given one, and what differs from it: servers beside the workers, too, and who sums for several workers.

    racks: of machines; an aggregator is for a rack then, else for a machine.
    """
    machines = tuple(dict.fromkeys(workers))
    groups = {racks.get(machine, machine): machine for machine in reversed(machines)}
    sums = given.aggregators or (tuple(reversed(groups.values())) if len(groups) < len(workers) else ())
    beside = (*machines, *(one for one in dict.fromkeys(given.servers) if one not in machines))
    yield given
    for servers in dict.fromkeys((given.servers, beside)):
        yield Arrangement(str(Flat()), servers)
        if len(machines) < len(workers):
            yield Arrangement(str(LocalSum()), servers)
        if sums:
            yield Arrangement(str(Aggregators()), servers, sums)


def simulated(job: Job, setup: Setup) -> tuple[list[Simulated], list[str]]:
    """Every arrangement, the fastest first, then the one nearest to the setup's; and why the job can't have others.

    setup: its job and steps are not used.
    """
    ps, workers, aggregators = (
        tuple(setup.machine(f"{role}/{number}") for number in range(count))
        for role, count in (("ps", setup.servers), ("worker", setup.workers), ("aggregator", setup.aggregators))
    )
    given = Arrangement(str(job.topology), ps, aggregators if topology.TOPOLOGIES.parse(job.topology).meets else ())
    rows, refused = [], []
    for arrangement in dict.fromkeys(arrangements(given, workers, setup.racks)):
        try:
            chosen = dataclasses.replace(job, topology=arrangement.topology)
            spec = chosen.spec(chosen.build_model())
        except JobError as error:
            refused.append(f"Not {arrangement.topology}: {error}")
            continue
        places = placed(arrangement.servers, workers, arrangement.aggregators)
        result = simulation(dataclasses.replace(setup, job=spec, steps=STEPS, **places))
        held = tuple(places["machines"][f"ps/{number}"] for number in range(places["servers"]))
        step_s = float(np.median(result.step_s))
        rows.append(Simulated(arrangement=arrangement, servers=held, step_s=step_s, result=result))
    # Those that differ by less than two digits tell are equally fast.
    rows.sort(key=lambda row: (float(f"{row.step_s:.1e}"), row.arrangement != given, row.servers != ps))
    return rows, list(dict.fromkeys(refused))


def report(job: Job, rows: Sequence[Simulated]) -> list[str]:
    """A table, and what the fastest one needs."""
    cells = [("topology", "servers on", "aggregators on", "ms/step", "steps/s", "MB/step")]
    for row in rows:
        moved = (row.result.push_bytes + row.result.pull_bytes) / row.result.steps
        cells.append(
            (
                row.arrangement.topology,
                ", ".join(row.servers),
                ", ".join(row.arrangement.aggregators) or "-",
                f"{row.step_s * 1e3:,.1f}",
                f"{1 / row.step_s:,.2f}",
                f"{moved / 1e6:,.2f}",
            )
        )
    best = rows[0]
    lines = [*aligned(cells, texts=3), "MB/step: pushed to the servers and pulled from them.", ""]
    for role, hosts in (("ps", best.servers), ("aggregator", best.arrangement.aggregators)):
        if hosts:
            lines.append(f'The fastest one has in cluster.json: "{role}" on {", ".join(hosts)}')
    if best.arrangement.topology != str(job.topology):
        lines.append(f"and in the job: topology={best.arrangement.topology!r},")
    return lines
